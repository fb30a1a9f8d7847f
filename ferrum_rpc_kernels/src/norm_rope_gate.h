/* What is done row by row (norm_rope_gate.c). */

#ifndef FERRUM_NORM_ROPE_GATE_H
#define FERRUM_NORM_ROPE_GATE_H

#include <stdint.h>

enum task { ADD_NORM, ROTATE, GATE };

/* Rows of bfloat16, or float32 where wide; norms of heads, cosines and sines are float32. */
struct row_task {
    int32_t task, wide, threads;
    int32_t width;           /* elements of a row; of a gate's, half of them */
    int32_t heads, head_dim; /* heads that are rotated, from the row's first on */
    float eps;
    int64_t count;
    char *hidden, *out;
    const char *delta, *weight;
    const float *head_norms, *cos, *sin;
};

void ferrum_rows(const struct row_task *rows, int32_t lanes);

#endif
