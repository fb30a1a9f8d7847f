/* Matrix products with resident weights on a CPU: x W^T + b for few rows or many, with weights in bfloat16, 8 bits
 * or 4.
 *
 * A decode step reads every weight for a few rows, so it is bound by memory if the arithmetic is fast enough. That of
 * oneDNN is at one row; at 8 rows it took 1.3 times as long as reading the weights, and at 32 2.9 times (two cores with
 * AVX-512 BF16, Qwen3-0.6B's layers: 28 ms of reading; 37 and 81). Here one layout of panels (gemm_tile.h) serves every
 * number of rows: a job is four panels and a slab of rows; during a job's later rows the next job's weights are
 * prefetched.
 *
 * If only the largest element of a row is needed (the next token of a greedy row), the row is not written: 32 rows of a
 * 152k vocabulary are 19 MB of floats that would be read again.
 *
 * Weights in 8 or 4 bits are groups of 16 to 128 elements of a column (linear.h): those of a file, multiplied as they are
 * stored, or our own. Rows are rounded to 8 bits in the same groups, because the instruction of AVX-512 multiplies bytes
 * by bytes. (llama.cpp does so too, with groups of 32 or 256.) A product may have parts of several kinds, one after the
 * other in the output: a file may store q and k in 4 bits and v in 6.
 *
 * Packing does not depend on the CPU. The inner loops are of the best instructions that it has (`kernel_of`): gemm_tile.h,
 * gemm_amx.h, gemm_avx2.h, gemm_portable.h.
 *
 * It needs no Python and no torch headers: ferrum_rpc/models/native_linear.py passes pointers. OpenMP: see attention_decode.c.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_features.h"
#include "gemm_amx.h"
#include "gemm_avx2.h"
#include "gemm_portable.h"
#include "gemm_tile.h"
#include "linear.h"
#include "buffer.h"

#define SLAB 240         /* rows of a job: their sums are 60 kB */
#define CHUNK 1024       /* vectors of a panel at a time: four panels and the next four are 512 kB */
#define MAX_GROUP 128    /* elements that share a scale */
#define UNPACKED 256     /* vectors of a panel of nibbles that are bytes at a time: of four panels 128 kB */
#define UNPACKED_BYTES (GEMM_PANELS * 2 * UNPACKED * 64)
#define UNPACKING 48     /* rows from which on that is faster: 1.16 times at 128; at 32 it is not */
#define TINY 1e-36f      /* 127 / TINY is a float */
#define SMALL 131072     /* bytes of weights below which waking threads costs more than they save */

/* Elements of a column in a vector of a panel, by enum kind. */
static const int32_t elements_of[] = {2, 4, 8, 8, 8, 8};

/* The largest element so far of a row, as an integer of that order (linear_isa.h), and its column. */
struct best {
    int32_t key, column;
};

/* Whether `x` is larger, or as large and further left. */
static inline int comes_first(const struct best *x, const struct best *y)
{
    return x->key > y->key || (x->key == y->key && x->column < y->column);
}

/* How rows are made ready for the inner loops, or NULL; a row's scales and starts are of groups. */
typedef void prepare_row(const struct matrix *linear, const char *row, char *to, float *scales, int32_t *starts);

struct isa {
    prepare_row *prepare_bytes;
    void (*round_row)(const float *sums, const float *bias, int from, int count, char *out, int wide);
    void (*best_of_row)(const float *sums, const float *bias, int from, int count, struct best *best);
};

#define ISA_ENTRIES {ISA(prepare_bytes), ISA(round_row), ISA(best_of_row)}
#define BODY "linear_isa.h"
#include "for_each_isa.h"

