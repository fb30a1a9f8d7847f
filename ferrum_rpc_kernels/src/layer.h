/* The weights of a decoder layer (layer.c). */

#ifndef FERRUM_LAYER_H
#define FERRUM_LAYER_H

#include <stdint.h>

#include "linear.h"

/* Norm weights are bfloat16, those of heads float32 or NULL. `rotating`: heads of query and key. */
struct layer_weights {
    const struct matrix *qkv, *output, *gate_up, *down;
    const char *input_norm, *post_norm;
    const float *head_norms;
    int32_t rotating, head_dim, lanes;
    float eps;
};

#endif
