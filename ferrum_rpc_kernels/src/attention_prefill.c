/* Attention of long spans over a paged KV cache on a CPU, by the products of pairs of bfloat16 that linear.c has too.
 *
 * A prompt's attention is bound by arithmetic, not memory: torch's kernel ran at 70 GFLOP/s, the products of its layers at
 * 800 (512 tokens, two cores with AVX-512 BF16), so it took two fifths of a prompt's time. Here K and V are packed into
 * panels, 64 positions at a time, and multiplied with all rows of a tile of queries: scores by one product, their softmax
 * online in float32, V by another product (Dao, "FlashAttention-2", 2023, without its parallel loops). Positions are on a
 * fixed grid of 64 and a row is summed in order, so its result does not depend on how its prompt was split into spans, on
 * the other spans or on the threads.
 *
 * What multiplies two floats for each pair reads rows of floats: queries are widened once for all keys, and weights stay as
 * the softmax leaves them. AMX, AVX-512 BF16 and portable C read rows of bfloat16, to which weights are rounded.
 *
 * Callers and OpenMP: see attention_decode.c.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_kernels.h"
#include "cpu_features.h"
#include "gemm_amx.h"
#include "gemm_avx2.h"
#include "gemm_portable.h"
#include "gemm_tile.h"
#include "buffer.h"

#define MAX_DIM 512
#define KEYS GEMM_WIDTH /* positions at a time: four panels */
#define TILE_ROWS 256  /* query rows (tokens x group) of a unit */

struct kernel;

struct ferrum_prefill {
    const struct kernel *kernel;
    char *scratch;
    size_t size;
};

struct job {
    const struct kernel *kernel;
    const struct span_arrays *step;
    const char *query, *keys, *values;
    const float *sinks;
    char *output;
    size_t query_bytes, row_bytes, slot_bytes;
    float scale, softcap;
    int32_t window, heads, group, dim, wide_dim, panels, rounded; /* dim, and as K is packed; panels of V */
};

/* A thread's buffers, for `rows` rows. */
struct buffers {
    char *query;      /* [rows][wide_dim / 2][step] */
    char *key, *value; /* panels: [4][wide_dim / 2][16][2], [panels][KEYS / 2][16][2] */
    float *key_scales, *value_scales; /* [KEYS], of a cache that is rounded */
    char *weights;    /* of a block of rows, [KEYS / 2][step]: bfloat16, or `scores` itself */
    float *scores;    /* of a block of rows, [KEYS] */
    float *sums;      /* [panels / 4][rows][64] */
    float *most, *total;
    int *configured; /* see gemm_amx.h */
};

struct isa {
    const char *name;
    void (*run_tile)(const struct job *job, const int32_t *table, int head, int row, int position, int tokens,
                     const struct buffers *own);
};

/* `step`: bytes of a row, as `multiply` reads it, for each pair. `narrow`: weights to bfloat16; NULL: rows are floats. `rows`:
 * so many at a time. */
struct kernel {
    const char *name;
    const struct isa *isa;
    void (*multiply)(const struct gemm_tile *tile, int rows, int panels);
    void (*narrow)(const float *from, char *to, int count);
    int32_t step, lanes, rows;
};

#define ISA_ENTRIES {ISA_NAME, ISA(run_tile)}
#define BODY "attention_prefill_isa.h"
#include "for_each_isa.h"

static const struct kernel portable = {"portable", &isa_portable, pairs_portable, narrow_portable, 4, 4, GEMM_ROWS};

#if defined(__x86_64__)
AVX2_ENTRY(prefill_avx2, avx2_pairs)
GEMM_ENTRY(prefill_avx512, gemm_halves, AVX512)
GEMM_ENTRY(prefill_avx512_bf16, gemm_pairs, AVX512_BF16)

static COMPILED_FOR(AVX512_BF16) void narrow_avx512_bf16(const float *from, char *to, int count)
{
    for (int i = 0; i < count; i += 16) {
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i));
        memcpy(to + i * 2, &rounded, sizeof rounded);
    }
}

static const struct kernel avx2 = {"avx2", &isa_avx2, prefill_avx2, NULL, AVX2_STEP, 8, GEMM_ROWS};
static const struct kernel avx512 = {"avx512", &isa_avx512, prefill_avx512, NULL, 8, 16, GEMM_ROWS};
static const struct kernel avx512_bf16 = {
    "avx512_bf16", &isa_avx512, prefill_avx512_bf16, narrow_avx512_bf16, 4, 16, GEMM_ROWS};
#if defined(AMX)
static const struct kernel amx = {"amx", &isa_avx512, pairs_amx, narrow_avx512_bf16, 4, 16, AMX_BLOCK};
#endif
#endif

/* The best kernel that this machine has of the instruction set of that name, or of all; NULL if there is none. Portable C
 * is slower than torch, so only its name gets it. */
static const struct kernel *find_kernel(const char *name)
{
#if defined(__x86_64__)
    if (!name || !strcmp(name, isa_avx512.name)) {
#if defined(AMX)
        if (CPU_HAS(AMX) && amx_permitted())
            return &amx;
#endif
        if (CPU_HAS(AVX512_BF16) && pairs_preferred())
            return &avx512_bf16;
        if (CPU_HAS(AVX512))
            return &avx512;
    }
    if ((!name || !strcmp(name, isa_avx2.name)) && CPU_HAS(AVX2))
        return &avx2;
#endif
    return name && !strcmp(name, isa_portable.name) ? &portable : NULL;
}