#if defined(__x86_64__)
GEMM_ENTRY(pairs_avx512_bf16, gemm_pairs, AVX512_BF16)
GEMM_ENTRY(pairs_avx512, gemm_halves, AVX512)
GEMM_ENTRY(bytes_avx512, gemm_bytes, AVX512_VNNI)
GEMM_ENTRY(nibbles_avx512, gemm_nibbles, AVX512_VNNI)
GEMM_ENTRY(factored_avx512, gemm_factored, AVX512_VNNI)
GEMM_ENTRY(factored_bytes_avx512, gemm_factored_bytes, AVX512_VNNI)
GEMM_ENTRY(mxfp4_avx512, gemm_mxfp4_nibbles, AVX512_VNNI)
GEMM_ENTRY(mxfp4_bytes_avx512, gemm_mxfp4_bytes, AVX512_VNNI)
GEMM_ENTRY(iq4_avx512, gemm_iq4_nibbles, AVX512_VNNI)
static COMPILED_FOR(AVX512) void unpack_avx512(const char *panel, const uint8_t *zeros, int every, int vectors, int group,
                                               char *to)
{
    gemm_unpack(panel, zeros, every, vectors, group, to, NIBBLES);
}
static COMPILED_FOR(AVX512) void unpack_mxfp4_avx512(const char *panel, const uint8_t *zeros, int every, int vectors,
                                                     int group, char *to)
{
    gemm_unpack(panel, zeros, every, vectors, group, to, MXFP4);
}
static COMPILED_FOR(AVX512) void unpack_iq4_avx512(const char *panel, const uint8_t *zeros, int every, int vectors,
                                                   int group, char *to)
{
    gemm_unpack(panel, zeros, every, vectors, group, to, IQ4);
}
AVX2_ENTRY(pairs_avx2, avx2_pairs)
AVX2_ENTRY(bytes_avx2, avx2_bytes)
AVX2_ENTRY(nibbles_avx2, avx2_nibbles)
AVX2_ENTRY(factored_avx2, avx2_factored)
AVX2_ENTRY(mxfp4_avx2, avx2_mxfp4)
static COMPILED_FOR(AVX2) void unpack_iq4_avx2(const char *panel, const uint8_t *zeros, int every, int vectors, int group,
                                               char *to)
{
    (void)zeros, (void)every, (void)group;
    avx2_unpack(panel, vectors, to, IQ4);
}
#endif

typedef void multiply_tile(const struct gemm_tile *tile, int rows, int panels);
typedef void unpack_panel(const char *panel, const uint8_t *zeros, int every, int vectors, int group, char *to);

/* Inner loops for up to `rows` rows at a time, of several such blocks a multiple of `whole`, and `chunk` vectors of a panel.
 * `unpack`: panels of nibbles to bytes before, if they multiply these; a nibble becomes `every` more, if a matrix has no
 * zeros. `packed`: rows are packed for registers before (amx_pack). */
struct loops {
    multiply_tile *multiply;
    int32_t rows, whole, chunk;
    unpack_panel *unpack;
    int32_t every, packed;
};

/* What multiplies the panels of a kind. Its bits do not depend on the number of rows: loops for few and, from `many_from` on,
 * for many rows compute the same. `step`: bytes of a row, as they read it, for each vector of a panel. `vectors`: what
 * ferrum_linear_supported says. */
struct kernel {
    const struct isa *isa;
    prepare_row *prepare;
    int32_t step, vectors, many_from;
    struct loops few, many;
};

#define FEW(multiply) {multiply, GEMM_ROWS, 1, CHUNK, NULL, 0, 0}
#define NEVER INT32_MAX

