/* Gated DeltaNet over long spans (prompts): tokens are combined into products of matrices, BLOCK at a time.
 *
 * What a token writes depends on what those before it wrote. Within a block that is a triangular system, so that the state
 * takes part in three products a block instead of three passes a token (Yang et al. 2024, arXiv:2406.06484). Heads are
 * independent; a head's products are small and stay in the L2 cache. Everything is float32. OpenMP: see attention_decode.c.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "cpu_features.h"
#include "recurrent.h"

#define BLOCK 64

/* A thread's memory: floats of a block. */
struct block {
    float *rows;    /* [BLOCK, key_dim + key_dim + value_dim]: query, key and value */
    float *turned;  /* [key_dim, BLOCK]: the keys, a column each */
    float *written; /* [BLOCK, value_dim] */
    float *found;   /* [BLOCK, value_dim] */
    float *system;  /* [BLOCK, BLOCK] */
    float *scores;  /* [BLOCK, BLOCK] */
    float *total;   /* [BLOCK]: the logarithm of the decay since the block began */
    float *since;   /* [BLOCK]: the decay since then */
    float *until;   /* [BLOCK]: the decay until it ends */
};

struct isa {
    void (*run_head)(const struct recurrent_layer *, int64_t, int, float *, const struct block *);
};

#define ISA_ENTRIES {ISA(run_head)}
#define BODY "recurrent_chunk_isa.h"
#include "for_each_isa.h"

static size_t block_floats(const struct recurrent_layer *layer)
{
    return BLOCK * (3 * (size_t)layer->key_dim + 3 * (size_t)layer->value_dim + 2 * BLOCK + 3);
}

static struct block block_at(const struct recurrent_layer *layer, float *at)
{
    const size_t keys = BLOCK * (size_t)layer->key_dim, values = BLOCK * (size_t)layer->value_dim, square = BLOCK * BLOCK;
    struct block block = {.rows = at};
    block.turned = block.rows + 2 * keys + values;
    block.written = block.turned + keys;
    block.found = block.written + values;
    block.system = block.found + values;
    block.scores = block.system + square;
    block.total = block.scores + square;
    block.since = block.total + BLOCK;
    block.until = block.since + BLOCK;
    return block;
}

/* `tokens` rows of a layer, whose inputs begin with those of the taps - 1 tokens before them. `state` [value_heads, key_dim,
 * value_dim] advances. 0, or -1 if memory is short; then nothing has changed. */
int32_t ferrum_recurrent_chunk(const struct recurrent_layer *layer, int64_t tokens, float *state)
{
    const struct isa *isa = isa_of(layer->lanes);
    const size_t share = block_floats(layer), state_floats = (size_t)layer->key_dim * layer->value_dim;
    void *scratch;
    if (posix_memalign(&scratch, 64, share * layer->threads * sizeof(float)))
        return -1;
    int next = 0;
#pragma omp parallel num_threads(layer->threads) if (layer->threads > 1)
    {
        float *mine = scratch;
        int head;
#pragma omp critical(ferrum_recurrent_thread)
        mine += share * next++;
        const struct block block = block_at(layer, mine);
#pragma omp for schedule(dynamic, 1)
        for (head = 0; head < layer->value_heads; head++)
            isa->run_head(layer, tokens, head, state + head * state_floats, &block);
    }
    free(scratch);
    return 0;
}
