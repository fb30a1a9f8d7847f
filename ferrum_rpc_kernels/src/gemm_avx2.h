/* The inner loops of gemm_tile.h in AVX2, over the same panels.
 *
 * Half a vector of a panel, 8 columns, is a register. It is taken in two steps: the first and the second bfloat16 of
 * each pair as floats, or the bytes 0 and 2 and the bytes 1 and 3 of each four as 16-bit integers. A byte's weight is
 * unsigned and its row signed, as there. (`vpmaddubsw` would add two products in 16 bits, and saturate.) Rows are
 * widened once for all columns, so that a step of a row is one broadcast: [pairs][2] floats, or [fours][2][2] of 16
 * bits. For nibbles `vpmaddubsw` is right: of 32 elements it adds 16 products of at most 15 x 127 in each 16-bit half of a
 * sum, 30,480. Numbers of MXFP4 are up to 24: of 16 elements it adds 8 products of at most 24 x 127, 24,384.
 * Those of IQ4 are bytes, which are unpacked before.
 *
 * 16 registers hold up to 12 sums: 6 rows of one panel, 2 of two, or one of four.
 */

#ifndef FERRUM_GEMM_AVX2_H
#define FERRUM_GEMM_AVX2_H

#if defined(__x86_64__)

#include "gemm_tile.h"

#define AVX2_STEP 8 /* bytes of a row for every vector of a panel */

GEMM_INLINE(AVX2) __m256i avx2_widen(__m256i weights, const int bytes, const int second)
{
    if (bytes)
        return second ? _mm256_srli_epi16(weights, 8) : _mm256_and_si256(weights, _mm256_set1_epi16(0xff));
    if (second)
        return _mm256_and_si256(weights, _mm256_set1_epi32((int32_t)0xffff0000));
    return _mm256_slli_epi32(weights, 16);
}

GEMM_INLINE(AVX2) __m256i avx2_add(__m256i sum, __m256i weights, __m256i x, const int bytes)
{
    if (bytes)
        return _mm256_add_epi32(sum, _mm256_madd_epi16(weights, x));
    return _mm256_castps_si256(
        _mm256_fmadd_ps(_mm256_castsi256_ps(weights), _mm256_castsi256_ps(x), _mm256_castsi256_ps(sum)));
}

/* Half a vector of a panel. */
GEMM_INLINE(AVX2) __m256i avx2_weights(const char *panel, size_t panel_bytes, int p, const int bytes, const int second)
{
    return avx2_widen(_mm256_loadu_si256((const __m256i *)(panel + p / 2 * panel_bytes + p % 2 * 32)), bytes, second);
}

GEMM_INLINE(AVX2) __m256i avx2_broadcast(const char *from)
{
    return _mm256_castps_si256(_mm256_broadcast_ss((const float *)from));
}

/* A row's two sums += weights of 8 columns each x what `from` holds. Written out: GCC 12 broadcasts all rows ahead, and keeps
 * sums in memory for it. */
GEMM_INLINE(AVX2) void avx2_row(__m256i *sums, __m256i left, __m256i right, const char *from, const int bytes)
{
    __m256i x, product;
    const float *four = (const float *)from;
    if (bytes)
        __asm__("vpbroadcastd %4, %2\n\t"
                "vpmaddwd %5, %2, %3\n\t"
                "vpmaddwd %6, %2, %2\n\t"
                "vpaddd %3, %0, %0\n\t"
                "vpaddd %2, %1, %1"
                : "+x"(sums[0]), "+x"(sums[1]), "=&x"(x), "=&x"(product)
                : "m"(*four), "x"(left), "x"(right));
    else
        __asm__("vbroadcastss %3, %2\n\t"
                "vfmadd231ps %4, %2, %0\n\t"
                "vfmadd231ps %5, %2, %1"
                : "+x"(sums[0]), "+x"(sums[1]), "=&x"(x)
                : "m"(*four), "x"(left), "x"(right));
}

/* sums += `count` vectors of rows and panels, `vector_bytes` apart in a panel; `ahead`: `lines` to fetch for each. Registers
 * hold the weights of one panel while rows pass, or one or two rows while weights pass. */
