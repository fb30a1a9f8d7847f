/* Sampling from rows of logits, and their best tokens (sample.c). */

#ifndef FERRUM_SAMPLE_H
#define FERRUM_SAMPLE_H

#include <stdint.h>

/* The sampling parameters of a row. Neutral filters: top_k 0, top_p 1, min_p 0. A temperature of 0 selects the largest. */
struct draw {
    uint64_t seed, position; /* the random number of a row is a function of these */
    float temperature, top_p, min_p;
    int32_t top_k;
};

/* The penalties of a row for the tokens before it. */
struct penalty {
    const int32_t *counts; /* `count` pairs: a token below the vocabulary, each once, and how often it counts */
    int64_t row, count;
    float repetition, presence, frequency;
};

/* The allowed tokens of a row: bit t % 32 of word t / 32 allows token t. */
struct row_mask {
    const uint32_t *words;
    int64_t row;
};

/* The tokens that the filters keep of a row, or of a shard of it: the logits above `least`, the first `ties` of those that
 * equal it, and of these the ones with a weight of at least `least_weight`. Weights are relative to `largest`, which may be
 * in another shard. */
struct limits {
    float largest, temperature, least, least_weight;
    int64_t ties;
    double target; /* what is left, added up by rising id, passes it at the token to find; below 0: there is none */
};

struct sampler;

struct sampler *ferrum_sampler_new(void);
void ferrum_sampler_free(struct sampler *sampler);
int32_t ferrum_sample(struct sampler *sampler, const float *logits, int64_t rows, int64_t vocabulary,
                      const struct draw *draws, int32_t *tokens, int32_t threads);
int32_t ferrum_weigh(struct sampler *sampler, const float *logits, int64_t rows, int64_t count, const struct limits *limits,
                     float *weights, double *sums, int32_t *tokens, int32_t threads);
int32_t ferrum_best(struct sampler *sampler, const float *logits, int64_t rows, int64_t vocabulary, int64_t k, int32_t *ids,
                    float *logsumexp, int32_t threads);
void ferrum_penalise(float *logits, int64_t vocabulary, const struct penalty *penalties, int64_t count, int32_t threads);
void ferrum_mask(const struct sampler *sampler, float *logits, int64_t vocabulary, const struct row_mask *masks, int64_t count,
                 int32_t threads);

#endif
