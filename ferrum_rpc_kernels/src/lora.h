/* Low-rank changes of products (lora.c). */

#ifndef FERRUM_LORA_H
#define FERRUM_LORA_H

#include <stdint.h>

/* Panels here are those of gemm_tile.h, interleaved vector by vector in groups of four: [panels / 4][pairs][4][16][2], the
 * last group with fewer than four. So a row reads its adapter sequentially. */

/* One matrix of a fused product: `columns` of the output from `first` on, and `rank` sums, which is even, from `start` on.
 * `b`: panels of `columns`, of `rank` / 2 pairs. */
struct lora_part {
    const char *b;
    int32_t first, columns, start, rank;
};

/* What an adapter changes of a product [n, k]; of `rank` 0: nothing. `a`: panels of `rank` columns, of k / 2 pairs. */
struct lora_change {
    const char *a;
    int32_t n, k, rank, parts;
    struct lora_part part[4];
};

/* `count` rows from `first` on, LORA_ROWS at most, with an adapter: its changes, by the slots of products. */
struct lora_rows {
    const struct lora_change *changes;
    int64_t first, count;
};

#define LORA_ROWS 24

/* The adapters of a step. `sums`: room for `rank` bfloat16 of every row of the step, a multiple of 16, and as large as any
 * adapter's. `lanes`: of ferrum_lora_lanes. */
struct lora_step {
    const struct lora_rows *rows;
    char *sums;
    int32_t count, rank, lanes;
};

void ferrum_lora(const struct lora_step *step, int32_t slot, const char *x, int64_t x_stride, char *y, int32_t threads);

#endif