GEMM_INLINE(AVX2) void avx2_multiply(const char *row, size_t row_bytes, const char *panel, size_t panel_bytes,
                                     size_t vector_bytes, const char *ahead, const int lines, int count, const int rows,
                                     const int panels, const int bytes, __m256i (*sums)[2 * GEMM_PANELS])
{
    for (int i = 0; i < count; i++, row += AVX2_STEP, panel += vector_bytes, ahead += vector_bytes) {
#pragma GCC unroll 4
        for (int line = 0; line < lines; line++)
            _mm_prefetch(ahead + 64 * line, _MM_HINT_T1);
#pragma GCC unroll 2
        for (int second = 0; second < 2; second++) {
            __asm__("" : "+r"(panel)); /* read it again: there is no register to keep it for the second step */
            if (rows > 2) {
                const __m256i left = avx2_weights(panel, panel_bytes, 0, bytes, second);
                const __m256i right = avx2_weights(panel, panel_bytes, 1, bytes, second);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++)
                    avx2_row(sums[r], left, right, row + r * row_bytes + 4 * second, bytes);
            } else {
                const __m256i x = avx2_broadcast(row + 4 * second);
                const __m256i other = rows > 1 ? avx2_broadcast(row + row_bytes + 4 * second) : x;
#pragma GCC unroll 8
                for (int p = 0; p < 2 * panels; p++) {
                    const __m256i weights = avx2_weights(panel, panel_bytes, p, bytes, second);
                    sums[0][p] = avx2_add(sums[0][p], weights, x, bytes);
                    if (rows > 1)
                        sums[1][p] = avx2_add(sums[1][p], weights, other, bytes);
                }
            }
        }
    }
}

/* `panels` panels, `panel_bytes` apart; the rest as avx2_multiply. `to`: the sums of these panels. */
GEMM_INLINE(AVX2) void avx2_pairs_at(const struct gemm_tile *tile, const char *panel, size_t panel_bytes,
                                     size_t vector_bytes, const char *ahead, const int lines, float *to, const int rows,
                                     const int panels)
{
    __m256i sums[GEMM_ROWS][2 * GEMM_PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 2 * panels; p++)
            sums[r][p] = _mm256_castps_si256(_mm256_loadu_ps(to + r * GEMM_WIDTH + p * 8));
    avx2_multiply(tile->rows, tile->row_bytes, panel, panel_bytes, vector_bytes, ahead, lines, tile->vectors, rows, panels,
                  0, sums);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < 2 * panels; p++)
            _mm256_storeu_ps(to + r * GEMM_WIDTH + p * 8, _mm256_castsi256_ps(sums[r][p]));
}

/* Rows against the panels from `first` on. Only the first of them fetch ahead. */
GEMM_INLINE(AVX2) void avx2_pairs(const struct gemm_tile *tile, int first, const int rows, const int panels)
{
    const char *panel = tile->panels + first * tile->panel_bytes;
    avx2_pairs_at(tile, panel, tile->panel_bytes, 64, first ? panel : tile->ahead, 1, tile->sums + first * GEMM_COLUMNS,
                  rows, panels);
}

GEMM_INLINE(AVX2) __m256i avx2_eight(const uint8_t *bytes)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
}

GEMM_INLINE(AVX2) __m256 avx2_floats(const uint16_t *halves)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
}

/* As gemm_start. */
GEMM_INLINE(AVX2) void avx2_start(const struct gemm_tile *tile, int first, int g, const int rows, const int panels,
                                  const int kind, __m256i (*sums)[2 * GEMM_PANELS])
{
#pragma GCC unroll 8
    for (int p = 0; p < 2 * panels; p++) {
        __m256i zeros = _mm256_set1_epi32(gemm_zero(kind));
        if (gemm_may_have_zeros(kind) && tile->panel_zeros)
            zeros = avx2_eight(tile->panel_zeros + (first + p / 2) * tile->panel_groups + (size_t)g * GEMM_COLUMNS +
                               p % 2 * 8);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
            sums[r][p] = _mm256_madd_epi16(zeros, _mm256_set1_epi32(tile->row_starts[r * tile->row_groups + g]));
    }
}

