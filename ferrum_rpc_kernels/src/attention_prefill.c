/* Attention of long spans over a paged KV cache on a CPU with AVX-512, by products of bfloat16 pairs (gemm_tile.h): one
 * instruction each with AVX-512 BF16, else two of float32.
 *
 * A prompt's attention is bound by arithmetic, not memory: torch's kernel ran at 70 GFLOP/s, the products of its layers at
 * 800 (512 tokens, two cores with AVX-512 BF16), so it took two fifths of a prompt's time. Here K and V are packed into
 * panels, 64 positions at a time, and multiplied with all rows of a tile of queries: scores by one product, their softmax
 * online in float32, weights rounded to bfloat16, V by another product (Dao, "FlashAttention-2", 2023, without its
 * parallel loops). Positions are on a fixed grid of 64 and a row is summed in order, so its result does not depend on how
 * its prompt was split into spans, on the other spans or on the threads.
 *
 * Callers and OpenMP: see attention_decode.c.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_kernels.h"
#include "cpu_features.h"
#include "gemm_tile.h"
#include "buffer.h"

struct isa;

struct ferrum_prefill {
    const struct isa *isa;
    char *scratch;
    size_t size;
};

#if defined(__x86_64__)

#define JOINED(name, suffix) name##suffix
#define ISA(name) JOINED(name, _prefill)
#define TARGET COMPILED_FOR(AVX512)
#define LANES 16
#include "simd.h"

#define MAX_DIM 256
#define KEYS GEMM_WIDTH /* positions at a time: four panels */
#define TILE_ROWS 256  /* query rows (tokens x group) of a unit */

GEMM_ENTRY(prefill_avx512, gemm_halves, AVX512)
GEMM_ENTRY(prefill_avx512_bf16, gemm_pairs, AVX512_BF16)

/* Round `count` floats, a multiple of 16, to bfloat16. */
static COMPILED_FOR(AVX512) void narrow_avx512(const float *from, char *to, int count)
{
    for (int i = 0; i < count; i += 16)
        ISA(store)(to, i, 0, *(const FV *)(from + i));
}

static COMPILED_FOR(AVX512_BF16) void narrow_avx512_bf16(const float *from, char *to, int count)
{
    for (int i = 0; i < count; i += 16) {
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i));
        memcpy(to + i * 2, &rounded, sizeof rounded);
    }
}

/* What an instruction set computes in its own way. All else is AVX-512. */
struct isa {
    const char *name;
    void (*multiply)(const struct gemm_tile *tile, int rows, int panels);
    void (*narrow)(const float *from, char *to, int count);
};

static const struct isa of_floats = {"avx512", prefill_avx512, narrow_avx512};
static const struct isa of_pairs = {"avx512_bf16", prefill_avx512_bf16, narrow_avx512_bf16};

/* The better of those that this machine has, or NULL. */
static const struct isa *best_isa(void)
{
    if (CPU_HAS(AVX512_BF16))
        return &of_pairs;
    return CPU_HAS(AVX512) ? &of_floats : NULL;
}

int32_t ferrum_prefill_supported(int32_t head_dim)
{
    return head_dim >= 16 && head_dim <= MAX_DIM && head_dim % 16 == 0 && best_isa();
}

/* NULL if memory is short. */
struct ferrum_prefill *ferrum_prefill_new(void)
{
    struct ferrum_prefill *made = calloc(1, sizeof *made);
    if (made)
        made->isa = best_isa();
    return made;
}

void ferrum_prefill_free(struct ferrum_prefill *self)
{
    free(self->scratch);
    free(self);
}

struct job {
    const struct isa *isa;
    const struct span_arrays *step;
    const char *query, *keys, *values;
    const float *sinks;
    char *output;
    size_t query_bytes, row_bytes, slot_bytes;
    float scale, softcap;
    int32_t window, heads, group, dim, wide_dim, panels, rounded; /* dim, and up to a multiple of 32; panels of V */
};

