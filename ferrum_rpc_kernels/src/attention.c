/* A layer's attention: writes new K and V to the cache, and calls the kernel of every span. Called by
 * ferrum_rpc/attention/native_paged.py for a single layer, and by layer.c for consecutive layers.
 */

#include <stddef.h>
#include <string.h>

#include "attention.h"
#include "attention_kernels.h"

/* Copy `count` tokens' K and V, `key_bytes` and `value_bytes` apart, to their slots of a layer, quantized if the cache is. */
void ferrum_store(const struct attention_layer *layer, const int64_t *slots, int64_t count, const char *key,
                  const char *value, int64_t key_bytes, int64_t value_bytes)
{
    const size_t bytes = layer->kv_heads * cached_bytes(layer);
    if (layer->rounded) {
        ferrum_decode_store(layer, slots, count, key, value, key_bytes, value_bytes);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        memcpy(layer->keys + slots[i] * bytes, key + i * key_bytes, bytes);
        memcpy(layer->values + slots[i] * bytes, value + i * value_bytes, bytes);
    }
}

/* A layer's queries, `query_stride` elements apart, to `output` [tokens, heads, head_dim]: the rows of the step's spans.
 * 0, or -1 if memory for the buffers is short. */
int32_t ferrum_attend(const struct attention_step *step, int32_t layer, const char *query, int64_t query_stride,
                      char *output)
{
    const struct attention_layer *own = step->layers + layer;
    if (step->long_spans && ferrum_prefill_attend(own, step->long_spans, query, query_stride, output))
        return -1;
    if (step->short_spans && ferrum_decode_attend(own, step->short_spans, query, query_stride, output))
        return -1;
    return 0;
}

/* Attention by the kernels here; `context`: a struct attention_step. -1 if memory for the buffers is short. */
int32_t ferrum_attention_layer(const void *context, int32_t layer, const char *qkv, int64_t count, char *attended)
{
    const struct attention_step *step = context;
    const struct attention_layer *own = step->layers + layer;
    const int64_t element = own->wide ? 4 : 2, kv = (int64_t)own->kv_heads * own->head_dim;
    const int64_t query = (int64_t)own->heads * own->head_dim, row = query + 2 * kv;
    const char *key = qkv + query * element, *value = key + kv * element;
    ferrum_store(own, step->slots, count, key, value, row * element, row * element);
    return ferrum_attend(step, layer, qkv, row, attended);
}