/* The best of this machine. */
static struct kernel kernel_of(int32_t kind)
{
#if defined(AMX)
    if (CPU_HAS(AMX) && amx_permitted()) {
        const struct loops pairs = {pairs_amx, AMX_BLOCK, AMX_ROWS, AMX_CHUNK, NULL, 0, 0};
        const struct loops packed_pairs = {packed_pairs_amx, AMX_BLOCK, AMX_ROWS, AMX_CHUNK, NULL, 0, 1};
        const struct loops bytes = {bytes_amx, AMX_BLOCK, AMX_ROWS, AMX_CHUNK, NULL, 0, 0};
        const struct loops nibbles = {bytes_amx, AMX_BLOCK, AMX_ROWS, AMX_CHUNK / 2, unpack_avx512, 120, 0};
        const struct loops factored = {factored_bytes_amx, AMX_BLOCK, AMX_ROWS, AMX_CHUNK / 2, unpack_avx512, 0, 0};
        const struct loops iq4 = {bytes_amx, AMX_BLOCK, AMX_ROWS, AMX_CHUNK / 2, unpack_iq4_avx512, 0, 0};
        const struct loops mxfp4 = {mxfp4_bytes_amx, AMX_BLOCK, AMX_ROWS, AMX_CHUNK / 2, unpack_mxfp4_avx512, 0, 0};
        if (kind == PAIRS)
            return (struct kernel){&isa_avx512, NULL, 4, 32, AMX_ROWS + 1, pairs, packed_pairs};
        if (kind == BYTES)
            return (struct kernel){&isa_avx512, prepare_bytes_avx512, 4, 32, AMX_ROWS, FEW(bytes_avx512), bytes};
        if (kind == NIBBLES)
            return (struct kernel){&isa_avx512, prepare_bytes_avx512, 8, 32, AMX_ROWS, FEW(nibbles_avx512), nibbles};
        if (kind == MXFP4)
            return (struct kernel){&isa_avx512, prepare_bytes_avx512, 8, 32, AMX_ROWS, FEW(mxfp4_avx512), mxfp4};
        if (kind == IQ4)
            return (struct kernel){&isa_avx512, prepare_bytes_avx512, 8, 32, AMX_ROWS, FEW(iq4_avx512), iq4};
        return (struct kernel){&isa_avx512, prepare_bytes_avx512, 8, 32, AMX_ROWS, FEW(factored_avx512), factored};
    }
#endif
#if defined(__x86_64__)
    if (kind == BYTES && CPU_HAS(AVX512_VNNI))
        return (struct kernel){&isa_avx512, prepare_bytes_avx512, 4, 16, NEVER, FEW(bytes_avx512)};
    if (kind == NIBBLES && CPU_HAS(AVX512_VNNI))
        return (struct kernel){&isa_avx512, prepare_bytes_avx512, 8, 16, UNPACKING, FEW(nibbles_avx512),
                               {bytes_avx512, GEMM_ROWS, 1, UNPACKED, unpack_avx512, 120, 0}};
    if (kind == FACTORED && CPU_HAS(AVX512_VNNI))
        return (struct kernel){&isa_avx512, prepare_bytes_avx512, 8, 16, UNPACKING, FEW(factored_avx512),
                               {factored_bytes_avx512, GEMM_ROWS, 1, UNPACKED, unpack_avx512, 0, 0}};
    if (kind == MXFP4 && CPU_HAS(AVX512_VNNI))
        return (struct kernel){&isa_avx512, prepare_bytes_avx512, 8, 16, UNPACKING, FEW(mxfp4_avx512),
                               {mxfp4_bytes_avx512, GEMM_ROWS, 1, UNPACKED, unpack_mxfp4_avx512, 0, 0}};
    if (kind == IQ4 && CPU_HAS(AVX512_VNNI))
        return (struct kernel){&isa_avx512, prepare_bytes_avx512, 8, 16, UNPACKING, FEW(iq4_avx512),
                               {bytes_avx512, GEMM_ROWS, 1, UNPACKED, unpack_iq4_avx512, 0, 0}};
    if (kind == PAIRS && CPU_HAS(AVX512_BF16) && pairs_preferred())
        return (struct kernel){&isa_avx512, NULL, 4, 16, NEVER, FEW(pairs_avx512_bf16)};
    if (kind == PAIRS && CPU_HAS(AVX512))
        return (struct kernel){&isa_avx512, prepare_pairs_avx512, 8, 16, NEVER, FEW(pairs_avx512)};
    if (kind == BYTES && CPU_HAS(AVX2))
        return (struct kernel){&isa_avx2, prepare_wide_bytes_avx2, AVX2_STEP, 8, NEVER, FEW(bytes_avx2)};
    if (kind == NIBBLES && CPU_HAS(AVX2))
        return (struct kernel){&isa_avx2, prepare_bytes_avx2, 8, 8, NEVER, FEW(nibbles_avx2)};
    if (kind == FACTORED && CPU_HAS(AVX2))
        return (struct kernel){&isa_avx2, prepare_bytes_avx2, 8, 8, NEVER, FEW(factored_avx2)};
    if (kind == MXFP4 && CPU_HAS(AVX2))
        return (struct kernel){&isa_avx2, prepare_bytes_avx2, 8, 8, NEVER, FEW(mxfp4_avx2)};
    if (kind == IQ4 && CPU_HAS(AVX2))
        return (struct kernel){&isa_avx2, prepare_wide_bytes_avx2, 2 * AVX2_STEP, 8, NEVER,
                               {bytes_avx2, GEMM_ROWS, 1, UNPACKED, unpack_iq4_avx2, 0, 0}};
    if (CPU_HAS(AVX2))
        return (struct kernel){&isa_avx2, prepare_pairs_avx2, AVX2_STEP, 8, NEVER, FEW(pairs_avx2)};
#endif
    if (kind == PAIRS)
        return (struct kernel){&isa_portable, NULL, 4, 4, NEVER, FEW(pairs_portable)};
    multiply_tile *const of_kinds[] = {pairs_portable, bytes_portable, nibbles_portable, factored_portable, mxfp4_portable,
                                        iq4_portable};
    return (struct kernel){&isa_portable, prepare_bytes_portable, kind == BYTES ? 4 : 8, 4, NEVER, FEW(of_kinds[kind])};
}

