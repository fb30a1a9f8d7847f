/* Samples a token from each row of logits, or selects its best tokens and its logsumexp.
 *
 * Sampling applies temperature, then top-k, then top-p, then min-p; then one number from [0, 1) selects a remaining token,
 * by weight, in the order of the ids.
 *
 * Sorting 152 thousand logits would take 10 ms. Here a row is read two to four times in vectors. The k-th largest is
 * searched only among logits that are not below the k-th largest of the chunks' maxima: at least k logits are as large. The
 * border of the nucleus is narrowed down by the mass above a few candidate borders.
 *
 * Penalties come first. They touch only the tokens that occur.
 *
 * If ranks share a row, each has a shard of its tokens: the remaining tokens, their sum, and the token at which a target is
 * passed are computed for a shard alone (`limits`), as for a row.
 *
 * A row's token depends only on the row and its parameters: not on the other rows, nor on the number of threads.
 */

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "buffer.h"
#include "cpu_features.h"
#include "sample.h"

#define CHUNK 64
#define BORDERS 3 /* that a pass compares weights with */
#define TOGETHER 16 /* chunks whose weights are added in one float of each lane */
#define ROUNDS 6  /* 4096 parts of the interval: some hundred weights of a flat row of 152 thousand */
#define FINITE 3.4e38f
#define STEEPEST 1e30f

struct isa {
    int (*chunk_maxima)(const float *, int64_t, float *);
    void (*weigh)(const float *, int64_t, float, float, float, float *, double *);
    void (*masses)(const float *, const float *, int64_t, const float *, double *);
    int64_t (*copy_between)(const float *, const float *, int64_t, float, float, float *);
    void (*drop_below)(float, int64_t, float *, double *);
    void (*forbid)(float *, const uint32_t *, int64_t);
};

#define ISA_ENTRIES {ISA(chunk_maxima), ISA(weigh), ISA(masses), ISA(copy_between), ISA(drop_below), ISA(forbid)}
#define BODY "sample_isa.h"
#include "for_each_isa.h"

struct sampler {
    const struct isa *isa;
    char *buffer;
    size_t size;
};

/* Buffers for one row. */
struct room {
    float *weights, *scratch, *maxima, *copies;
    double *sums;
};

static void swap(float *a, float *b)
{
    const float kept = *a;
    *a = *b;
    *b = kept;
}

/* The pivot of `count` numbers: the middle one of three. */
static float pivot_of(const float *numbers, int64_t count)
{
    const float a = numbers[0], b = numbers[count / 2], c = numbers[count - 1];
    const float low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* Order `count` numbers as those above the pivot, [0, *above), those equal to it, [*above, *equal), and the others. */
static void partition(float *numbers, int64_t count, float pivot, int64_t *above, int64_t *equal)
{
    int64_t high = 0, at = 0, low = count;
    while (at < low) {
        if (numbers[at] > pivot)
            swap(numbers + high++, numbers + at++);
        else if (numbers[at] < pivot)
            swap(numbers + at, numbers + --low);
        else
            at++;
    }
    *above = high;
    *equal = low;
}

/* The k-th largest, 1 <= k <= count. The numbers change their order. */
static float kth_largest(float *numbers, int64_t count, int64_t k)
{
    for (;;) {
        const float pivot = pivot_of(numbers, count);
        int64_t above, equal;
        partition(numbers, count, pivot, &above, &equal);
        if (k > above && k <= equal)
            return pivot;
        if (k <= above) {
            count = above;
        } else {
            k -= equal;
            count -= equal;
            numbers += equal;
        }
    }
}

/* The k-th largest logit, where k is below their number. */
static float least_of_top_k(const float *row, int64_t count, int64_t k, const struct room *room)
{
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    float bound = -INFINITY;
    if (k <= chunks) {
        memcpy(room->copies, room->maxima, (size_t)chunks * sizeof(float));
        bound = kth_largest(room->copies, chunks, k);
    }
    int64_t found = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        if (room->maxima[chunk] < bound)
            continue;
        const int64_t end = (chunk + 1) * CHUNK < count ? (chunk + 1) * CHUNK : count;
        for (int64_t at = chunk * CHUNK; at < end; at++) {
            room->scratch[found] = row[at];
            found += row[at] >= bound;
        }
    }
    return kth_largest(room->scratch, found, k);
}

