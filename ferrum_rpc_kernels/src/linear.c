/* Matrix products with resident weights on a CPU: x W^T + b for few rows or many, with bfloat16 or 8-bit weights.
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
 * 8-bit weights are blocks of 64 elements of a column with a scale each; rows are rounded to 8 bits in blocks of
 * 64 as well, because the instruction multiplies bytes by bytes. (llama.cpp's Q8_0 does so with blocks of 32.)
 *
 * It needs no Python and no torch headers: ferrum_rpc/models/native_linear.py passes pointers. OpenMP: see attention_decode.c.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_features.h"
#include "gemm_tile.h"
#include "linear.h"
#include "buffer.h"

#if defined(__x86_64__)

#define SLAB 240         /* rows of a job: their sums are 60 kB */
#define CHUNK_BYTES 65536 /* of a panel at a time: four panels and the next four are 512 kB */
#define GROUP 64         /* elements that share a scale */
#define TINY 1e-36f      /* 127 / TINY is a float */
#define SMALL 131072     /* bytes of weights below which waking threads costs more than they save */

/* The largest element so far of a row, and its column. */
struct best {
    float value;
    int32_t column;
};

/* Buffers of buffer.h. */
struct ferrum_linears {
    float *sums;      /* [threads][SLAB][GEMM_WIDTH] */
    char *rows;       /* bytes: [m][k] */
    float *scales;    /* bytes: [m][k / GROUP] */
    int32_t *starts;  /* bytes: [m][k / GROUP] */
    struct best *best; /* [threads][m] */
    size_t sums_size, rows_size, scales_size, starts_size, best_size;
};

int32_t ferrum_linear_supported(int32_t kind)
{
    return kind == BYTES ? CPU_HAS(AVX512_VNNI) : CPU_HAS(AVX512_BF16);
}

/* NULL if memory is short. */
struct ferrum_linears *ferrum_linears_new(void) { return calloc(1, sizeof(struct ferrum_linears)); }

void ferrum_linears_free(struct ferrum_linears *self)
{
    free(self->sums);
    free(self->rows);
    free(self->scales);
    free(self->starts);
    free(self->best);
    free(self);
}

/* Shared by both kinds. */
#define TARGET COMPILED_FOR(AVX512)

GEMM_ENTRY(pairs_entry, gemm_pairs, AVX512_BF16)
GEMM_ENTRY(bytes_entry, gemm_bytes, AVX512_VNNI)

/* One row to 8 bits: for every group its scale and -128 x its sum. A group with an element that is not finite gets a NaN
 * for a scale; one whose largest is below TINY counts as zeros: 127 over that would be infinite. */
