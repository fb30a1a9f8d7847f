/* Experts: rows are sorted by expert, so that a step reads the weights of each expert once, and all experts are one list of
 * products, which threads share. Of 128 experts of 768 channels, 8 for a row of 2,048 (Qwen3-30B-A3B's), a layer takes in
 * bfloat16 0.72 of the time that they took one by one from Python at 1 row and 0.8 at 8, 32 and 512; in 4 bits 0.59, 0.54, 0.65
 * and 0.8 (two cores with AVX-512 BF16).
 *
 * A row's answers are added in the order in which its experts are named, in float32, with what computes every row, and rounded
 * once: its bits do not depend on its neighbours.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "cpu_features.h"
#include "experts.h"

#define TOGETHER 1024 /* rows that all experts compute at a time: what bounds the buffers of a prompt */

/* Buffers of buffer.h, of n = rows x chosen sorted rows. */
struct ferrum_experts {
    struct ferrum_linears *linears;
    int32_t *rows;   /* of each sorted row, which row it is */
    int32_t *places; /* of each row and choice, where it is sorted */
    int32_t *starts; /* of each expert, and behind the last: its first sorted row */
    char *gate_up, *gated, *answers;
    size_t rows_size, places_size, starts_size, gate_up_size, gated_size, answers_size;
};

/* The sums of rows: the answers of each, which lie at its `places`, times its `weights`; plus `shared`, times `gate` if there
 * is one. */
struct sums {
    const char *answers, *shared;
    const int32_t *places;
    const float *weights, *gate;
    char *out;
    int32_t chosen, width;
};

struct isa {
    void (*sum_row)(const struct sums *sums, int64_t row);
};

#define ISA_ENTRIES {ISA(sum_row)}
#define BODY "experts_isa.h"
#include "for_each_isa.h"

/* NULL if memory is short. */
struct ferrum_experts *ferrum_experts_new(struct ferrum_linears *linears)
{
    struct ferrum_experts *made = calloc(1, sizeof *made);
    if (made)
        made->linears = linears;
    return made;
}

void ferrum_experts_free(struct ferrum_experts *self)
{
    free(self->rows);
    free(self->places);
    free(self->starts);
    free(self->gate_up);
    free(self->gated);
    free(self->answers);
    free(self);
}

static int reserve(struct ferrum_experts *self, const struct expert_layer *layer, int64_t sorted)
{
    const size_t some = (size_t)(sorted < TOGETHER ? sorted : TOGETHER) * 2;
    return reserve_buffer(&self->rows, &self->rows_size, (size_t)sorted * sizeof *self->rows) &&
           reserve_buffer(&self->places, &self->places_size, (size_t)sorted * sizeof *self->places) &&
           reserve_buffer(&self->starts, &self->starts_size, (size_t)(layer->count + 1) * sizeof *self->starts) &&
           reserve_buffer(&self->gate_up, &self->gate_up_size, some * (size_t)layer->gate_ups[0]->width) &&
           reserve_buffer(&self->gated, &self->gated_size, some * (size_t)layer->downs[0]->k) &&
           reserve_buffer(&self->answers, &self->answers_size, (size_t)sorted * 2 * (size_t)layer->downs[0]->width);
}

/* Sort rows by expert; rows of an expert keep their order. */
static void sort(struct ferrum_experts *self, const struct expert_layer *layer, const int64_t *experts, int64_t sorted)
{
    int32_t *const starts = self->starts;
    memset(starts, 0, (size_t)(layer->count + 1) * sizeof *starts);
    for (int64_t i = 0; i < sorted; i++)
        starts[experts[i] + 1]++;
    for (int32_t expert = 0; expert < layer->count; expert++)
        starts[expert + 1] += starts[expert];
    for (int64_t i = 0; i < sorted; i++) {
        const int32_t place = starts[experts[i]]++;
        self->places[i] = place;
        self->rows[place] = (int32_t)(i / layer->chosen);
    }
    memmove(starts + 1, starts, (size_t)layer->count * sizeof *starts); /* they have moved to the next expert's */
    starts[0] = 0;
}

