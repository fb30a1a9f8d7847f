/* Sums of experts.c, in vectors of one instruction set; see for_each_isa.h. */

#include "simd.h"

/* One row of `struct sums`. Products are rounded before they are added, as torch does. */
static TARGET void ISA(sum_row)(const struct sums *sums, int64_t row)
{
    const int32_t *const places = sums->places + row * sums->chosen;
    const float *const weights = sums->weights + row * sums->chosen;
    const size_t bytes = (size_t)sums->width * 2;
    for (int i = 0; i < sums->width; i += LANES) {
        FV total = ISA(load)(sums->answers + places[0] * bytes, i, 0) * weights[0];
        for (int k = 1; k < sums->chosen; k++)
            total += ISA(load)(sums->answers + places[k] * bytes, i, 0) * weights[k];
        if (sums->shared)
            total += ISA(load)(sums->shared + row * bytes, i, 0) * (sums->gate ? sums->gate[row] : 1.0f);
        ISA(store)(sums->out + row * bytes, i, 0, total);
    }
}
