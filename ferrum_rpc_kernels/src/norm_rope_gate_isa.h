/* A decoder's row operations between its matrix products, for one instruction set: included by norm_rope_gate.c once per
 * set (see simd.h). All of them compute in float32 and round once. */

#include "simd.h"

/* Root mean square normalisation of n elements: their factor, from the sum of their squares. */
INLINE float ISA(inverse_rms)(FV squares, int n, float eps)
{
    return 1.0f / __builtin_sqrtf(ISA(total)(squares) / (float)n + eps);
}

/* out = (hidden - its mean) / its deviation * weight + bias. */
INLINE void ISA(centre)(const struct row_task *rows, const char *hidden, char *out, int wide)
{
    const int n = rows->width;
    FV sum = {0}, squares = {0};
    for (int i = 0; i < n; i += LANES)
        sum += ISA(load)(hidden, i, wide);
    const float mean = ISA(total)(sum) / (float)n;
    for (int i = 0; i < n; i += LANES) {
        const FV x = ISA(load)(hidden, i, wide) - mean;
        squares = ISA(fma)(x, x, squares);
    }
    const float scale = ISA(inverse_rms)(squares, n, rows->kind->eps);
    for (int i = 0; i < n; i += LANES) {
        FV x = (ISA(load)(hidden, i, wide) - mean) * scale * *(const FV *)(rows->norm + i);
        if (rows->kind->biased)
            x += *(const FV *)(rows->norm + n + i);
        ISA(store)(out, i, wide, x);
    }
}

/* hidden += delta * residual (if there is a delta), rounded; out = hidden / rms(hidden) * weight (if there is a norm), or
 * `centre`. `out` may be `hidden`. */
INLINE void ISA(add_norm)(const struct row_task *rows, int64_t row, int wide)
{
    const int n = rows->width;
    const size_t element = wide ? 4 : 2, at = (size_t)row * n * element;
    char *hidden = rows->hidden + at;
    const char *delta = rows->delta ? rows->delta + at : NULL;
    const float residual = rows->kind->residual;
    FV squares[2] = {{0}, {0}};
    for (int i = 0; i < n; i += LANES) {
        FV x = ISA(load)(hidden, i, wide);
        if (delta) {
            ISA(store)(hidden, i, wide, x + ISA(load)(delta, i, wide) * residual);
            x = ISA(load)(hidden, i, wide);
        }
        squares[i / LANES & 1] = ISA(fma)(x, x, squares[i / LANES & 1]);
    }
    if (!rows->norm)
        return;
    if (rows->kind->centred) {
        ISA(centre)(rows, hidden, rows->out + at, wide);
        return;
    }
    const float scale = ISA(inverse_rms)(squares[0] + squares[1], n, rows->kind->eps);
    for (int i = 0; i < n; i += LANES)
        ISA(store)(rows->out + at, i, wide, ISA(load)(hidden, i, wide) * scale * *(const FV *)(rows->norm + i));
}

/* The factor that gives n elements of a row, from x on, a root mean square of one. */
INLINE float ISA(norm_of)(const char *x, int n, float eps, int wide)
{
    FV squares = {0};
    for (int i = 0; i < n; i += LANES) {
        const FV each = ISA(load)(x, i, wide);
        squares = ISA(fma)(each, each, squares);
    }
    return ISA(inverse_rms)(squares, n, eps);
}

/* Query and key of a row, in place: normalized if there are norms, then channels i and i + turned / 2 rotated if there is a
 * rotation. */
INLINE void ISA(rotate)(const struct row_task *rows, int64_t row, int wide)
{
    const struct row_kind *kind = rows->kind;
    const int dim = kind->head_dim, turned = rows->cos ? kind->turned : 0, half = turned / 2;
    const size_t element = wide ? 4 : 2;
    const float *cos = rows->cos + (size_t)row * turned, *sin = rows->sin + (size_t)row * half;
    char *first_head = rows->hidden + (size_t)row * rows->width * element;
    float scale = 1.0f;
    for (int head = 0; head < kind->heads + kind->kv_heads; head++) {
        char *x = first_head + (size_t)head * dim * element;
        const float *norm = rows->norm ? rows->norm + (size_t)head * dim : NULL;
        if (norm && !kind->whole_rows)
            scale = ISA(norm_of)(x, dim, kind->eps, wide);
        else if (norm && (head == 0 || head == kind->heads))
            scale = ISA(norm_of)(x, dim * (head ? kind->kv_heads : kind->heads), kind->eps, wide);
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
        if (norm)
            for (int i = turned; i < dim; i += LANES)
                ISA(store)(x, i, wide, ISA(load)(x, i, wide) * scale * *(const FV *)(norm + i));
    }
}

/* silu(x) = x / (1 + e^-x), or the tanh form of gelu, which is x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE FV ISA(activated)(FV x, int activation)
{
    if (activation == RELU)
        return ISA(where)(x < 0.0f, (FV){0}, x);
    FV s = x;
    if (activation == GELU_TANH)
        s = x * (x * x * 0.0713548163f + 1.59576912f);
    return ISA(times_sigmoid)(x, s);
}

/* x * sigmoid(slope x) * (1 + up), where x = min(gate, limit), and up is cut off at +-limit. What is not a number stays so. */
INLINE FV ISA(clamped)(const struct row_kind *kind, FV gate, FV up)
{
    const FV limit = ISA(splat)(kind->limit);
    gate = ISA(where)(gate > limit, limit, gate);
    up = ISA(where)(up > limit, limit, ISA(where)(up < -limit, -limit, up));
    return ISA(times_sigmoid)(gate, gate * kind->slope) * (up + 1.0f);
}

/* out = activation(gate) * up, where a row holds gate and up one after the other; without a gate activation(up). */
INLINE void ISA(gate)(const struct row_task *rows, int64_t row, int wide, int activation, int gated)
{
    const int n = rows->width;
    const size_t element = wide ? 4 : 2;
    const char *gate = rows->hidden + (size_t)row * (1 + gated) * n * element, *up = gate + (size_t)n * element;
    for (int i = 0; i < n; i += LANES) {
        FV x = ISA(load)(gate, i, wide);
        if (activation == CLAMPED) {
            x = ISA(clamped)(rows->kind, x, ISA(load)(up, i, wide));
        } else {
            x = ISA(activated)(x, activation);
            if (gated)
                x *= ISA(load)(up, i, wide);
        }
        ISA(store)(rows->out + (size_t)row * n * element, i, wide, x);
    }
}

/* The operations of most models have specialized code. */
INLINE void ISA(any_gate)(const struct row_task *rows, int64_t row, int wide)
{
    if (rows->kind->activation == SILU && rows->kind->gated)
        ISA(gate)(rows, row, wide, SILU, 1);
    else if (rows->kind->activation == GELU_TANH && rows->kind->gated)
        ISA(gate)(rows, row, wide, GELU_TANH, 1);
    else if (rows->kind->activation == CLAMPED)
        ISA(gate)(rows, row, wide, CLAMPED, 1);
    else
        ISA(gate)(rows, row, wide, rows->kind->activation, rows->kind->gated);
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
        ISA(any_gate)(rows, row, 0);
        break;
    default:
        ISA(any_gate)(rows, row, 1);
    }
}
