/* What linear.c does to rows before and after the inner loops, in vectors of one instruction set; see for_each_isa.h. */

#include "simd.h"

/* `group` bfloat16, or floats if they are `wide`, to 8 bits: their scale, which is returned, and -1 x their sum. A group with an element that is not
 * finite gets a NaN for a scale; one whose largest is below TINY counts as zeros: 127 over that would be infinite. */
INLINE float ISA(quantise)(const char *row, const int wide, int group, char *to, int32_t *start)
{
    const FV magic = ISA(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, half to even */
    FV most = {0}, odd = {0};
    for (int i = 0; i < group; i += LANES) {
        const FV x = ISA(load)(row, i, wide);
        most = ISA(larger)(ISA(larger)(x, -x), most); /* of a NaN and a number the second */
    }
    const float largest = ISA(largest)(most), inverse = largest > TINY ? 127.0f / largest : 0.0f;
    IV sum = {0};
    for (int i = 0; i < group; i += LANES) {
        const FV scaled = ISA(load)(row, i, wide) * inverse;
        const IV number = scaled == scaled; /* infinity times 0 is NaN too */
        odd = ISA(where)(number, odd, scaled);
        /* `where` between product and sum: they must not be fused */
        const IV rounded = (IV)(ISA(where)(number, scaled, (FV){0}) + magic) - (IV)magic;
        sum += rounded;
        ISA(store_bytes)(to + i, rounded);
    }
    *start = -(int32_t)ISA(total)(__builtin_convertvector(sum, FV));
    return largest / 127.0f + ISA(total)(odd);
}

/* Group `g` of a row, in the order of the matrix's columns. `held`: where it may be put together. */
INLINE const char *ISA(group_of)(const struct matrix *linear, const char *row, int g, char *held)
{
    const size_t first = (size_t)g * linear->group;
    if (!linear->order)
        return row + 2 * first;
    for (int i = 0; i < linear->group; i++)
        memcpy(held + 2 * i, row + 2 * (size_t)linear->order[first + i], 2);
    return held;
}

/* Group `g` of a row to 8 bits: see `quantise`. A 16th of it is mixed, so that no sum is infinite. */
INLINE float ISA(quantise_group)(const struct matrix *linear, const char *row, int g, char *to, int32_t *start)
{
    char held[2 * MAX_GROUP];
    FV mixed[MIXED / LANES];
    const char *from = ISA(group_of)(linear, row, g, held);
    if (!linear->mixed)
        return ISA(quantise)(from, 0, linear->group, to, start);
    for (int i = 0; i < MIXED / LANES; i++)
        mixed[i] = ISA(load)(from, i * LANES, 0) * 0.0625f;
    ISA(mix)(mixed);
    return ISA(quantise)((const char *)mixed, 1, MIXED, to, start);
}

/* A row to 8 bits. */
static TARGET void ISA(prepare_bytes)(const struct matrix *linear, const char *row, char *to, float *scales,
                                      int32_t *starts)
{
    const int group = linear->group;
    for (int g = 0; g < linear->k / group; g++, to += group)
        scales[g] = ISA(quantise_group)(linear, row, g, to, starts + g) * linear->factor;
}

#if LANES == 8
/* The same, widened to 16 bits. */
static TARGET void ISA(prepare_wide_bytes)(const struct matrix *linear, const char *row, char *to, float *scales,
                                           int32_t *starts)
{
    const int group = linear->group;
    for (int g = 0; g < linear->k / group; g++) {
        char rounded[MAX_GROUP];
        scales[g] = ISA(quantise_group)(linear, row, g, rounded, starts + g) * linear->factor;
        for (int i = 0; i < group; i += 16, to += 32) {
            const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(rounded + i)));
            const __m256i first = _mm256_shufflelo_epi16(wide, _MM_SHUFFLE(3, 1, 2, 0));
            _mm256_storeu_si256((__m256i *)to, _mm256_shufflehi_epi16(first, _MM_SHUFFLE(3, 1, 2, 0)));
        }
    }
}

#endif

#if LANES >= 8
/* A row of bfloat16 as floats. */
static TARGET void ISA(prepare_pairs)(const struct matrix *linear, const char *row, char *to, float *scales,
                                      int32_t *starts)
{
    (void)scales, (void)starts;
    const int k = linear->k;
    int i = 0;
    for (; i + LANES <= k; i += LANES)
        ISA(store)(to, i, 1, ISA(load)(row, i, 0));
    for (; i < k; i++) {
        memset(to + 4 * (size_t)i, 0, 2);
        memcpy(to + 4 * (size_t)i + 2, row + 2 * (size_t)i, 2);
    }
}
#endif

/* The first LANES sums of a row, of which the output has `left`, with their biases: as bits of bfloat16. */
INLINE UV ISA(round_sums)(const float *sums, const float *bias, int left)
{
    FV x = *(const FV *)sums;
    if (bias && left >= LANES)
        x += *(const FV *)bias;
    else if (bias) {
        float held[LANES] = {0};
        memcpy(held, bias, (size_t)left * sizeof *held);
        x += *(const FV *)held;
    }
    return ISA(to_half)(x);
}

/* The sums of a row to an output row of `count` columns, of which `from` is the first: as bfloat16, as floats of such
 * values where `wide` is 1, or as they are where it is 2. */
static TARGET void ISA(round_row)(const float *sums, const float *bias, int from, int count, char *out, int wide)
{
    if (wide == 2) {
        float *to = (float *)out + from;
        for (int i = 0; i < count; i++)
            to[i] = bias ? sums[i] + bias[from + i] : sums[i];
        return;
    }
    const size_t bytes = wide ? 4 : 2;
    for (int i = 0; i < count; i += LANES) {
        const UV half = ISA(round_sums)(sums + i, bias ? bias + from + i : NULL, count - i);
        char *to = out + (size_t)(from + i) * bytes, held[4 * LANES];
        char *const at = count - i < LANES ? held : to;
        if (wide)
            *(UV *)at = half << 16;
        else
            *(HV *)at = __builtin_convertvector(half, HV);
        if (at == held)
            memcpy(to, held, (size_t)(count - i) * bytes);
    }
}

/* LANES values of a row as integers of the order that `struct best` needs: a NaN is above all, as it is to torch, both
 * zeros are one, and what the output does not have is below all. */
INLINE IV ISA(keys)(const float *sums, const float *bias, int left)
{
    static const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const IV bits = (IV)((FV)(ISA(round_sums)(sums, bias, left) << 16) + 0.0f);
    const IV keys = bits ^ (bits >> 31 & INT32_MAX);
    if (left >= LANES)
        return keys;
    const IV held = *(const IV *)numbers < left;
    return (held & keys) | (~held & INT32_MIN);
}

/* The largest of a row's values as `round_row` would write them. */
static TARGET void ISA(best_of_row)(const float *sums, const float *bias, int from, int count, struct best *best)
{
    if (bias)
        bias += from;
    IV most = ISA(keys)(sums, bias, count);
    for (int i = LANES; i < count; i += LANES)
        most = ISA(larger_key)(ISA(keys)(sums + i, bias ? bias + i : NULL, count - i), most);
    const int32_t key = ISA(largest_key)(most);
    if (key < best->key)
        return; /* nearly always */
    int32_t keys[GEMM_WIDTH], column = 0;
    for (int i = 0; i < count; i += LANES)
        *(IV *)(keys + i) = ISA(keys)(sums + i, bias ? bias + i : NULL, count - i);
    while (keys[column] != key)
        column++;
    const struct best found = {key, from + column};
    if (comes_first(&found, best))
        *best = found;
}
