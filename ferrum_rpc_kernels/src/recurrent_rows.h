/* Rows beside a recurrence (recurrent_rows.c). */

#ifndef FERRUM_RECURRENT_ROWS_H
#define FERRUM_RECURRENT_ROWS_H

#include <stdint.h>

/* Two numbers of every head, from rows of bfloat16, or float32 if wide, that are `row_bytes` apart: beta is the sigmoid of
 * what is written; log_decay is `speed` times the softplus of the decay + `shift`. */
struct decay_rows {
    const char *written, *decay;
    const float *speed, *shift; /* [heads] */
    float *log_decay, *beta;    /* [rows, heads] */
    int64_t rows, row_bytes;
    int32_t heads, wide, lanes;
};

/* Heads times a function of their gates: the sigmoid, or where there is a norm the SiLU, and then heads are over their root
 * mean square, times the norm. All are bfloat16, or float32 if wide; heads and results are contiguous, gates are the given
 * bytes apart. */
struct gated_rows {
    const char *heads, *gates;
    char *out;
    const float *norm; /* [dim], or NULL */
    int64_t rows, row_bytes, head_bytes;
    int32_t count, dim, wide, lanes, threads; /* `count` heads a row */
    float eps;
};

void ferrum_decay_rows(const struct decay_rows *rows);
void ferrum_gated_rows(const struct gated_rows *rows);

#endif
