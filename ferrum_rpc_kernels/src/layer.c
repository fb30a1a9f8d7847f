/* A decoder layer's work before and after its attention, in one call each: norm, qkv and rotation; output, norm,
 * gate-up, gate and down. Called one by one from Python, they and their tensors took 3 ms of a decode step of 29
 * (Qwen3-0.6B's 28 layers, two cores).
 *
 * And layers one after the other, where attention is ours as well (attention.c). Called by halves, with the cache's
 * writes and attention between them, they let go of Python's interpreter 112 times a step, and each time a busy thread
 * may keep it for some milliseconds.
 *
 * Where a model is cut over ranks, each computes a part of the heads and of the MLP: what output and down make of it are
 * parts of sums, which a function that Python names completes.
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

/* Buffers of buffer.h: what lies within a half of a layer, and what lies between the two. `lora`: the adapters of the step,
 * or NULL; `layer`: where it is. `reduce`: over the ranks, or NULL. */
struct ferrum_layers {
    struct ferrum_linears *linears;
    const struct lora_step *lora;
    reduce_rows *reduce;
    void *context;
    int32_t layer;
    char *buffer, *heads;
    size_t size, heads_size;
};

/* NULL where there is no memory. */
struct ferrum_layers *ferrum_layers_new(struct ferrum_linears *linears)
{
    struct ferrum_layers *made = calloc(1, sizeof *made);
    if (made)
        made->linears = linears;
    return made;
}

void ferrum_layers_free(struct ferrum_layers *self)
{
    free(self->buffer);
    free(self->heads);
    free(self);
}

/* The next call of a half is of this layer, of a step with these adapters; all layers in one call count by themselves. */
void ferrum_layers_adapt(struct ferrum_layers *self, const struct lora_step *lora, int32_t layer)
{
    self->lora = lora;
    self->layer = layer;
}

/* From now on what output and down make is a part of a sum, which `reduce` completes. */
void ferrum_layers_reduce(struct ferrum_layers *self, reduce_rows *reduce, void *context)
{
    self->reduce = reduce;
    self->context = context;
}

/* A product of the present layer, with what adapters change of it. */
static int32_t product_of(struct ferrum_layers *self, const struct matrix *linear, enum product product, const char *x,
                          int64_t count, char *y, int32_t threads)
{
    if (ferrum_linear(self->linears, linear, x, linear->k, count, y, 0, threads))
        return -1;
    if (self->lora)
        ferrum_lora(self->lora, self->layer, product, x, linear->k, y, threads);
    return 0;
}

/* The same, and the sum of it over the ranks. 0, -1, or what the ranks' sum returned. */
static int32_t sum_of(struct ferrum_layers *self, const struct matrix *linear, enum product product, const char *x,
                      int64_t count, char *y, int32_t threads)
{
    if (product_of(self, linear, product, x, count, y, threads))
        return -1;
    return self->reduce ? self->reduce(self->context, y, count * linear->n) : 0;
}

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* `count` rows: hidden += delta, where there is one; out = their norm, where there is one. Returns where the normed rows
 * are: `out`, or without a norm `hidden`. */
static char *add_norm(const struct layer_weights *weights, char *hidden, const char *delta, const float *norm, char *out,
                      int64_t count, int32_t threads)
{
    const struct row_task rows = {
        .kind = &weights->kind,
        .task = ADD_NORM,
        .threads = threads,
        .width = weights->output->n,
        .count = count,
        .hidden = hidden,
        .out = out,
        .delta = delta,
        .norm = norm,
    };
    if (delta || norm)
        ferrum_rows(&rows, weights->lanes);
    return norm ? out : hidden;
}

/* hidden [count, width] += delta, where there is one; qkv [count, ...] = its norm through the weights, heads rotated by
 * cos and sin, of which there are those of every rotation. 0, or -1 where there is no memory for the buffers. */
