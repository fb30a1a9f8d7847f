/* The kernels of attention.c, one for short spans (attention_decode.c) and one for long spans
 * (attention_prefill.c). */

#ifndef FERRUM_ATTENTION_KERNELS_H
#define FERRUM_ATTENTION_KERNELS_H

#include "kv_layout.h"

void ferrum_decode_store(const struct attention_layer *layer, const int64_t *slots, int64_t count, const char *key,
                         const char *value, int64_t key_bytes, int64_t value_bytes);
int32_t ferrum_decode_attend(const struct attention_layer *layer, const struct span_arrays *step, const char *query,
                            int64_t query_stride, char *output);
int32_t ferrum_prefill_attend(const struct attention_layer *layer, const struct span_arrays *step, const char *query,
                           int64_t query_stride, char *output);

#endif
