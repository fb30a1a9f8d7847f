/* What a decoder does row by row between its matrix products, for one instruction set: included by norm_rope_gate.c once per set
 * (see simd.h). All of it is computed in float32 and rounded once. */

#include "simd.h"

/* Root mean square normalisation of n elements: their factor, from the sum of their squares. */
INLINE float ISA(inverse_rms)(FV squares, int n, float eps)
{
    return 1.0f / __builtin_sqrtf(ISA(total)(squares) / (float)n + eps);
}

/* hidden += delta (where there is one), rounded; out = hidden / rms(hidden) * weight. */
INLINE void ISA(add_norm)(const struct row_task *rows, int64_t row, int wide)
{
    const int n = rows->width;
    const size_t element = wide ? 4 : 2, at = (size_t)row * n * element;
    char *hidden = rows->hidden + at;
    const char *delta = rows->delta ? rows->delta + at : NULL;
    FV squares[2] = {{0}, {0}};
    for (int i = 0; i < n; i += LANES) {
        FV x = ISA(load)(hidden, i, wide);
        if (delta) {
            ISA(store)(hidden, i, wide, x + ISA(load)(delta, i, wide));
            x = ISA(load)(hidden, i, wide);
        }
        squares[i / LANES & 1] += x * x;
    }
    const float scale = ISA(inverse_rms)(squares[0] + squares[1], n, rows->eps);
    for (int i = 0; i < n; i += LANES)
        ISA(store)(rows->out + at, i, wide, ISA(load)(hidden, i, wide) * scale * ISA(load)(rows->weight, i, wide));
}

/* The heads of a row that are rotated, in place: normed where there are norms, then channel i with i + dim / 2. */
INLINE void ISA(rotate)(const struct row_task *rows, int64_t row, int wide)
{
    const int dim = rows->head_dim, half = dim / 2;
    const size_t element = wide ? 4 : 2;
    const float *cos = rows->cos + (size_t)row * dim, *sin = rows->sin + (size_t)row * half;
    for (int head = 0; head < rows->heads; head++) {
        char *x = rows->hidden + ((size_t)row * rows->width + (size_t)head * dim) * element;
        const float *norm = rows->head_norms ? rows->head_norms + (size_t)head * dim : NULL;
        float scale = 1.0f;
        if (norm) {
            FV squares = {0};
            for (int i = 0; i < dim; i += LANES) {
                const FV each = ISA(load)(x, i, wide);
                squares += each * each;
            }
            scale = ISA(inverse_rms)(squares, dim, rows->eps);
        }
        for (int i = 0; i < half; i += LANES) {
            FV first = ISA(load)(x, i, wide), second = ISA(load)(x, i + half, wide);
            if (norm) {
                first = first * scale * *(const FV *)(norm + i);
                second = second * scale * *(const FV *)(norm + half + i);
            }
            const FV c = *(const FV *)(cos + i), s = *(const FV *)(sin + i);
            ISA(store)(x, i, wide, first * c - second * s);
            ISA(store)(x, i + half, wide, second * *(const FV *)(cos + half + i) + first * s);
        }
    }
}

/* out = silu(gate) * up, where a row holds gate and up one after the other. */
INLINE void ISA(gate)(const struct row_task *rows, int64_t row, int wide)
{
    const int n = rows->width;
    const size_t element = wide ? 4 : 2;
    const char *gate = rows->hidden + (size_t)row * 2 * n * element, *up = gate + (size_t)n * element;
    for (int i = 0; i < n; i += LANES) {
        const FV x = ISA(load)(gate, i, wide);
        const FV t = ISA(exp)(ISA(where)(x < 0.0f, x, -x)); /* e^-|x|: no overflow on either side */
        const FV silu = ISA(where)(x < 0.0f, x * t, x) / (1.0f + t);
        ISA(store)(rows->out + (size_t)row * n * element, i, wide, silu * ISA(load)(up, i, wide));
    }
}

static TARGET void ISA(run_row)(const struct row_task *rows, int64_t row)
{
    switch (rows->task * 2 + rows->wide) {
    case ADD_NORM * 2:
        ISA(add_norm)(rows, row, 0);
        break;
    case ADD_NORM * 2 + 1:
        ISA(add_norm)(rows, row, 1);
        break;
    case ROTATE * 2:
        ISA(rotate)(rows, row, 0);
        break;
    case ROTATE * 2 + 1:
        ISA(rotate)(rows, row, 1);
        break;
    case GATE * 2:
        ISA(gate)(rows, row, 0);
        break;
    default:
        ISA(gate)(rows, row, 1);
    }
}