/* Add the sums of group `g`, integers, to a tile's, with the scales of rows and columns. */
GEMM_INLINE(AVX2) void avx2_scale(const struct gemm_tile *tile, int first, int g, const int rows, const int panels,
                                  const int kind, __m256i (*sums)[2 * GEMM_PANELS])
{
#pragma GCC unroll 8
    for (int p = 0; p < 2 * panels; p++) {
        const size_t at = (first + p / 2) * tile->panel_groups + (size_t)g * GEMM_COLUMNS + p % 2 * 8;
        const uint16_t *factors = tile->panel_factors + (first + p / 2) * tile->panel_supers +
                                  g / GEMM_SUPER * 2 * GEMM_COLUMNS + p % 2 * 8;
        __m256 scale, least = _mm256_setzero_ps();
        if (kind == FACTORED) {
            scale = _mm256_mul_ps(_mm256_cvtepi32_ps(avx2_eight((const uint8_t *)tile->panel_scales + at)),
                                  avx2_floats(factors));
            least =
                _mm256_mul_ps(_mm256_cvtepi32_ps(avx2_eight(tile->panel_zeros + at)), avx2_floats(factors + GEMM_COLUMNS));
        } else if (kind == MXFP4) {
            const __m256i bits = _mm256_slli_epi32(avx2_eight((const uint8_t *)tile->panel_scales + at), 23);
            scale = _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(MXFP4_TINY)));
        } else
            scale = avx2_floats((const uint16_t *)tile->panel_scales + at);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            float *to = tile->sums + r * GEMM_WIDTH + first * GEMM_COLUMNS + p * 8;
            const float of_row = tile->row_scales[r * tile->row_groups + g];
            const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(of_row));
            __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][p]), both, _mm256_loadu_ps(to));
            if (kind == FACTORED)
                sum = _mm256_fmadd_ps(
                    least, _mm256_set1_ps((float)tile->row_starts[r * tile->row_groups + g] * of_row), sum);
            _mm256_storeu_ps(to, sum);
        }
    }
}

GEMM_INLINE(AVX2) void avx2_bytes(const struct gemm_tile *tile, int first, const int rows, const int panels)
{
    const char *row = tile->rows, *panel = tile->panels + first * tile->panel_bytes;
    const char *ahead = first ? panel : tile->ahead;
    const int group = tile->group;
    for (int g = 0; g < tile->vectors / group; g++) {
        __m256i sums[GEMM_ROWS][2 * GEMM_PANELS];
        avx2_start(tile, first, g, rows, panels, BYTES, sums);
        avx2_multiply(row, tile->row_bytes, panel, tile->panel_bytes, 64, ahead, 1, group, rows, panels, 1, sums);
        row += group * AVX2_STEP, panel += group * 64, ahead += group * 64;
        avx2_scale(tile, first, g, rows, panels, BYTES, sums);
    }
}

/* The numbers of half a vector of a panel of nibbles: of the low ones or the high ones. */
GEMM_INLINE(AVX2) __m256i avx2_numbers(const char *panel, size_t panel_bytes, int p, const int second, const int kind)
{
    const __m256i both = _mm256_loadu_si256((const __m256i *)(panel + p / 2 * panel_bytes + p % 2 * 32));
    const __m256i nibbles = _mm256_and_si256(second ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    if (!gemm_table(kind))
        return nibbles;
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)gemm_table(kind))), nibbles);
}

/* `vectors` of a panel of nibbles to twice as many of bytes. */
GEMM_INLINE(AVX2) void avx2_unpack(const char *panel, int vectors, char *to, const int kind)
{
    for (int i = 0; i < vectors; i++, panel += 64, to += 128)
        for (int half = 0; half < 4; half++)
            _mm256_storeu_si256((__m256i *)(to + half * 32), avx2_numbers(panel, 64, half % 2, half / 2, kind));
}

/* Of as many elements as 16 bits can add: `count` vectors of a panel. Sums of products of two numbers and two bytes. */
GEMM_INLINE(AVX2) void avx2_nibble_sums(const struct gemm_tile *tile, const char *row, const char *panel, int count,
                                        const int rows, const int panels, const int kind, __m256i (*sums)[2 * GEMM_PANELS])
{
    const size_t row_bytes = tile->row_bytes, panel_bytes = tile->panel_bytes;
    for (int i = 0; i < count; i++, row += 8, panel += 64) {
#pragma GCC unroll 2
        for (int second = 0; second < 2; second++) {
            if (rows > 2) {
                const __m256i left = avx2_numbers(panel, panel_bytes, 0, second, kind);
                const __m256i right = avx2_numbers(panel, panel_bytes, 1, second, kind);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    __m256i x, product;
                    __asm__("vpbroadcastd %4, %2\n\t"
                            "vpmaddubsw %2, %5, %3\n\t"
                            "vpmaddubsw %2, %6, %2\n\t"
                            "vpaddw %3, %0, %0\n\t"
                            "vpaddw %2, %1, %1"
                            : "+x"(sums[r][0]), "+x"(sums[r][1]), "=&x"(x), "=&x"(product)
                            : "m"(*(const float *)(row + r * row_bytes + 4 * second)), "x"(left), "x"(right));
                }
            } else {
#pragma GCC unroll 8
                for (int p = 0; p < 2 * panels; p++) {
                    const __m256i weights = avx2_numbers(panel, panel_bytes, p, second, kind);
#pragma GCC unroll 2
                    for (int r = 0; r < rows; r++) {
                        const __m256i x = avx2_broadcast(row + r * row_bytes + 4 * second);
                        sums[r][p] = _mm256_add_epi16(sums[r][p], _mm256_maddubs_epi16(weights, x));
                    }
                }
            }
        }
    }
}

