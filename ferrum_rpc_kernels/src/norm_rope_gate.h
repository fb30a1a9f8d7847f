/* What is done row by row (norm_rope_gate.c). */

#ifndef FERRUM_NORM_ROPE_GATE_H
#define FERRUM_NORM_ROPE_GATE_H

#include <stdint.h>

enum task { ADD_NORM, ROTATE, GATE };

enum activation { SILU, GELU_TANH, RELU };

/* What a model does to its rows. Norms are of the root mean square or, where `centred`, of the deviation from the mean;
 * behind their weights lie biases where `biased`. Query and key are normed head by head or, where `whole_rows`, each as a
 * whole; `turned` channels of a head are rotated, from its first on. What is added is multiplied with `residual`. */
struct row_kind {
    int32_t centred, biased, activation, gated, heads, kv_heads, head_dim, turned, whole_rows;
    float eps, residual;
};

/* Rows of bfloat16, or float32 where wide; norms, cosines and sines are float32. */
struct row_task {
    const struct row_kind *kind;
    int32_t task, wide, threads;
    int32_t width; /* elements of a row; of what a gate yields */
    int64_t count;
    char *hidden, *out;
    const char *delta;             /* NULL: nothing is added */
    const float *norm, *cos, *sin; /* NULL: nothing is normed, or rotated */
};

void ferrum_rows(const struct row_task *rows, int32_t lanes);

#endif
