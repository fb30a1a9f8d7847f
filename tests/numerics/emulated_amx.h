/* The operations of amx.h as C functions, for a library that any CPU with AVX-512 BF16 and VNNI can run; included before every
 * source. They do what Intel's manual says in "Operation", rounding and denormal numbers too, and abort where it says that
 * the CPU raises an exception. So they prove addresses, packing and tails. They do not prove that a CPU rounds as its manual
 * says. */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __builtin_cpu_supports(feature) (!strncmp(feature, "amx", 3) || __builtin_cpu_supports(feature))

struct emulated_tiles {
    int configured;
    uint8_t rows[8];
    uint16_t row_bytes[8];
    char of[8][16][64] __attribute__((aligned(64)));
};

static __thread struct emulated_tiles emulated;

static inline void emulated_check(int right, const char *what)
{
    if (right)
        return;
    fprintf(stderr, "AMX: %s\n", what);
    abort();
}

static inline int amx_permitted(void) { return 1; }

static inline void emulated_configure(const void *from)
{
    const uint8_t *config = from;
    emulated_check(config[0] == 1 && config[1] == 0, "the palette must be 1");
    memset(&emulated, 0, sizeof emulated);
    emulated.configured = 1;
    for (int i = 0; i < 16; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, config + 16 + 2 * i, 2);
        const uint8_t rows = config[48 + i];
        emulated_check(i < 8 || (!rows && !row_bytes), "there are 8 registers");
        emulated_check(rows <= 16 && row_bytes <= 64 && !rows == !row_bytes, "a register is too large, or half empty");
        if (i < 8) {
            emulated.rows[i] = rows;
            emulated.row_bytes[i] = row_bytes;
        }
    }
}

static inline void emulated_used(int tile) { emulated_check(emulated.configured && emulated.rows[tile], "no such register"); }

static inline void emulated_zero(int tile)
{
    emulated_used(tile);
    memset(emulated.of[tile], 0, sizeof emulated.of[tile]);
}

static inline void emulated_load(int tile, const void *from, size_t stride)
{
    emulated_zero(tile);
    for (int row = 0; row < emulated.rows[tile]; row++)
        memcpy(emulated.of[tile][row], (const char *)from + row * stride, emulated.row_bytes[tile]);
}

static inline void emulated_store(int tile, void *to, size_t stride)
{
    emulated_used(tile);
    for (int row = 0; row < emulated.rows[tile]; row++)
        memcpy((char *)to + row * stride, emulated.of[tile][row], emulated.row_bytes[tile]);
}

static inline void emulated_shapes(int to, int rows, int columns)
{
    emulated_used(to), emulated_used(rows), emulated_used(columns);
    emulated_check(to != rows && to != columns && rows != columns, "three registers must differ");
    emulated_check(!(emulated.row_bytes[to] % 4 || emulated.row_bytes[rows] % 4), "rows must be of whole words");
    emulated_check(emulated.row_bytes[to] == emulated.row_bytes[columns], "columns of sums and panel differ");
    emulated_check(emulated.row_bytes[rows] / 4 == emulated.rows[columns], "rows and panel have other depths");
    emulated_check(emulated.rows[to] == emulated.rows[rows], "rows of sums and rows differ");
}

/* The arithmetic is fast, because tests of whole models run it, and it reads nothing but registers. */
#define EMULATED_PRODUCT \
    static __attribute__((target("avx512f,fma"), optimize("O3"), no_sanitize("address", "undefined"))) void

/* With bits of MXCSR that make denormal numbers zero, as arguments and as results. */
EMULATED_PRODUCT emulated_pairs(int to, int rows, int columns)
{
    emulated_shapes(to, rows, columns);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    for (int m = 0; m < emulated.rows[to]; m++) {
        float sums[2][16] = {{0.0f}}, *result = (float *)emulated.of[to][m];
        for (int k = 0; k < emulated.rows[columns]; k++) {
            const uint32_t row = ((const uint32_t *)emulated.of[rows][m])[k], halves[2] = {row << 16, row & 0xffff0000u};
            const uint32_t *panel = (const uint32_t *)emulated.of[columns][k];
            float x[2];
            memcpy(x, halves, sizeof x);
            for (int n = 0; n < 16; n++) {
                union {
                    uint32_t bits;
                    float number;
                } low = {panel[n] << 16}, high = {panel[n] & 0xffff0000u};
                sums[0][n] = __builtin_fmaf(x[0], low.number, sums[0][n]);
                sums[1][n] = __builtin_fmaf(x[1], high.number, sums[1][n]);
            }
        }
        for (int n = 0; n < emulated.row_bytes[to] / 4; n++)
            result[n] += sums[0][n] + sums[1][n];
    }
    _mm_setcsr(before);
}

EMULATED_PRODUCT emulated_bytes(int to, int rows, int columns)
{
    emulated_shapes(to, rows, columns);
    for (int m = 0; m < emulated.rows[to]; m++) {
        int32_t *result = (int32_t *)emulated.of[to][m];
        for (int k = 0; k < emulated.rows[columns]; k++)
            for (int n = 0; n < emulated.row_bytes[to] / 4; n++)
                for (int i = 0; i < 4; i++)
                    result[n] += (int8_t)emulated.of[rows][m][4 * k + i] * (uint8_t)emulated.of[columns][k][4 * n + i];
    }
}

static inline void emulated_release(void) { memset(&emulated, 0, sizeof emulated); }

#define TILE_CONFIGURE(config) emulated_configure(config)
#define TILE_RELEASE() emulated_release()
#define TILE_ZERO(to) emulated_zero(to)
#define TILE_LOAD(to, from, stride) emulated_load(to, from, stride)
#define TILE_STORE(from, to, stride) emulated_store(from, to, stride)
#define TILE_PAIRS(to, rows, columns) emulated_pairs(to, rows, columns)
#define TILE_BYTES(to, rows, columns) emulated_bytes(to, rows, columns)