/* Buffers of buffer.h. Of a list of products each has a part of `rows`, `scales` and `starts`, m being its rows. */
struct ferrum_linears {
    struct kernel kernels[IQ4 + 1]; /* of enum kind */
    float *sums;      /* [threads][SLAB][GEMM_WIDTH] */
    char *unpacked;   /* [threads][GEMM_PANELS][2 * UNPACKED][64] */
    char *rows;       /* as they were made ready: [m][vectors of a panel][step] */
    float *scales;    /* all but pairs: [m][k / group] */
    int32_t *starts;  /* the same */
    struct best *best; /* [threads][m] */
    struct problem *problems;
    struct product *products;
    size_t sums_size, unpacked_size, rows_size, scales_size, starts_size, best_size, problems_size, products_size;
};

/* The floats in the vectors of this machine's kernel: 16 (AVX-512), 8 (AVX2) or 4 (portable C); 32 with AMX. */
int32_t ferrum_linear_supported(int32_t kind) { return kernel_of(kind).vectors; }

/* Bytes for each element of a row that this machine's kernel takes to make it ready; 0: it reads rows as they are. */
int32_t ferrum_linear_prepared(int32_t kind)
{
    const struct kernel kernel = kernel_of(kind);
    return kernel.prepare ? kernel.step / elements_of[kind] : kernel.many.packed ? 2 : 0;
}

/* NULL if memory is short. */
struct ferrum_linears *ferrum_linears_new(void)
{
    struct ferrum_linears *made = calloc(1, sizeof *made);
    for (int32_t kind = PAIRS; made && kind <= IQ4; kind++)
        made->kernels[kind] = kernel_of(kind);
    return made;
}

void ferrum_linears_free(struct ferrum_linears *self)
{
    free(self->sums);
    free(self->unpacked);
    free(self->rows);
    free(self->scales);
    free(self->starts);
    free(self->best);
    free(self->problems);
    free(self->products);
    free(self);
}

/* Room for so many problems. NULL if memory is short. */
struct problem *ferrum_linear_problems(struct ferrum_linears *self, int32_t count)
{
    return reserve_buffer(&self->problems, &self->problems_size, (size_t)count * sizeof *self->problems) ? self->problems
                                                                                                          : NULL;
}

