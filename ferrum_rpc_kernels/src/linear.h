/* Matrix products with resident weights (linear.c). */

#ifndef FERRUM_LINEAR_H
#define FERRUM_LINEAR_H

#include <stdint.h>

enum kind { PAIRS, BYTES };

/* A matrix [n, k], its panels in order. `k` is a multiple of 2 (pairs) or 64 (bytes); the last panel may have columns that
 * no output has. Bias: n floats, or NULL. */
struct matrix {
    int32_t kind, n, k;
    const char *panels;
    const float *scales; /* bytes: [panels][k / 64][16] */
    const float *bias;
};

struct ferrum_linears;

int32_t ferrum_linear(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                      int64_t count, char *out, int32_t wide, int32_t threads);
int32_t ferrum_linear_largest(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                              int64_t count, int64_t *ids, int32_t threads);

#endif
