/* Attention over a paged KV cache on a CPU: K and V are read once, in place.
 *
 * torch has no CPU kernel that reads through a block table, so it gathers blocks into a buffer and reads them again. Here
 * a step's work is split into units: a tile of a sequence's new tokens against one chunk of its cache. Chunks are on a
 * fixed grid of positions and are combined in order, so a result depends neither on the number of threads nor on the rest
 * of the batch. Inside a unit the softmax is online and everything is float32 (Milakov and Gimelshein,
 * "Online normalizer calculation for softmax", 2018); splitting a long sequence over units is flash-decoding's idea
 * (Dao et al., 2023).
 *
 * It needs no Python and no torch headers: ferrum_rpc/attention/native_paged.py passes data pointers. It is compiled with
 * -fopenmp but not linked to OpenMP: the caller makes torch's runtime visible first, so that both share one set of
 * threads.
 */

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_kernels.h"
#include "cpu_features.h"
#include "buffer.h"

#if !defined(SPECIALIZED) /* tests compile fewer copies of the loops */
#define SPECIALIZED 1
#endif
#define MAX_DIM 1024
#define CHUNK 512    /* positions of a unit */
#define TILE_ROWS 16 /* query rows (tokens x group) of a unit and KV head */
#define SMALL 65536  /* bytes of K and V below which waking threads costs more than they save */

typedef float aliasing_float __attribute__((may_alias));

struct row {
    float most, sum; /* largest score so far, and the sum of the weights relative to it */
};

struct unit {
    int32_t span, row, position, tokens; /* first row, its position, and how many */
    int32_t low, high;                   /* positions of the chunk that any of them attends to */
    int32_t partial;                     /* first token in the partial results, or -1: the only chunk of its tile */
    int32_t chunks;                      /* of the tile, at its first unit; 0 at the others */
};

/* A layer's step. Queries: a row every query_bytes. */
struct work {
    const struct span_arrays *step;
    const char *query, *keys, *values;
    const float *sinks;
    char *output;
    size_t query_bytes, block_bytes, slot_bytes;
    float scale, softcap;
    int32_t heads, kv_heads, head_dim, window, wide, rounded;
    struct row *partial_rows;
    float *partials;
};

struct isa {
    const char *name;
    void (*unit)(const struct work *, const struct unit *, int, int, float *);
    void (*join)(const struct work *, const struct unit *, int);
    void (*round)(char *, const char *, int, int, int);
};

#define ISA_ENTRIES {ISA_NAME, ISA(run_unit), ISA(run_join), ISA(run_round)}
#define BODY "attention_decode_isa.h"
#include "for_each_isa.h"

/* Buffers of buffer.h. */
struct ferrum_decode {
    const struct isa *isa;
    struct unit *units;
    float *scratch, *partials;
    struct row *partial_rows;
    size_t units_size, scratch_size, partials_size, partial_rows_size;
};

/* The instruction set of that name, or the best of this machine where it is NULL; NULL where the machine does not have
 * it or its vectors do not divide a head. */
static const struct isa *find_isa(const char *name, int32_t head_dim)
{
    if (head_dim < 1 || head_dim > MAX_DIM)
        return NULL;
    for (int lanes = widest_lanes(head_dim); lanes >= 4; lanes /= 2)
        if (lanes_supported(lanes) && (!name || !strcmp(name, isa_of(lanes)->name)))
            return isa_of(lanes);
    return NULL;
}

/* Whether there is such a set: by name, or any if that is NULL. */
int32_t ferrum_decode_supported(const char *name, int32_t head_dim)
{
    return find_isa(name, head_dim) != NULL;
}

/* NULL if memory is short, or if there is no such set. */
struct ferrum_decode *ferrum_decode_new(const char *name, int32_t head_dim)
{
    const struct isa *isa = find_isa(name, head_dim);
    struct ferrum_decode *made = isa ? calloc(1, sizeof *made) : NULL;
    if (made)
        made->isa = isa;
    return made;
}

void ferrum_decode_free(struct ferrum_decode *self)
{
    free(self->units);
    free(self->scratch);
    free(self->partials);
    free(self->partial_rows);
    free(self);
}

const char *ferrum_decode_name(const struct ferrum_decode *self)
{
    return self->isa->name;
}

static int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}

