/* Consecutive decoder layers: products, row operations, recurrences, and attention (attention.c, or a callback into Python
 * in every layer). Called one by one from Python, their overhead was 3 ms of a decode step of 29 (Qwen3-0.6B's 28 layers, two
 * cores), and they released Python's interpreter lock several times a layer: each time a busy thread may keep it for some
 * milliseconds.
 *
 * If a model is sharded over ranks, each computes a part of the heads and of the MLP: the results of output and down are
 * partial sums, which a callback into Python completes.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "lora.h"
#include "buffer.h"
#include "norm_rope_gate.h"
#include "recurrent.h"
#include "recurrent_rows.h"

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

/* A layer in a step of `count` rows. `attend`: attention, of `context`; `lora`: the adapters of the step, or NULL; `jobs`:
 * `job_count` of each recurrent layer, which have all rows. */
struct layer_step {
    struct ferrum_layers *self;
    const struct layer_weights *weights;
    attend_layer *attend;
    const void *context;
    const struct lora_step *lora;
    struct recurrent_job *jobs;
    int64_t count;
    int32_t job_count, threads;
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

/* Elements of query, key and value. */
static int64_t qkv_width(const struct layer_weights *weights)
{
    return (int64_t)(weights->kind.heads + 2 * weights->kind.kv_heads) * weights->kind.head_dim;
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
        .width = (int32_t)qkv_width(weights),
        .count = step->count,
        .hidden = qkv,
        .norm = weights->qk_norm,
        .cos = weights->rope < 0 ? NULL : cos + table,
        .sin = weights->rope < 0 ? NULL : sin + table / 2,
    };
    if (rows.norm || rows.cos)
        ferrum_rows(&rows, weights->lanes);
}

/* What a layer's mixer makes: its first product `made`, query, key and value `qkv`, log_decay and beta `numbers`, and the
 * rows for its last product. Those that a layer has are one buffer. */
struct mixed {
    char *made, *qkv, *rows;
    float *numbers;
};

enum part { MADE_QKV, MADE_ROWS, MADE_NUMBERS, MADE_ALL, PARTS };

/* Where the parts behind the first one begin, and where the last one ends. */
static void find_parts(const struct layer_step *step, size_t at[PARTS])
{
    const struct layer_weights *weights = step->weights;
    const size_t bytes = (size_t)step->count * 2, made = align_up(bytes * weights->products[QKV]->width);
    at[MADE_QKV] = weights->gate_lanes ? made : 0;
    at[MADE_ROWS] = made + (weights->gate_lanes ? align_up(bytes * qkv_width(weights)) : 0);
    at[MADE_NUMBERS] = at[MADE_ROWS] + align_up(bytes * weights->products[OUTPUT]->k);
    at[MADE_ALL] = at[MADE_NUMBERS];
    if (weights->recurrent)
        at[MADE_ALL] += (size_t)step->count * weights->recurrent->value_heads * 2 * sizeof(float);
}

/* Attention of normed rows. 0, -1, or its status. */
static int32_t attend(const struct layer_step *step, const char *normed, const struct mixed *mixed, const float *cos,
                      const float *sin)
{
    const struct layer_weights *weights = step->weights;
    const struct row_kind *kind = &weights->kind;
    const size_t head = (size_t)kind->head_dim * 2, queries = head * kind->heads;
    const size_t from = (size_t)weights->products[QKV]->width * 2, to = (size_t)qkv_width(weights) * 2;
    if (product(step, QKV, normed, mixed->made))
        return -1;
    if (weights->gate_lanes)
        for (int64_t row = 0; row < step->count; row++) {
            const char *made = mixed->made + row * from;
            char *qkv = mixed->qkv + row * to;
            for (int32_t i = 0; i < kind->heads; i++)
                memcpy(qkv + i * head, made + 2 * i * head, head);
            memcpy(qkv + queries, made + 2 * queries, to - queries);
        }
    rotate(step, mixed->qkv, cos, sin);
    const int32_t status = step->attend(step->context, weights->place, mixed->qkv, step->count, mixed->rows);
    if (status || !weights->gate_lanes)
        return status;
    const struct gated_rows gated = {
        .heads = mixed->rows,
        .gates = mixed->made + head,
        .out = mixed->rows,
        .rows = step->count,
        .row_bytes = (int64_t)from,
        .head_bytes = (int64_t)(2 * head),
        .count = kind->heads,
        .dim = kind->head_dim,
        .lanes = weights->gate_lanes,
        .threads = step->threads,
    };
    ferrum_gated_rows(&gated);
    return 0;
}

