/* The ABI version and struct sizes, which ferrum_rpc/native/library.py checks before any call. That file declares the structs
 * and functions a second time; a library built from other sources would access memory at wrong offsets. */

#include <stdint.h>

#include "attention.h"
#include "experts.h"
#include "layer.h"
#include "linear.h"
#include "lora.h"
#include "norm_rope_gate.h"
#include "recurrent.h"
#include "recurrent_rows.h"
#include "sample.h"

/* Raised with every change of a struct or a function that Python declares. */
#ifndef FERRUM_ABI_VERSION
#define FERRUM_ABI_VERSION 34
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
        sizeof(struct expert_layer),
        sizeof(struct recurrent_weights),
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
        sizeof(struct recurrent_layer),
        sizeof(struct recurrent_job),
        sizeof(struct decay_rows),
        sizeof(struct gated_rows),
    };
    return which >= 0 && which < (int32_t)(sizeof numbers / sizeof *numbers) ? numbers[which] : -1;
}
