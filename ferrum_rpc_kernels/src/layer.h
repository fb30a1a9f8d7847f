/* The weights of a decoder layer (layer.c). */

#ifndef FERRUM_LAYER_H
#define FERRUM_LAYER_H

#include <stdint.h>

#include "linear.h"
#include "norm_rope_gate.h"

/* Norms before and after each half of a layer, and of heads: NULL where there is none. `rope`: which of a step's rotations
 * turns its heads; -1: none does. `parallel`: attention and MLP read the same row. */
struct layer_weights {
    const struct matrix *qkv, *output, *gate_up, *down;
    const float *before_attention, *after_attention, *before_mlp, *after_mlp, *head_norms;
    int32_t rope, lanes, parallel;
    struct row_kind kind;
};

#endif