static TARGET void quantise(const char *row, int k, char *to, float *scales, int32_t *starts)
{
    for (int g = 0; g < k / GROUP; g++) {
        __m512 x[GROUP / 16], most = _mm512_setzero_ps();
        for (int i = 0; i < GROUP / 16; i++) {
            const __m256i half = _mm256_loadu_si256((const __m256i *)(row + ((size_t)g * GROUP + i * 16) * 2));
            x[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
            most = _mm512_max_ps(_mm512_abs_ps(x[i]), most); /* max of a NaN and a number is its second operand */
        }
        const float largest = _mm512_reduce_max_ps(most), scale = largest / 127.0f;
        const __m512 inverse = _mm512_set1_ps(largest > TINY ? 127.0f / largest : 0.0f);
        __m512i sum = _mm512_setzero_si512();
        __mmask16 finite = 0xffff; /* infinity times 0 is NaN too */
        for (int i = 0; i < GROUP / 16; i++) {
            const __m512 scaled = _mm512_mul_ps(x[i], inverse);
            const __mmask16 number = _mm512_cmp_ps_mask(scaled, scaled, _CMP_ORD_Q);
            const __m512i rounded = _mm512_maskz_cvtps_epi32(number, scaled);
            finite &= number;
            sum = _mm512_add_epi32(sum, rounded);
            _mm_storeu_si128((__m128i *)(to + g * GROUP + i * 16), _mm512_cvtsepi32_epi8(rounded));
        }
        scales[g] = finite == 0xffff ? scale : __builtin_nanf("");
        starts[g] = -128 * _mm512_reduce_add_epi32(sum);
    }
}

/* 16 sums of a row, with the biases of the columns that are `held`: rounded to bfloat16 to the nearest, ties to even (a
 * NaN stays one), in the lower halves. */
static inline TARGET __m512i round_sums(const float *sums, const float *bias, __mmask16 held)
{
    __m512 x = _mm512_loadu_ps(sums);
    if (bias)
        x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(held, bias));
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i more = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i half = _mm512_srli_epi32(_mm512_add_epi32(bits, more), 16);
    return _mm512_mask_mov_epi32(half, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}

static inline __mmask16 held_columns(int count) { return count < 16 ? (__mmask16)((1u << count) - 1) : 0xffff; }

/* The sums of a row to an output row of `count` columns, of which `from` is the first: as bfloat16, or as floats of
 * such values where `wide`. */
static TARGET void round_row(const float *sums, const float *bias, int from, int count, char *out, int wide)
{
    for (int i = 0; i < count; i += 16) {
        const __mmask16 held = held_columns(count - i);
        const __m512i half = round_sums(sums + i, bias ? bias + from + i : NULL, held);
        if (wide)
            _mm512_mask_storeu_epi32(out + (size_t)(from + i) * 4, held, _mm512_slli_epi32(half, 16));
        else
            _mm256_mask_storeu_epi16(out + (size_t)(from + i) * 2, held, _mm512_cvtepi32_epi16(half));
    }
}

/* Whether `x` at `column` comes before what is held: larger, or as large and further left. A NaN is larger than any
 * number, as it is to torch. */
static inline int comes_first(float x, int column, const struct best *best)
{
    if (x != x || best->value != best->value)
        return x != x && (best->value == best->value || column < best->column);
    return x > best->value || (x == best->value && column < best->column);
}

/* The largest of a row's values as `round_row` would write them. */
static TARGET void best_of_row(const float *sums, const float *bias, int from, int count, struct best *best)
{
    for (int i = 0; i < count; i += 16) {
        const __mmask16 held = held_columns(count - i);
        const __m512i half = round_sums(sums + i, bias ? bias + from + i : NULL, held);
        const __m512 x = _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
        const __mmask16 none = _mm512_mask_cmp_ps_mask(held, x, x, _CMP_UNORD_Q);
        const float most = none ? __builtin_nanf("") : _mm512_mask_reduce_max_ps(held, x);
        if (!none && most < best->value)
            continue; /* nearly always */
        const __mmask16 where = none ? none : _mm512_mask_cmp_ps_mask(held, x, _mm512_set1_ps(most), _CMP_EQ_OQ);
        const int column = from + i + __builtin_ctz(where);
        if (comes_first(most, column, best))
            *best = (struct best){most, column};
    }
}

struct product {
    const struct matrix *linear;
    const char *rows;
    const float *row_scales;
    const int32_t *row_starts;
    size_t row_bytes, panel_bytes, out_bytes;
    char *out;
    int64_t count;
    int panels, unit, slabs, wide; /* all panels, those of a job, jobs of the same panels */
    int ranked;                    /* the largest of each row is wanted, and no row */
};

/* Job `job`: its panels against its rows. `next`: the one that this thread will do then. `best`: of this thread. */
static void multiply(const struct product *product, int64_t job, int64_t next, float *sums, struct best *best)
{
    const struct matrix *linear = product->linear;
    const int pairs = linear->kind == PAIRS, panel = (int)(job / product->slabs) * product->unit;
    const int panels = product->panels - panel < product->unit ? product->panels - panel : product->unit;
    const int64_t from = job % product->slabs * SLAB;
    const int rows = (int)(product->count - from < SLAB ? product->count - from : SLAB);
    const int blocks = (rows + GEMM_ROWS - 1) / GEMM_ROWS;
    const int vectors = (int)(product->panel_bytes / 64), groups = linear->k / GROUP;
    const char *ahead = NULL;
    if (blocks > 1 && next / product->slabs != job / product->slabs)
        ahead = linear->panels + next / product->slabs * product->unit * product->panel_bytes;
    memset(sums, 0, (size_t)rows * GEMM_WIDTH * sizeof *sums);
    for (int first = 0; first < vectors; first += CHUNK_BYTES / 64) {
        struct gemm_tile tile = {
            .panels = linear->panels + panel * product->panel_bytes + (size_t)first * 64,
            .row_bytes = product->row_bytes,
            .panel_bytes = product->panel_bytes,
            .vectors = vectors - first < CHUNK_BYTES / 64 ? vectors - first : CHUNK_BYTES / 64,
            .panel_scales = pairs ? NULL : linear->scales + ((size_t)panel * groups + first * 4 / GROUP) * GEMM_COLUMNS,
            .row_groups = groups,
            .panel_groups = (size_t)groups * GEMM_COLUMNS,
            .group = GROUP / 4,
        };
        int row = 0;
        for (int block = 0; block < blocks; block++) {
            const int count = (rows - row + blocks - block - 1) / (blocks - block);
            tile.rows = product->rows + (from + row) * product->row_bytes + (size_t)first * 4;
            tile.sums = sums + row * GEMM_WIDTH;
            tile.ahead = ahead && block < panels ? ahead + block * product->panel_bytes + (size_t)first * 64 : tile.panels;
            if (pairs) {
                pairs_entry(&tile, count, panels);
            } else {
                tile.row_scales = product->row_scales + (from + row) * groups + first * 4 / GROUP;
                tile.row_starts = product->row_starts + (from + row) * groups + first * 4 / GROUP;
                bytes_entry(&tile, count, panels);
            }
            row += count;
        }
    }
    const int column = panel * GEMM_COLUMNS;
    const int columns = linear->n - column < panels * GEMM_COLUMNS ? linear->n - column : panels * GEMM_COLUMNS;
    for (int row = 0; row < rows; row++)
        if (product->ranked)
            best_of_row(sums + row * GEMM_WIDTH, linear->bias, column, columns, best + from + row);
        else
            round_row(sums + row * GEMM_WIDTH, linear->bias, column, columns,
                      product->out + (from + row) * product->out_bytes, product->wide);
}

/* The product of x [count, k], whose rows lie `x_stride` elements apart, to `out`, or only the largest of each row to
 * `self->best`, of as many threads as it returns; -1 if memory for the buffers is short. */
static int32_t run(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                   int64_t count, char *out, int32_t wide, int32_t threads)
{
    const int pairs = linear->kind == PAIRS, groups = linear->k / GROUP;
    struct product product = {
        .linear = linear,
        .rows = x,
        .row_bytes = (size_t)x_stride * 2,
        .panel_bytes = (size_t)linear->k * GEMM_COLUMNS * (pairs ? 2 : 1),
        .out = out,
        .out_bytes = (size_t)linear->n * (wide ? 4 : 2),
        .count = count,
        .panels = (linear->n + GEMM_COLUMNS - 1) / GEMM_COLUMNS,
        .unit = GEMM_PANELS,
        .slabs = (int)((count + SLAB - 1) / SLAB),
        .wide = wide,
        .ranked = !out,
    };
    if (product.panels * product.panel_bytes < SMALL)
        threads = 1;
    while (product.unit > 1 && (int64_t)product.panels / product.unit * product.slabs < 4 * threads)
        product.unit /= 2;
    const int64_t jobs = (int64_t)((product.panels + product.unit - 1) / product.unit) * product.slabs;
    const size_t sums = (size_t)(count < SLAB ? count : SLAB) * GEMM_WIDTH;
    if (!reserve_buffer(&self->sums, &self->sums_size, threads * sums * sizeof(float)))
        return -1;
    if (product.ranked) {
        if (!reserve_buffer(&self->best, &self->best_size, (size_t)threads * count * sizeof *self->best))
            return -1;
        for (int64_t i = 0; i < threads * count; i++)
            self->best[i] = (struct best){-__builtin_inff(), INT32_MAX};
    }
    if (!pairs) {
        if (!reserve_buffer(&self->rows, &self->rows_size, (size_t)count * linear->k) ||
            !reserve_buffer(&self->scales, &self->scales_size, (size_t)count * groups * sizeof(float)) ||
            !reserve_buffer(&self->starts, &self->starts_size, (size_t)count * groups * sizeof(int32_t)))
            return -1;
        product.rows = self->rows;
        product.row_bytes = linear->k;
        product.row_scales = self->scales;
        product.row_starts = self->starts;
    }
    int64_t taken = 0;
    int arrived = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const int number = __atomic_fetch_add(&arrived, 1, __ATOMIC_RELAXED);
        float *mine = self->sums + number * sums;
        struct best *best = product.ranked ? self->best + number * count : NULL;
        if (!pairs) {
            int64_t row;
#pragma omp for schedule(static)
            for (row = 0; row < count; row++)
                quantise(x + (size_t)row * x_stride * 2, linear->k, self->rows + (size_t)row * linear->k,
                         self->scales + (size_t)row * groups, self->starts + (size_t)row * groups);
        }
        int64_t job = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
        while (job < jobs) {
            const int64_t next = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
            multiply(&product, job, next < jobs ? next : job, mine, best);
            job = next;
        }
    }
    return threads;
}