/* A thread's buffers, for `rows` rows. */
struct buffers {
    char *query;      /* bfloat16 [rows][wide_dim] */
    char *key, *value; /* panels: [4][wide_dim / 2][16][2], [panels][KEYS / 2][16][2] */
    float *key_scales, *value_scales; /* [KEYS], of a cache that is rounded */
    char *weights;    /* bfloat16 [GEMM_ROWS][KEYS] */
    float *scores;    /* [GEMM_ROWS][KEYS] */
    float *sums;      /* [panels / 4][rows][64] */
    float *most, *total;
};

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t lay_out(const struct job *job, int rows, char *base, struct buffers *buffers)
{
    const size_t planes = (size_t)(job->panels + GEMM_PANELS - 1) / GEMM_PANELS;
    size_t at = 0;
#define PLACE(name, bytes)                                                                                             \
    buffers->name = (void *)(base + at);                                                                               \
    at += rounded(bytes)
    PLACE(query, (size_t)rows * job->wide_dim * 2);
    PLACE(key, (size_t)KEYS * job->wide_dim * 2);
    PLACE(value, (size_t)KEYS * job->panels * GEMM_COLUMNS * 2);
    PLACE(key_scales, KEYS * sizeof(float));
    PLACE(value_scales, KEYS * sizeof(float));
    PLACE(weights, GEMM_ROWS * KEYS * 2);
    PLACE(scores, GEMM_ROWS * KEYS * sizeof(float));
    PLACE(sums, planes * rows * GEMM_WIDTH * sizeof(float));
    PLACE(most, rows * sizeof(float));
    PLACE(total, rows * sizeof(float));
#undef PLACE
    return at;
}

/* Transpose 16 vectors of 16 numbers. */
INLINE void transpose(__m512i *x)
{
    __m512i y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
    }
}

/* 16 numbers of a row of the cache, bfloat16 in the lower halves; those of a quantized row unscaled, which is exact. */
INLINE __m512i words(const char *row, int element, int rounded)
{
    if (rounded)
        return _mm512_srli_epi32((__m512i)ISA(load_bytes)(row + element), 16);
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(row + element * 2)));
}