/* Whether there is a kernel for such heads: of an instruction set by name, or any if that is NULL. */
int32_t ferrum_prefill_supported(const char *name, int32_t head_dim)
{
    return head_dim >= 16 && head_dim <= MAX_DIM && head_dim % 16 == 0 && find_kernel(name);
}

/* NULL if memory is short, or if there is no such kernel. */
struct ferrum_prefill *ferrum_prefill_new(const char *name)
{
    const struct kernel *kernel = find_kernel(name);
    struct ferrum_prefill *made = kernel ? calloc(1, sizeof *made) : NULL;
    if (made)
        made->kernel = kernel;
    return made;
}

void ferrum_prefill_free(struct ferrum_prefill *self)
{
    free(self->scratch);
    free(self);
}

static size_t align_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t lay_out(const struct job *job, int rows, char *base, struct buffers *buffers)
{
    const size_t planes = (size_t)(job->panels + GEMM_PANELS - 1) / GEMM_PANELS;
    size_t at = 0;
#define PLACE(name, bytes)                                                                                             \
    buffers->name = (void *)(base + at);                                                                               \
    at += align_up(bytes)
    PLACE(query, (size_t)rows * job->wide_dim / 2 * job->kernel->step);
    PLACE(key, (size_t)KEYS * job->wide_dim * 2);
    PLACE(value, (size_t)KEYS * job->panels * GEMM_COLUMNS * 2);
    PLACE(key_scales, KEYS * sizeof(float));
    PLACE(value_scales, KEYS * sizeof(float));
    PLACE(weights, job->kernel->narrow ? job->kernel->rows * KEYS * 2 : 0); /* 0: where the scores are, which are next */
    PLACE(scores, job->kernel->rows * KEYS * sizeof(float));
    PLACE(sums, planes * rows * GEMM_WIDTH * sizeof(float));
    PLACE(most, rows * sizeof(float));
    PLACE(total, rows * sizeof(float));
#undef PLACE
    return at;
}

/* The long spans of one layer, of bfloat16 queries; as ferrum_decode_attend. */
int32_t ferrum_prefill_attend(const struct attention_layer *layer, const struct span_arrays *step, const char *query,
                           int64_t query_stride, char *output)
{
    struct ferrum_prefill *self = layer->prefill;
    const int together = 2 * self->kernel->lanes; /* numbers of a head that are packed at once */
    const struct job job = {
        .kernel = self->kernel,
        .step = step,
        .query = query,
        .keys = layer->keys,
        .values = layer->values,
        .sinks = layer->sinks,
        .output = output,
        .query_bytes = (size_t)query_stride * 2,
        .row_bytes = cached_bytes(layer),
        .slot_bytes = layer->kv_heads * cached_bytes(layer),
        .rounded = layer->rounded,
        .scale = layer->scale,
        .softcap = layer->softcap,
        .window = layer->window,
        .heads = layer->heads,
        .group = layer->heads / layer->kv_heads,
        .dim = layer->head_dim,
        .wide_dim = (layer->head_dim + together - 1) / together * together,
        .panels = layer->head_dim / GEMM_COLUMNS,
    };
    const int tile = job.group < TILE_ROWS ? TILE_ROWS / job.group : 1;
    struct buffers buffers;
    const size_t bytes = lay_out(&job, tile * job.group, NULL, &buffers), wanted = bytes * step->threads;
    if (!reserve_buffer(&self->scratch, &self->size, wanted))
        return -1;
    int64_t tiles = 0;
    for (int span = 0; span < step->spans; span++)
        tiles += (step->lengths[span] - step->starts[span] + tile - 1) / tile;
    const int64_t jobs = tiles * layer->kv_heads;
    int arrived = 0;
    int64_t taken = 0;
#pragma omp parallel num_threads(step->threads) if (step->threads > 1)
    {
        struct buffers own;
        int configured = 0;
        lay_out(&job, tile * job.group, self->scratch + bytes * __atomic_fetch_add(&arrived, 1, __ATOMIC_RELAXED), &own);
        own.configured = &configured;
        int64_t next;
        while ((next = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < jobs) {
            /* from the last tile on: a span's later tiles have more keys, and the small ones balance the end */
            int64_t left = tiles - 1 - next / layer->kv_heads;
            int span = 0;
            for (;; span++) {
                const int64_t count = (step->lengths[span] - step->starts[span] + tile - 1) / tile;
                if (left < count)
                    break;
                left -= count;
            }
            const int from = (int)left * tile, tokens = step->lengths[span] - step->starts[span] - from;
            self->kernel->isa->run_tile(&job, step->tables + step->table_start[span], (int)(next % layer->kv_heads),
                                        step->rows[span] + from, step->starts[span] + from, tokens < tile ? tokens : tile,
                                        &own);
        }
#if defined(AMX)
        amx_release(configured);
#endif
    }
    return 0;
}
