/* Gated DeltaNet (recurrent_step.c, recurrent_chunk.c). */

#ifndef FERRUM_RECURRENT_H
#define FERRUM_RECURRENT_H

#include <stdint.h>

#define MOST_TAPS 64

/* A recurrent layer and a step's packed rows. `weight`: [taps, channels] of the convolution, the last row for the newest
 * input. Inputs, before the convolution, and the output [rows, value_heads, value_dim] are bfloat16, or float32 if wide; of
 * the inputs there is a row every `input_bytes`. `lanes` divides key_dim and value_dim. */
struct recurrent_layer {
    const float *weight;
    const char *inputs;
    int64_t input_bytes;
    const float *log_decay, *beta; /* [rows, value_heads] */
    char *output;
    int32_t key_heads, value_heads, key_dim, value_dim, taps, wide, lanes, threads;
};

/* A sequence's part of a step: the layer's state, which contains `folded` tokens, and its journal, a ring of `rows`. The
 * tokens up to `floor` are folded; `count` rows from `row` on follow those up to `start`. */
struct recurrent_job {
    float *state;   /* [value_heads, key_dim, value_dim] */
    char *channels; /* [rows, channels]: inputs before the convolution */
    float *gates;   /* [rows, 2, value_heads]: log_decay and beta */
    int64_t rows, folded, floor, start, row, count;
};

/* The jobs of a layer, whose states then contain up to `floor`, as they say. 0, or -1 if memory is short; then nothing has
 * changed. */
int32_t ferrum_recurrent_step(const struct recurrent_layer *layer, struct recurrent_job *jobs, int32_t count);

static inline int channels_of(const struct recurrent_layer *layer)
{
    return 2 * layer->key_heads * layer->key_dim + layer->value_heads * layer->value_dim;
}

#endif
