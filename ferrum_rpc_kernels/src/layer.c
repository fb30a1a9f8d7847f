/* Consecutive decoder layers: products, row operations and attention (attention.c, or a callback into Python in every
 * layer). Called one by one from Python, their overhead was 3 ms of a decode step of 29 (Qwen3-0.6B's 28 layers, two
 * cores), and they released Python's interpreter lock several times a layer: each time a busy thread may keep it for some
 * milliseconds.
 *
 * If a model is sharded over ranks, each computes a part of the heads and of the MLP: the results of output and down are
 * partial sums, which a callback into Python completes.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "lora.h"
#include "buffer.h"
#include "norm_rope_gate.h"

/* Make bfloat16 rows the sum of all ranks' rows. 0, or a number above it, which ends the step. */
typedef int32_t reduce_rows(void *context, void *rows, int64_t elements);

/* Two buffers of buffer.h. `reduce`: over the ranks, or NULL. */
struct ferrum_layers {
    struct ferrum_linears *linears;
    reduce_rows *reduce;
    void *context;
    char *rows, *heads;
    size_t rows_size, heads_size;
};

/* A layer in a step of `count` rows. `attend`: attention, of `context`; `lora`: the adapters of the step, or NULL. */
struct layer_step {
    struct ferrum_layers *self;
    const struct layer_weights *weights;
    attend_layer *attend;
    const void *context;
    const struct lora_step *lora;
    int64_t count;
    int32_t threads;
};

/* `reduce`: completes partial sums of output and down. NULL if memory is short. */
struct ferrum_layers *ferrum_layers_new(struct ferrum_linears *linears, reduce_rows *reduce, void *context)
{
    struct ferrum_layers *made = calloc(1, sizeof *made);
    if (made)
        *made = (struct ferrum_layers){.linears = linears, .reduce = reduce, .context = context};
    return made;
}

void ferrum_layers_free(struct ferrum_layers *self)
{
    free(self->rows);
    free(self->heads);
    free(self);
}

static size_t align_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* y = x times a matrix, with the changes of adapters. 0, or -1. */
static int32_t product(const struct layer_step *step, enum product which, const char *x, char *y)
{
    const struct matrix *matrix = step->weights->products[which];
    if (ferrum_linear(step->self->linears, matrix, x, matrix->k, step->count, y, 0, step->threads))
        return -1;
    if (step->lora)
        ferrum_lora(step->lora, step->weights->slot + which, x, matrix->k, y, step->threads);
    return 0;
}

/* The same, summed over the ranks. 0, -1, or the result of the ranks' sum. */
static int32_t summed_product(const struct layer_step *step, enum product which, const char *x, char *y)
{
    const struct ferrum_layers *self = step->self;
    if (product(step, which, x, y))
        return -1;
    return self->reduce ? self->reduce(self->context, y, step->count * step->weights->products[which]->width) : 0;
}

/* hidden += delta, if there is one; out = their norm, if there is one. Returns the address of the normed rows: `out`, or
 * without a norm `hidden`. */
static char *add_norm(const struct layer_step *step, char *hidden, const char *delta, const float *norm, char *out)
{
    const struct row_task rows = {
        .kind = &step->weights->kind,
        .task = ADD_NORM,
        .threads = step->threads,
        .width = step->weights->products[OUTPUT]->width,
        .count = step->count,
        .hidden = hidden,
        .out = out,
        .delta = delta,
        .norm = norm,
    };
    if (delta || norm)
        ferrum_rows(&rows, step->weights->lanes);
    return norm ? out : hidden;
}

/* Normalize the heads of query and key, and rotate them by cos and sin, which have the tables of every rotation. */
static void rotate(const struct layer_step *step, char *qkv, const float *cos, const float *sin)
{
    const struct layer_weights *weights = step->weights;
    const int64_t table = weights->rope * step->count * weights->kind.turned;
    const struct row_task rows = {
        .kind = &weights->kind,
        .task = ROTATE,
        .threads = step->threads,
        .width = weights->products[QKV]->width,
        .count = step->count,
        .hidden = qkv,
        .norm = weights->qk_norm,
        .cos = weights->rope < 0 ? NULL : cos + table,
        .sin = weights->rope < 0 ? NULL : sin + table / 2,
    };
    if (rows.norm || rows.cos)
        ferrum_rows(&rows, weights->lanes);
}

