/* The row operations between a decoder's matrix products: norms, rotary embeddings, the gate of the MLP.
 *
 * In torch each takes several passes over bfloat16 rows, converted to float32 and back, and each pass costs a dispatch: at
 * 32 rows of the 0.6B shape together a tenth of a step. Here a row is read once and written once.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_features.h"
#include "norm_rope_gate.h"

#define LARGE 131072 /* elements above which rows are distributed to threads */

struct isa {
    void (*run_row)(const struct row_task *, int64_t);
};

#define ISA_ENTRIES {ISA(run_row)}
#define BODY "norm_rope_gate_isa.h"
#include "for_each_isa.h"

/* The lanes of the widest set of this machine whose vectors divide `elements`, or 0. */
int32_t ferrum_rows_lanes(int32_t elements) { return widest_lanes(elements); }

/* Run a task on every row. `lanes`: as ferrum_rows_lanes returned. */
void ferrum_rows(const struct row_task *rows, int32_t lanes)
{
    const struct isa *isa = isa_of(lanes);
    const int shared = rows->count * rows->width > LARGE && rows->threads > 1;
    int64_t row;
#pragma omp parallel for num_threads(rows->threads) if (shared)
    for (row = 0; row < rows->count; row++)
        isa->run_row(rows, row);
}
