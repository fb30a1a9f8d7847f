/* What attention works on: the spans of a step, and a layer's paged KV cache. */

#ifndef FERRUM_KV_LAYOUT_H
#define FERRUM_KV_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

struct ferrum_decode;
struct ferrum_prefill;

/* Spans of a step, for all of its layers (BatchGeometry in ferrum_rpc/attention/geometry.py). Arrays have an entry per
 * span, table_start one more. */
struct span_arrays {
    int32_t spans, block_size, threads;
    const int32_t *rows;        /* first row in the packed queries */
    const int32_t *starts;      /* tokens cached before the span */
    const int32_t *lengths;     /* tokens once it is written */
    const int32_t *table_start; /* first entry in tables */
    const int32_t *tables;      /* block ids */
};

/* A layer's kernels (prefill NULL: it gets no long spans), its cache, and what its rows see of it: the last `window`
 * positions, or all where it is 0. Queries and answers are bfloat16 or, where `wide`, float32. So is the cache, [blocks,
 * block_size, kv_heads, head_dim]; or, where `rounded`, it is int8, and behind the numbers of each head lies their scale,
 * a float (ferrum_rpc/attention/eight_bits.py). Scores are bent to less than `softcap` where that is not 0. `sinks`, a
 * logit for every head or NULL: the softmax counts it like a score, but there is no value to it. */
struct attention_layer {
    struct ferrum_decode *decode;
    struct ferrum_prefill *prefill;
    char *keys, *values;
    const float *sinks;
    int32_t heads, kv_heads, head_dim, wide, rounded, window;
    float scale, softcap;
};

/* Bytes of a head's key or value in the cache. */
static inline size_t cached_bytes(const struct attention_layer *layer)
{
    if (layer->rounded)
        return (size_t)layer->head_dim + sizeof(float);
    return (size_t)layer->head_dim * (layer->wide ? 4 : 2);
}

#endif