static float from_bits(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static uint32_t to_bits(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* The smallest weight of the nucleus, the smallest set of the largest weights whose sum reaches `need`; `kept`: how many of
 * that weight are in it, `ties`: of how many. Weights up to `idle` are not in it; room->maxima are the chunks' maxima.
 *
 * Positive floats are in the order of their bits, so an interval of bits is narrowed to a few hundred weights at most, by
 * the sums of the weights at or above its inner borders. */
static float least_of_nucleus(int64_t chunks, double need, float idle, const struct isa *isa, const struct room *room,
                              int64_t *kept, int64_t *ties)
{
    uint32_t low = to_bits(idle), high = to_bits(1.0f) + 1; /* weights >= low come to `need`, those >= high do not */
    double above = 0.0;                                     /* what those >= high come to */
    for (int round = 0; round < ROUNDS && high - low > BORDERS; round++) {
        float borders[BORDERS];
        double masses[BORDERS];
        for (uint32_t i = 0; i < BORDERS; i++)
            borders[i] = from_bits(low + (uint32_t)((uint64_t)(high - low) * (i + 1) / (BORDERS + 1)));
        isa->masses(room->weights, room->maxima, chunks, borders, masses);
        const uint32_t top = high;
        for (int i = BORDERS - 1; i >= 0 && masses[i] < need; i--) {
            high = to_bits(borders[i]);
            above = masses[i];
        }
        for (int i = 0; i < BORDERS; i++)
            if (masses[i] >= need)
                low = to_bits(borders[i]);
        if (high == top && low == top)
            break;
    }
    float *inside = room->scratch;
    const float least = from_bits(low);
    int64_t found = isa->copy_between(room->weights, room->maxima, chunks, least, from_bits(high), inside);
    need -= above;
    *kept = *ties = 0;
    while (found > 0) {
        const float pivot = pivot_of(inside, found);
        int64_t larger, equal;
        partition(inside, found, pivot, &larger, &equal);
        double before = 0.0;
        for (int64_t i = 0; i < larger; i++)
            before += inside[i];
        if (larger > 0 && before >= need) {
            found = larger;
            continue;
        }
        const double with = before + (double)(equal - larger) * pivot;
        if (with >= need || equal == found) {
            const double wanted = ceil((need - before) / pivot);
            *ties = equal - larger;
            *kept = wanted < 1.0 ? 1 : wanted > (double)*ties ? *ties : (int64_t)wanted;
            return pivot;
        }
        need -= with;
        inside += equal;
        found -= equal;
    }
    return least;
}

/* Of the weights that equal `weight` those after the first `kept` go. */
static void drop_ties(float weight, int64_t kept, int64_t count, const struct room *room)
{
    for (int64_t at = 0; at < count; at++)
        if (room->weights[at] == weight && kept-- <= 0) {
            room->weights[at] = 0.0f;
            room->sums[at / CHUNK] -= weight;
        }
}

static double total_of(const double *sums, int64_t chunks)
{
    double total = 0.0;
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        total += sums[chunk];
    return total;
}

/* The id at which the weights, added up in the order of the ids, pass `target`. */
static int64_t drawn(double target, int64_t count, const struct room *room)
{
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    int64_t last = 0;
    double passed = 0.0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        if (passed + room->sums[chunk] <= target) {
            passed += room->sums[chunk];
            continue;
        }
        double sum = passed;
        int64_t found = -1;
        for (int64_t at = chunk * CHUNK; at < (chunk + 1) * CHUNK; at++) {
            sum += room->weights[at];
            found = room->weights[at] > 0.0f ? at : found;
            if (found == at && sum > target)
                return at;
        }
        if (found >= 0)
            return found; /* the sum of the chunk was rounded up */
        passed += room->sums[chunk];
    }
    for (int64_t at = 0; at < count; at++)
        last = room->weights[at] > 0.0f ? at : last;
    return last;
}

/* A number from [0, 1) for a seed and a position: two words of Philox4x32-10 (Salmon et al., 2011). */
static double uniform(uint64_t seed, uint64_t position)
{
    uint32_t words[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    uint32_t keys[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t first = (uint64_t)0xD2511F53u * words[0], second = (uint64_t)0xCD9E8D57u * words[2];
        words[0] = (uint32_t)(second >> 32) ^ words[1] ^ keys[0];
        words[1] = (uint32_t)second;
        words[2] = (uint32_t)(first >> 32) ^ words[3] ^ keys[1];
        words[3] = (uint32_t)first;
        keys[0] += 0x9E3779B9u;
        keys[1] += 0xBB67AE85u;
    }
    return ((double)(words[0] >> 5) * 67108864.0 + (double)(words[1] >> 6)) / 9007199254740992.0;
}

static float inverse_of(float temperature)
{
    return 1.0f / temperature < STEEPEST ? 1.0f / temperature : STEEPEST;
}

static int32_t token_of(const float *row, int64_t count, const struct draw *draw, const struct isa *isa, struct room room)
{
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    const int numbers = isa->chunk_maxima(row, count, room.maxima);
    float largest = room.maxima[0];
    for (int64_t chunk = 1; chunk < chunks; chunk++)
        largest = room.maxima[chunk] > largest ? room.maxima[chunk] : largest;
    if (!numbers || !(draw->temperature > 0.0f) || !(largest < FINITE && largest > -FINITE)) {
        for (int64_t at = 0; at < count; at++)
            if (numbers ? row[at] == largest : row[at] != row[at])
                return (int32_t)at; /* as an argmax: the first of the largest; a NaN is larger than any number */
        return 0;
    }
    const float inverse = inverse_of(draw->temperature);
    float least = -INFINITY;
    if (draw->top_k > 0 && draw->top_k < count)
        least = least_of_top_k(row, count, draw->top_k, &room);
    isa->weigh(row, count, largest, inverse, least, room.weights, room.sums);
    double total = total_of(room.sums, chunks);
    float least_weight = draw->min_p;
    if (draw->top_p < 1.0f) {
        isa->weigh(room.maxima, chunks, largest, inverse, least, room.maxima, (double *)room.copies);
        const double rest = 1.0 - draw->top_p;
        int64_t kept, ties;
        const double need = draw->top_p > 0.0f ? draw->top_p * total : DBL_MIN; /* the largest at least */
        const float idle = (float)(0.99 * rest * total / (double)count);
        const float end = least_of_nucleus(chunks, need, idle, isa, &room, &kept, &ties);
        if (kept < ties && end >= least_weight)
            drop_ties(end, kept, count, &room);
        least_weight = end > least_weight ? end : least_weight;
    }
    if (least_weight > 0.0f) {
        isa->drop_below(least_weight, chunks * CHUNK, room.weights, room.sums);
        total = total_of(room.sums, chunks);
    }
    return (int32_t)drawn(uniform(draw->seed, draw->position) * total, count, &room);
}

struct sampler *ferrum_sampler_new(void)
{
    struct sampler *sampler = calloc(1, sizeof *sampler);
    if (sampler)
        sampler->isa = isa_of(widest_lanes(CHUNK));
    return sampler;
}

void ferrum_sampler_free(struct sampler *sampler)
{
    if (sampler)
        free(sampler->buffer);
    free(sampler);
}

static int64_t padded_chunks(int64_t chunks)
{
    return (chunks + CHUNK - 1) / CHUNK * CHUNK;
}

static size_t room_bytes(int64_t chunks)
{
    const int64_t padded = padded_chunks(chunks);
    return (size_t)(chunks * CHUNK * 2 + padded * 2) * sizeof(float) + (size_t)padded * sizeof(double);
}

static struct room room_of(char *buffer, int64_t chunks)
{
    float *weights = (float *)buffer, *scratch = weights + chunks * CHUNK, *maxima = scratch + chunks * CHUNK;
    const int64_t padded = padded_chunks(chunks);
    return (struct room){weights, scratch, maxima, maxima + padded, (double *)(maxima + 2 * padded)};
}

/* Sample a token for each row of `logits` [rows, vocabulary], which are not changed. 0 if memory is short. */
int32_t ferrum_sample(struct sampler *sampler, const float *logits, int64_t rows, int64_t vocabulary,
                      const struct draw *draws, int32_t *tokens, int32_t threads)
{
    const int64_t chunks = (vocabulary + CHUNK - 1) / CHUNK;
    const size_t each = room_bytes(chunks);
    const int teams = threads < rows ? threads : (int)rows;
    if (!reserve_buffer(&sampler->buffer, &sampler->size, each * (size_t)(teams > 0 ? teams : 1)))
        return 0;
    int worker;
#pragma omp parallel for num_threads(teams) if (teams > 1) schedule(static, 1)
    for (worker = 0; worker < teams; worker++) {
        const struct room room = room_of(sampler->buffer + each * (size_t)worker, chunks);
        for (int64_t row = worker; row < rows; row += teams)
            tokens[row] = token_of(logits + row * vocabulary, vocabulary, draws + row, sampler->isa, room);
    }
    return 1;
}

/* Weigh what the limits leave of `count` logits. */
static void weigh_part(const float *row, int64_t count, const struct limits *limits, const struct isa *isa,
                       const struct room *room)
{
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    int64_t ties = limits->ties;
    isa->weigh(row, count, limits->largest, inverse_of(limits->temperature), limits->least, room->weights, room->sums);
    for (int64_t chunk = 0; chunk < chunks && limits->ties < count; chunk++) {
        const int64_t end = (chunk + 1) * CHUNK < count ? (chunk + 1) * CHUNK : count;
        for (int64_t at = chunk * CHUNK; room->sums[chunk] > 0.0 && at < end; at++)
            if (row[at] == limits->least && ties-- <= 0)
                room->weights[at] = 0.0f;
    }
    if (limits->ties < count || limits->least_weight > 0.0f)
        isa->drop_below(limits->least_weight, chunks * CHUNK, room->weights, room->sums);
}

/* The tokens that the limits keep of each row of `logits` [rows, count], shards of rows of a vocabulary. Any of these may be
 * NULL: `weights` [rows, count], their `sums` [rows], and for rows with a target the token there, `tokens` [rows]; without
 * weights and sums other rows are skipped. 0 if memory is short. */
int32_t ferrum_weigh(struct sampler *sampler, const float *logits, int64_t rows, int64_t count, const struct limits *limits,
                     float *weights, double *sums, int32_t *tokens, int32_t threads)
{
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    const size_t each = room_bytes(chunks);
    const int teams = threads < rows ? threads : (int)rows;
    if (!reserve_buffer(&sampler->buffer, &sampler->size, each * (size_t)(teams > 0 ? teams : 1)))
        return 0;
    int worker;
#pragma omp parallel for num_threads(teams) if (teams > 1) schedule(static, 1)
    for (worker = 0; worker < teams; worker++) {
        const struct room room = room_of(sampler->buffer + each * (size_t)worker, chunks);
        for (int64_t row = worker; row < rows; row += teams) {
            const double target = limits[row].target;
            if (!weights && !sums && !(target >= 0.0))
                continue;
            weigh_part(logits + row * count, count, limits + row, sampler->isa, &room);
            if (weights)
                memcpy(weights + row * count, room.weights, (size_t)count * sizeof(float));
            if (sums)
                sums[row] = total_of(room.sums, chunks);
            if (tokens && target >= 0.0)
                tokens[row] = (int32_t)drawn(target, count, &room);
        }
    }
    return 1;
}

struct candidate {
    float logit;
    int32_t id;
};

/* By falling logit, then rising id. */
static int by_rank(const void *one, const void *other)
{
    const struct candidate *a = one, *b = other;
    return a->logit > b->logit ? -1 : a->logit < b->logit ? 1 : a->id < b->id ? -1 : 1;
}

/* The k best of a row, 0 <= k <= count, in order, and its logsumexp. 0 if a logit is NaN or the largest is infinite. `best`
 * has space for k. A shard of a row may be all -inf if a mask allows only tokens of other shards. */
static int best_of(const float *row, int64_t count, int64_t k, int32_t *ids, float *logsumexp, struct candidate *best,
                   const struct isa *isa, struct room room)
{
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    const int numbers = isa->chunk_maxima(row, count, room.maxima);
    float largest = room.maxima[0];
    for (int64_t chunk = 1; chunk < chunks; chunk++)
        largest = room.maxima[chunk] > largest ? room.maxima[chunk] : largest;
    if (numbers && largest == -INFINITY) {
        for (int64_t i = 0; i < k; i++)
            ids[i] = (int32_t)i;
        *logsumexp = largest;
        return 1;
    }
    if (!numbers || !(largest < FINITE && largest > -FINITE))
        return 0;
    isa->weigh(row, count, largest, 1.0f, -INFINITY, room.weights, room.sums);
    *logsumexp = (float)(largest + log(total_of(room.sums, chunks)));
    if (k == 0)
        return 1;
    const float least = k < count ? least_of_top_k(row, count, k, &room) : -INFINITY;
    int64_t found = 0;
    for (int pass = 0; pass < 2; pass++) /* those above the k-th, then as many as there is room for of those that equal it */
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            if (room.maxima[chunk] < least)
                continue;
            const int64_t end = (chunk + 1) * CHUNK < count ? (chunk + 1) * CHUNK : count;
            for (int64_t at = chunk * CHUNK; at < end && found < k; at++)
                if (pass == 0 ? row[at] > least : row[at] == least)
                    best[found++] = (struct candidate){row[at], (int32_t)at};
        }
    qsort(best, (size_t)k, sizeof *best, by_rank);
    for (int64_t i = 0; i < k; i++)
        ids[i] = best[i].id;
    return 1;
}

/* The k best tokens of each row of `logits` [rows, vocabulary], `ids` [rows, k], by falling logit, then rising id, and the
 * rows' logsumexp [rows]. 0 if memory is short, -1 if a row has a NaN or an infinite largest logit: then the results are
 * undefined. */
int32_t ferrum_best(struct sampler *sampler, const float *logits, int64_t rows, int64_t vocabulary, int64_t k, int32_t *ids,
                    float *logsumexp, int32_t threads)
{
    const int64_t chunks = (vocabulary + CHUNK - 1) / CHUNK;
    const size_t each = room_bytes(chunks), whole = each + (size_t)(k + 7) / 8 * 8 * sizeof(struct candidate);
    const int teams = threads < rows ? threads : (int)rows;
    if (!reserve_buffer(&sampler->buffer, &sampler->size, whole * (size_t)(teams > 0 ? teams : 1)))
        return 0;
    int worker, odd = 0;
#pragma omp parallel for num_threads(teams) if (teams > 1) schedule(static, 1) reduction(| : odd)
    for (worker = 0; worker < teams; worker++) {
        char *mine = sampler->buffer + whole * (size_t)worker;
        const struct room room = room_of(mine, chunks);
        for (int64_t row = worker; row < rows; row += teams)
            odd |= !best_of(logits + row * vocabulary, vocabulary, k, ids + row * k, logsumexp + row,
                            (struct candidate *)(mine + each), sampler->isa, room);
    }
    return odd ? -1 : 1;
}

/* Repetition divides what is positive and multiplies the rest; of a token that counts frequency is subtracted for each
 * occurrence, and then presence once. */
static void penalise(float *row, const struct penalty *penalty)
{
    for (int64_t at = 0; at < penalty->count; at++) {
        const int32_t occurrences = penalty->counts[2 * at + 1];
        float *x = row + penalty->counts[2 * at];
        *x = *x > 0.0f ? *x / penalty->repetition : *x * penalty->repetition;
        if (occurrences) {
            const float frequent = penalty->frequency * (float)occurrences;
            *x -= frequent;
            *x -= penalty->presence;
        }
    }
}

/* Change the rows of `logits` [.., vocabulary] that the penalties name, each at most once. */
void ferrum_penalise(float *logits, int64_t vocabulary, const struct penalty *penalties, int64_t count, int32_t threads)
{
    const int teams = threads < count ? threads : (int)count;
    int64_t at;
#pragma omp parallel for num_threads(teams) if (teams > 1) schedule(static)
    for (at = 0; at < count; at++)
        penalise(logits + penalties[at].row * vocabulary, penalties + at);
}

/* Change the rows of `logits` [.., vocabulary] that the masks name. */
void ferrum_mask(const struct sampler *sampler, float *logits, int64_t vocabulary, const struct row_mask *masks, int64_t count,
                 int32_t threads)
{
    const int teams = threads < count ? threads : (int)count;
    int64_t at;
#pragma omp parallel for num_threads(teams) if (teams > 1) schedule(static)
    for (at = 0; at < count; at++)
        sampler->isa->forbid(logits + masks[at].row * vocabulary, masks[at].words, vocabulary);
}
