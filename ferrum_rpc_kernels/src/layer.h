/* The weights of a decoder layer (layer.c). */

#ifndef FERRUM_LAYER_H
#define FERRUM_LAYER_H

#include <stdint.h>

#include "linear.h"
#include "norm_rope_gate.h"

/* The products of a layer with attention and a dense MLP, in the order of LayerSpec.matrices
 * (ferrum_rpc/models/parts/layer.py). */
enum product { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };

/* Norms before and after each half of a layer, and of heads: NULL if there is none. `slot`: of the first product's
 * adapters; those of the others follow. `rope`: which of a step's rotations its heads have; -1: none. `parallel`:
 * attention and MLP read the same row. */
struct layer_weights {
    const struct matrix *products[PRODUCTS];
    const float *before_mixer, *after_mixer, *before_mlp, *after_mlp, *qk_norm;
    int32_t slot, rope, lanes, parallel;
    struct row_kind kind;
};

#endif