/* `count` of 32 numbers from `element` on, in pairs; zeros after them. */
INLINE __m512i pairs(const char *row, int element, int count, int rounded)
{
    if (!rounded) {
        const __mmask32 held = count < 32 ? (__mmask32)((1u << count) - 1) : 0xffffffffu;
        return _mm512_maskz_loadu_epi16(held, row + element * 2);
    }
    const __m512i low = words(row, element, 1);
    const __m512i high = count < 32 ? _mm512_setzero_si512() : words(row, element + 16, 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
}

/* Pack K and V of the positions `first .. first + KEYS` of one head into panels; zeros from `end` on, where the cache is
 * uninitialized. */
INLINE void pack_as(const struct job *job, const int32_t *table, int head, int first, int end, const struct buffers *to,
                    int rounded)
{
    const int size = job->step->block_size, dim = job->dim;
    const char *key[KEYS], *value[KEYS];
    for (int i = 0; i < KEYS; i++) {
        const int position = first + i;
        if (position >= end) {
            key[i] = value[i] = NULL;
            to->key_scales[i] = to->value_scales[i] = 0.0f;
            continue;
        }
        const size_t slot = (size_t)table[position / size] * size + position % size;
        const size_t at = slot * job->slot_bytes + head * job->row_bytes;
        key[i] = job->keys + at;
        value[i] = job->values + at;
        if (rounded) {
            memcpy(to->key_scales + i, key[i] + dim, sizeof(float));
            memcpy(to->value_scales + i, value[i] + dim, sizeof(float));
        }
    }
    for (int panel = 0; panel < KEYS / GEMM_COLUMNS; panel++)
        for (int d = 0; d < job->wide_dim; d += 32) {
            __m512i x[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const char *row = key[panel * GEMM_COLUMNS + i];
                x[i] = row ? pairs(row, d, dim - d, rounded) : _mm512_setzero_si512();
            }
            transpose(x);
            char *out = to->key + ((size_t)panel * job->wide_dim / 2 + d / 2) * 64;
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                _mm512_storeu_si512(out + i * 64, x[i]);
        }
    for (int pair = 0; pair < KEYS / 2; pair++)
        for (int panel = 0; panel < job->panels; panel++) {
            const char *even = value[2 * pair], *odd = value[2 * pair + 1];
            __m512i x = _mm512_setzero_si512();
            if (even)
                x = words(even, panel * 16, rounded);
            if (odd)
                x = _mm512_or_si512(x, _mm512_slli_epi32(words(odd, panel * 16, rounded), 16));
            _mm512_storeu_si512(to->value + ((size_t)panel * KEYS / 2 + pair) * 64, x);
        }
}

static TARGET void pack(const struct job *job, const int32_t *table, int head, int first, int end,
                        const struct buffers *to)
{
    if (job->rounded)
        pack_as(job, table, head, first, end, to, 1);
    else
        pack_as(job, table, head, first, end, to, 0);
}

/* Convert one row's scores for the positions `first .. first + KEYS`, of which it attends to `low .. high`, to weights: a
 * step of the online softmax, in place. The scales of K multiply the scores, those of V the weights. Returns the factor
 * for the row's sums so far. */
INLINE float soften(const struct job *job, const struct buffers *own, float *scores, int first, int low, int high,
                    float *most, float *total)
{
    FV x[KEYS / 16], largest = ISA(splat)(-__builtin_inff());
    const IV lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int whole = low <= first && first + KEYS <= high;
#pragma GCC unroll 4
    for (int i = 0; i < KEYS / 16; i++) {
        x[i] = *(const FV *)(scores + i * 16) * job->scale;
        if (job->rounded)
            x[i] *= *(const FV *)(own->key_scales + i * 16);
        if (job->softcap > 0.0f)
            x[i] = ISA(tanh)(x[i] / job->softcap) * job->softcap;
        if (!whole) {
            const IV position = lane + (first + i * 16);
            x[i] = ISA(where)((position >= low) & (position < high), x[i], ISA(splat)(-__builtin_inff()));
        }
        largest = (FV)_mm512_max_ps((__m512)largest, (__m512)x[i]);
    }
    const float before = *most, now = _mm512_reduce_max_ps((__m512)largest);
    if (now == -__builtin_inff()) { /* it attends to none of them, or their scores are -inf or NaN */
        const float all = ISA(total)(x[0] + x[1] + x[2] + x[3]);
        if (all != all)
            *total = all;
        memset(scores, 0, KEYS * sizeof(float));
        return 1.0f;
    }
    const float after = now > before ? now : before;
    FV sum = {0};
#pragma GCC unroll 4
    for (int i = 0; i < KEYS / 16; i++) {
        x[i] = ISA(exp)(x[i] - after);
        sum += x[i];
        if (job->rounded)
            x[i] *= *(const FV *)(own->value_scales + i * 16);
        *(FV *)(scores + i * 16) = x[i];
    }
    const float scale = now > before ? ISA(exp)(ISA(splat)(before - after))[0] : 1.0f;
    *most = after;
    *total = *total * scale + ISA(total)(sum);
    return scale;
}

/* A tile of `tokens` tokens from row `row`, position `position` on, for one KV head. */
static TARGET void run_tile(const struct job *job, const int32_t *table, int head, int row, int position, int tokens,
                                const struct buffers *own)
{
    const int group = job->group, dim = job->dim, rows = tokens * group;
    const int planes = (job->panels + GEMM_PANELS - 1) / GEMM_PANELS, end = position + tokens;
    for (int r = 0; r < rows; r++) {
        char *to = own->query + (size_t)r * job->wide_dim * 2;
        memcpy(to, job->query + (size_t)(row + r / group) * job->query_bytes + ((size_t)head * group + r % group) * dim * 2,
               (size_t)dim * 2);
        memset(to + (size_t)dim * 2, 0, (size_t)(job->wide_dim - dim) * 2);
        own->most[r] = job->sinks ? job->sinks[head * group + r % group] : -__builtin_inff();
        own->total[r] = job->sinks ? 1.0f : 0.0f;
    }
    memset(own->sums, 0, (size_t)planes * rows * GEMM_WIDTH * sizeof(float));
    const int seen = job->window > 0 && position + 1 > job->window ? position + 1 - job->window : 0;
    for (int first = seen / KEYS * KEYS; first < end; first += KEYS) {
        pack(job, table, head, first, end, own);
        int count;
        for (int r = 0; r < rows; r += count) {
            count = rows - r < GEMM_ROWS ? rows - r : GEMM_ROWS;
            const int last = position + (r + count - 1) / group;
            if (last < first || (job->window > 0 && position + r / group - job->window >= first + KEYS))
                continue; /* no row of the block attends to these positions */
            struct gemm_tile tile = {
                .rows = own->query + (size_t)r * job->wide_dim * 2,
                .panels = own->key,
                .ahead = own->key,
                .row_bytes = (size_t)job->wide_dim * 2,
                .panel_bytes = (size_t)job->wide_dim / 2 * 64,
                .sums = own->scores,
                .vectors = job->wide_dim / 2,
            };
            memset(own->scores, 0, (size_t)count * KEYS * sizeof(float));
            job->isa->multiply(&tile, count, KEYS / GEMM_COLUMNS);
            for (int i = 0; i < count; i++) {
                const int at = position + (r + i) / group;
                const int low = job->window > 0 && at + 1 > job->window ? at + 1 - job->window : 0;
                const float scale = soften(job, own, own->scores + i * KEYS, first, low, at + 1, own->most + r + i,
                                           own->total + r + i);
                if (scale != 1.0f)
                    for (int plane = 0; plane < planes; plane++) {
                        float *sums = own->sums + ((size_t)plane * rows + r + i) * GEMM_WIDTH;
#pragma GCC unroll 4
                        for (int d = 0; d < GEMM_WIDTH; d += 16)
                            *(FV *)(sums + d) = *(FV *)(sums + d) * scale;
                    }
            }
            job->isa->narrow(own->scores, own->weights, count * KEYS);
            for (int plane = 0; plane < planes; plane++) {
                const int panels = job->panels - plane * GEMM_PANELS < GEMM_PANELS ? job->panels - plane * GEMM_PANELS : GEMM_PANELS;
                tile = (struct gemm_tile){
                    .rows = own->weights,
                    .panels = own->value + (size_t)plane * GEMM_PANELS * (KEYS / 2) * 64,
                    .ahead = own->value,
                    .row_bytes = KEYS * 2,
                    .panel_bytes = KEYS / 2 * 64,
                    .sums = own->sums + ((size_t)plane * rows + r) * GEMM_WIDTH,
                    .vectors = KEYS / 2,
                };
                job->isa->multiply(&tile, count, panels);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        char *to = job->output + ((size_t)(row + r / group) * job->heads + (size_t)head * group + r % group) * dim * 2;
        const float share = 1.0f / own->total[r];
        for (int d = 0; d < dim; d += 16)
            ISA(store)(to, d, 0, *(FV *)(own->sums + ((size_t)(d / GEMM_WIDTH) * rows + r) * GEMM_WIDTH + d % GEMM_WIDTH) * share);
    }
}

/* The long spans of one layer, of bfloat16 queries; as ferrum_decode_attend. */
int32_t ferrum_prefill_attend(const struct attention_layer *layer, const struct span_arrays *step, const char *query,
                           int64_t query_stride, char *output)
{
    struct ferrum_prefill *self = layer->prefill;
    const struct job job = {
        .isa = self->isa,
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
        .wide_dim = (layer->head_dim + 31) / 32 * 32,
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
        lay_out(&job, tile * job.group, self->scratch + bytes * __atomic_fetch_add(&arrived, 1, __ATOMIC_RELAXED), &own);
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
            run_tile(&job, step->tables + step->table_start[span], (int)(next % layer->kv_heads), step->rows[span] + from,
                     step->starts[span] + from, tokens < tile ? tokens : tile, &own);
        }
    }
    return 0;
}

#else

/* Without these instructions only the first function is called. */
int32_t ferrum_prefill_supported(int32_t head_dim)
{
    (void)head_dim;
    return 0;
}

int32_t ferrum_prefill_attend(const struct attention_layer *layer, const struct span_arrays *step, const char *query,
                           int64_t query_stride, char *output)
{
    (void)layer, (void)step, (void)query, (void)query_stride, (void)output;
    return -1;
}

#endif
