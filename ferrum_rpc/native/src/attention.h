/* Attention as the code of a decoder's layers sees it (attention.c), and the kernels behind it (paged.c, flash.c). */

#ifndef FERRUM_ATTENTION_H
#define FERRUM_ATTENTION_H

#include <stdint.h>

#include "step.h"

struct ferrum_attention;
struct ferrum_flash;

/* A layer's cache, [blocks, block_size, kv_heads, head_dim] of bfloat16 each, and what its rows see of it: the last
 * `window` positions, or all where it is 0. Scores are bent to less than `softcap` where that is not 0. */
struct attention_layer {
    char *keys, *values;
    int32_t window;
    float scale, softcap;
};

/* Attention of a step, in all layers. Spans are short or long (NULL: there are none), for one kernel or the other. */
struct attention_step {
    struct ferrum_attention *paged;
    struct ferrum_flash *flash;
    const struct step *short_spans, *long_spans;
    const struct attention_layer *layers;
    const int64_t *slots; /* of every token of the step */
};

int32_t ferrum_attention_layer(const struct attention_step *step, int32_t layer, const char *qkv, int64_t count,
                               char *attended);

void ferrum_store(char *keys, char *values, const int64_t *slots, int64_t count, const char *key, const char *value,
                  int64_t key_bytes, int64_t value_bytes, int64_t bytes);
int32_t ferrum_attend(struct ferrum_attention *self, const struct step *step, const void *query, int64_t query_stride,
                      const void *keys, const void *values, void *output, int32_t wide, int32_t window, float scale,
                      float softcap);
int32_t ferrum_flash(struct ferrum_flash *self, const struct step *step, const void *query, int64_t query_stride,
                     const void *keys, const void *values, void *output, int32_t window, float scale, float softcap);

#endif