/* A problem and how it is computed. `ready`: its rows are made ready, in `room` bytes. Of a list it has the rows that are
 * made ready from `first_row` to `last_row`, and the jobs from `first_job` to `last_job`. */
struct product {
    const struct problem *problem;
    const struct kernel *kernel;
    const struct loops *loops;
    const char *rows;
    float *row_scales;
    int32_t *row_starts;
    size_t row_bytes, panel_bytes, room;
    int64_t first_row, last_row, first_job, last_job;
    int panels, slabs;           /* all panels; jobs of the same panels */
    int together, groups, ready; /* elements of a column in a vector; groups of a column */
};

/* Products that threads share. `unit`: panels of a job; `slab`: its rows at most; `ready`: rows that are made
 * ready; `unpacking`: some are unpacked. */
struct list {
    struct product *products;
    int64_t jobs, ready, slab;
    int unit, wide, unpacking;
};

/* What a thread has of its own: see struct ferrum_linears, and gemm_amx.h. */
struct thread {
    float *sums;
    char *unpacked;
    struct best *best;
    int configured;
};

/* A job of a list: panels of a product from `panel` on against the rows of slab `slab`. */
struct job {
    const struct product *product;
    int panel, slab;
};

/* The next job that no thread has; its product is `product` or a later one, or NULL: there is none. */
static struct job next_job(const struct list *list, int64_t *taken, const struct product *product)
{
    const int64_t number = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
    if (number >= list->jobs)
        return (struct job){0};
    while (number >= product->last_job)
        product++;
    const int64_t own = number - product->first_job;
    return (struct job){product, (int)(own / product->slabs) * list->unit, (int)(own % product->slabs)};
}

