/* The two products of an adapter, in vectors of one instruction set; lora.c includes it once for each (see simd.h). */

#include "simd.h"

/* sums [rows][GEMM_WIDTH] = rows of `elements` against a group of panels, interleaved vector by vector. */
INLINE void ISA(multiply)(const char *x, size_t x_bytes, int rows, int elements, const char *weights, int panels,
                          float *sums)
{
#if LANES == 16
    const struct gemm_tile tile = {
        .rows = x, .panels = weights, .row_bytes = x_bytes, .sums = sums, .vectors = elements / 2};
    lora_avx512(&tile, rows, panels);
#else
    float held[GEMM_ROWS * WIDENED];
    memset(sums, 0, (size_t)rows * GEMM_WIDTH * sizeof *sums);
    for (int first = 0; first < elements; first += WIDENED) {
        const int count = elements - first < WIDENED ? elements - first : WIDENED;
        for (int r = 0; r < rows; r++) {
            const char *from = x + r * x_bytes + (size_t)first * 2;
            char *to = (char *)(held + r * WIDENED);
            int i = 0;
            for (; i + LANES <= count; i += LANES)
                ISA(store)(to, i, 1, ISA(load)(from, i, 0));
            for (; i < count; i++) {
                memset(to + i * 4, 0, 2);
                memcpy(to + i * 4 + 2, from + i * 2, 2);
            }
        }
        const struct gemm_tile tile = {
            .rows = (const char *)held,
            .panels = weights + (size_t)first / 2 * panels * 64,
            .row_bytes = WIDENED * sizeof *held,
            .panel_bytes = (size_t)panels * 64,
            .sums = sums,
            .vectors = count / 2,
        };
        lora_avx2(&tile, rows, panels);
    }
#endif
}

INLINE HV ISA(to_bf16)(FV x)
{
#if LANES == 16
    return (HV)_mm512_cvtneps_pbh((__m512)x);
#else
    return __builtin_convertvector(ISA(to_half)(x), HV);
#endif
}

/* Add LANES sums to a row, of which `left` are in it. */
INLINE void ISA(add_sums)(char *row, const float *sums, int left)
{
    if (left >= LANES) {
        *(HV *)row = ISA(to_bf16)(ISA(load)(row, 0, 0) + *(const FV *)sums);
        return;
    }
    char held[2 * LANES] = {0};
    memcpy(held, row, (size_t)left * 2);
    *(HV *)held = ISA(to_bf16)(ISA(load)(held, 0, 0) + *(const FV *)sums);
    memcpy(row, held, (size_t)left * 2);
}

/* Rows against a group of panels of A, of which `panel` is the first: their sums. */
static TARGET void ISA(multiply_a)(const struct lora_rows *rows, const struct lora_change *change, int panel, int panels,
                                   const char *x, size_t x_bytes, char *sums, size_t sums_bytes)
{
    const char *weights = change->a + panel * ((size_t)change->k * GEMM_COLUMNS * 2);
    for (int64_t row = rows->first, last = row + rows->count; row < last; row += GEMM_ROWS) {
        const int count = (int)(last - row < GEMM_ROWS ? last - row : GEMM_ROWS);
        float tile_sums[GEMM_ROWS * GEMM_WIDTH];
        ISA(multiply)(x + row * x_bytes, x_bytes, count, change->k, weights, panels, tile_sums);
        for (int r = 0; r < count; r++)
            for (int i = 0; i < panels * GEMM_COLUMNS; i += LANES)
                *(HV *)(sums + (row + r) * sums_bytes + (panel * GEMM_COLUMNS + i) * 2) =
                    ISA(to_bf16)(*(const FV *)(tile_sums + r * GEMM_WIDTH + i));
    }
}

/* The sums of rows against groups of panels of a part's B, of which `panel` is the first: added to y. */
static TARGET void ISA(add_b)(const struct lora_rows *rows, const struct lora_part *part, int panel, int panels, char *y,
                              size_t y_bytes, const char *sums, size_t sums_bytes)
{
    const size_t panel_bytes = (size_t)part->rank * GEMM_COLUMNS * 2;
    const char *weights = part->b + panel * panel_bytes;
    for (int64_t row = rows->first, last = row + rows->count; row < last; row += GEMM_ROWS) {
        const int count = (int)(last - row < GEMM_ROWS ? last - row : GEMM_ROWS);
        for (int done = 0; done < panels; done += GEMM_PANELS) {
            const int width = panels - done < GEMM_PANELS ? panels - done : GEMM_PANELS;
            const int first = (panel + done) * GEMM_COLUMNS, left = part->columns - first;
            const int columns = left < width * GEMM_COLUMNS ? left : width * GEMM_COLUMNS;
            float tile_sums[GEMM_ROWS * GEMM_WIDTH];
            ISA(multiply)(sums + row * sums_bytes + part->start * 2, sums_bytes, count, part->rank,
                          weights + done * panel_bytes, width, tile_sums);
            for (int r = 0; r < count; r++)
                for (int i = 0; i < columns; i += LANES)
                    ISA(add_sums)(y + (row + r) * y_bytes + (part->first + first + i) * 2,
                                  tile_sums + r * GEMM_WIDTH + i, columns - i);
        }
    }
}
