/* The rows of a head of a recurrent layer, for one instruction set: included by recurrent_step_isa.h and recurrent_chunk_isa.h
 * once per set (see simd.h). */

#include "simd.h"

#undef EPSILON
#define EPSILON 1e-6f /* added to the squared length of q and k */

/* n channels of a token behind the convolution and SiLU. */
INLINE void ISA(convolve)(const struct recurrent_layer *layer, const char *const *window, int first, int n, float *out)
{
    const float *weight = layer->weight + first;
    const int channels = channels_of(layer);
    for (int i = 0; i < n; i += LANES) {
        FV sum = {0};
        for (int tap = 0; tap < layer->taps; tap++)
            sum = ISA(fma)(ISA(load)(window[tap], first + i, layer->wide),
                           *(const FV *)(weight + (size_t)tap * channels + i), sum);
        *(FV *)(out + i) = ISA(times_sigmoid)(sum, sum);
    }
}

/* n elements, divided by their length and multiplied by `factor`. */
INLINE void ISA(normalise)(float *x, int n, float factor)
{
    FV squares = {0};
    for (int i = 0; i < n; i += LANES)
        squares = ISA(fma)(*(FV *)(x + i), *(FV *)(x + i), squares);
    factor /= __builtin_sqrtf(ISA(total)(squares) + EPSILON);
    for (int i = 0; i < n; i += LANES)
        *(FV *)(x + i) *= factor;
}

/* A head's query, key and value for a token, one after the other. */
static TARGET void ISA(split_head)(const struct recurrent_layer *layer, const char *const *window, int head, float *row)
{
    const int keys = layer->key_dim, values = layer->value_dim, all_keys = layer->key_heads * keys;
    const int first_key = head / (layer->value_heads / layer->key_heads) * keys;
    ISA(convolve)(layer, window, first_key, keys, row);
    ISA(convolve)(layer, window, all_keys + first_key, keys, row + keys);
    ISA(convolve)(layer, window, 2 * all_keys + head * values, values, row + 2 * keys);
    ISA(normalise)(row, keys, 1.0f / __builtin_sqrtf((float)keys));
    ISA(normalise)(row + keys, keys, 1.0f);
}