/* Do a job. `next`: the one that this thread will do then. */
static void multiply(const struct list *list, const struct job *job, const struct job *next, struct thread *own)
{
    const struct product *product = job->product;
    const struct problem *problem = product->problem;
    const struct matrix *linear = problem->linear;
    const struct kernel *kernel = product->kernel;
    const struct loops *loops = product->loops;
    const int panel = job->panel;
    const int panels = product->panels - panel < list->unit ? product->panels - panel : list->unit;
    const int64_t from = (int64_t)job->slab * SLAB;
    const int rows = (int)(problem->count - from < SLAB ? problem->count - from : SLAB);
    const int blocks = (rows + loops->rows - 1) / loops->rows;
    const size_t step = loops->packed ? 64 : kernel->step;
    const int vectors = (int)(product->panel_bytes / 64), groups = product->groups, together = product->together;
    const size_t scale_bytes = linear->kind == FACTORED || linear->kind == MXFP4 ? sizeof(uint8_t) : sizeof(uint16_t);
    const size_t supers = linear->factors ? (size_t)(linear->k / SUPER_GROUP) * 2 * GEMM_COLUMNS : 0;
    const char *ahead = NULL;
    if (blocks > 1 && (next->product != product || next->panel != panel))
        ahead = next->product->problem->linear->panels + next->panel * next->product->panel_bytes;
    memset(own->sums, 0, (size_t)rows * GEMM_WIDTH * sizeof *own->sums);
    for (int first = 0; first < vectors; first += loops->chunk) {
        struct gemm_tile tile = {
            .panels = linear->panels + panel * product->panel_bytes + (size_t)first * 64,
            .row_bytes = product->row_bytes,
            .panel_bytes = product->panel_bytes,
            .vectors = vectors - first < loops->chunk ? vectors - first : loops->chunk,
            .row_groups = groups,
            .panel_groups = (size_t)groups * GEMM_COLUMNS,
            .panel_supers = supers,
            .group = linear->group / together,
            .configured = &own->configured,
        };
        const int group = groups ? first * together / linear->group : 0; /* the first of this chunk */
        if (groups) {
            const size_t at = ((size_t)panel * groups + group) * GEMM_COLUMNS;
            tile.panel_scales = (const char *)linear->scales + at * scale_bytes;
            tile.panel_zeros = linear->zeros ? linear->zeros + at : NULL;
        }
        if (linear->factors)
            tile.panel_factors = linear->factors + panel * supers + group / GEMM_SUPER * 2 * GEMM_COLUMNS;
        if (loops->unpack) {
            const uint8_t *zeros = linear->kind == NIBBLES ? tile.panel_zeros : NULL;
            for (int p = 0; p < panels; p++)
                loops->unpack(tile.panels + p * tile.panel_bytes, zeros ? zeros + p * tile.panel_groups : NULL,
                              loops->every, tile.vectors, tile.group, own->unpacked + (size_t)p * 2 * UNPACKED * 64);
            if (zeros)
                tile.panel_zeros = NULL; /* all are 128 now */
            tile.panels = own->unpacked;
            tile.panel_bytes = 2 * UNPACKED * 64;
            tile.vectors *= 2;
            tile.group *= 2;
        }
        int row = 0;
        for (int block = 0; block < blocks; block++) {
            const int share = (rows - row + blocks - block - 1) / (blocks - block);
            const int even = (share + loops->whole - 1) / loops->whole * loops->whole;
            const int count = even < rows - row ? even : rows - row;
            tile.rows = product->rows + (from + row) * product->row_bytes + first * step;
            tile.sums = own->sums + row * GEMM_WIDTH;
            tile.ahead = tile.panels;
            if (ahead && block < panels)
                tile.ahead = ahead + block * next->product->panel_bytes + (size_t)first * 64;
            if (groups) {
                tile.row_scales = product->row_scales + (from + row) * groups + group;
                tile.row_starts = product->row_starts + (from + row) * groups + group;
            }
            loops->multiply(&tile, count, panels);
            row += count;
        }
    }
    const int column = panel * GEMM_COLUMNS;
    const int columns = linear->n - column < panels * GEMM_COLUMNS ? linear->n - column : panels * GEMM_COLUMNS;
    for (int row = 0; row < rows; row++)
        if (problem->out)
            kernel->isa->round_row(own->sums + row * GEMM_WIDTH, linear->bias, column, columns,
                                   problem->out + (from + row) * problem->out_bytes, list->wide);
        else
            kernel->isa->best_of_row(own->sums + row * GEMM_WIDTH, linear->bias, column, columns, own->best + from + row);
}

/* How a problem is computed. */
static struct product plan(const struct ferrum_linears *self, const struct problem *problem)
{
    const struct matrix *linear = problem->linear;
    const struct kernel *kernel = self->kernels + linear->kind;
    const int together = elements_of[linear->kind];
    struct product product = {
        .problem = problem,
        .kernel = kernel,
        .loops = problem->count >= kernel->many_from ? &kernel->many : &kernel->few,
        .rows = problem->x,
        .row_bytes = (size_t)problem->x_stride * 2,
        .panel_bytes = (size_t)linear->k / together * 64,
        .panels = (linear->n + GEMM_COLUMNS - 1) / GEMM_COLUMNS,
        .slabs = (int)((problem->count + SLAB - 1) / SLAB),
        .together = together,
        .groups = linear->group ? linear->k / linear->group : 0,
    };
    product.ready = kernel->prepare || product.loops->packed || problem->index;
    if (kernel->prepare)
        product.row_bytes = product.panel_bytes / 64 * kernel->step;
    else if (product.ready)
        product.row_bytes = (size_t)linear->k * 2;
    product.room = (size_t)problem->count * product.row_bytes;
#if defined(AMX)
    if (product.loops->packed) {
        product.row_bytes = amx_packed_bytes(linear->k);
        product.room = (size_t)(problem->count + AMX_ROWS - 1) * product.row_bytes;
    }
#endif
    product.room = (product.room + 63) / 64 * 64;
    return product;
}

