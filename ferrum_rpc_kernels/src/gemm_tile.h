/* Rows times panels, the inner loops of every matrix product here: sums of pairs of bfloat16 (AVX-512 BF16, or two
 * products in float32 for each pair) and of fours of bytes, whose weights have 8 bits or 4 (AVX-512 VNNI). gemm_amx.h,
 * gemm_avx2.h and gemm_portable.h have those of other CPUs, over the same panels.
 *
 * A panel is 16 columns of a matrix, stored so that one vector holds the same few elements of all 16: [pairs][16][2] of
 * bfloat16, [fours][16][4] of bytes or [eights][16][4] of nibbles, the first four of eight in the low halves of bytes and the
 * others in the high ones; a table turns those of MXFP4 and IQ4 into numbers. A vector of a panel meets one broadcast element group of
 * a row, and each of the 16 lanes sums for its own column: no lane is ever added to another. An output's sum runs over the
 * elements in their order in one chain, whatever rows or panels stand beside it: it does not depend on the batch.
 *
 * Up to 6 rows and 4 panels are kept in registers: 24 sums, 4 vectors of weights, a broadcast.
 */

#ifndef FERRUM_GEMM_TILE_H
#define FERRUM_GEMM_TILE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_features.h"
#include "linear.h"

#if !defined(GEMM_ROWS) /* tests compile fewer copies of the loops */
#define GEMM_ROWS 6
#endif
#define GEMM_PANELS 4
#define GEMM_COLUMNS 16 /* of a panel */
#define GEMM_WIDTH (GEMM_PANELS * GEMM_COLUMNS)

/* A block of rows against neighbouring panels. Rows lie `row_bytes` apart, panels `panel_bytes`; `sums` has GEMM_WIDTH
 * floats a row, which are added to. `ahead`: memory to fetch into the cache meanwhile, a line for every vector. */
struct gemm_tile {
    const char *rows, *panels, *ahead;
    size_t row_bytes, panel_bytes;
    float *sums;
    int vectors; /* of a panel: pairs, fours or eights */
    /* all but pairs: a group is `group` vectors. Of each in a row its scale and -1 x its sum, and in each column what
     * linear.h says of scales, zeros and factors */
    const float *row_scales;
    const int32_t *row_starts;
    const void *panel_scales;
    const uint8_t *panel_zeros;
    const uint16_t *panel_factors;
    size_t row_groups, panel_groups, panel_supers; /* from one row's, or panel's, to the next one's */
    int group;
    int *configured; /* of a thread: see gemm_amx.h */
};

#define GEMM_SUPER 8 /* groups that share factors */

