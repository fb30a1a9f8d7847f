/* Rows times panels, the inner loops of every matrix product here: sums of pairs of bfloat16 (AVX-512 BF16, or two
 * products in float32 for each pair) and of fours of bytes (AVX-512 VNNI). gemm_avx2.h and gemm_portable.h have those of
 * other CPUs, over the same panels.
 *
 * A panel is 16 columns of a matrix, stored so that one vector holds the same few elements of all 16: [pairs][16][2] of
 * bfloat16 or [fours][16][4] of bytes. A vector of a panel meets one broadcast element group of a row, and each of the 16
 * lanes sums for its own column: no lane is ever added to another. An output's sum runs over the elements in their
 * order in one chain, whatever rows or panels stand beside it: it does not depend on the batch.
 *
 * Up to 6 rows and 4 panels are kept in registers: 24 sums, 4 vectors of weights, a broadcast.
 */

#ifndef FERRUM_GEMM_TILE_H
#define FERRUM_GEMM_TILE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_features.h"

#define GEMM_ROWS 6
#define GEMM_PANELS 4
#define GEMM_COLUMNS 16 /* of a panel */
#define GEMM_WIDTH (GEMM_PANELS * GEMM_COLUMNS)

/* A block of rows against neighbouring panels. Rows lie `row_bytes` apart, panels `panel_bytes`; `sums` has GEMM_WIDTH
 * floats a row, which are added to. `ahead`: memory to fetch into the cache meanwhile, a line for every vector. */
struct gemm_tile {
    const char *rows, *panels, *ahead;
    size_t row_bytes, panel_bytes;
    float *sums;
    int vectors; /* of a panel: pairs, or fours */
    /* bytes only: a group is `group` vectors, its scale in a row and in each column, and -128 x the row's sum */
    const float *row_scales, *panel_scales;
    const int32_t *row_starts;
    size_t row_groups, panel_groups; /* from one row's, or panel's, to the next one's */
    int group;
};

#if defined(__x86_64__)

#include <immintrin.h>

#define GEMM_INLINE(SET) static inline __attribute__((always_inline)) COMPILED_FOR(SET)

GEMM_INLINE(AVX512) __m512i gemm_broadcast(const char *from)
{
    int32_t four;
    memcpy(&four, from, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Written out: with the intrinsic GCC 12 keeps a copy of every sum in memory, and the loop takes 2.5 times as long. */
GEMM_INLINE(AVX512_VNNI) __m512i gemm_fours(__m512i sum, __m512i weights, __m512i x)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
    return sum;
}

/* The sums of a tile, and where they go back to. */
GEMM_INLINE(AVX512) void gemm_load(const struct gemm_tile *tile, const int rows, const int panels,
                                   __m512 (*sums)[GEMM_PANELS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            sums[r][p] = _mm512_loadu_ps(tile->sums + r * GEMM_WIDTH + p * GEMM_COLUMNS);
}

GEMM_INLINE(AVX512) void gemm_store(const struct gemm_tile *tile, const int rows, const int panels,
                                    __m512 (*sums)[GEMM_PANELS])
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            _mm512_storeu_ps(tile->sums + r * GEMM_WIDTH + p * GEMM_COLUMNS, sums[r][p]);
}

GEMM_INLINE(AVX512_BF16) void gemm_pairs(const struct gemm_tile *tile, const int rows, const int panels)
{
    __m512 sums[GEMM_ROWS][GEMM_PANELS];
    gemm_load(tile, rows, panels, sums);
    const char *row = tile->rows, *panel = tile->panels, *ahead = tile->ahead;
    const size_t row_bytes = tile->row_bytes, panel_bytes = tile->panel_bytes;
    for (int i = 0; i < tile->vectors; i++, row += 4, panel += 64, ahead += 64) {
        __m512i weights[GEMM_PANELS];
        _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            weights[p] = _mm512_loadu_si512(panel + p * panel_bytes);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512i x = gemm_broadcast(row + r * row_bytes);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                sums[r][p] = _mm512_dpbf16_ps(sums[r][p], (__m512bh)weights[p], (__m512bh)x);
        }
    }
    gemm_store(tile, rows, panels, sums);
}

