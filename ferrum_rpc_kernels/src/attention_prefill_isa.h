/* Attention of one tile of a long span, for one instruction set: included by attention_prefill.c once per set (see
 * for_each_isa.h).
 */

#include "simd.h"

/* Transpose LANES vectors of LANES numbers. */
INLINE void ISA(transpose)(IV *x)
{
#if LANES == 16
    __m512i *const a = (__m512i *)x, b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
    }
#elif LANES == 8
    __m256i *const a = (__m256i *)x, b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m256i low = a[i], high = a[i + 4];
        a[i] = _mm256_permute2x128_si256(low, high, 0x20);
        a[i + 4] = _mm256_permute2x128_si256(low, high, 0x31);
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const int32_t held = x[i][j];
            x[i][j] = x[j][i];
            x[j][i] = held;
        }
#endif
}

/* LANES numbers of a row of the cache, bfloat16 in the lower halves; those of a quantized row unscaled, which is exact. */
INLINE UV ISA(load_words)(const char *row, int element, int rounded)
{
    if (rounded)
        return (UV)ISA(load_bytes)(row + element) >> 16;
    return __builtin_convertvector(*(const HV *)(row + element * 2), UV);
}

/* LANES pairs of numbers from `element` on, of which there are `count`, a multiple of 16; zeros after them. */
INLINE IV ISA(load_pairs)(const char *row, int element, int count, int rounded)
{
#if LANES == 16
    if (!rounded) {
        const __mmask32 held = count < 32 ? (__mmask32)((1u << count) - 1) : 0xffffffffu;
        return (IV)_mm512_maskz_loadu_epi16(held, row + element * 2);
    }
    const __m512i low = (__m512i)ISA(load_words)(row, element, 1);
    const __m512i high = count < 32 ? _mm512_setzero_si512() : (__m512i)ISA(load_words)(row, element + 16, 1);
    return (IV)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
#else
    (void)count;
    if (!rounded)
        return *(const IV *)(row + element * 2);
    HV half[2];
    for (int i = 0; i < 2; i++)
        half[i] = __builtin_convertvector(ISA(load_words)(row, element + i * LANES, 1), HV);
    IV pairs;
    memcpy(&pairs, half, sizeof pairs);
    return pairs;
#endif
}

/* Pack K and V of the positions `first .. first + KEYS` of one head into panels; zeros from `end` on, where the cache is
 * uninitialized. */
INLINE void ISA(pack_as)(const struct job *job, const int32_t *table, int head, int first, int end, const struct buffers *to,
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
        for (int column = 0; column < GEMM_COLUMNS; column += LANES)
            for (int d = 0; d < job->wide_dim; d += 2 * LANES) {
                IV x[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) {
                    const char *row = key[panel * GEMM_COLUMNS + column + i];
                    x[i] = row ? ISA(load_pairs)(row, d, dim - d, rounded) : (IV){0};
                }
                ISA(transpose)(x);
                char *out = to->key + ((size_t)panel * job->wide_dim / 2 + d / 2) * 64 + column * 4;
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    *(IV *)(out + i * 64) = x[i];
            }
    for (int pair = 0; pair < KEYS / 2; pair++)
        for (int panel = 0; panel < job->panels; panel++)
            for (int column = 0; column < GEMM_COLUMNS; column += LANES) {
                const char *even = value[2 * pair], *odd = value[2 * pair + 1];
                UV x = {0};
                if (even)
                    x = ISA(load_words)(even, panel * GEMM_COLUMNS + column, rounded);
                if (odd)
                    x |= ISA(load_words)(odd, panel * GEMM_COLUMNS + column, rounded) << 16;
                *(UV *)(to->value + ((size_t)panel * KEYS / 2 + pair) * 64 + column * 4) = x;
            }
}

static TARGET void ISA(pack)(const struct job *job, const int32_t *table, int head, int first, int end,
                             const struct buffers *to)
{
    if (job->rounded)
        ISA(pack_as)(job, table, head, first, end, to, 1);
    else
        ISA(pack_as)(job, table, head, first, end, to, 0);
}

/* Convert one row's scores for the positions `first .. first + KEYS`, of which it attends to `low .. high`, to weights: a
 * step of the online softmax, in place. The scales of K multiply the scores, those of V the weights. Returns the factor
 * for the row's sums so far. */
INLINE float ISA(soften)(const struct job *job, const struct buffers *own, float *scores, int first, int low, int high,
                         float *most, float *total)
{
    static const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    FV x[KEYS / LANES], largest = ISA(splat)(-__builtin_inff()), sum = {0};
    const IV lane = *(const IV *)numbers;
    const int whole = low <= first && first + KEYS <= high;
#pragma GCC unroll 16
    for (int i = 0; i < KEYS / LANES; i++) {
        x[i] = *(const FV *)(scores + i * LANES) * job->scale;
        if (job->rounded)
            x[i] *= *(const FV *)(own->key_scales + i * LANES);
        if (job->softcap > 0.0f)
            x[i] = ISA(tanh)(x[i] / job->softcap) * job->softcap;
        if (!whole) {
            const IV position = lane + (first + i * LANES);
            x[i] = ISA(where)((position >= low) & (position < high), x[i], ISA(splat)(-__builtin_inff()));
        }
        largest = ISA(larger)(largest, x[i]);
    }
    const float before = *most, now = ISA(largest)(largest);
    if (now == -__builtin_inff()) { /* it attends to none of them, or their scores are -inf or NaN */
#pragma GCC unroll 16
        for (int i = 0; i < KEYS / LANES; i++)
            sum += x[i];
        const float all = ISA(total)(sum);
        if (all != all)
            *total = all;
        memset(scores, 0, KEYS * sizeof(float));
        return 1.0f;
    }
    const float after = now > before ? now : before;
#pragma GCC unroll 16
    for (int i = 0; i < KEYS / LANES; i++) {
        x[i] = ISA(exp)(x[i] - after);
        sum += x[i];
        if (job->rounded)
            x[i] *= *(const FV *)(own->value_scales + i * LANES);
        *(FV *)(scores + i * LANES) = x[i];
    }
    const float scale = now > before ? ISA(exp)(ISA(splat)(before - after))[0] : 1.0f;
    *most = after;
    *total = *total * scale + ISA(total)(sum);
    return scale;
}