/* What a nibble of MXFP4 is multiplied as: twice its number, from -12 to 12, plus 12. */
static const uint8_t gemm_mxfp4[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#define MXFP4_TINY 0x00400000 /* the bits of 2^-127, whose exponent is 0: it is subnormal */

/* The same of IQ4: one of 16 numbers from -127 to 113, plus 128. */
static const uint8_t gemm_iq4[] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

/* The table of a kind of nibbles that has one. */
static inline const uint8_t *gemm_table(const int kind) { return kind == MXFP4 ? gemm_mxfp4 : kind == IQ4 ? gemm_iq4 : NULL; }

/* Which number stands for 0 in a matrix of this kind that has no zeros of its own. FACTORED: see linear.h. */
static inline int gemm_zero(const int kind) 
{
    return kind == BYTES || kind == IQ4 ? 128 : kind == NIBBLES ? 8 : kind == MXFP4 ? 12 : 0;
}

static inline int gemm_may_have_zeros(const int kind) { return kind == BYTES || kind == NIBBLES; }

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

/* Fetch a line `ahead`, and of each panel one that is needed soon: the processor's own prefetching ends with every page. At 1
 * and 2 rows products take 0.87 (4 bits) to 0.94 (bfloat16) of the time without it. */
GEMM_INLINE(AVX512) void gemm_prefetch(const char *ahead, const char *panel, size_t panel_bytes, const int panels)
{
    _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++)
        _mm_prefetch(panel + p * panel_bytes + 512, _MM_HINT_T0);
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
        gemm_prefetch(ahead, panel, panel_bytes, panels);
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

/* As gemm_pairs, over rows of floats. The product of two bfloat16 is exact in float32, so what is rounded is each sum. One half
 * of the pairs after the other, so that the vectors fit the registers. */
GEMM_INLINE(AVX512) void gemm_halves(const struct gemm_tile *tile, const int rows, const int panels)
{
    __m512 sums[GEMM_ROWS][GEMM_PANELS];
    gemm_load(tile, rows, panels, sums);
    const char *row = tile->rows, *panel = tile->panels, *ahead = tile->ahead;
    const size_t row_bytes = tile->row_bytes, panel_bytes = tile->panel_bytes;
    for (int i = 0; i < tile->vectors; i++, row += 8, panel += 64, ahead += 64) {
        gemm_prefetch(ahead, panel, panel_bytes, panels);
#pragma GCC unroll 2
        for (int second = 0; second < 2; second++) {
            __m512 weights[GEMM_PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                weights[p] = gemm_half(_mm512_loadu_si512(panel + p * panel_bytes), second);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m512 x = _mm512_castsi512_ps(gemm_broadcast(row + r * row_bytes + 4 * second));
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
                    sums[r][p] = _mm512_fmadd_ps(weights[p], x, sums[r][p]);
            }
        }
    }
    gemm_store(tile, rows, panels, sums);
}

GEMM_INLINE(AVX512) __m512i gemm_widen(const uint8_t *bytes)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
}

GEMM_INLINE(AVX512) __m512 gemm_floats(const uint16_t *halves)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
}

/* Of group `g` in panel `p`, if a matrix has some of its own: the number that stands for 0. */
GEMM_INLINE(AVX512) __m512i gemm_zeros(const struct gemm_tile *tile, int g, int p)
{
    return gemm_widen(tile->panel_zeros + p * tile->panel_groups + (size_t)g * GEMM_COLUMNS);
}

/* What the sums of group `g` begin with: numbers are unsigned and rows are signed, so the number that stands for 0 times the
 * sum of the row's group is taken off. 16 bits hold the number, and the sum of 128 bytes. */
GEMM_INLINE(AVX512) __m512i gemm_zero_sums(const struct gemm_tile *tile, int g, int r, __m512i zeros)
{
    return _mm512_madd_epi16(zeros, _mm512_set1_epi32(tile->row_starts[r * tile->row_groups + g]));
}

/* The same, if it is `zero` everywhere. */
GEMM_INLINE(AVX512) __m512i gemm_start_of(const struct gemm_tile *tile, int g, int r, const int zero)
{
    return _mm512_set1_epi32(zero * tile->row_starts[r * tile->row_groups + g]);
}

GEMM_INLINE(AVX512) void gemm_start(const struct gemm_tile *tile, int g, const int rows, const int panels, const int kind,
                                    __m512i (*sums)[GEMM_PANELS])
{
    const int own = gemm_may_have_zeros(kind) && tile->panel_zeros;
#pragma GCC unroll 6
    for (int r = 0; r < rows && !own; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            sums[r][p] = gemm_start_of(tile, g, r, gemm_zero(kind));
#pragma GCC unroll 4
    for (int p = 0; p < panels && own; p++) {
        const __m512i zeros = gemm_zeros(tile, g, p);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
            sums[r][p] = gemm_zero_sums(tile, g, r, zeros);
    }
}

/* Of group `g` in panel `p`: what a number counts, and of a FACTORED matrix what is taken off each. */
struct gemm_scales {
    __m512 scale, least;
};

GEMM_INLINE(AVX512) struct gemm_scales gemm_scales_of(const struct gemm_tile *tile, int g, int p, const int kind)
{
    const size_t at = p * tile->panel_groups + (size_t)g * GEMM_COLUMNS;
    if (kind == MXFP4) {
        const __m512i bits = _mm512_slli_epi32(gemm_widen((const uint8_t *)tile->panel_scales + at), 23);
        return (struct gemm_scales){_mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(MXFP4_TINY))),
                                    _mm512_setzero_ps()};
    }
    if (kind != FACTORED)
        return (struct gemm_scales){gemm_floats((const uint16_t *)tile->panel_scales + at), _mm512_setzero_ps()};
    const uint16_t *factors = tile->panel_factors + p * tile->panel_supers + g / GEMM_SUPER * 2 * GEMM_COLUMNS;
    return (struct gemm_scales){
        _mm512_mul_ps(_mm512_cvtepi32_ps(gemm_widen((const uint8_t *)tile->panel_scales + at)), gemm_floats(factors)),
        _mm512_mul_ps(_mm512_cvtepi32_ps(gemm_widen(tile->panel_zeros + at)), gemm_floats(factors + GEMM_COLUMNS)),
    };
}