GEMM_INLINE(AVX2) void avx2_in_nibbles(const struct gemm_tile *tile, int first, const int rows, const int panels,
                                       const int kind)
{
    const char *row = tile->rows, *panel = tile->panels + first * tile->panel_bytes;
    const char *ahead = first ? panel : tile->ahead;
    const int most = kind == MXFP4 ? 2 : 4, count = tile->group < most ? tile->group : most; /* of a group of 16: 2 */
    for (int g = 0; g < tile->vectors / tile->group; g++) {
        __m256i whole[GEMM_ROWS][2 * GEMM_PANELS];
        avx2_start(tile, first, g, rows, panels, kind, whole);
        for (int i = 0; i < tile->group; i += count, row += count * 8, panel += count * 64, ahead += count * 64) {
            __m256i sums[GEMM_ROWS][2 * GEMM_PANELS];
            for (int line = 0; line < count; line++)
                _mm_prefetch(ahead + 64 * line, _MM_HINT_T1);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int p = 0; p < 2 * panels; p++)
                    sums[r][p] = _mm256_setzero_si256();
            avx2_nibble_sums(tile, row, panel, count, rows, panels, kind, sums);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int p = 0; p < 2 * panels; p++)
                    whole[r][p] = _mm256_add_epi32(whole[r][p], _mm256_madd_epi16(sums[r][p], _mm256_set1_epi16(1)));
        }
        avx2_scale(tile, first, g, rows, panels, kind, whole);
    }
}

GEMM_INLINE(AVX2) void avx2_nibbles(const struct gemm_tile *tile, int first, const int rows, const int panels)
{
    avx2_in_nibbles(tile, first, rows, panels, NIBBLES);
}

GEMM_INLINE(AVX2) void avx2_factored(const struct gemm_tile *tile, int first, const int rows, const int panels)
{
    avx2_in_nibbles(tile, first, rows, panels, FACTORED);
}

GEMM_INLINE(AVX2) void avx2_mxfp4(const struct gemm_tile *tile, int first, const int rows, const int panels)
{
    avx2_in_nibbles(tile, first, rows, panels, MXFP4);
}

#define AVX2_CASE(kind, r, p)                                                                                          \
    case (p) * 8 + (r):                                                                                                \
        if ((r) <= GEMM_ROWS)                                                                                          \
            kind(tile, first, r, p);                                                                                   \
        break;
#define AVX2_ENTRY(name, kind)                                                                                         \
    static COMPILED_FOR(AVX2) void name(const struct gemm_tile *tile, int rows, int panels)                            \
    {                                                                                                                  \
        const int most = rows == 1 ? 4 : rows == 2 ? 2 : 1;                                                            \
        for (int first = 0; first < panels; first += most) {                                                           \
            switch ((panels - first < most ? panels - first : most) * 8 + rows) {                                      \
                AVX2_CASE(kind, 1, 1) AVX2_CASE(kind, 2, 1) AVX2_CASE(kind, 3, 1)                                      \
                AVX2_CASE(kind, 4, 1) AVX2_CASE(kind, 5, 1) AVX2_CASE(kind, 6, 1)                                      \
                AVX2_CASE(kind, 1, 2) AVX2_CASE(kind, 2, 2)                                                            \
                AVX2_CASE(kind, 1, 3) AVX2_CASE(kind, 1, 4)                                                            \
            }                                                                                                          \
        }                                                                                                              \
    }

#endif
#endif