/* How many of the sorted rows from `*first` on, before `last`, are an expert's; `*first` becomes the first of them. */
static int32_t rows_of(const struct ferrum_experts *self, int32_t expert, int32_t *first, int32_t last)
{
    const int32_t from = self->starts[expert], to = self->starts[expert + 1];
    *first = from > *first ? from : *first;
    return (to < last ? to : last) - *first;
}

/* One product of each expert for the sorted rows from `first` on, before `last`: of rows of x, or of dense rows. */
static int32_t multiply(struct ferrum_experts *self, const struct expert_layer *layer,
                        const struct matrix *const *products, const char *x, int64_t stride, const int32_t *index,
                        int32_t first, int32_t last, char *out, int32_t threads)
{
    int32_t count = 0;
    for (int32_t expert = 0; expert < layer->count; expert++) {
        int32_t from = first;
        if (rows_of(self, expert, &from, last) > 0)
            for (const struct matrix *part = products[expert]; part; part = part->next)
                count++;
    }
    struct problem *const problems = ferrum_linear_problems(self->linears, count), *problem = problems;
    if (!problems)
        return -1;
    for (int32_t expert = 0; expert < layer->count; expert++) {
        int32_t from = first;
        const int32_t rows = rows_of(self, expert, &from, last);
        const int64_t width = products[expert]->width, row = from - first;
        char *at = out + row * width * 2;
        for (const struct matrix *part = rows > 0 ? products[expert] : NULL; part; at += part->n * 2, part = part->next)
            *problem++ = (struct problem){
                .linear = part,
                .x = index ? x : x + row * stride * 2,
                .index = index ? index + from : NULL,
                .x_stride = stride,
                .count = rows,
                .out = at,
                .out_bytes = width * 2,
            };
    }
    return ferrum_linear_all(self->linears, problems, count, 0, threads);
}

/* out [rows, hidden] = what experts find for x, plus `shared`, all in bfloat16. `experts` [rows, chosen] in ascending order,
 * and their `weights`. `shared`: NULL if nothing computes every row; it is multiplied with `gate` [rows] if there is one. 0,
 * or -1 if memory for the buffers is short. */
int32_t ferrum_experts(struct ferrum_experts *self, const struct expert_layer *layer, const char *x, int64_t rows,
                       const int64_t *experts, const float *weights, const char *shared, const float *gate, char *out,
                       int32_t threads)
{
    const int64_t sorted = rows * layer->chosen;
    const int32_t hidden = layer->downs[0]->width, inner = layer->downs[0]->k;
    if (sorted > INT32_MAX || !reserve(self, layer, sorted))
        return -1;
    sort(self, layer, experts, sorted);
    for (int32_t first = 0; first < sorted; first += TOGETHER) {
        const int32_t last = sorted - first < TOGETHER ? (int32_t)sorted : first + TOGETHER;
        const struct row_task gates = {
            .kind = layer->kind,
            .task = GATE,
            .threads = threads,
            .width = inner,
            .count = last - first,
            .hidden = self->gate_up,
            .out = self->gated,
        };
        if (multiply(self, layer, layer->gate_ups, x, hidden, self->rows, first, last, self->gate_up, threads))
            return -1;
        ferrum_rows(&gates, layer->lanes);
        if (multiply(self, layer, layer->downs, self->gated, inner, NULL, first, last,
                     self->answers + (size_t)first * hidden * 2, threads))
            return -1;
    }
    const struct sums sums = {self->answers, shared, self->places, weights, gate, out, layer->chosen, hidden};
    const struct isa *const isa = isa_of(layer->lanes);
    int64_t row;
#pragma omp parallel for num_threads(threads) if (threads > 1 && sorted * hidden > 131072)
    for (row = 0; row < rows; row++)
        isa->sum_row(&sums, row);
    return 0;
}
