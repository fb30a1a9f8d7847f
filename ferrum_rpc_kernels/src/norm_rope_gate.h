/* Row operations (norm_rope_gate.c). */

#ifndef FERRUM_NORM_ROPE_GATE_H
#define FERRUM_NORM_ROPE_GATE_H

#include <stdint.h>

enum task { ADD_NORM, ROTATE, GATE };

enum activation { SILU, GELU_TANH, RELU, CLAMPED };

/* A model's row operations. Norms are RMS norms, or layer norms if `centred`; if `biased`, biases follow their weights.
 * Query and key are normalized head by head, or as whole rows if `whole_rows`; the first `turned` channels of a head are
 * rotated. Additions are multiplied by `residual`. `limit` and `slope` are those of a clamped gate. */
struct row_kind {
    int32_t centred, biased, activation, gated, heads, kv_heads, head_dim, turned, whole_rows;
    float eps, residual, limit, slope;
};

/* Rows of bfloat16, or float32 if wide; norms, cosines and sines are float32. */
struct row_task {
    const struct row_kind *kind;
    int32_t task, wide, threads;
    int32_t width; /* elements of a row; of the result of a gate */
    int64_t count;
    char *hidden, *out;
    const char *delta;             /* NULL: nothing is added */
    const float *norm, *cos, *sin; /* NULL: nothing is normed, or rotated */
};

void ferrum_rows(const struct row_task *rows, int32_t lanes);

#endif