/* A recurrence over normed rows, normed and gated. 0, or -1. */
static int32_t recur(const struct layer_step *step, const char *normed, const struct mixed *mixed)
{
    const struct recurrent_weights *own = step->weights->recurrent;
    const int64_t row_bytes = (int64_t)step->weights->products[QKV]->width * 2;
    const int64_t values = (int64_t)own->value_heads * own->value_dim;
    float *const beta = mixed->numbers + step->count * own->value_heads;
    const struct recurrent_layer layer = {
        .weight = own->weight,
        .inputs = mixed->made,
        .input_bytes = row_bytes,
        .log_decay = mixed->numbers,
        .beta = beta,
        .output = mixed->rows,
        .key_heads = own->key_heads,
        .value_heads = own->value_heads,
        .key_dim = own->key_dim,
        .value_dim = own->value_dim,
        .taps = own->taps,
        .lanes = own->step_lanes,
        .threads = step->threads,
    };
    const char *gates = mixed->made + (int64_t)channels_of(&layer) * 2, *written = gates + values * 2;
    const struct decay_rows decay = {
        .written = written,
        .decay = written + (int64_t)own->value_heads * 2,
        .speed = own->speed,
        .shift = own->shift,
        .log_decay = mixed->numbers,
        .beta = beta,
        .rows = step->count,
        .row_bytes = row_bytes,
        .heads = own->value_heads,
        .lanes = own->decay_lanes,
    };
    const struct gated_rows gated = {
        .heads = mixed->rows,
        .gates = gates,
        .out = mixed->rows,
        .norm = own->norm,
        .rows = step->count,
        .row_bytes = row_bytes,
        .head_bytes = (int64_t)own->value_dim * 2,
        .count = own->value_heads,
        .dim = own->value_dim,
        .lanes = own->gate_lanes,
        .threads = step->threads,
        .eps = own->eps,
    };
    if (product(step, QKV, normed, mixed->made))
        return -1;
    ferrum_decay_rows(&decay);
    if (ferrum_recurrent_step(&layer, step->jobs + (int64_t)step->weights->place * step->job_count, step->job_count))
        return -1;
    ferrum_gated_rows(&gated);
    return 0;
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

/* hidden [count, width] += `added`, if any, and then the result of the mixer; delta = the MLP of the sum, or, if the two are
 * parallel, of the mixer's input. Returns as summed_product. */
static int32_t run_layer(const struct layer_step *step, char *hidden, const char *added, char *delta, const float *cos,
                         const float *sin)
{
    const struct layer_weights *weights = step->weights;
    const struct matrix *const *products = weights->products;
    struct ferrum_layers *self = step->self;
    const size_t bytes = (size_t)step->count * 2, row = align_up(bytes * products[OUTPUT]->width);
    const size_t wide_row = align_up(bytes * products[GATE_UP]->width);
    size_t at[PARTS];
    find_parts(step, at);
    if (!reserve_buffer(&self->rows, &self->rows_size, row + wide_row + bytes * products[DOWN]->k) ||
        !reserve_buffer(&self->heads, &self->heads_size, at[MADE_ALL]))
        return -1;
    char *const buffer = self->rows, *const made = self->heads;
    const struct mixed mixed = {made, made + at[MADE_QKV], made + at[MADE_ROWS], (float *)(made + at[MADE_NUMBERS])};
    char *normed = add_norm(step, hidden, added, weights->before_mixer, buffer);
    int32_t status = weights->recurrent ? recur(step, normed, &mixed) : attend(step, normed, &mixed, cos, sin);
    if (status)
        return status;
    status = summed_product(step, OUTPUT, mixed.rows, delta);
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
 * the step, or NULL. `jobs`: `job_count` of each recurrent layer, which have all rows; NULL if no layer is. cos and sin have
 * the tables of every rotation. 0, -1 if memory for the buffers is short, or the status of attention or of the ranks' sum. */
int32_t ferrum_layers_run(struct ferrum_layers *self, const struct layer_weights *weights, int32_t layers,
                          attend_layer *attend, const void *context, const struct lora_step *lora,
                          struct recurrent_job *jobs, int32_t job_count, char *hidden, char *delta, const float *cos,
                          const float *sin, int64_t count, int32_t threads)
{
    struct layer_step step = {
        .self = self,
        .attend = attend,
        .context = context,
        .lora = lora,
        .jobs = jobs,
        .count = count,
        .job_count = job_count,
        .threads = threads,
    };
    int32_t status = 0;
    for (int32_t layer = 0; layer < layers && !status; layer++) {
        step.weights = weights + layer;
        status = run_layer(&step, hidden, layer ? delta : NULL, delta, cos, sin);
    }
    return status;
}
