/* The inner loops of gemm_tile.h in plain C, over the same panels: for CPUs without any of the instructions, and what the
 * others are tested against.
 *
 * Sums of bytes have the bits of all others. So have sums of pairs those of every loop that multiplies two floats for
 * each pair, because the product of two bfloat16 is exact in float32; `vdpbf16ps` rounds otherwise.
 */

#ifndef FERRUM_GEMM_PORTABLE_H
#define FERRUM_GEMM_PORTABLE_H

#include "gemm_tile.h"

/* A bfloat16 is the upper half of a float. */
static inline float portable_float(uint32_t half)
{
    const uint32_t bits = half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* x * y + z, rounded once. Without an instruction for it: the product is exact in double, and so is the error of the sum,
 * which makes the sum odd; an odd double rounds to float as the exact sum does (Boldo and Melquiond, 2008). */
static inline float portable_fma(float x, float y, float z)
{
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(x, y, z);
#else
    const double product = (double)x * y, sum = product + z, added = sum - product;
    const double error = (product - (sum - added)) + (z - added);
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if (!(bits & 1) && (error < 0.0 || error > 0.0))
        bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
    double odd;
    memcpy(&odd, &bits, sizeof odd);
    return (float)odd;
#endif
}

static inline void pairs_portable(const struct gemm_tile *tile, int rows, int panels)
{
    for (int p = 0; p < panels; p++)
        for (int r = 0; r < rows; r++) {
            const uint16_t *panel = (const uint16_t *)(tile->panels + p * tile->panel_bytes);
            const uint16_t *row = (const uint16_t *)(tile->rows + r * tile->row_bytes);
            float *to = tile->sums + r * GEMM_WIDTH + p * GEMM_COLUMNS, sums[GEMM_COLUMNS];
            memcpy(sums, to, sizeof sums);
            for (int i = 0; i < 2 * tile->vectors; i++) {
                const float x = portable_float(row[i]);
                for (int c = 0; c < GEMM_COLUMNS; c++)
                    sums[c] += portable_float(panel[(i / 2 * GEMM_COLUMNS + c) * 2 + i % 2]) * x;
            }
            memcpy(to, sums, sizeof sums);
        }
}

/* A float16, which may be subnormal; none is infinite or a NaN. */
static inline float portable_half(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest < 0x400)
        return (sign ? -1.0f : 1.0f) * (float)rest * 0x1p-24f;
    const uint32_t bits = sign | ((rest << 13) + ((127 - 15) << 23));
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 2 to the power of a byte less 127. */
static inline float portable_power(uint32_t exponent)
{
    const uint32_t bits = exponent ? exponent << 23 : MXFP4_TINY;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Add the integer sums of group `g` in panel `p` and row `r` to a tile's, with the scales of both. */
static inline void portable_scale(const struct gemm_tile *tile, int p, int r, int g, const int kind, const int32_t *sums)
{
    const size_t at = p * tile->panel_groups + (size_t)g * GEMM_COLUMNS;
    const float scale = tile->row_scales[r * tile->row_groups + g];
    const float start = (float)tile->row_starts[r * tile->row_groups + g] * scale;
    float *to = tile->sums + r * GEMM_WIDTH + p * GEMM_COLUMNS;
    for (int c = 0; c < GEMM_COLUMNS; c++) {
        if (kind != FACTORED) {
            const float own = kind == MXFP4 ? portable_power(((const uint8_t *)tile->panel_scales)[at + c])
                                            : portable_half(((const uint16_t *)tile->panel_scales)[at + c]);
            to[c] = portable_fma((float)sums[c], own * scale, to[c]);
            continue;
        }
        const uint16_t *factors = tile->panel_factors + p * tile->panel_supers + g / GEMM_SUPER * 2 * GEMM_COLUMNS;
        const float own = (float)((const uint8_t *)tile->panel_scales)[at + c] * portable_half(factors[c]);
        const float least = (float)tile->panel_zeros[at + c] * portable_half(factors[GEMM_COLUMNS + c]);
        to[c] = portable_fma(least, start, portable_fma((float)sums[c], own * scale, to[c]));
    }
}

/* Number `i` of a column, in a panel of bytes or of nibbles. */
static inline int portable_number(const uint8_t *panel, int column, int i, const int kind)
{
    const int together = kind == BYTES ? 4 : 8;
    const int four = panel[(i / together * GEMM_COLUMNS + column) * 4 + i % 4];
    if (kind == BYTES)
        return four;
    const int nibble = four >> (i / 4 % 2 * 4) & 15;
    return gemm_table(kind) ? gemm_table(kind)[nibble] : nibble;
}

static inline void portable_groups(const struct gemm_tile *tile, int rows, int panels, const int kind)
{
    const int together = kind == BYTES ? 4 : 8;
    for (int p = 0; p < panels; p++)
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < tile->vectors / tile->group; g++) {
                const size_t first = (size_t)g * tile->group;
                const uint8_t *panel = (const uint8_t *)tile->panels + p * tile->panel_bytes + first * 64;
                const uint8_t *zeros = gemm_may_have_zeros(kind) ? tile->panel_zeros : NULL;
                const int8_t *row = (const int8_t *)tile->rows + r * tile->row_bytes + first * together;
                int32_t sums[GEMM_COLUMNS];
                for (int c = 0; c < GEMM_COLUMNS; c++)
                    sums[c] = (zeros ? zeros[p * tile->panel_groups + (size_t)g * GEMM_COLUMNS + c] : gemm_zero(kind)) *
                              tile->row_starts[r * tile->row_groups + g];
                for (int i = 0; i < together * tile->group; i++)
                    for (int c = 0; c < GEMM_COLUMNS; c++)
                        sums[c] += portable_number(panel, c, i, kind) * row[i];
                portable_scale(tile, p, r, g, kind, sums);
            }
}

static inline void bytes_portable(const struct gemm_tile *tile, int rows, int panels) { portable_groups(tile, rows, panels, BYTES); }
static inline void nibbles_portable(const struct gemm_tile *tile, int rows, int panels) { portable_groups(tile, rows, panels, NIBBLES); }
static inline void factored_portable(const struct gemm_tile *tile, int rows, int panels) { portable_groups(tile, rows, panels, FACTORED); }
static inline void mxfp4_portable(const struct gemm_tile *tile, int rows, int panels) { portable_groups(tile, rows, panels, MXFP4); }
static inline void iq4_portable(const struct gemm_tile *tile, int rows, int panels) { portable_groups(tile, rows, panels, IQ4); }

#endif
