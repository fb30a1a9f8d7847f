/* Rows times panels, the inner loops of every matrix product here: sums of pairs of bfloat16 (AVX-512 BF16) and of fours
 * of bytes (AVX-512 VNNI).
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

#if defined(__x86_64__)

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_features.h"

#define DOT_ROWS 6
#define DOT_PANELS 4
#define DOT_COLUMNS 16 /* of a panel */
#define DOT_WIDTH (DOT_PANELS * DOT_COLUMNS)
#define DOT_INLINE(SET) static inline __attribute__((always_inline)) COMPILED_FOR(SET)

/* A block of rows against neighbouring panels. Rows lie `row_bytes` apart, panels `panel_bytes`; `sums` has DOT_WIDTH
 * floats a row, which are added to. `ahead`: memory to fetch into the cache meanwhile, a line for every vector. */
struct dots {
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

DOT_INLINE(AVX512) __m512i dot_broadcast(const char *from)
{
    int32_t four;
    memcpy(&four, from, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Written out: with the intrinsic GCC 12 keeps a copy of every sum in memory, and the loop takes 2.5 times as long. */
DOT_INLINE(AVX512_VNNI) __m512i dot_fours(__m512i sum, __m512i weights, __m512i x)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
    return sum;
}

DOT_INLINE(AVX512_BF16) void dot_pairs(const struct dots *dots, const int rows, const int panels)
{
    __m512 sums[DOT_ROWS][DOT_PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            sums[r][p] = _mm512_loadu_ps(dots->sums + r * DOT_WIDTH + p * DOT_COLUMNS);
    const char *row = dots->rows, *panel = dots->panels, *ahead = dots->ahead;
    const size_t row_bytes = dots->row_bytes, panel_bytes = dots->panel_bytes;
    for (int i = 0; i < dots->vectors; i++, row += 4, panel += 64, ahead += 64) {
        __m512i weights[DOT_PANELS];
        _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            weights[p] = _mm512_loadu_si512(panel + p * panel_bytes);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512i x = dot_broadcast(row + r * row_bytes);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                sums[r][p] = _mm512_dpbf16_ps(sums[r][p], (__m512bh)weights[p], (__m512bh)x);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            _mm512_storeu_ps(dots->sums + r * DOT_WIDTH + p * DOT_COLUMNS, sums[r][p]);
}

/* Weights are unsigned, 128 more than they are, and rows are signed: what that adds, 128 x the sum of the row's group,
 * is taken off where the group's sum begins. */
DOT_INLINE(AVX512_VNNI) void dot_bytes(const struct dots *dots, const int rows, const int panels)
{
    const char *row = dots->rows, *panel = dots->panels, *ahead = dots->ahead;
    const size_t row_bytes = dots->row_bytes, panel_bytes = dots->panel_bytes;
    for (int g = 0; g < dots->vectors / dots->group; g++) {
        __m512i sums[DOT_ROWS][DOT_PANELS];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                sums[r][p] = _mm512_set1_epi32(dots->row_starts[r * dots->row_groups + g]);
        for (int i = 0; i < dots->group; i++, row += 4, panel += 64, ahead += 64) {
            __m512i weights[DOT_PANELS];
            _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                weights[p] = _mm512_loadu_si512(panel + p * panel_bytes);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m512i x = dot_broadcast(row + r * row_bytes);
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
                    sums[r][p] = dot_fours(sums[r][p], weights[p], x);
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const __m512 scale = _mm512_loadu_ps(dots->panel_scales + p * dots->panel_groups + g * DOT_COLUMNS);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                float *to = dots->sums + r * DOT_WIDTH + p * DOT_COLUMNS;
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(dots->row_scales[r * dots->row_groups + g]));
                _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][p]), both, _mm512_loadu_ps(to)));
            }
        }
    }
}

/* One copy of the loops for every number of rows and panels, so that their sums stay in registers. */
#define DOT_CASE(kind, r, p)                                                                                           \
    case (p) * 8 + (r):                                                                                                \
        kind(dots, r, p);                                                                                              \
        break;
#define DOT_CASES(kind, p)                                                                                             \
    DOT_CASE(kind, 1, p)                                                                                               \
    DOT_CASE(kind, 2, p) DOT_CASE(kind, 3, p) DOT_CASE(kind, 4, p) DOT_CASE(kind, 5, p) DOT_CASE(kind, 6, p)
#define DOT_ENTRY(name, kind, SET)                                                                                     \
    static COMPILED_FOR(SET) void name(const struct dots *dots, int rows, int panels)                                  \
    {                                                                                                                  \
        switch (panels * 8 + rows) {                                                                                   \
            DOT_CASES(kind, 1)                                                                                         \
            DOT_CASES(kind, 2)                                                                                         \
            DOT_CASES(kind, 3)                                                                                         \
            DOT_CASES(kind, 4)                                                                                         \
        }                                                                                                              \
    }

#endif
#endif