/* Add the sums of group `g` in row `r` and panel `p`, integers, to a tile's, with the scales of both. */
GEMM_INLINE(AVX512) void gemm_add(const struct gemm_tile *tile, int g, int r, int p, const int kind,
                                  const struct gemm_scales *scales, __m512i sums)
{
    float *to = tile->sums + r * GEMM_WIDTH + p * GEMM_COLUMNS;
    const float of_row = tile->row_scales[r * tile->row_groups + g];
    const __m512 both = _mm512_mul_ps(scales->scale, _mm512_set1_ps(of_row));
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), both, _mm512_loadu_ps(to));
    if (kind == FACTORED)
        sum = _mm512_fmadd_ps(scales->least,
                              _mm512_set1_ps((float)tile->row_starts[r * tile->row_groups + g] * of_row), sum);
    _mm512_storeu_ps(to, sum);
}

GEMM_INLINE(AVX512) void gemm_scale(const struct gemm_tile *tile, int g, const int rows, const int panels, const int kind,
                                    __m512i (*sums)[GEMM_PANELS])
{
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
        const struct gemm_scales scales = gemm_scales_of(tile, g, p, kind);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
            gemm_add(tile, g, r, p, kind, &scales, sums[r][p]);
    }
}

/* `kind`: BYTES, or that of numbers from gemm_unpack. */
GEMM_INLINE(AVX512_VNNI) void gemm_in_bytes(const struct gemm_tile *tile, const int rows, const int panels, const int kind)
{
    const char *row = tile->rows, *panel = tile->panels, *ahead = tile->ahead;
    const size_t row_bytes = tile->row_bytes, panel_bytes = tile->panel_bytes;
    for (int g = 0; g < tile->vectors / tile->group; g++) {
        __m512i sums[GEMM_ROWS][GEMM_PANELS];
        gemm_start(tile, g, rows, panels, kind, sums);
        for (int i = 0; i < tile->group; i++, row += 4, panel += 64, ahead += 64) {
            __m512i weights[GEMM_PANELS];
            gemm_prefetch(ahead, panel, panel_bytes, panels);
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
        gemm_scale(tile, g, rows, panels, kind, sums);
    }
}

GEMM_INLINE(AVX512_VNNI) void gemm_bytes(const struct gemm_tile *tile, const int rows, const int panels)
{
    gemm_in_bytes(tile, rows, panels, BYTES);
}

GEMM_INLINE(AVX512_VNNI) void gemm_factored_bytes(const struct gemm_tile *tile, const int rows, const int panels)
{
    gemm_in_bytes(tile, rows, panels, FACTORED);
}

GEMM_INLINE(AVX512_VNNI) void gemm_mxfp4_bytes(const struct gemm_tile *tile, const int rows, const int panels)
{
    gemm_in_bytes(tile, rows, panels, MXFP4);
}

/* The numbers of a vector of nibbles: the low ones or the high ones. */
GEMM_INLINE(AVX512) __m512i gemm_numbers(__m512i both, const int second, const int kind)
{
    const __m512i nibbles = _mm512_and_si512(second ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
    if (!gemm_table(kind))
        return nibbles;
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)gemm_table(kind))), nibbles);
}

