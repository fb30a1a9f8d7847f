/* Sums of group.c, in vectors of one instruction set; see for_each_isa.h. */

#include "simd.h"

/* Elements [first, last) of out: the sums of the parts, in order. `out` may be one of the parts. */
static TARGET void ISA(sum_parts)(const struct parts *parts, int64_t first, int64_t last, char *out)
{
    const int wide = parts->wide;
    const int64_t whole = first + (last - first) / LANES * LANES;
    const size_t bytes = wide ? 4 : 2;
    for (int64_t i = first; i < whole; i += LANES) {
        FV sum = ISA(load)(parts->of[0] + i * bytes, 0, wide);
        for (int rank = 1; rank < parts->count; rank++)
            sum += ISA(load)(parts->of[rank] + i * bytes, 0, wide);
        ISA(store)(out + i * bytes, 0, wide, sum);
    }
    if (whole < last) {
        const size_t left = (size_t)(last - whole) * bytes;
        char row[4 * LANES] = {0};
        memcpy(row, parts->of[0] + whole * bytes, left);
        FV sum = ISA(load)(row, 0, wide);
        for (int rank = 1; rank < parts->count; rank++) {
            memcpy(row, parts->of[rank] + whole * bytes, left);
            sum += ISA(load)(row, 0, wide);
        }
        ISA(store)(row, 0, wide, sum);
        memcpy(out + whole * bytes, row, left);
    }
}