int32_t ferrum_layer_before(struct ferrum_layers *self, const struct layer_weights *weights, char *hidden,
                            const char *delta, const float *cos, const float *sin, int64_t count, char *qkv,
                            int32_t threads)
{
    const int width = weights->output->n;
    if (!reserve_buffer(&self->buffer, &self->size, (size_t)count * width * 2))
        return -1;
    const char *normed = add_norm(weights, hidden, delta, weights->before_attention, self->buffer, count, threads);
    if (product_of(self, weights->qkv, QKV, normed, count, qkv, threads))
        return -1;
    const int64_t table = weights->rope * count * weights->kind.turned;
    const struct row_task rows = {
        .kind = &weights->kind,
        .task = ROTATE,
        .threads = threads,
        .width = weights->qkv->n,
        .count = count,
        .hidden = qkv,
        .norm = weights->head_norms,
        .cos = weights->rope < 0 ? NULL : cos + table,
        .sin = weights->rope < 0 ? NULL : sin + table / 2,
    };
    if (rows.norm || rows.cos)
        ferrum_rows(&rows, weights->lanes);
    return 0;
}

/* hidden += attended [count, ...] through the output weights; delta = the MLP of its norm, or, where the two are parallel,
 * of its norm as it was before. As above, or what the ranks' sum returned. */
int32_t ferrum_layer_after(struct ferrum_layers *self, const struct layer_weights *weights, char *hidden,
                           const char *attended, int64_t count, char *delta, int32_t threads)
{
    const int width = weights->output->n, inner = weights->down->k, wide_row = weights->gate_up->n;
    const size_t row = rounded((size_t)count * width * 2), wide = rounded((size_t)count * wide_row * 2);
    if (!reserve_buffer(&self->buffer, &self->size, row + wide + (size_t)count * inner * 2))
        return -1;
    char *normed = self->buffer, *gate_up = normed + row, *gated = gate_up + wide;
    int32_t status = sum_of(self, weights->output, OUTPUT, attended, count, delta, threads);
    if (status)
        return status;
    add_norm(weights, delta, NULL, weights->after_attention, delta, count, threads);
    if (weights->parallel) {
        normed = add_norm(weights, hidden, NULL, weights->before_attention, normed, count, threads);
        add_norm(weights, hidden, delta, NULL, NULL, count, threads);
    } else {
        normed = add_norm(weights, hidden, delta, weights->before_mlp, normed, count, threads);
    }
    if (product_of(self, weights->gate_up, GATE_UP, normed, count, gate_up, threads))
        return -1;
    const struct row_task rows = {
        .kind = &weights->kind,
        .task = GATE,
        .threads = threads,
        .width = inner,
        .count = count,
        .hidden = gate_up,
        .out = gated,
    };
    ferrum_rows(&rows, weights->lanes);
    status = sum_of(self, weights->down, DOWN, gated, count, delta, threads);
    if (status)
        return status;
    add_norm(weights, delta, NULL, weights->after_mlp, delta, count, threads);
    return 0;
}

/* All `layers`, attention included. hidden and delta as above; before layer 0 there is no delta to add. 0, -1 where there
 * is no memory for the buffers, or what the ranks' sum returned. */
int32_t ferrum_layers_run(struct ferrum_layers *self, const struct layer_weights *weights,
                          const struct attention_step *attention, int32_t layers, char *hidden, char *delta,
                          const float *cos, const float *sin, int64_t count, int32_t threads)
{
    const size_t all = rounded((size_t)count * weights->qkv->n * 2);
    if (!reserve_buffer(&self->heads, &self->heads_size, all + (size_t)count * weights->output->k * 2))
        return -1;
    char *qkv = self->heads, *attended = qkv + all;
    for (int32_t layer = 0; layer < layers; layer++) {
        const struct layer_weights *own = weights + layer;
        self->layer = layer;
        if (ferrum_layer_before(self, own, hidden, layer ? delta : NULL, cos, sin, count, qkv, threads) ||
            ferrum_attention_layer(attention, layer, qkv, count, attended))
            return -1;
        const int32_t status = ferrum_layer_after(self, own, hidden, attended, count, delta, threads);
        if (status)
            return status;
    }
    return 0;
}