#if LANES == 4 /* AVX-512 BF16 has an instruction, and the others multiply floats */
/* Round `count` floats, a multiple of LANES, to bfloat16. */
static TARGET void ISA(narrow)(const float *from, char *to, int count)
{
    for (int i = 0; i < count; i += LANES)
        ISA(store)(to, i, 0, *(const FV *)(from + i));
}
#endif

/* A row of queries as the products read it, with zeros up to `wide_dim`. */
INLINE void ISA(copy_query)(const struct job *job, const char *from, char *to)
{
    const int dim = job->dim;
    if (job->kernel->narrow) {
        memcpy(to, from, (size_t)dim * 2);
        memset(to + (size_t)dim * 2, 0, (size_t)(job->wide_dim - dim) * 2);
    } else
        for (int d = 0; d < job->wide_dim; d += LANES)
            ISA(store)(to, d, 1, d < dim ? ISA(load)(from, d, 0) : (FV){0});
}

/* A tile of `tokens` tokens from row `row`, position `position` on, for one KV head. */
static TARGET void ISA(run_tile)(const struct job *job, const int32_t *table, int head, int row, int position, int tokens,
                                 const struct buffers *own)
{
    const int group = job->group, dim = job->dim, rows = tokens * group;
    const struct kernel *kernel = job->kernel;
    const size_t query_bytes = (size_t)job->wide_dim / 2 * kernel->step;
    const int planes = (job->panels + GEMM_PANELS - 1) / GEMM_PANELS, end = position + tokens;
    for (int r = 0; r < rows; r++) {
        const size_t at = (size_t)(row + r / group) * job->query_bytes + ((size_t)head * group + r % group) * dim * 2;
        ISA(copy_query)(job, job->query + at, own->query + r * query_bytes);
        own->most[r] = job->sinks ? job->sinks[head * group + r % group] : -__builtin_inff();
        own->total[r] = job->sinks ? 1.0f : 0.0f;
    }
    memset(own->sums, 0, (size_t)planes * rows * GEMM_WIDTH * sizeof(float));
    const int seen = job->window > 0 && position + 1 > job->window ? position + 1 - job->window : 0;
    for (int first = seen / KEYS * KEYS; first < end; first += KEYS) {
        ISA(pack)(job, table, head, first, end, own);
        int count;
        for (int r = 0; r < rows; r += count) {
            count = rows - r < kernel->rows ? rows - r : kernel->rows;
            const int last = position + (r + count - 1) / group;
            if (last < first || (job->window > 0 && position + r / group - job->window >= first + KEYS))
                continue; /* no row of the block attends to these positions */
            struct gemm_tile tile = {
                .rows = own->query + r * query_bytes,
                .panels = own->key,
                .ahead = own->key,
                .row_bytes = query_bytes,
                .panel_bytes = (size_t)job->wide_dim / 2 * 64,
                .sums = own->scores,
                .vectors = job->wide_dim / 2,
                .configured = own->configured,
            };
            memset(own->scores, 0, (size_t)count * KEYS * sizeof(float));
            kernel->multiply(&tile, count, KEYS / GEMM_COLUMNS);
            for (int i = 0; i < count; i++) {
                const int at = position + (r + i) / group;
                const int low = job->window > 0 && at + 1 > job->window ? at + 1 - job->window : 0;
                const float scale = ISA(soften)(job, own, own->scores + i * KEYS, first, low, at + 1, own->most + r + i,
                                                own->total + r + i);
                if (scale != 1.0f)
                    for (int plane = 0; plane < planes; plane++) {
                        float *sums = own->sums + ((size_t)plane * rows + r + i) * GEMM_WIDTH;
#pragma GCC unroll 16
                        for (int d = 0; d < GEMM_WIDTH; d += LANES)
                            *(FV *)(sums + d) = *(FV *)(sums + d) * scale;
                    }
            }
            if (kernel->narrow)
                kernel->narrow(own->scores, own->weights, count * KEYS);
            for (int plane = 0; plane < planes; plane++) {
                const int left = job->panels - plane * GEMM_PANELS, panels = left < GEMM_PANELS ? left : GEMM_PANELS;
                tile = (struct gemm_tile){
                    .rows = own->weights,
                    .panels = own->value + (size_t)plane * GEMM_PANELS * (KEYS / 2) * 64,
                    .ahead = own->value,
                    .row_bytes = KEYS / 2 * kernel->step,
                    .panel_bytes = KEYS / 2 * 64,
                    .sums = own->sums + ((size_t)plane * rows + r) * GEMM_WIDTH,
                    .vectors = KEYS / 2,
                    .configured = own->configured,
                };
                kernel->multiply(&tile, count, panels);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        char *to = job->output + ((size_t)(row + r / group) * job->heads + (size_t)head * group + r % group) * dim * 2;
        const float share = 1.0f / own->total[r];
        for (int d = 0; d < dim; d += LANES) {
            const float *sums = own->sums + ((size_t)(d / GEMM_WIDTH) * rows + r) * GEMM_WIDTH + d % GEMM_WIDTH;
            ISA(store)(to, d, 0, *(const FV *)sums * share);
        }
    }
}
