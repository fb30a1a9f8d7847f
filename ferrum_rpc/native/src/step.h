/* What the attention kernels are told of a step (see BatchGeometry in ferrum_rpc/attention/geometry.py). */

#ifndef FERRUM_STEP_H
#define FERRUM_STEP_H

#include <stdint.h>

/* What all layers of a step share. Arrays have an entry per span, table_start one more. */
struct step {
    int32_t spans, heads, kv_heads, head_dim, block_size, threads;
    const int32_t *rows;        /* first row in the packed queries */
    const int32_t *starts;      /* tokens cached before the span */
    const int32_t *lengths;     /* tokens once it is written */
    const int32_t *table_start; /* first entry in tables */
    const int32_t *tables;      /* block ids */
};

#endif
