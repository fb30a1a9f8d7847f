/* A head of a recurrent layer, token by token, for one instruction set: included by recurrent_step.c once per set. */

#include "recurrent_isa.h"

/* What a pass does for the token before it, and for the one behind. */
enum ISA(pass) {
    ISA(FIRST) = 1, /* there is none before: the state is read. Otherwise what that token writes is added */
    ISA(READ) = 2,  /* its output is summed */
    ISA(KEEP) = 4,  /* the state is stored */
    ISA(NEXT) = 8,  /* the next token lets the state decay, and sums what it answers to the key */
};

/* The tokens of a pass as `split_head` made them, and a slice's vectors: what the token before writes, and the sum of its
 * output; the answer to the one behind. */
struct ISA(slice) {
    const float *before, *behind;
    float decay;
    FV written[SLICE], output[SLICE], answer[SLICE];
};

INLINE void ISA(run_pass)(struct ISA(slice) *slice, float *state, float *held, int keys, int values, const int width,
                          const int pass)
{
    FV written[SLICE], output[SLICE], answer[SLICE];
    const float *query = slice->before, *key = slice->before + keys, *next_key = slice->behind + keys;
    const float decay = slice->decay;
#pragma GCC unroll 4
    for (int v = 0; v < width; v++) {
        written[v] = slice->written[v];
        output[v] = answer[v] = (FV){0};
    }
    for (int k = 0; k < keys; k++) {
        const FV key_now = ISA(splat)(key[k]), query_now = ISA(splat)(query[k]), key_next = ISA(splat)(next_key[k]);
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) {
            FV *stored = (FV *)(state + (size_t)k * values + v * LANES), *own = (FV *)(held + (k * SLICE + v) * LANES);
            FV x;
            if (pass & ISA(FIRST))
                x = *stored;
            else
                x = ISA(fma)(written[v], key_now, *own);
            if (pass & ISA(READ))
                output[v] = ISA(fma)(x, query_now, output[v]);
            if (pass & ISA(KEEP))
                *stored = x;
            if (pass & ISA(NEXT)) {
                x *= decay;
                answer[v] = ISA(fma)(x, key_next, answer[v]);
                *own = x;
            }
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < width; v++) {
        slice->output[v] = output[v];
        slice->answer[v] = answer[v];
    }
}

/* All tokens over `width` vectors of columns from `first` on. `rows`: of the tokens from `folded` on, `gates`: decay and
 * beta of each. */
INLINE void ISA(run_slice)(const struct recurrent_layer *layer, const struct recurrent_job *job, int head, int first,
                           float *held, const float *rows, const float *gates, const int width)
{
    const int keys = layer->key_dim, values = layer->value_dim, row_floats = 2 * keys + values;
    const int tokens = (int)(end_of(job) - job->folded), fold = (int)(job->floor - job->folded);
    const int old = tokens - (int)job->count;
    float *state = job->state + (size_t)head * keys * values + first;
    struct ISA(slice) slice = {0};
    for (int t = 0; t <= tokens; t++) {
        slice.before = rows + (size_t)(t ? t - 1 : 0) * row_floats;
        slice.behind = rows + (size_t)(t < tokens ? t : 0) * row_floats;
        slice.decay = gates[2 * (t < tokens ? t : 0)];
        switch ((t ? 0 : ISA(FIRST)) | (t > old ? ISA(READ) : 0) | (t && t == fold ? ISA(KEEP) : 0) |
                (t < tokens ? ISA(NEXT) : 0)) {
        case ISA(FIRST) | ISA(NEXT):
            ISA(run_pass)(&slice, state, held, keys, values, width, ISA(FIRST) | ISA(NEXT));
            break;
        case ISA(NEXT):
            ISA(run_pass)(&slice, state, held, keys, values, width, ISA(NEXT));
            break;
        case ISA(KEEP) | ISA(NEXT):
            ISA(run_pass)(&slice, state, held, keys, values, width, ISA(KEEP) | ISA(NEXT));
            break;
        case ISA(KEEP):
            ISA(run_pass)(&slice, state, held, keys, values, width, ISA(KEEP));
            break;
        case ISA(READ) | ISA(NEXT):
            ISA(run_pass)(&slice, state, held, keys, values, width, ISA(READ) | ISA(NEXT));
            break;
        default:
            ISA(run_pass)(&slice, state, held, keys, values, width, ISA(READ));
        }
        if (t > old) {
            const int64_t row = (job->row + t - 1 - old) * layer->value_heads + head;
            char *out = layer->output + (size_t)row * values * (layer->wide ? 4 : 2);
            for (int v = 0; v < width; v++)
                ISA(store)(out, first + v * LANES, layer->wide, slice.output[v]);
        }
        if (t < tokens)
            for (int v = 0; v < width; v++)
                slice.written[v] =
                    (*(const FV *)(slice.behind + 2 * keys + first + v * LANES) - slice.answer[v]) * gates[2 * t + 1];
    }
}

/* A head of a sequence. `scratch`: keys * SLICE vectors, and a row and two numbers for each token. */
static TARGET void ISA(run_head)(const struct recurrent_layer *layer, const struct recurrent_job *job, int head,
                                 float *scratch)
{
    const int keys = layer->key_dim, values = layer->value_dim, row_floats = 2 * keys + values;
    const int heads = layer->value_heads, tokens = (int)(end_of(job) - job->folded);
    float *held = scratch, *rows = held + (size_t)keys * SLICE * LANES, *gates = rows + (size_t)tokens * row_floats;
    for (int t = 0; t < tokens; t++) {
        const int64_t position = job->folded + t, new = position - job->start;
        const char *window[MOST_TAPS];
        find_window(layer, job, position, window);
        ISA(split_head)(layer, window, head, rows + (size_t)t * row_floats);
        const int64_t at = (new < 0 ? row_of(job, position) * 2 : job->row + new) * heads + head;
        const float log_decay = new < 0 ? job->gates[at] : layer->log_decay[at];
        gates[2 * t] = ISA(exp)(ISA(splat)(log_decay))[0];
        gates[2 * t + 1] = new < 0 ? job->gates[at + heads] : layer->beta[at];
    }
    int first = 0;
    for (; first + SLICE * LANES <= values; first += SLICE * LANES)
        ISA(run_slice)(layer, job, head, first, held, rows, gates, SLICE);
    for (; first < values; first += LANES)
        ISA(run_slice)(layer, job, head, first, held, rows, gates, 1);
}
