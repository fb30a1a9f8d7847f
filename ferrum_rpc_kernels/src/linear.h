/* Matrix products with resident weights (linear.c). */

#ifndef FERRUM_LINEAR_H
#define FERRUM_LINEAR_H

#include <stdint.h>

enum kind { PAIRS, BYTES, NIBBLES, FACTORED, MXFP4, IQ4 };

#define SUPER_GROUP 256 /* elements of a column that share the factors of a FACTORED matrix */

/* A matrix [n, k], its panels in order. `k` is a multiple of 2 (pairs), of SUPER_GROUP (FACTORED) or of `group`, so many
 * elements of a column that share a scale; the last panel may have columns that no output has. Bias: n floats, or NULL.
 *
 * A weight is scale x (number - zero), of a FACTORED matrix, whose numbers are nibbles too, scale x number - minimum.
 * There both are bytes times a factor: GGUF's Q4_K. Nibbles of MXFP4 (OCP Microscaling Formats 1.0) are float4_e2m1: a
 * weight is scale x twice that number, and a scale a power of two, a byte that is its exponent plus 127. Those of IQ4 are one
 * of 16 numbers of 8 bits: GGUF's IQ4_NL. */
struct matrix {
    int32_t kind, n, k, group; /* group: 0 for pairs; 32 (FACTORED too), 16, 64 or 128 */
    int32_t width;             /* columns of the output: n, and those of all that are `next` */
    int32_t mixed;             /* of bytes in groups of 64 without an order: each is mixed (simd.h), in W as in a row */
    float factor;              /* of all scales, a power of two */
    const char *panels;
    const void *scales;      /* [panels][k / group][16]: float16; FACTORED and MXFP4: uint8 */
    const uint8_t *zeros;    /* as scales, which number stands for 0; NULL: 128 of bytes, 8 of nibbles. FACTORED: minimums; MXFP4, IQ4: NULL */
    const uint16_t *factors; /* FACTORED: float16 [panels][k / SUPER_GROUP][2][16], of scales and of minimums */
    const float *bias;
    const int32_t *order;      /* which element of a row meets each column of W; NULL: the same. Not for pairs */
    const struct matrix *next; /* the part of the same product that comes next in the output, or NULL */
};

/* A product: rows of `x`, `x_stride` elements apart, times a matrix of one part (its `next` is none of it). `index`: of each
 * row of the output its row in x; NULL: the same. Rows of `out` lie `out_bytes` apart; NULL: see ferrum_linear_largest. */
struct problem {
    const struct matrix *linear;
    const char *x;
    const int32_t *index;
    int64_t x_stride, count;
    char *out;
    int64_t out_bytes;
};

struct ferrum_linears;

struct problem *ferrum_linear_problems(struct ferrum_linears *self, int32_t count);
int32_t ferrum_linear_all(struct ferrum_linears *self, const struct problem *problems, int32_t count, int32_t wide,
                          int32_t threads);
int32_t ferrum_linear(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                      int64_t count, char *out, int32_t wide, int32_t threads);
int32_t ferrum_linear_heads(struct ferrum_linears *self, const struct matrix *const *linears, int32_t heads, const char *x,
                            int64_t x_stride, int64_t x_head, int64_t count, char *out, int64_t out_stride,
                            int64_t out_head, int32_t threads);
int32_t ferrum_linear_largest(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                              int64_t count, int64_t *ids, int32_t threads);

#endif
