/* Adapters: y += B (A x) for those rows of a step that have one, many adapters in one call.
 *
 * A and B are panels (gemm_tile.h), so that a row costs little more than reading its adapter once: a batch with a different
 * adapter in every row reads all of them, 20 MB each at rank 16 of Qwen3-0.6B, and rows of one adapter share the reads. The
 * order of a sum is fixed, as in linear.c: a row's result does not depend on the other rows.
 *
 * A x is rounded to bfloat16, and so is the result: y is read as bfloat16, and rounded again. Pairs are multiplied by
 * AVX-512 BF16, or as two floats each by AVX2. OpenMP: see attention_decode.c.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu_features.h"
#include "gemm_avx2.h"
#include "gemm_tile.h"
#include "lora.h"

#if defined(__x86_64__)

#define JOB_PANELS 32  /* of B, that a job takes: groups of four */
#define AHEAD 2048     /* bytes that are fetched ahead */
#define WIDENED 512    /* elements of a row that AVX2 has as floats at a time: 12 kB of six */

/* Rows against a group of panels, as gemm_pairs, of which every panel is a vector further on; sums begin at zero. */
GEMM_INLINE(AVX512_BF16) void lora_pairs(const struct gemm_tile *tile, const int rows, const int panels)
{
    __m512 sums[GEMM_ROWS][GEMM_PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            sums[r][p] = _mm512_setzero_ps();
    const char *row = tile->rows, *panel = tile->panels;
    const size_t row_bytes = tile->row_bytes;
    for (int i = 0; i < tile->vectors; i++, row += 4, panel += panels * 64) {
        __m512i weights[GEMM_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            weights[p] = _mm512_loadu_si512(panel + p * 64);
            _mm_prefetch(panel + p * 64 + AHEAD, _MM_HINT_T0);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512i x = gemm_broadcast(row + r * row_bytes);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                sums[r][p] = _mm512_dpbf16_ps(sums[r][p], (__m512bh)weights[p], (__m512bh)x);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            _mm512_storeu_ps(tile->sums + r * GEMM_WIDTH + p * GEMM_COLUMNS, sums[r][p]);
}

/* The same of rows of floats, added to the sums; `panel_bytes`: of a vector of all panels. */
GEMM_INLINE(AVX2) void lora_floats(const struct gemm_tile *tile, int first, const int rows, const int panels)
{
    const char *panel = tile->panels + first * 64;
    avx2_pairs_at(tile, panel, 64, tile->panel_bytes, panel + AHEAD, panels, tile->sums + first * GEMM_COLUMNS, rows, panels);
}

GEMM_ENTRY(lora_avx512, lora_pairs, AVX512_BF16)
AVX2_ENTRY(lora_avx2, lora_floats)

struct isa {
    void (*multiply_a)(const struct lora_rows *rows, const struct lora_change *change, int panel, int panels,
                       const char *x, size_t x_bytes, char *sums, size_t sums_bytes);
    void (*add_b)(const struct lora_rows *rows, const struct lora_part *part, int panel, int panels, char *y,
                  size_t y_bytes, const char *sums, size_t sums_bytes);
};

#define JOINED(name, suffix) name##suffix
#define ISA(name) JOINED(name, _avx512)
#define TARGET COMPILED_FOR(AVX512_BF16)
#define LANES 16
#include "lora_isa.h"
static const struct isa isa_avx512 = {multiply_a_avx512, add_b_avx512};
#undef ISA
#undef TARGET
#undef LANES

#define ISA(name) JOINED(name, _avx2)
#define TARGET COMPILED_FOR(AVX2)
#define LANES 8
#include "lora_isa.h"
static const struct isa isa_avx2 = {multiply_a_avx2, add_b_avx2};

/* The floats in the vectors of this machine's kernel: 16 (AVX-512 BF16), 8 (AVX2), or 0: there is none. */
int32_t ferrum_lora_lanes(void) { return CPU_HAS(AVX512_BF16) ? 16 : CPU_HAS(AVX2) ? 8 : 0; }

static inline int panels_of(int columns) { return (columns + GEMM_COLUMNS - 1) / GEMM_COLUMNS; }

struct task {
    const struct isa *isa;
    const struct lora_step *step;
    const char *x;
    char *y;
    size_t x_bytes, sums_bytes;
    int32_t slot; /* of the product */
};

/* The group of panels `group` of A, for the rows of one adapter. */
static void job_of_a(const struct task *task, int64_t which, int group)
{
    const struct lora_rows *rows = task->step->rows + which;
    const struct lora_change *change = rows->changes + task->slot;
    const int panel = group * GEMM_PANELS, left = panels_of(change->rank) - panel;
    if (left > 0)
        task->isa->multiply_a(rows, change, panel, left < GEMM_PANELS ? left : GEMM_PANELS, task->x, task->x_bytes,
                              task->step->sums, task->sums_bytes);
}

/* The same of B, of each part; JOB_PANELS at a time. */
static void job_of_b(const struct task *task, int64_t which, int groups)
{
    const struct lora_rows *rows = task->step->rows + which;
    const struct lora_change *change = rows->changes + task->slot;
    const int panel = groups * JOB_PANELS;
    for (int p = 0; p < change->parts; p++) {
        const int left = panels_of(change->part[p].columns) - panel;
        if (left > 0)
            task->isa->add_b(rows, change->part + p, panel, left < JOB_PANELS ? left : JOB_PANELS, task->y,
                             (size_t)change->n * 2, task->step->sums, task->sums_bytes);
    }
}

/* Add the changes of the adapters of `step` to y [rows, n], a product of x, whose rows are `x_stride` elements apart. */
void ferrum_lora(const struct lora_step *step, int32_t slot, const char *x, int64_t x_stride, char *y, int32_t threads)
{
    const struct task task = {
        .isa = step->lanes == 16 ? &isa_avx512 : &isa_avx2,
        .step = step,
        .x = x,
        .y = y,
        .x_bytes = (size_t)x_stride * 2,
        .sums_bytes = (size_t)step->rank * 2,
        .slot = slot,
    };
    int a_groups = 0, b_groups = 0; /* jobs of one of the `rows`, of any adapter at most */
    for (int i = 0; i < step->count; i++) {
        const struct lora_change *change = step->rows[i].changes + task.slot;
        const int of_a = (panels_of(change->rank) + GEMM_PANELS - 1) / GEMM_PANELS;
        const int of_b = (panels_of(change->n) + JOB_PANELS - 1) / JOB_PANELS;
        a_groups = of_a > a_groups ? of_a : a_groups;
        b_groups = of_b > b_groups ? of_b : b_groups;
    }
    if (!a_groups)
        return;
    const int64_t count = step->count, a_jobs = count * a_groups, b_jobs = count * b_groups;
    int64_t job;
    if (count >= 4 * threads) { /* enough jobs for all threads: no thread waits for another's sums */
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
        for (job = 0; job < count; job++) {
            for (int group = 0; group < a_groups; group++)
                job_of_a(&task, job, group);
            for (int groups = 0; groups < b_groups; groups++)
                job_of_b(&task, job, groups);
        }
        return;
    }
#pragma omp parallel num_threads(threads) if (threads > 1) private(job)
    {
#pragma omp for schedule(dynamic, 1)
        for (job = 0; job < a_jobs; job++)
            job_of_a(&task, job / a_groups, (int)(job % a_groups));
#pragma omp for schedule(dynamic, 1)
        for (job = 0; job < b_jobs; job++)
            job_of_b(&task, job / b_groups, (int)(job % b_groups));
    }
}

#else

/* Without these instructions only the first function is called. */
int32_t ferrum_lora_lanes(void) { return 0; }

void ferrum_lora(const struct lora_step *step, int32_t slot, const char *x, int64_t x_stride, char *y, int32_t threads)
{
    (void)step, (void)slot, (void)x, (void)x_stride, (void)y, (void)threads;
}

#endif