/* delta = the MLP of normed rows; `gate_up` and `gated`: buffers for intermediate rows. Returns as summed_product. */
static int32_t mlp(const struct layer_step *step, const char *normed, char *gate_up, char *gated, char *delta)
{
    const struct row_task rows = {
        .kind = &step->weights->kind,
        .task = GATE,
        .threads = step->threads,
        .width = step->weights->products[DOWN]->k,
        .count = step->count,
        .hidden = gate_up,
        .out = gated,
    };
    if (product(step, GATE_UP, normed, gate_up))
        return -1;
    ferrum_rows(&rows, step->weights->lanes);
    return summed_product(step, DOWN, gated, delta);
}

/* hidden [count, width] += `added`, if any, and then the result of attention; delta = the MLP of the sum, or, if the two are
 * parallel, of attention's input. Returns as summed_product. */
static int32_t run_layer(const struct layer_step *step, int32_t layer, char *hidden, const char *added, char *delta,
                         const float *cos, const float *sin)
{
    const struct layer_weights *weights = step->weights;
    const struct matrix *const *products = weights->products;
    struct ferrum_layers *self = step->self;
    const size_t bytes = (size_t)step->count * 2, row = align_up(bytes * products[OUTPUT]->width);
    const size_t wide_row = align_up(bytes * products[GATE_UP]->width), heads = align_up(bytes * products[QKV]->width);
    if (!reserve_buffer(&self->rows, &self->rows_size, row + wide_row + bytes * products[DOWN]->k) ||
        !reserve_buffer(&self->heads, &self->heads_size, heads + bytes * products[OUTPUT]->k))
        return -1;
    char *const buffer = self->rows, *const qkv = self->heads, *const attended = qkv + heads;
    char *normed = add_norm(step, hidden, added, weights->before_mixer, buffer);
    if (product(step, QKV, normed, qkv))
        return -1;
    rotate(step, qkv, cos, sin);
    int32_t status = step->attend(step->context, layer, qkv, step->count, attended);
    if (status)
        return status;
    status = summed_product(step, OUTPUT, attended, delta);
    if (status)
        return status;
    add_norm(step, delta, NULL, weights->after_mixer, delta);
    if (weights->parallel) {
        normed = add_norm(step, hidden, NULL, weights->before_mixer, buffer);
        add_norm(step, hidden, delta, NULL, NULL);
    } else {
        normed = add_norm(step, hidden, delta, weights->before_mlp, buffer);
    }
    status = mlp(step, normed, buffer + row, buffer + row + wide_row, delta);
    if (!status)
        add_norm(step, delta, NULL, weights->after_mlp, delta);
    return status;
}

/* Run all `layers` on hidden [count, width]; delta: the output of the last one, still to be added. `lora`: the adapters of
 * the step, or NULL. cos and sin have the tables of every rotation. 0, -1 if memory for the buffers is short, or the status
 * of attention or of the ranks' sum. */
int32_t ferrum_layers_run(struct ferrum_layers *self, const struct layer_weights *weights, int32_t layers,
                          attend_layer *attend, const void *context, const struct lora_step *lora, char *hidden,
                          char *delta, const float *cos, const float *sin, int64_t count, int32_t threads)
{
    struct layer_step step = {
        .self = self, .attend = attend, .context = context, .lora = lora, .count = count, .threads = threads};
    int32_t status = 0;
    for (int32_t layer = 0; layer < layers && !status; layer++) {
        step.weights = weights + layer;
        status = run_layer(&step, layer, hidden, layer ? delta : NULL, delta, cos, sin);
    }
    return status;
}
