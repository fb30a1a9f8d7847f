/* What ferrum_rpc/native/library.py compares before it calls anything. It declares these structs and the functions a second
 * time, and a library that was built from other sources would read and write where nothing of the kind lies. */

#include <stdint.h>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "lora.h"
#include "norm_rope_gate.h"
#include "sample.h"

/* Raised with every change of a struct or a function that Python knows. */
#ifndef FERRUM_ABI_VERSION
#define FERRUM_ABI_VERSION 17
#endif

/* The version at 0, then the sizes of the structs in the order of `STRUCTS` there; -1 beyond. */
int32_t ferrum_abi(int32_t which)
{
    static const int32_t numbers[] = {
        FERRUM_ABI_VERSION,
        sizeof(struct span_arrays),
        sizeof(struct row_kind),
        sizeof(struct row_task),
        sizeof(struct matrix),
        sizeof(struct layer_weights),
        sizeof(struct attention_layer),
        sizeof(struct attention_step),
        sizeof(struct draw),
        sizeof(struct penalty),
        sizeof(struct row_mask),
        sizeof(struct limits),
        sizeof(struct lora_part),
        sizeof(struct lora_change),
        sizeof(struct lora_step),
    };
    return which >= 0 && which < (int32_t)(sizeof numbers / sizeof *numbers) ? numbers[which] : -1;
}
