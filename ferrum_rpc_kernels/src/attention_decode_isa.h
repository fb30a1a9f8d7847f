/* The work of one unit of attention, for one instruction set: included by attention_decode.c once per set (see simd.h).
 *
 * As many slots of a block are processed together as a vector has lanes: their scores fit one vector, and so does the
 * exponential of the softmax.
 */

#include "simd.h"

/* Every other lane of a and then b, from `first` on. */
#undef ALTERNATE
#if LANES == 16
#define ALTERNATE(a, b, first)                                                                                         \
    SHUFFLED(a, b, first, first + 2, first + 4, first + 6, first + 8, first + 10, first + 12, first + 14, first + 16,  \
             first + 18, first + 20, first + 22, first + 24, first + 26, first + 28, first + 30)
#elif LANES == 8
#define ALTERNATE(a, b, first)                                                                                         \
    SHUFFLED(a, b, first, first + 2, first + 4, first + 6, first + 8, first + 10, first + 12, first + 14)
#else
#define ALTERNATE(a, b, first) SHUFFLED(a, b, first, first + 2, first + 4, first + 6)
#endif

/* Lane s of the result is the sum of sums[s]: neighbours are added in pairs, log2(LANES) times. */
INLINE FV ISA(sum_each)(FV *sums)
{
#pragma GCC unroll 8
    for (int count = LANES / 2; count; count /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            const FV a = sums[2 * i], b = sums[2 * i + 1];
            sums[i] = ALTERNATE(a, b, 0) + ALTERNATE(a, b, 1);
        }
    return sums[0];
}

/* LANES elements of a row of the cache as floats, unscaled if it is quantized. */
INLINE FV ISA(cached)(const char *row, int element, int wide, int rounded)
{
    if (rounded)
        return ISA(load_bytes)(row + element);
    return ISA(load)(row, element, wide);
}

/* The scale of a quantized row. */
INLINE float ISA(scale)(const char *row, int dim) { return *(const aliasing_float *)(row + dim); }

/* Bytes of a row of the cache. */
INLINE int ISA(row_bytes)(int dim, int wide, int rounded)
{
    return rounded ? dim + (int)sizeof(float) : dim * (wide ? 4 : 2);
}

/* Prefetch a slot's bytes of a head. Called slot by slot between the sums: all prefetches at once would fill the miss
 * buffers and stall the computation. */
INLINE void ISA(fetch)(const char *ahead, int bytes)
{
#pragma GCC unroll 8
    for (int line = 0; line < bytes; line += 64)
        __builtin_prefetch(ahead + line);
}

/* Scores of `rows` (1 or 2) query rows against `count` slots, unscaled; lanes beyond are 0. Each element of K is read
 * and widened once for all rows. `ahead`: data to prefetch, in as many pieces, `ahead_bytes` apart. */
INLINE void ISA(scores)(const float *query, int rows, const char *key, const char *ahead, size_t ahead_bytes,
                        size_t slot_bytes, int count, int dim, int wide, int rounded, FV *scores)
{
    FV sums[2][LANES];
    for (int slot = 0; slot < LANES; slot++)
        sums[0][slot] = sums[1][slot] = (FV){0};
    for (int slot = 0; slot < count; slot++) {
        const char *k = key + slot * slot_bytes;
        FV sum[2] = {{0}};
        ISA(fetch)(ahead + slot * ahead_bytes, ISA(row_bytes)(dim, wide, rounded));
#pragma GCC unroll 16
        for (int d = 0; d < dim; d += LANES) {
            const FV x = ISA(cached)(k, d, wide, rounded);
            for (int r = 0; r < rows; r++)
                sum[r] = ISA(fma)(x, *(const FV *)(query + r * dim + d), sum[r]);
        }
        for (int r = 0; r < rows; r++)
            sums[r][slot] = sum[r] * (rounded ? ISA(scale)(k, dim) : 1.0f);
    }
    for (int r = 0; r < rows; r++)
        scores[r] = ISA(sum_each)(sums[r]);
}

/* acc[r] = acc[r] * scale[r] + sum over slots of weight[r][slot] * V[slot]. Accumulators of up to 8 vectors a row stay
 * in registers over all slots. */