/* Make row `row` of a product ready. */
static void make_ready(const struct product *product, int64_t row)
{
    const struct problem *problem = product->problem;
    const struct matrix *linear = problem->linear;
    const char *x = problem->x + (size_t)(problem->index ? problem->index[row] : row) * problem->x_stride * 2;
    char *const rows = (char *)product->rows, *const to = rows + (size_t)row * product->row_bytes;
    const size_t group = (size_t)row * product->groups;
    if (product->kernel->prepare)
        product->kernel->prepare(linear, x, to, product->row_scales + group, product->row_starts + group);
#if defined(AMX)
    else if (product->loops->packed)
        amx_pack(x, row, linear->k, rows);
#endif
    else
        memcpy(to, x, product->row_bytes);
}

/* Plan a list of problems, and reserve what it needs. 0, or -1 if memory is short. `threads` becomes 1 where the weights are
 * few. */
static int32_t plan_all(struct ferrum_linears *self, const struct problem *problems, int32_t count, int32_t *threads,
                        struct list *list)
{
    if (!reserve_buffer(&self->products, &self->products_size, (size_t)count * sizeof *self->products))
        return -1;
    struct product *const products = list->products = self->products;
    size_t weights = 0, rows = 0, groups = 0;
    int64_t units = 0;
    for (int32_t i = 0; i < count; i++) {
        struct product *const product = products + i;
        *product = plan(self, problems + i);
        weights += product->panels * product->panel_bytes;
        units += (int64_t)product->panels * product->slabs;
        list->slab = problems[i].count > list->slab ? problems[i].count : list->slab;
        list->unpacking |= product->loops->unpack != NULL;
        if (product->ready) {
            rows += product->room;
            groups += (size_t)problems[i].count * product->groups;
        }
    }
    list->slab = list->slab < SLAB ? list->slab : SLAB;
    if (weights < SMALL)
        *threads = 1;
    list->unit = GEMM_PANELS;
    while (list->unit > 1 && units / list->unit < 4 * *threads)
        list->unit /= 2;
    const size_t each = *threads;
    if (!reserve_buffer(&self->sums, &self->sums_size, each * (size_t)list->slab * GEMM_WIDTH * sizeof(float)) ||
        (list->unpacking && !reserve_buffer(&self->unpacked, &self->unpacked_size, each * UNPACKED_BYTES)) ||
        !reserve_buffer(&self->rows, &self->rows_size, rows) ||
        !reserve_buffer(&self->scales, &self->scales_size, groups * sizeof(float)) ||
        !reserve_buffer(&self->starts, &self->starts_size, groups * sizeof(int32_t)))
        return -1;
    rows = groups = 0;
    for (int32_t i = 0; i < count; i++) {
        struct product *const product = products + i;
        product->first_row = list->ready;
        product->first_job = list->jobs;
        if (product->ready) {
            product->rows = self->rows + rows;
            product->row_scales = self->scales + groups;
            product->row_starts = self->starts + groups;
            list->ready += problems[i].count;
            rows += product->room;
            groups += (size_t)problems[i].count * product->groups;
        }
        list->jobs += (int64_t)((product->panels + list->unit - 1) / list->unit) * product->slabs;
        product->last_row = list->ready;
        product->last_job = list->jobs;
    }
    return 0;
}

/* The products of a list: to their outputs, or, of one without an output, the largest of each row to `self->best`, of as
 * many threads as it returns; -1 if memory for the buffers is short. */
