/* The weights of a decoder layer (layer.c). */

#ifndef FERRUM_LAYER_H
#define FERRUM_LAYER_H

#include <stdint.h>

#include "linear.h"
#include "norm_rope_gate.h"

/* The products of a layer with attention or a recurrence, and a dense MLP, in the order of LayerSpec.matrices
 * (ferrum_rpc/models/parts/layer.py). */
enum product { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };

/* What a recurrent layer has besides its products: the weights of its convolution, and see recurrent.h and
 * recurrent_rows.h. Lanes: of the recurrence, and of what is around it. */
struct recurrent_weights {
    const float *weight, *speed, *shift, *norm;
    int32_t key_heads, value_heads, key_dim, value_dim, taps, step_lanes, decay_lanes, gate_lanes;
    float eps;
};

/* Norms before and after each half of a layer, and of heads: NULL if there is none. `recurrent`: NULL for attention.
 * `slot`: of the first product's adapters; those of the others follow. `rope`: which of a step's rotations its heads
 * have; -1: none. `parallel`: attention and MLP read the same row. `place`: among the layers with attention, or the
 * recurrent ones. `gate_lanes`: of the gates of attention, which stand behind each head's query; 0: there are none. */
struct layer_weights {
    const struct matrix *products[PRODUCTS];
    const float *before_mixer, *after_mixer, *before_mlp, *after_mlp, *qk_norm;
    const struct recurrent_weights *recurrent;
    int32_t slot, rope, lanes, parallel, place, gate_lanes;
    struct row_kind kind;
};

#endif
