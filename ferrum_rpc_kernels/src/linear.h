/* Matrix products with resident weights (linear.c). */

#ifndef FERRUM_LINEAR_H
#define FERRUM_LINEAR_H

#include <stdint.h>

enum kind { PAIRS, BYTES, NIBBLES };

/* A matrix [n, k], its panels in order. `k` is a multiple of 2 (pairs) or of `group`, so many elements of a column that
 * share a scale; the last panel may have columns that no output has. Bias: n floats, or NULL. */
struct matrix {
    int32_t kind, n, k, group; /* group: 0 for pairs; a multiple of 32 up to 128 for nibbles */
    float factor;              /* of all scales, a power of two */
    const char *panels;
    const void *scales;   /* [panels][k / group][16]: float32 for bytes, float16 for nibbles */
    const uint8_t *zeros; /* nibbles: as scales, which number stands for 0; NULL: 8 */
    const float *bias;
};

struct ferrum_linears;

int32_t ferrum_linear(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                      int64_t count, char *out, int32_t wide, int32_t threads);
int32_t ferrum_linear_largest(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                              int64_t count, int64_t *ids, int32_t threads);

#endif