/* Split a step into units, in the order of spans, tiles (of `tile` tokens) and chunks. If units is NULL, only count. */
static size_t cut(const struct span_arrays *step, int tile, int window, struct unit *units, size_t *partial_tokens,
                  size_t *slots)
{
    size_t count = 0;
    *partial_tokens = *slots = 0;
    for (int span = 0; span < step->spans; span++) {
        const int start = step->starts[span], end = step->lengths[span];
        for (int first = start; first < end; first += tile) {
            const int last = first + tile < end ? first + tile : end;
            const int low = window > 0 && first + 1 > window ? first + 1 - window : 0;
            const int chunks = ceil_div(last, CHUNK) - low / CHUNK;
            for (int c = 0; c < chunks; c++) {
                const int from = (low / CHUNK + c) * CHUNK, to = from + CHUNK;
                if (units)
                    units[count] = (struct unit){
                        .span = span,
                        .row = step->rows[span] + first - start,
                        .position = first,
                        .tokens = last - first,
                        .low = from > low ? from : low,
                        .high = to < last ? to : last,
                        .partial = chunks > 1 ? (int32_t)*partial_tokens : -1,
                        .chunks = c ? 0 : chunks,
                    };
                if (chunks > 1)
                    *partial_tokens += (size_t)(last - first);
                *slots += (size_t)((to < last ? to : last) - (from > low ? from : low));
                count++;
            }
        }
    }
    return count;
}

/* As ferrum_store, into a quantized cache. */
void ferrum_decode_store(const struct attention_layer *layer, const int64_t *slots, int64_t count, const char *key,
                         const char *value, int64_t key_bytes, int64_t value_bytes)
{
    const struct isa *isa = layer->decode->isa;
    const int heads = layer->kv_heads, dim = layer->head_dim, wide = layer->wide;
    const size_t bytes = heads * cached_bytes(layer);
    for (int64_t i = 0; i < count; i++) {
        isa->round(layer->keys + slots[i] * bytes, key + i * key_bytes, heads, dim, wide);
        isa->round(layer->values + slots[i] * bytes, value + i * value_bytes, heads, dim, wide);
    }
}

/* The short spans of one layer: 0, or -1 if memory for the buffers is short. `query_stride`: elements between two
 * rows of the queries; the output is contiguous. */
int32_t ferrum_decode_attend(const struct attention_layer *layer, const struct span_arrays *step, const char *query,
                            int64_t query_stride, char *output)
{
    struct ferrum_decode *self = layer->decode;
    const size_t element = layer->wide ? 4 : 2;
    const int group = layer->heads / layer->kv_heads, dim = layer->head_dim;
    const int tokens = group < TILE_ROWS ? TILE_ROWS / group : 1;
    size_t partial_tokens, slots;
    const size_t count = cut(step, tokens, layer->window, NULL, &partial_tokens, &slots);
    const size_t slot_bytes = layer->kv_heads * cached_bytes(layer);
    const int threads = slots * slot_bytes * 2 < SMALL ? 1 : step->threads;

    /* Heads are distributed only if there are too few units, so that whole blocks are read sequentially. */
    int parts = 1;
    while (count * parts < 2 * (size_t)threads && threads > 1 && parts * 2 <= layer->kv_heads)
        parts *= 2;
    const int heads = ceil_div(layer->kv_heads, parts);
    const size_t rows = (size_t)tokens * group * heads;
    const size_t scratch = (rows * (2 * dim + 2) + 2 * (size_t)tokens * group + 31) / 16 * 16;
    const size_t partials = partial_tokens * layer->heads;
    if (!reserve_buffer(&self->units, &self->units_size, count * sizeof *self->units) ||
        !reserve_buffer(&self->scratch, &self->scratch_size, scratch * threads * sizeof(float)) ||
        !reserve_buffer(&self->partial_rows, &self->partial_rows_size, partials * sizeof(struct row)) ||
        !reserve_buffer(&self->partials, &self->partials_size, partials * dim * sizeof(float)))
        return -1;
    cut(step, tokens, layer->window, self->units, &partial_tokens, &slots);

    const struct work work = {
        .step = step,
        .query = query,
        .keys = layer->keys,
        .values = layer->values,
        .sinks = layer->sinks,
        .output = output,
        .query_bytes = (size_t)query_stride * element,
        .block_bytes = slot_bytes * step->block_size,
        .slot_bytes = slot_bytes,
        .scale = layer->scale,
        .softcap = layer->softcap,
        .heads = layer->heads,
        .kv_heads = layer->kv_heads,
        .head_dim = dim,
        .window = layer->window,
        .wide = layer->wide,
        .rounded = layer->rounded,
        .partial_rows = self->partial_rows,
        .partials = self->partials,
    };
    const int64_t jobs = (int64_t)count * parts;
    int next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *mine = self->scratch;
        int64_t job;
#pragma omp critical(ferrum_decode_thread)
        mine += scratch * next++;
#pragma omp for schedule(dynamic, 1)
        for (job = 0; job < jobs; job++) {
            const int head = (int)(job % parts) * heads;
            const int head_end = head + heads < layer->kv_heads ? head + heads : layer->kv_heads;
            if (head < head_end)
                self->isa->unit(&work, self->units + job / parts, head, head_end, mine);
        }
        if (partials) {
#pragma omp for schedule(dynamic, 1)
            for (job = 0; job < (int64_t)count; job++)
                if (self->units[job].chunks > 1)
                    self->isa->join(&work, self->units + job, self->units[job].chunks);
        }
    }
    return 0;
}