INLINE void ISA(accumulate)(float *acc, int rows, const FV *weights, const float *scale, const char *value,
                            const char *ahead, size_t ahead_bytes, size_t slot_bytes, int count, int dim, int wide,
                            int rounded)
{
    const int step = dim < 8 * LANES ? dim : 8 * LANES;
    for (int from = 0; from < dim; from += step) {
        const int vectors = (dim - from < step ? dim - from : step) / LANES;
        FV sum[2][8];
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++)
                sum[r][i] = *(FV *)(acc + r * dim + from + i * LANES) * scale[r];
        for (int slot = 0; slot < count; slot++) {
            const char *v = value + slot * slot_bytes;
            FV weight[2];
            if (!from)
                ISA(fetch)(ahead + slot * ahead_bytes, ISA(row_bytes)(dim, wide, rounded));
            for (int r = 0; r < rows; r++)
                weight[r] = ISA(splat)(((const float *)&weights[r])[slot]) * (rounded ? ISA(scale)(v, dim) : 1.0f);
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++) {
                const FV x = ISA(cached)(v, from + i * LANES, wide, rounded);
                for (int r = 0; r < rows; r++)
                    sum[r][i] = ISA(fma)(weight[r], x, sum[r][i]);
            }
        }
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++)
                *(FV *)(acc + r * dim + from + i * LANES) = sum[r][i];
    }
}

/* `rows` (1 or 2) neighbouring query rows of one KV head against the slots `first .. first + count` of a sequence, of
 * of which row r attends to `low[r] .. high[r]`: one step of the online softmax. */
INLINE void ISA(advance)(const struct work *work, const float *query, int rows, const char *key, const char *value,
                         const char *key_ahead, const char *value_ahead, size_t ahead_bytes, int first, int count,
                         const int *low, const int *high, struct row *state, float *acc, int dim, int wide,
                         int rounded)
{
    const float none = -__builtin_inff();
    const size_t slot_bytes = work->slot_bytes;
    FV score[2], weight[2];
    float scale[2];
    IV lane;
    int any = 0;
    for (int i = 0; i < LANES; i++)
        lane[i] = first + i;
    ISA(scores)(query, rows, key, key_ahead, ahead_bytes, slot_bytes, count, dim, wide, rounded,
                score);
    for (int r = 0; r < rows; r++) {
        const int end = high[r] < first + count ? high[r] : first + count;
        FV s = score[r] * work->scale;
        if (work->softcap > 0.0f)
            s = ISA(tanh)(s / work->softcap) * work->softcap;
        if (low[r] > first || end < first + LANES)
            s = ISA(where)((lane >= low[r]) & (lane < end), s, ISA(splat)(none));
        const float most = ISA(largest)(s), before = state[r].most;
        scale[r] = 1.0f;
        weight[r] = (FV){0};
        if (most == none) { /* the row attends to none of these slots, or their scores are -inf or NaN */
            const float all = ISA(total)(s);
            if (all != all)
                state[r].sum = all;
            continue;
        }
        any = 1;
        if (most > before) {
            scale[r] = before == none ? 0.0f : ISA(exp)(ISA(splat)(before - most))[0];
            state[r].most = most;
        }
        weight[r] = ISA(exp)(s - state[r].most);
        if (low[r] > first || end < first + LANES)
            weight[r] = ISA(where)((lane >= low[r]) & (lane < end), weight[r], (FV){0});
        state[r].sum = state[r].sum * scale[r] + ISA(total)(weight[r]);
    }
    if (any)
        ISA(accumulate)(acc, rows, weight, scale, value, value_ahead, ahead_bytes, slot_bytes, count, dim, wide,
                        rounded);
}

/* One unit: a tile of query tokens against one chunk of their sequence, for the KV heads `head .. head_end`. A block is
 * prefetched during the computation of the previous one: sequentially with all its heads, which takes 4 to 8 % less than
 * head by head (32 sequences, two cores), or only the parts of the unit's heads. */
