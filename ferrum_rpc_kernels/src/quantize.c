/* What is done to weights before they are packed.
 *
 * To 4 bits: the range of each group that changes its weights least, by their mean square.
 *
 * Two ranges are tried, the whole one and a smaller one that cuts off the largest weights; each is then fitted twice to
 * the numbers that it gave (least squares). That is 6 passes over a group, which took 13 times as long in torch. One
 * version, compiled for every CPU of the architecture: the numbers do not depend on the machine.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ISA(name) name##_any
#define TARGET
#define LANES 4
#include "simd.h"

#define FITS 2
#define LARGEST 15.0f

/* Mix each of the groups of MIXED floats (simd.h). */
void ferrum_mix(float *numbers, int64_t groups, int32_t threads)
{
    int64_t g;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (g = 0; g < groups; g++)
        ISA(mix)((FV *)(numbers + g * MIXED));
}

/* The numbers of a group as `scale` and `zero` give them, and what comes of them. */
struct trial {
    float scale, zero, changed; /* the sum of squares of what it changes */
    float along, size;          /* sums of products of numbers and weights, and of squares of numbers */
};

INLINE FV numbers_of(const float *weights, float inverse, float zero)
{
    const FV magic = ISA(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, half to even */
    FV number = *(const FV *)weights * inverse + zero;
    number = ISA(where)(number > 0.0f, number, (FV){0});
    number = ISA(where)(number < LARGEST, number, ISA(splat)(LARGEST));
    return (number + magic) - magic;
}

static struct trial try_range(const float *weights, int group, float scale, float zero)
{
    const float inverse = 1.0f / scale;
    FV changed = {0}, along = {0}, size = {0};
    for (int i = 0; i < group; i += LANES) {
        const FV weight = *(const FV *)(weights + i), number = numbers_of(weights + i, inverse, zero) - zero;
        const FV error = number * scale - weight;
        changed += error * error;
        along += number * weight;
        size += number * number;
    }
    return (struct trial){scale, zero, ISA(total)(changed), ISA(total)(along), ISA(total)(size)};
}

static struct trial best_range(const float *weights, int group)
{
    static const float parts[] = {1.0f, 0.9f};
    FV least = {0}, most = {0};
    for (int i = 0; i < group; i += LANES) {
        const FV weight = *(const FV *)(weights + i);
        most = ISA(larger)(weight, most);
        least = ISA(larger)(-weight, least);
    }
    const float low = ISA(largest)(least), high = ISA(largest)(most);
    struct trial best = {0.0f, 8.0f, 0.0f, 0.0f, 0.0f};
    for (size_t each = 0; each < sizeof parts / sizeof *parts && low + high > 1e-30f; each++) {
        float scale = (low + high) * parts[each] / LARGEST;
        const float zero = (float)(int32_t)(low * parts[each] / scale + 0.5f);
        for (int fit = 0; fit <= FITS && scale > 0.0f; fit++) {
            const struct trial trial = try_range(weights, group, scale, zero);
            if (best.scale == 0.0f || trial.changed < best.changed)
                best = trial;
            scale = trial.size > 0.0f ? trial.along / trial.size : 0.0f;
        }
    }
    return best;
}

/* Of weights [groups][group] the numbers, their scales, which of 0 .. 15 stands for 0, and the sum of squares of what that
 * changes. `group` is a multiple of 4; a group of less than 1e-30 becomes zeros. */
void ferrum_quantize(const float *weights, int64_t groups, int32_t group, uint8_t *numbers, float *scales, uint8_t *zeros,
                     float *changed, int32_t threads)
{
    int64_t g;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (g = 0; g < groups; g++) {
        const float *own = weights + g * group;
        const struct trial best = best_range(own, group);
        scales[g] = best.scale;
        zeros[g] = (uint8_t)best.zero;
        changed[g] = best.changed;
        if (best.scale == 0.0f) {
            memset(numbers + g * group, 8, (size_t)group);
            continue;
        }
        for (int i = 0; i < group; i += LANES) {
            const FV number = numbers_of(own + i, 1.0f / best.scale, best.zero);
            for (int lane = 0; lane < LANES; lane++)
                numbers[g * group + i + lane] = (uint8_t)number[lane];
        }
    }
}
