/* The inner loops of gemm_tile.h by AMX: a register holds 16 rows of 16 vectors (32 bfloat16 or 64 bytes), or 16 vectors of a
 * panel, which are one without any change, or the sums of 16 rows and one panel.
 *
 * Up to 16 rows meet four panels at a time, more meet two, so that a register that was loaded is used twice: one
 * multiplication takes 16 cycles, and reads 64 bytes a cycle if it is not. The other instruction adds the products of 16
 * vectors before it adds them to a sum, and those of the first and the second elements of pairs apart, so a sum of pairs has
 * other bits than by AVX-512: on a CPU with AMX all rows are multiplied here. Sums of bytes are integers, the same
 * everywhere: these loops take over where there are rows enough for a register.
 *
 * Tests emulate the instructions on other CPUs (tests/numerics/emulated_amx.h). docs/kernels.md has the figures of a CPU that
 * has them.
 */

#ifndef FERRUM_GEMM_AMX_H
#define FERRUM_GEMM_AMX_H

#include "gemm_tile.h"

#if defined(AMX)

#include "amx.h"

#define AMX_ROWS 16 /* of a register */
#define AMX_DEPTH 16 /* vectors of one */
#define AMX_BLOCK (2 * AMX_ROWS) /* rows at a time */
#define AMX_CHUNK 128 /* vectors of a panel at a time: of four panels 32 kB, which stay in the L1 cache */

/* Registers: 0 to 3 sums, 4 and 5 rows, 6 and 7 panels; up to 16 rows need one for rows, so 5 is for panels too.
 * `configured`: of this thread, how they are; 0 before the first time. */
static COMPILED_FOR(AMX) void amx_configure(int *configured, int rows, int depth)
{
    const int wanted = rows * (AMX_DEPTH + 1) + depth;
    if (*configured == wanted)
        return;
    const int first = rows < AMX_ROWS ? rows : AMX_ROWS, second = rows - first, below = second ? second : first;
    const int of[] = {first, first, below, below, first, second ? second : depth, depth, depth};
    struct tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = (uint8_t)of[i];
        config.row_bytes[i] = (uint16_t)(i == 4 || (i == 5 && second) ? 4 * depth : 64);
    }
    TILE_CONFIGURE(&config);
    *configured = wanted;
}

/* Lines that are needed soon, `ahead`, or of each panel: see gemm_prefetch. */
GEMM_INLINE(AMX) void amx_prefetch(const struct gemm_tile *tile, const char *ahead, const char *panel, int rows, int panels,
                                   int depth)
{
    for (int i = 0; i < depth; i++)
        _mm_prefetch(ahead + i * 64, _MM_HINT_T1);
    for (int p = 0; p < panels && rows <= AMX_ROWS; p++)
        for (int i = 0; i < depth; i++)
            _mm_prefetch(panel + p * tile->panel_bytes + (AMX_DEPTH + i) * 64, _MM_HINT_T0);
}

#define AMX_MULTIPLY(to, rows, columns)                                                                                \
    do {                                                                                                               \
        if (bytes)                                                                                                     \
            TILE_BYTES(to, rows, columns);                                                                             \
        else                                                                                                           \
            TILE_PAIRS(to, rows, columns);                                                                             \
    } while (0)
#define AMX_BEGIN(to, from)                                                                                            \
    do {                                                                                                               \
        if (bytes)                                                                                                     \
            TILE_ZERO(to);                                                                                             \
        else                                                                                                           \
            TILE_LOAD(to, from, stride);                                                                               \
    } while (0)

/* `steps` times `depth` vectors from `first` on. Sums of pairs are added to, those of bytes are new. `packed`: the rows are as
 * amx_pack made them. */
GEMM_INLINE(AMX) void amx_multiply(const struct gemm_tile *tile, int rows, int panels, int first, int steps, int depth,
                                   char *sums, const int bytes, const int packed)
{
    const size_t stride = GEMM_WIDTH * 4, of_panel = GEMM_COLUMNS * 4, step = packed ? 64 : 4;
    const size_t panel_bytes = tile->panel_bytes, row_bytes = packed ? 64 : tile->row_bytes;
    const int low = rows <= AMX_ROWS, together = low ? GEMM_PANELS : 2;
    for (int p = 0; p < panels; p += together, sums += together * of_panel) {
        const char *row = tile->rows + step * first, *panel = tile->panels + p * panel_bytes + 64 * (size_t)first;
        const char *ahead = tile->ahead + 64 * (size_t)first, *second = row + AMX_ROWS * tile->row_bytes;
        const int count = panels - p < together ? panels - p : together;
        char *const below = sums + AMX_ROWS * stride;
        AMX_BEGIN(0, sums);
        if (count > 1)
            AMX_BEGIN(1, sums + of_panel);
        if (low && count > 2)
            AMX_BEGIN(2, sums + 2 * of_panel);
        if (low && count > 3)
            AMX_BEGIN(3, sums + 3 * of_panel);
        if (!low)
            AMX_BEGIN(2, below);
        if (!low && count > 1)
            AMX_BEGIN(3, below + of_panel);
        for (int i = 0; i < steps; i++, row += step * depth, second += step * depth, panel += 64 * depth, ahead += 64 * depth) {
            if (p == 0)
                amx_prefetch(tile, ahead, panel, rows, count, depth);
            TILE_LOAD(4, row, row_bytes);
            TILE_LOAD(6, panel, 64);
            AMX_MULTIPLY(0, 4, 6);
            if (count > 1) {
                TILE_LOAD(7, panel + panel_bytes, 64);
                AMX_MULTIPLY(1, 4, 7);
            }
            if (!low) {
                TILE_LOAD(5, second, row_bytes);
                AMX_MULTIPLY(2, 5, 6);
                if (count > 1)
                    AMX_MULTIPLY(3, 5, 7);
                continue;
            }
            if (count > 2) {
                TILE_LOAD(5, panel + 2 * panel_bytes, 64);
                AMX_MULTIPLY(2, 4, 5);
            }
            if (count > 3) {
                TILE_LOAD(6, panel + 3 * panel_bytes, 64);
                AMX_MULTIPLY(3, 4, 6);
            }
        }
        TILE_STORE(0, sums, stride);
        if (count > 1)
            TILE_STORE(1, sums + of_panel, stride);
        if (low && count > 2)
            TILE_STORE(2, sums + 2 * of_panel, stride);
        if (low && count > 3)
            TILE_STORE(3, sums + 3 * of_panel, stride);
        if (!low)
            TILE_STORE(2, below, stride);
        if (!low && count > 1)
            TILE_STORE(3, below + of_panel, stride);
    }
}