INLINE void ISA(unit)(const struct work *work, const struct unit *unit, int head, int head_end, float *scratch,
                      int dim, int wide, int rounded)
{
    const struct span_arrays *step = work->step;
    const int group = work->heads / work->kv_heads, size = step->block_size;
    const int tokens = unit->tokens, rows = tokens * group, count = (head_end - head) * rows;
    const size_t element = wide ? 4 : 2, slot_bytes = work->slot_bytes, row_bytes = ISA(row_bytes)(dim, wide, rounded);
    const int32_t *table = step->tables + step->table_start[unit->span];
    float *query = scratch, *acc = scratch + (size_t)count * dim;
    struct row *state = (struct row *)(acc + (size_t)count * dim);
    int *low = (int *)(state + count), *high = low + rows;

    for (int token = 0; token < tokens; token++) { /* rows of a KV head lie together: its group, token by token */
        const char *q = work->query + (size_t)(unit->row + token) * work->query_bytes;
        const int position = unit->position + token;
        for (int h = head; h < head_end; h++)
            for (int g = 0; g < group; g++) {
                float *to = query + ((size_t)(h - head) * rows + token * group + g) * dim;
                for (int d = 0; d < dim; d += LANES)
                    *(FV *)(to + d) = ISA(load)(q + (size_t)(h * group + g) * dim * element, d, wide);
            }
        for (int g = 0; g < group; g++) {
            const int seen = work->window > 0 && position + 1 > work->window ? position + 1 - work->window : 0;
            low[token * group + g] = seen;
            high[token * group + g] = position + 1;
        }
    }
    for (int r = 0; r < count; r++) /* a sink counts once, in the first chunk */
        state[r] = work->sinks && unit->chunks ? (struct row){work->sinks[(head + r / rows) * group + r % group], 1.0f}
                                               : (struct row){-__builtin_inff(), 0.0f};
    memset(acc, 0, (size_t)count * dim * sizeof(float));

    const int whole = head == 0 && head_end == work->kv_heads;
    const size_t ahead_bytes = whole ? row_bytes : slot_bytes;
    for (int first = unit->low; first < unit->high;) {
        const int offset = first % size, left = size - offset;
        int slots = left < LANES ? left : LANES;
        if (slots > unit->high - first)
            slots = unit->high - first;
        const int next = first + slots;
        const size_t base = (size_t)table[first / size] * work->block_bytes + (size_t)offset * slot_bytes;
        const size_t ahead =
            next < unit->high ? (size_t)table[next / size] * work->block_bytes + (size_t)(next % size) * slot_bytes : base;
        for (int h = head; h < head_end; h++) {
            const size_t at = h * row_bytes;
            const char *key = work->keys + base + at, *value = work->values + base + at;
            const size_t then = whole ? (size_t)h * slots * ahead_bytes : at;
            const char *key_ahead = work->keys + ahead + then, *value_ahead = work->values + ahead + then;
            const int row = (h - head) * rows;
            int r = 0;
            for (; r + 2 <= rows; r += 2)
                ISA(advance)(work, query + (size_t)(row + r) * dim, 2, key, value, key_ahead, value_ahead, ahead_bytes,
                             first, slots, low + r, high + r, state + row + r, acc + (size_t)(row + r) * dim, dim, wide,
                             rounded);
            if (r < rows)
                ISA(advance)(work, query + (size_t)(row + r) * dim, 1, key, value, key_ahead, value_ahead, ahead_bytes,
                             first, slots, low + r, high + r, state + row + r, acc + (size_t)(row + r) * dim, dim, wide,
                             rounded);
        }
        first = next;
    }

    for (int h = head; h < head_end; h++)
        for (int token = 0; token < tokens; token++)
            for (int g = 0; g < group; g++) {
                const int r = (h - head) * rows + token * group + g, out_head = h * group + g;
                const float *from = acc + (size_t)r * dim;
                if (unit->partial >= 0) {
                    const size_t to = ((size_t)unit->partial + token) * work->heads + out_head;
                    work->partial_rows[to] = state[r];
                    memcpy(work->partials + to * dim, from, dim * sizeof(float));
                    continue;
                }
                char *out = work->output + ((size_t)(unit->row + token) * work->heads + out_head) * dim * element;
                const float share = 1.0f / state[r].sum;
                for (int d = 0; d < dim; d += LANES)
                    ISA(store)(out, d, wide, *(const FV *)(from + d) * share);
            }
}

