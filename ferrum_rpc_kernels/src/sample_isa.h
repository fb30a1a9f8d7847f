/* The passes over a row of logits, for one instruction set: included by sample.c once per set (see simd.h). */

#include "simd.h"

/* The largest of each chunk; returns whether every logit is a number. */
static TARGET int ISA(chunk_maxima)(const float *row, int64_t count, float *maxima)
{
    IV odd = {0};
    int64_t at = 0;
    for (; at + CHUNK <= count; at += CHUNK) {
        FV best = *(const FV *)(row + at);
        odd |= best != best;
        for (int i = LANES; i < CHUNK; i += LANES) {
            const FV x = *(const FV *)(row + at + i);
            odd |= x != x;
            best = ISA(larger)(best, x);
        }
        maxima[at / CHUNK] = ISA(largest)(best);
    }
    int numbers = 1;
    if (at < count) {
        float best = row[at];
        for (int64_t i = at; i < count; i++) {
            numbers &= row[i] == row[i];
            best = row[i] > best ? row[i] : best;
        }
        maxima[at / CHUNK] = best;
    }
    for (int i = 0; i < LANES; i++)
        numbers &= !odd[i];
    return numbers;
}

/* e^((x - largest) * inverse) of the logits that are not below `least`, else 0, and the sum of each chunk. `weights` has
 * whole chunks. */
static TARGET void ISA(weigh)(const float *row, int64_t count, float largest, float inverse, float least, float *weights,
                              double *sums)
{
    for (int64_t at = 0; at < count; at += CHUNK) {
        float padded[CHUNK];
        const float *from = row + at;
        if (at + CHUNK > count) {
            for (int i = 0; i < CHUNK; i++)
                padded[i] = at + i < count ? row[at + i] : -__builtin_inff();
            from = padded;
        }
        FV sum = {0};
        for (int i = 0; i < CHUNK; i += LANES) {
            const FV x = *(const FV *)(from + i);
            const FV weight = ISA(where)(x >= least, ISA(exp)((x - largest) * inverse), (FV){0});
            *(FV *)(weights + at + i) = weight;
            sum += weight;
        }
        sums[at / CHUNK] = ISA(total)(sum);
    }
}

/* What the weights come to that are not below each border, the borders by rising size. Chunks whose maxima are below all
 * borders are not looked at. */
static TARGET void ISA(masses)(const float *weights, const float *maxima, int64_t chunks, const float *borders, double *masses)
{
    FV sums[BORDERS] = {{0}};
    for (int border = 0; border < BORDERS; border++)
        masses[border] = 0.0;
    for (int64_t chunk = 0, added = 0; chunk <= chunks; chunk++) {
        if (chunk == chunks || added == TOGETHER) {
            for (int border = 0; border < BORDERS; border++) {
                masses[border] += ISA(total)(sums[border]);
                sums[border] = (FV){0};
            }
            added = 0;
        }
        if (chunk == chunks || maxima[chunk] < borders[0])
            continue;
        added++;
        for (int i = 0; i < CHUNK; i += LANES) {
            const FV weight = *(const FV *)(weights + chunk * CHUNK + i);
            for (int border = 0; border < BORDERS; border++)
                sums[border] += ISA(where)(weight >= borders[border], weight, (FV){0});
        }
    }
}

/* Copies the weights in [least, most) that are not 0; returns how many there are. */
static TARGET int64_t ISA(copy_between)(const float *weights, const float *maxima, int64_t chunks, float least, float most,
                                        float *copies)
{
    int64_t found = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const float *from = weights + chunk * CHUNK;
        IV inside = {0};
        if (maxima[chunk] < least)
            continue;
        for (int i = 0; i < CHUNK; i += LANES) {
            const FV weight = *(const FV *)(from + i);
            inside |= (weight >= least) & (weight < most);
        }
        if (ISA(total)((FV)(inside & (IV)ISA(splat)(1.0f))) == 0.0f)
            continue;
        for (int i = 0; i < CHUNK; i++) { /* without branches, which would be mispredicted */
            copies[found] = from[i];
            found += (from[i] >= least) & (from[i] < most) & (from[i] > 0.0f);
        }
    }
    return found;
}

/* Drop the weights below `least`, and sum each chunk again. */
static TARGET void ISA(drop_below)(float least, int64_t count, float *weights, double *sums)
{
    for (int64_t at = 0; at < count; at += CHUNK) {
        FV sum = {0};
        for (int i = 0; i < CHUNK; i += LANES) {
            FV *weight = (FV *)(weights + at + i);
            *weight = ISA(where)(*weight >= least, *weight, (FV){0});
            sum += *weight;
        }
        sums[at / CHUNK] = ISA(total)(sum);
    }
}

/* -inf for tokens that the mask forbids, and more than that for others, so that a row of only -inf yields an allowed token. */
static TARGET void ISA(forbid)(float *row, const uint32_t *words, int64_t count)
{
    UV bits;
    int64_t at = 0;
    for (int i = 0; i < LANES; i++)
        bits[i] = 1u << i;
    for (; at + 32 <= count; at += 32)
        for (int i = 0; i < 32; i += LANES) {
            FV *x = (FV *)(row + at + i);
            const IV forbidden = (bits & ((UV){0} + (words[at / 32] >> i))) == 0;
            *x = ISA(where)(forbidden, ISA(splat)(-__builtin_inff()), ISA(where)(*x < -FLT_MAX, ISA(splat)(-FLT_MAX), *x));
        }
    for (; at < count; at++)
        row[at] = !(words[at / 32] >> (at % 32) & 1) ? -__builtin_inff() : row[at] < -FLT_MAX ? -FLT_MAX : row[at];
}
