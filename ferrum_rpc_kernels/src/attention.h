/* Attention over a paged KV cache: the interface of attention.c for Python and for layer.c. */

#ifndef FERRUM_ATTENTION_H
#define FERRUM_ATTENTION_H

#include "kv_layout.h"

/* Attention of a step, for all layers. Short and long spans (NULL: none) have different kernels. */
struct attention_step {
    const struct span_arrays *short_spans, *long_spans;
    const struct attention_layer *layers;
    const int64_t *slots; /* of every token of the step */
};

/* `qkv` [count, heads + 2 kv_heads, head_dim] of the step's tokens: K and V to their slots, and what attention finds to
 * `attended` [count, heads, head_dim]. 0, or a number that ends the step. */
typedef int32_t attend_layer(const void *context, int32_t layer, const char *qkv, int64_t count, char *attended);

attend_layer ferrum_attention_layer;
void ferrum_store(const struct attention_layer *layer, const int64_t *slots, int64_t count, const char *key,
                  const char *value, int64_t key_bytes, int64_t value_bytes);
int32_t ferrum_attend(const struct attention_step *step, int32_t layer, const char *query, int64_t query_stride,
                      char *output);

#endif