/* The chunks of one tile, combined in order: the result does not depend on which thread computed which chunk. */
INLINE void ISA(join)(const struct work *work, const struct unit *unit, int chunks, int dim, int wide)
{
    const size_t element = wide ? 4 : 2, stride = (size_t)unit->tokens * work->heads;
    for (int row = 0; row < (int)stride; row++) {
        const struct row *rows = work->partial_rows + (size_t)unit->partial * work->heads + row;
        const float *from = work->partials + ((size_t)unit->partial * work->heads + row) * dim;
        float most = -__builtin_inff(), sum = 0.0f;
        for (int c = 0; c < chunks; c++)
            most = rows[c * stride].most > most ? rows[c * stride].most : most;
        FV acc[MAX_DIM / LANES];
        for (int d = 0; d < dim; d += LANES)
            acc[d / LANES] = (FV){0};
        for (int c = 0; c < chunks; c++) {
            if (rows[c * stride].sum == 0.0f) /* the row attends to nothing of this chunk */
                continue;
            const float share = ISA(exp)(ISA(splat)(rows[c * stride].most - most))[0];
            sum += rows[c * stride].sum * share;
            for (int d = 0; d < dim; d += LANES)
                acc[d / LANES] =
                    ISA(fma)(*(const FV *)(from + c * stride * dim + d), ISA(splat)(share), acc[d / LANES]);
        }
        char *out = work->output + ((size_t)unit->row * work->heads + row) * dim * element;
        for (int d = 0; d < dim; d += LANES)
            ISA(store)(out, d, wide, acc[d / LANES] / sum);
    }
}

/* Head widths and types with specialized code; the others share one loop. */
static TARGET void ISA(run_unit)(const struct work *work, const struct unit *unit, int head, int head_end,
                                 float *scratch)
{
    const int dim = work->head_dim, wide = work->wide, rounded = work->rounded;
    if (!SPECIALIZED)
        ISA(unit)(work, unit, head, head_end, scratch, dim, wide, rounded);
    else if (dim == 128 && !wide && rounded)
        ISA(unit)(work, unit, head, head_end, scratch, 128, 0, 1);
    else if (dim == 128 && !wide)
        ISA(unit)(work, unit, head, head_end, scratch, 128, 0, 0);
    else if (dim == 64 && !wide && rounded)
        ISA(unit)(work, unit, head, head_end, scratch, 64, 0, 1);
    else if (dim == 64 && !wide)
        ISA(unit)(work, unit, head, head_end, scratch, 64, 0, 0);
    else if (dim == 576 && !wide && !rounded) /* rows of latents */
        ISA(unit)(work, unit, head, head_end, scratch, 576, 0, 0);
    else if (rounded)
        ISA(unit)(work, unit, head, head_end, scratch, dim, wide, 1);
    else if (wide)
        ISA(unit)(work, unit, head, head_end, scratch, dim, 1, 0);
    else
        ISA(unit)(work, unit, head, head_end, scratch, dim, 0, 0);
}

static TARGET void ISA(run_join)(const struct work *work, const struct unit *unit, int chunks)
{
    ISA(join)(work, unit, chunks, work->head_dim, work->wide);
}

/* Write a token's keys or values to a quantized cache: for each head the numbers in units of its scale, and the scale, a
 * 127th of the largest. If a number is not finite, the scale is NaN, and so are all results computed with it. */
static TARGET void ISA(run_round)(char *to, const char *from, int heads, int dim, int wide)
{
    const FV magic = ISA(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, half to even */
    for (int head = 0; head < heads; head++, to += ISA(row_bytes)(dim, wide, 1)) {
        FV most = {0}, odd = {0};
        for (int d = 0; d < dim; d += LANES) {
            const FV x = ISA(load)(from, head * dim + d, wide);
            most = ISA(larger)(most, ISA(larger)(x, -x));
            odd += x - x;
        }
        const float scale = ISA(largest)(most) / 127.0f + ISA(total)(odd);
        const float inverse = scale < FLT_MIN ? 0.0f : 1.0f / scale;
        for (int d = 0; d < dim; d += LANES) {
            const FV x = ISA(load)(from, head * dim + d, wide) * inverse;
            ISA(store_bytes)(to + d, (IV)(x + magic));
        }
        *(aliasing_float *)(to + dim) = scale;
    }
}
