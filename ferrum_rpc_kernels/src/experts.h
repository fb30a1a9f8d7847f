/* The experts of a layer (experts.c). */

#ifndef FERRUM_EXPERTS_H
#define FERRUM_EXPERTS_H

#include <stdint.h>

#include "linear.h"
#include "norm_rope_gate.h"

/* `count` experts, each with a product to gate and up, side by side, and one back. `kind` has their activation, `lanes` is
 * that of their rows. `chosen` compute a row. */
struct expert_layer {
    const struct matrix *const *gate_ups, *const *downs;
    const struct row_kind *kind;
    int32_t count, chosen, lanes;
};

#endif