/* The first or the second bfloat16 of each pair, as floats: one is the upper half of the other. */
GEMM_INLINE(AVX512) __m512 gemm_half(__m512i pairs, const int second)
{
    if (second)
        return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int32_t)0xffff0000)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

/* As gemm_pairs, on a CPU without its instruction. The product of two bfloat16 is exact in float32, so what is rounded
 * is each sum. One half of the pairs after the other, so that the vectors fit the registers. */
GEMM_INLINE(AVX512) void gemm_halves(const struct gemm_tile *tile, const int rows, const int panels)
{
    __m512 sums[GEMM_ROWS][GEMM_PANELS];
    gemm_load(tile, rows, panels, sums);
    const char *row = tile->rows, *panel = tile->panels, *ahead = tile->ahead;
    const size_t row_bytes = tile->row_bytes, panel_bytes = tile->panel_bytes;
    for (int i = 0; i < tile->vectors; i++, row += 4, panel += 64, ahead += 64) {
        _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 2
        for (int second = 0; second < 2; second++) {
            __m512 weights[GEMM_PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                weights[p] = gemm_half(_mm512_loadu_si512(panel + p * panel_bytes), second);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m512 x = gemm_half(gemm_broadcast(row + r * row_bytes), second);
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
                    sums[r][p] = _mm512_fmadd_ps(weights[p], x, sums[r][p]);
            }
        }
    }
    gemm_store(tile, rows, panels, sums);
}

/* Weights are unsigned, 128 more than they are, and rows are signed: what that adds, 128 x the sum of the row's group,
 * is taken off where the group's sum begins. */
GEMM_INLINE(AVX512_VNNI) void gemm_bytes(const struct gemm_tile *tile, const int rows, const int panels)
{
    const char *row = tile->rows, *panel = tile->panels, *ahead = tile->ahead;
    const size_t row_bytes = tile->row_bytes, panel_bytes = tile->panel_bytes;
    for (int g = 0; g < tile->vectors / tile->group; g++) {
        __m512i sums[GEMM_ROWS][GEMM_PANELS];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                sums[r][p] = _mm512_set1_epi32(tile->row_starts[r * tile->row_groups + g]);
        for (int i = 0; i < tile->group; i++, row += 4, panel += 64, ahead += 64) {
            __m512i weights[GEMM_PANELS];
            _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                weights[p] = _mm512_loadu_si512(panel + p * panel_bytes);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m512i x = gemm_broadcast(row + r * row_bytes);
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
                    sums[r][p] = gemm_fours(sums[r][p], weights[p], x);
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const __m512 scale = _mm512_loadu_ps(tile->panel_scales + p * tile->panel_groups + g * GEMM_COLUMNS);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                float *to = tile->sums + r * GEMM_WIDTH + p * GEMM_COLUMNS;
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(tile->row_scales[r * tile->row_groups + g]));
                _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][p]), both, _mm512_loadu_ps(to)));
            }
        }
    }
}

/* One copy of the loops for every number of rows and panels, so that their sums stay in registers. */
#define GEMM_CASE(kind, r, p)                                                                                          \
    case (p) * 8 + (r):                                                                                                \
        kind(tile, r, p);                                                                                              \
        break;
#define GEMM_CASES(kind, p)                                                                                            \
    GEMM_CASE(kind, 1, p)                                                                                              \
    GEMM_CASE(kind, 2, p) GEMM_CASE(kind, 3, p) GEMM_CASE(kind, 4, p) GEMM_CASE(kind, 5, p) GEMM_CASE(kind, 6, p)
#define GEMM_ENTRY(name, kind, SET)                                                                                    \
    static COMPILED_FOR(SET) void name(const struct gemm_tile *tile, int rows, int panels)                             \
    {                                                                                                                  \
        switch (panels * 8 + rows) {                                                                                   \
            GEMM_CASES(kind, 1)                                                                                        \
            GEMM_CASES(kind, 2)                                                                                        \
            GEMM_CASES(kind, 3)                                                                                        \
            GEMM_CASES(kind, 4)                                                                                        \
        }                                                                                                              \
    }

#endif
#endif