GEMM_INLINE(AMX) void amx_in_pairs(const struct gemm_tile *tile, int rows, int panels, const int packed)
{
    const int steps = tile->vectors / AMX_DEPTH, rest = tile->vectors % AMX_DEPTH;
    if (steps) {
        amx_configure(tile->configured, rows, AMX_DEPTH);
        amx_multiply(tile, rows, panels, 0, steps, AMX_DEPTH, (char *)tile->sums, 0, packed);
    }
    if (rest) {
        amx_configure(tile->configured, rows, rest);
        amx_multiply(tile, rows, panels, steps * AMX_DEPTH, 1, rest, (char *)tile->sums, 0, packed);
    }
}

static inline COMPILED_FOR(AMX) void pairs_amx(const struct gemm_tile *tile, int rows, int panels)
{
    amx_in_pairs(tile, rows, panels, 0);
}

static inline COMPILED_FOR(AMX) void packed_pairs_amx(const struct gemm_tile *tile, int rows, int panels)
{
    amx_in_pairs(tile, rows, panels, 1);
}

/* Bytes of a packed row of k bfloat16. */
static inline size_t amx_packed_bytes(int k) { return ((size_t)k * 2 + 63) / 64 * 64; }

/* Copy row `number` of k bfloat16 to its place among packed rows: 16 rows by 64 bytes of each lie together, as a register
 * holds them. Rows of a model lie a multiple of 1024 bytes apart: they fall into few sets of the L1 cache and displace one
 * another. Products of 32 to 512 rows take 0.76 to 0.98 of the time (two readings of each, two cores of a Xeon with AMX). */
static inline void amx_pack(const char *row, int64_t number, int k, char *rows)
{
    const size_t bytes = (size_t)k * 2;
    char *to = rows + (size_t)number / AMX_ROWS * AMX_ROWS * amx_packed_bytes(k) + number % AMX_ROWS * 64;
    for (size_t at = 0; at < bytes; at += 64, to += AMX_ROWS * 64)
        memcpy(to, row + at, bytes - at < 64 ? bytes - at : 64);
}

/* `kind`: as of gemm_in_bytes. */
GEMM_INLINE(AMX) void amx_in_bytes(const struct gemm_tile *tile, int rows, int panels, const int kind)
{
    const int own = gemm_may_have_zeros(kind) && tile->panel_zeros;
    const int depth = tile->group < AMX_DEPTH ? tile->group : AMX_DEPTH; /* both are powers of two */
    amx_configure(tile->configured, rows, depth);
    for (int g = 0; g < tile->vectors / tile->group; g++) {
        int32_t sums[AMX_BLOCK][GEMM_WIDTH] __attribute__((aligned(64)));
        amx_multiply(tile, rows, panels, g * tile->group, tile->group / depth, depth, (char *)sums, 1, 0);
        for (int p = 0; p < panels; p++) {
            const struct gemm_scales scales = gemm_scales_of(tile, g, p, kind);
            const __m512i zeros = own ? gemm_zeros(tile, g, p) : _mm512_setzero_si512();
            for (int r = 0; r < rows; r++) {
                __m512i sum = _mm512_load_si512(sums[r] + p * GEMM_COLUMNS);
                if (kind != FACTORED)
                    sum = _mm512_add_epi32(
                        sum, own ? gemm_zero_sums(tile, g, r, zeros) : gemm_start_of(tile, g, r, gemm_zero(kind)));
                gemm_add(tile, g, r, p, kind, &scales, sum);
            }
        }
    }
}

static inline COMPILED_FOR(AMX) void bytes_amx(const struct gemm_tile *tile, int rows, int panels)
{
    amx_in_bytes(tile, rows, panels, BYTES);
}

static inline COMPILED_FOR(AMX) void factored_bytes_amx(const struct gemm_tile *tile, int rows, int panels)
{
    amx_in_bytes(tile, rows, panels, FACTORED);
}

static inline COMPILED_FOR(AMX) void mxfp4_bytes_amx(const struct gemm_tile *tile, int rows, int panels)
{
    amx_in_bytes(tile, rows, panels, MXFP4);
}

/* The registers of a thread that configured any; see amx_configure. */
static inline void amx_release(int configured)
{
    if (configured)
        TILE_RELEASE();
}

#endif
#endif
