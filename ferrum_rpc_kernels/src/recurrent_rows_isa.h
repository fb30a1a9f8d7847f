/* Rows beside a recurrence, for one instruction set: included by recurrent_rows.c once per set (see simd.h). */

#include "simd.h"

/* log(1 + e^x), to 3 ulp: the larger of x and 0, and log(1 + t) of t = e^-|x| by the series of 2 artanh(t / (2 + t)). */
INLINE FV ISA(softplus)(FV x)
{
    const FV t = ISA(exp)(ISA(where)(x < 0.0f, x, -x)), s = t / (t + 2.0f), z = s * s;
    FV y = ISA(line)(z, 1.0f / 15.0f, 1.0f / 13.0f);
    y = ISA(fma)(y, z, ISA(splat)(1.0f / 11.0f));
    y = ISA(fma)(y, z, ISA(splat)(1.0f / 9.0f));
    y = ISA(fma)(y, z, ISA(splat)(1.0f / 7.0f));
    y = ISA(fma)(y, z, ISA(splat)(1.0f / 5.0f));
    y = ISA(fma)(y, z, ISA(splat)(1.0f / 3.0f));
    y = ISA(fma)(y, z, ISA(splat)(1.0f));
    return s * y * 2.0f + ISA(where)(x < 0.0f, (FV){0}, x);
}

/* The first n of LANES elements; the others are zero. */
INLINE FV ISA(load_some)(const char *row, int element, int wide, int n)
{
    const int bytes = wide ? 4 : 2;
    char held[4 * LANES] = {0};
    memcpy(held, row + (size_t)element * bytes, (size_t)n * bytes);
    return ISA(load)(held, 0, wide);
}

static TARGET void ISA(decay_row)(const struct decay_rows *rows, int64_t row)
{
    const int heads = rows->heads, wide = rows->wide;
    const char *written = rows->written + row * rows->row_bytes, *decay = rows->decay + row * rows->row_bytes;
    for (int i = 0; i < heads; i += LANES) {
        const int n = heads - i < LANES ? heads - i : LANES;
        const FV shift = ISA(load_some)((const char *)rows->shift, i, 1, n);
        const FV speed = ISA(load_some)((const char *)rows->speed, i, 1, n);
        const FV log_decay = speed * ISA(softplus)(ISA(load_some)(decay, i, wide, n) + shift);
        const FV beta = ISA(times_sigmoid)(ISA(splat)(1.0f), ISA(load_some)(written, i, wide, n));
        memcpy(rows->log_decay + row * heads + i, &log_decay, (size_t)n * sizeof(float));
        memcpy(rows->beta + row * heads + i, &beta, (size_t)n * sizeof(float));
    }
}

INLINE void ISA(gate_heads)(const struct gated_rows *rows, int64_t row, int wide)
{
    const int dim = rows->dim;
    const size_t head_bytes = (size_t)dim * (wide ? 4 : 2);
    for (int head = 0; head < rows->count; head++) {
        const size_t at = (size_t)(row * rows->count + head) * head_bytes;
        const char *x = rows->heads + at, *gate = rows->gates + row * rows->row_bytes + head * rows->head_bytes;
        float scale = 1.0f;
        if (rows->norm) {
            FV squares = {0};
            for (int i = 0; i < dim; i += LANES) {
                const FV each = ISA(load)(x, i, wide);
                squares = ISA(fma)(each, each, squares);
            }
            scale = 1.0f / __builtin_sqrtf(ISA(total)(squares) / (float)dim + rows->eps);
        }
        for (int i = 0; i < dim; i += LANES) {
            const FV g = ISA(load)(gate, i, wide);
            FV y = ISA(load)(x, i, wide);
            if (rows->norm)
                y = y * scale * *(const FV *)(rows->norm + i) * g;
            ISA(store)(rows->out + at, i, wide, ISA(times_sigmoid)(y, g));
        }
    }
}

static TARGET void ISA(gate_row)(const struct gated_rows *rows, int64_t row)
{
    if (rows->wide)
        ISA(gate_heads)(rows, row, 1);
    else
        ISA(gate_heads)(rows, row, 0);
}
