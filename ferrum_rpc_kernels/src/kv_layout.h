/* The inputs of attention: the spans of a step, and a layer's paged KV cache. */

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

/* A layer's kernels (prefill NULL: no long spans), its cache, and its mask: the last `window` positions, or all if it is 0.
 * Queries and results are bfloat16, or float32 if `wide`. So is the cache, [blocks, block_size, kv_heads, head_dim]; if
 * `rounded`, it is int8, and each head's numbers are followed by their scale, a float (ferrum_rpc/attention/eight_bits.py).
 * Scores are soft-capped at `softcap` unless that is 0. `sinks`: a logit for every head, or NULL; the softmax counts it as a
 * score without a value. */
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
