/* What lies between the products of a recurrent layer and its recurrence, and the gates of outputs, also of attention.
 *
 * In torch the place of a row in a tensor changes its last bits, so that each row takes operations of its own: most of the
 * time of a prompt's layers between their products. Here every element is computed alike wherever it is. Everything is
 * float32, and rounded once.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_features.h"
#include "recurrent_rows.h"

#define LARGE 131072 /* elements above which rows are distributed to threads */

struct isa {
    void (*decay_row)(const struct decay_rows *, int64_t);
    void (*gate_row)(const struct gated_rows *, int64_t);
};

#define ISA_ENTRIES {ISA(decay_row), ISA(gate_row)}
#define BODY "recurrent_rows_isa.h"
#include "for_each_isa.h"

void ferrum_decay_rows(const struct decay_rows *rows)
{
    const struct isa *isa = isa_of(rows->lanes);
    for (int64_t row = 0; row < rows->rows; row++)
        isa->decay_row(rows, row);
}

void ferrum_gated_rows(const struct gated_rows *rows)
{
    const struct isa *isa = isa_of(rows->lanes);
    const int shared = rows->rows * rows->count * rows->dim > LARGE && rows->threads > 1;
    int64_t row;
#pragma omp parallel for num_threads(rows->threads) if (shared)
    for (row = 0; row < rows->rows; row++)
        isa->gate_row(rows, row);
}