static int32_t run(struct ferrum_linears *self, const struct problem *problems, int32_t count, int32_t wide, int32_t threads)
{
    struct list list = {.wide = wide};
    if (plan_all(self, problems, count, &threads, &list) < 0)
        return -1;
    const int64_t ranked = problems->out ? 0 : problems->count;
    if (!reserve_buffer(&self->best, &self->best_size, (size_t)(threads * ranked) * sizeof *self->best))
        return -1;
    for (int64_t i = 0; i < threads * ranked; i++)
        self->best[i] = (struct best){INT32_MIN, INT32_MAX};
    int64_t taken = 0;
    int arrived = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const int number = __atomic_fetch_add(&arrived, 1, __ATOMIC_RELAXED);
        struct thread own = {
            .sums = self->sums + number * (size_t)list.slab * GEMM_WIDTH,
            .unpacked = list.unpacking ? self->unpacked + (size_t)number * UNPACKED_BYTES : NULL,
            .best = ranked ? self->best + number * ranked : NULL,
        };
        if (list.ready) {
            const struct product *product = list.products;
            int64_t row;
#pragma omp for schedule(static)
            for (row = 0; row < list.ready; row++) {
                while (row >= product->last_row)
                    product++;
                make_ready(product, row - product->first_row);
            }
        }
        struct job job = next_job(&list, &taken, list.products);
        while (job.product) {
            const struct job next = next_job(&list, &taken, job.product);
            multiply(&list, &job, next.product ? &next : &job, &own);
            job = next;
        }
#if defined(AMX)
        amx_release(own.configured);
#endif
    }
    return threads;
}

/* The products of `count` problems, which threads share, to their outputs. `wide`: as ferrum_linear. 0, or -1 if memory for
 * the buffers is short. */
int32_t ferrum_linear_all(struct ferrum_linears *self, const struct problem *problems, int32_t count, int32_t wide,
                          int32_t threads)
{
    return run(self, problems, count, wide, threads) < 0 ? -1 : 0;
}

/* out [count, width] = x [count, k] W^T + b: bfloat16, floats of bfloat16 values where `wide` is 1, or floats as they were
 * summed where it is 2. Rows of x lie `x_stride` elements apart, those of the output one after the other. 0, or -1 if
 * memory for the buffers is short. */
int32_t ferrum_linear(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                      int64_t count, char *out, int32_t wide, int32_t threads)
{
    const size_t element = wide ? 4 : 2, out_bytes = (size_t)linear->width * element;
    int32_t parts = 0;
    for (const struct matrix *part = linear; part; part = part->next)
        parts++;
    struct problem *const problems = ferrum_linear_problems(self, parts);
    if (!problems)
        return -1;
    for (int32_t i = 0; i < parts; out += (size_t)linear->n * element, linear = linear->next, i++)
        problems[i] = (struct problem){linear, x, NULL, x_stride, count, out, (int64_t)out_bytes};
    return ferrum_linear_all(self, problems, parts, wide, threads);
}

/* Of each head's rows, out [count, n] = x [count, k] W^T, in bfloat16, by the head's own small matrix of one part. Elements
 * lie `x_stride` and `out_stride` apart between two rows, and `x_head` and `out_head` between two heads. 0, or -1 if memory
 * for the buffers is short. */
int32_t ferrum_linear_heads(struct ferrum_linears *self, const struct matrix *const *linears, int32_t heads, const char *x,
                            int64_t x_stride, int64_t x_head, int64_t count, char *out, int64_t out_stride,
                            int64_t out_head, int32_t threads)
{
    struct problem *const problems = ferrum_linear_problems(self, heads);
    if (!problems)
        return -1;
    for (int32_t head = 0; head < heads; head++, x += x_head * 2, out += out_head * 2)
        problems[head] = (struct problem){linears[head], x, NULL, x_stride, count, out, out_stride * 2};
    return ferrum_linear_all(self, problems, heads, 0, threads);
}

/* ids [count]: of each row of a product of one part the column of its largest element, the first of several. */
int32_t ferrum_linear_largest(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                              int64_t count, int64_t *ids, int32_t threads)
{
    const struct problem problem = {.linear = linear, .x = x, .x_stride = x_stride, .count = count};
    const int32_t lists = run(self, &problem, 1, 0, threads);
    if (lists < 0)
        return -1;
    for (int64_t row = 0; row < count; row++) {
        struct best best = self->best[row];
        for (int32_t list = 1; list < lists; list++) {
            const struct best *other = self->best + list * count + row;
            if (comes_first(other, &best))
                best = *other;
        }
        ids[row] = best.column;
    }
    return 0;
}
