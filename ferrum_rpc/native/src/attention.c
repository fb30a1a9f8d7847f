/* A layer's attention between its two halves (layer.c): new K and V into the cache, then every span to its kernel.
 *
 * What ferrum_rpc/attention/native_paged.py does in `write` and `attend`, for layers that run one after the other in C.
 */

#include <stddef.h>

#include "attention.h"

/* `qkv` [count, heads + 2 kv_heads, head_dim] of the step's tokens: K and V to their slots, and what attention finds to
 * `attended` [count, heads, head_dim], all bfloat16. 0, or -1 where there is no memory for the buffers. */
int32_t ferrum_attention_layer(const struct attention_step *step, int32_t layer, const char *qkv, int64_t count,
                               char *attended)
{
    const struct attention_layer *own = step->layers + layer;
    const struct step *shape = step->short_spans ? step->short_spans : step->long_spans;
    const int64_t kv = (int64_t)shape->kv_heads * shape->head_dim, query = (int64_t)shape->heads * shape->head_dim;
    const int64_t row = query + 2 * kv;
    const char *key = qkv + query * 2, *value = key + kv * 2;
    ferrum_store(own->keys, own->values, step->slots, count, key, value, row * 2, row * 2, kv * 2);
    if (step->long_spans && ferrum_flash(step->flash, step->long_spans, qkv, row, own->keys, own->values, attended,
                                         own->window, own->scale, own->softcap))
        return -1;
    if (step->short_spans && ferrum_attend(step->paged, step->short_spans, qkv, row, own->keys, own->values, attended,
                                           0, own->window, own->scale, own->softcap))
        return -1;
    return 0;
}
