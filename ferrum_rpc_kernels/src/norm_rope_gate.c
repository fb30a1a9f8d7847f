/* What a decoder does between its matrix products: norms, the rotation of heads, the gate of the MLP.
 *
 * In torch each is several passes over bfloat16 rows that are widened, worked on and narrowed again, and each pass costs
 * a dispatch: at 32 rows of the 0.6B shape together a tenth of a step. Here a row is read once and written once.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_features.h"
#include "norm_rope_gate.h"

#define LARGE 131072 /* elements above which rows are shared out to threads */

#define BODY "norm_rope_gate_isa.h"
#include "for_each_isa.h"

/* The lanes of the widest set of this machine whose vectors divide `elements`, or 0. */
int32_t ferrum_rows_lanes(int32_t elements)
{
    for (int lanes = 16; lanes >= 4; lanes /= 2)
        if (elements % lanes == 0 && lanes_supported(lanes))
            return lanes;
    return 0;
}

/* Do a task to every row. `lanes`: as ferrum_rows_lanes returned. */
void ferrum_rows(const struct row_task *rows, int32_t lanes)
{
    void (*run)(const struct row_task *, int64_t) = run_row_portable;
#if defined(__x86_64__)
    run = lanes == 16 ? run_row_avx512 : lanes == 8 ? run_row_avx2 : run;
#else
    (void)lanes;
#endif
    const int shared = rows->count * rows->width > LARGE && rows->threads > 1;
    int64_t row;
#pragma omp parallel for num_threads(rows->threads) if (shared)
    for (row = 0; row < rows->count; row++)
        run(rows, row);
}