/* out [count, n] = x [count, k] W^T + b: bfloat16, or floats of bfloat16 values where `wide`. Rows of x lie `x_stride`
 * elements apart, those of the output one after the other. 0, or -1 if memory for the buffers is short. */
int32_t ferrum_linear(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                      int64_t count, char *out, int32_t wide, int32_t threads)
{
    return run(self, linear, x, x_stride, count, out, wide, threads) < 0 ? -1 : 0;
}

/* ids [count]: of each row of that product the column of its largest element, the first of several. */
int32_t ferrum_linear_largest(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                              int64_t count, int64_t *ids, int32_t threads)
{
    const int32_t lists = run(self, linear, x, x_stride, count, NULL, 0, threads);
    if (lists < 0)
        return -1;
    for (int64_t row = 0; row < count; row++) {
        struct best best = self->best[row];
        for (int32_t list = 1; list < lists; list++) {
            const struct best *other = self->best + list * count + row;
            if (comes_first(other->value, other->column, &best))
                best = *other;
        }
        ids[row] = best.column;
    }
    return 0;
}

#else

/* Without these instructions only the first function is called. */
int32_t ferrum_linear_supported(int32_t kind)
{
    (void)kind;
    return 0;
}

int32_t ferrum_linear(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                      int64_t count, char *out, int32_t wide, int32_t threads)
{
    (void)self, (void)linear, (void)x, (void)x_stride, (void)count, (void)out, (void)wide, (void)threads;
    return -1;
}

int32_t ferrum_linear_largest(struct ferrum_linears *self, const struct matrix *linear, const char *x, int64_t x_stride,
                              int64_t count, int64_t *ids, int32_t threads)
{
    (void)self, (void)linear, (void)x, (void)x_stride, (void)count, (void)ids, (void)threads;
    return -1;
}

#endif
