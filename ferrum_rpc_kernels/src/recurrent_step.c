/* Gated DeltaNet, token by token: the steps of decoding and verification (ferrum_rpc/attention/recurrent.py).
 *
 * Such a step is bound by reading and writing the states, 1 MiB a layer and sequence of Qwen3.5-0.8B. In torch each token
 * passes over them several times. Here a job is one head of a sequence: a slice of its state's columns is read once, passes
 * all tokens in cache, and is written once, behind the last token that is folded.
 *
 * Columns are independent, and every sum runs over the keys in their order. So the bits of a state and of a row depend on the
 * sequence's tokens only. New tokens reach the journal behind all heads: their rows may be those of folded ones, whose inputs
 * other heads still read. OpenMP: see attention_decode.c.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_features.h"
#include "recurrent.h"

#define SLICE 4 /* vectors of a slice: its columns of 128 keys stay in the L1 cache */

static int64_t row_of(const struct recurrent_job *job, int64_t position)
{
    return (position + job->rows) % job->rows; /* the first inputs are behind tokens -1, -2 ... */
}

static int64_t end_of(const struct recurrent_job *job)
{
    return job->start + job->count;
}

/* The inputs of the convolution for a token. */
static void find_window(const struct recurrent_layer *layer, const struct recurrent_job *job, int64_t position,
                        const char *window[])
{
    const size_t row_bytes = (size_t)channels_of(layer) * (layer->wide ? 4 : 2);
    for (int tap = 0; tap < layer->taps; tap++) {
        const int64_t at = position - layer->taps + 1 + tap;
        window[tap] = at < job->start ? job->channels + row_of(job, at) * row_bytes
                                      : layer->inputs + (job->row + at - job->start) * layer->input_bytes;
    }
}

struct isa {
    void (*run_head)(const struct recurrent_layer *, const struct recurrent_job *, int, float *);
};

#define ISA_ENTRIES {ISA(run_head)}
#define BODY "recurrent_step_isa.h"
#include "for_each_isa.h"

static void write_journal(const struct recurrent_layer *layer, const struct recurrent_job *job)
{
    const size_t row_bytes = (size_t)channels_of(layer) * (layer->wide ? 4 : 2), heads = (size_t)layer->value_heads;
    for (int64_t token = 0; token < job->count; token++) {
        const int64_t from = job->row + token, to = row_of(job, job->start + token);
        memcpy(job->channels + to * row_bytes, layer->inputs + from * layer->input_bytes, row_bytes);
        memcpy(job->gates + to * 2 * heads, layer->log_decay + from * heads, heads * sizeof(float));
        memcpy(job->gates + (to * 2 + 1) * heads, layer->beta + from * heads, heads * sizeof(float));
    }
}

int32_t ferrum_recurrent_step(const struct recurrent_layer *layer, struct recurrent_job *jobs, int32_t count)
{
    const struct isa *isa = isa_of(layer->lanes);
    int64_t most = 0;
    for (int i = 0; i < count; i++)
        if (end_of(jobs + i) - jobs[i].folded > most)
            most = end_of(jobs + i) - jobs[i].folded;
    const size_t floats = (size_t)layer->key_dim * SLICE * layer->lanes +
                          (size_t)most * (2 * layer->key_dim + layer->value_dim + 2);
    const size_t share = (floats + 15) / 16 * 16;
    void *scratch;
    if (posix_memalign(&scratch, 64, share * layer->threads * sizeof(float)))
        return -1;
    const int64_t heads = layer->value_heads;
    int next = 0;
#pragma omp parallel num_threads(layer->threads) if (layer->threads > 1)
    {
        float *mine = scratch;
        int64_t each;
#pragma omp critical(ferrum_recurrent_thread)
        mine += share * next++;
#pragma omp for schedule(dynamic, 1)
        for (each = 0; each < count * heads; each++)
            isa->run_head(layer, jobs + each / heads, (int)(each % heads), mine);
#pragma omp for schedule(static)
        for (each = 0; each < count; each++)
            write_journal(layer, jobs + each);
    }
    for (int i = 0; i < count; i++)
        jobs[i].folded = jobs[i].floor;
    free(scratch);
    return 0;
}