/* `vectors` of a panel of nibbles to twice as many of bytes. `zeros`: of each group of `group` vectors in each column, the
 * nibble that becomes 128; NULL: `every` is added to each. */
GEMM_INLINE(AVX512) void gemm_unpack(const char *panel, const uint8_t *zeros, int every, int vectors, int group, char *to,
                                     const int kind)
{
    for (int i = 0; i < vectors; i += group) {
        __m512i more = _mm512_set1_epi8((char)every);
        if (zeros)
            more = _mm512_sub_epi8(_mm512_set1_epi8((char)128),
                                   _mm512_mullo_epi32(gemm_widen(zeros + (size_t)i / group * GEMM_COLUMNS),
                                                      _mm512_set1_epi32(0x01010101)));
        for (int v = 0; v < group; v++, panel += 64, to += 128) {
            const __m512i both = _mm512_loadu_si512(panel);
            _mm512_storeu_si512(to, _mm512_add_epi8(gemm_numbers(both, 0, kind), more));
            _mm512_storeu_si512(to + 64, _mm512_add_epi8(gemm_numbers(both, 1, kind), more));
        }
    }
}

/* Low nibbles before high ones, so that the vectors fit the registers. */
GEMM_INLINE(AVX512_VNNI) void gemm_in_nibbles(const struct gemm_tile *tile, const int rows, const int panels,
                                              const int kind)
{
    const char *row = tile->rows, *panel = tile->panels, *ahead = tile->ahead;
    const size_t row_bytes = tile->row_bytes, panel_bytes = tile->panel_bytes;
    for (int g = 0; g < tile->vectors / tile->group; g++) {
        __m512i sums[GEMM_ROWS][GEMM_PANELS];
        gemm_start(tile, g, rows, panels, kind, sums);
        for (int i = 0; i < tile->group; i++, row += 8, panel += 64, ahead += 64) {
            gemm_prefetch(ahead, panel, panel_bytes, panels);
#pragma GCC unroll 2
            for (int second = 0; second < 2; second++) {
                __m512i weights[GEMM_PANELS];
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
                    weights[p] = gemm_numbers(_mm512_loadu_si512(panel + p * panel_bytes), second, kind);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    const __m512i x = gemm_broadcast(row + r * row_bytes + 4 * second);
#pragma GCC unroll 4
                    for (int p = 0; p < panels; p++)
                        sums[r][p] = gemm_fours(sums[r][p], weights[p], x);
                }
            }
        }
        gemm_scale(tile, g, rows, panels, kind, sums);
    }
}

GEMM_INLINE(AVX512_VNNI) void gemm_nibbles(const struct gemm_tile *tile, const int rows, const int panels)
{
    gemm_in_nibbles(tile, rows, panels, NIBBLES);
}

GEMM_INLINE(AVX512_VNNI) void gemm_factored(const struct gemm_tile *tile, const int rows, const int panels)
{
    gemm_in_nibbles(tile, rows, panels, FACTORED);
}

GEMM_INLINE(AVX512_VNNI) void gemm_mxfp4_nibbles(const struct gemm_tile *tile, const int rows, const int panels)
{
    gemm_in_nibbles(tile, rows, panels, MXFP4);
}

GEMM_INLINE(AVX512_VNNI) void gemm_iq4_nibbles(const struct gemm_tile *tile, const int rows, const int panels)
{
    gemm_in_nibbles(tile, rows, panels, IQ4);
}

/* One copy of the loops for every number of rows and panels, so that their sums stay in registers. */
#define GEMM_CASE(kind, r, p)                                                                                          \
    case (p) * 8 + (r):                                                                                                \
        if ((r) <= GEMM_ROWS)                                                                                          \
            kind(tile, r, p);                                                                                          \
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
