/* Rows, attention, recurrence and products in portable C on fixed random numbers, printed bit by bit: on every machine the same.
 *
 * For test_native_builds.py, linked with the sources of the library. The first line says what else there is. */

#include <stdio.h>
#include <stdlib.h>

#include "attention.h"
#include "linear.h"
#include "norm_rope_gate.h"
#include "recurrent.h"
#include "recurrent_rows.h"

#define ROWS 7
#define DIM 32
#define HEADS 4
#define KV_HEADS 2
#define BLOCK 16
#define BLOCKS 64
#define TOKENS 6

int32_t ferrum_linear_supported(int32_t kind);
struct ferrum_linears *ferrum_linears_new(void);
void ferrum_linears_free(struct ferrum_linears *self);
int32_t ferrum_prefill_supported(const char *name, int32_t head_dim);
struct ferrum_prefill *ferrum_prefill_new(const char *name);
void ferrum_prefill_free(struct ferrum_prefill *self);
int32_t ferrum_rows_lanes(int32_t elements);
struct ferrum_decode *ferrum_decode_new(const char *name, int32_t head_dim);
const char *ferrum_decode_name(const struct ferrum_decode *self);
void ferrum_decode_free(struct ferrum_decode *self);
int32_t ferrum_recurrent_chunk(const struct recurrent_layer *layer, int64_t tokens, float *state);
void ferrum_decay_rows(const struct decay_rows *rows);
void ferrum_gated_rows(const struct gated_rows *rows);

static uint32_t state = 1;

/* Between -1 and 1. */
static float draw(void)
{
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state / 2147483648.0f;
}

static char *drawn(int count, int wide)
{
    char *made = malloc((size_t)count * 4);
    for (int i = 0; i < count; i++) {
        union { float number; uint16_t half[2]; } each = {draw()};
        if (wide)
            ((float *)made)[i] = each.number;
        else
            ((uint16_t *)made)[i] = each.half[1]; /* little-endian */
    }
    return made;
}

static void print(const char *name, int wide, const void *numbers, int count)
{
    printf("%s %s", name, wide ? "float32" : "bfloat16");
    for (int i = 0; i < count; i++)
        printf(" %x", wide ? ((const uint32_t *)numbers)[i] : ((const uint16_t *)numbers)[i]);
    printf("\n");
}

static void run_rows(int wide)
{
    const int width = (HEADS + 2 * KV_HEADS) * DIM;
    char *hidden = drawn(ROWS * 2 * width, wide), *out = calloc(ROWS * width, 4), *delta = drawn(ROWS * width, wide);
    float *norms = (float *)drawn(width, 1), *angles = (float *)drawn(ROWS * DIM, 1);
    const struct row_kind kind = {.activation = SILU, .gated = 1, .heads = HEADS, .kv_heads = KV_HEADS, .head_dim = DIM,
                                  .turned = DIM, .eps = 1e-6f, .residual = 1.0f};
    struct row_task rows = {.kind = &kind, .wide = wide, .threads = 1, .width = width, .count = ROWS, .hidden = hidden,
                            .out = out, .delta = delta, .norm = norms, .cos = angles, .sin = angles};
    const char *names[] = {"add_norm", "rotate", "gate"};
    for (rows.task = ADD_NORM; rows.task <= GATE; rows.task++) {
        ferrum_rows(&rows, 4);
        print(names[rows.task], wide, out, ROWS * width);
        print(names[rows.task], wide, hidden, ROWS * width);
    }
    free(hidden), free(out), free(delta), free(norms), free(angles);
}

/* A span of five tokens at the start of a sequence, and a single one behind two chunks of another: by the kernel of short
 * spans, and those of bfloat16 by that of long spans too. */
static void run_attention(struct ferrum_decode *kernel, struct ferrum_prefill *prefill, int wide, int rounded, int window,
                          float softcap)
{
    const int32_t rows[] = {0, 5}, starts[] = {0, 1000}, lengths[] = {5, 1001}, table_start[] = {0, 1, BLOCKS};
    const int row = (HEADS + 2 * KV_HEADS) * DIM;
    int32_t tables[BLOCKS];
    for (int i = 0; i < BLOCKS; i++)
        tables[i] = BLOCKS - 1 - i;
    const int64_t slots[] = {tables[0] * BLOCK, tables[0] * BLOCK + 1, tables[0] * BLOCK + 2, tables[0] * BLOCK + 3,
                             tables[0] * BLOCK + 4, tables[1 + 62] * BLOCK + 8};
    const struct span_arrays step = {2, BLOCK, 1, rows, starts, lengths, table_start, tables};
    char *keys = drawn(BLOCKS * BLOCK * KV_HEADS * DIM, wide), *values = drawn(BLOCKS * BLOCK * KV_HEADS * DIM, wide);
    char *qkv = drawn(TOKENS * row, wide), *out = calloc(TOKENS * HEADS * DIM, 4);
    struct attention_layer layer = {.decode = kernel, .prefill = prefill, .keys = keys, .values = values, .heads = HEADS, .kv_heads = KV_HEADS,
                                    .head_dim = DIM, .wide = wide, .rounded = rounded, .window = window, .scale = 0.2f,
                                    .softcap = softcap};
    if (rounded) {
        const int64_t bytes = KV_HEADS * DIM * (wide ? 4 : 2);
        layer.keys = malloc(BLOCKS * BLOCK * KV_HEADS * cached_bytes(&layer));
        layer.values = malloc(BLOCKS * BLOCK * KV_HEADS * cached_bytes(&layer));
        for (int64_t slot = 0; slot < BLOCKS * BLOCK; slot++)
            ferrum_store(&layer, &slot, 1, keys + slot * bytes, values + slot * bytes, bytes, bytes);
    }
    const struct attention_step whole = {&step, NULL, &layer, slots};
    if (wide ? ferrum_attend(&whole, 0, qkv, row, out) : ferrum_attention_layer(&whole, 0, qkv, TOKENS, out))
        exit(1);
    print("attention", wide, out, TOKENS * HEADS * DIM);
    const struct attention_step as_long = {NULL, &step, &layer, slots};
    if (!wide && ferrum_attend(&as_long, 0, qkv, row, out))
        exit(1);
    if (!wide)
        print("long spans", wide, out, TOKENS * HEADS * DIM);
    if (rounded)
        free(layer.keys), free(layer.values);
    free(keys), free(values), free(qkv), free(out);
}

/* FERRUM_ISA=portable is set: the kernels of the library are those. */
static void run_products(int32_t kind)
{
    const int n = 40, k = SUPER_GROUP;
    char *x = drawn(ROWS * k, 0), *out = calloc(ROWS * n, 2), *panels = drawn(48 * k, 0);
    const int group = kind == PAIRS ? 0 : kind == BYTES ? 64 : 32;
    uint16_t *scales = (uint16_t *)drawn(48 * k / 32, 1), *factors = (uint16_t *)drawn(2 * 48 * k / SUPER_GROUP, 1);
    float *bias = (float *)drawn(n, 1);
    uint8_t *zeros = malloc(48 * k / 32);
    for (int i = 0; i < 48 * k / 32; i++) {
        zeros[i] = i % 16 + (kind == MXFP4 ? 120 : 0);
        scales[i] &= 0xbfff; /* a float16 below 2 */
    }
    for (int i = 0; i < 2 * 48 * k / SUPER_GROUP; i++)
        factors[i] &= 0xbfff;
    struct ferrum_linears *linears = ferrum_linears_new();
    const struct matrix matrix = {.kind = kind, .n = n, .k = k, .group = group, .width = n, .factor = 0.5f, .panels = panels,
                                  .scales = kind == MXFP4 ? (void *)zeros : scales, .bias = bias,
                                  .zeros = kind >= MXFP4 ? NULL : zeros,
                                  .factors = kind == FACTORED ? factors : NULL, .mixed = kind == BYTES};
    if (ferrum_linear(linears, &matrix, x, k, ROWS, out, 0, 1))
        exit(1);
    print((const char *[]){"pairs", "bytes", "nibbles", "factored", "mxfp4", "iq4"}[kind], 0, out, ROWS * n);
    ferrum_linears_free(linears);
    free(x), free(out), free(panels), free(scales), free(factors), free(zeros), free(bias);
}

/* Rows as a layer has them; a step of five tokens and one behind them, and a chunk of 70 from that state. */
static void run_recurrent(int wide)
{
    const int channels = (2 * KV_HEADS + HEADS) * DIM, taps = 4, tokens = 70, rows = 16, element = wide ? 4 : 2;
    char *inputs = drawn((tokens + taps) * channels, wide), *gates = drawn(tokens * 2 * HEADS, wide);
    char *journal = calloc(rows * channels, element), *out = calloc(tokens * HEADS * DIM, 4);
    float *weight = (float *)drawn(taps * channels, 1), *heads = (float *)drawn(2 * HEADS, 1), *norm = (float *)drawn(DIM, 1);
    float *numbers = calloc(2 * tokens * HEADS, 4), *journal_gates = calloc(rows * 2 * HEADS, 4);
    float *state = calloc(HEADS * DIM * DIM, 4), *log_decay = numbers, *beta = numbers + tokens * HEADS;
    for (int i = 0; i < HEADS; i++)
        heads[i] = -heads[i] * heads[i];
    const struct decay_rows decays = {.written = gates, .decay = gates + HEADS * element, .speed = heads,
                                      .shift = heads + HEADS, .log_decay = log_decay, .beta = beta, .rows = tokens,
                                      .row_bytes = 2 * HEADS * element, .heads = HEADS, .wide = wide, .lanes = 4};
    ferrum_decay_rows(&decays);
    print("decays", 1, numbers, 2 * tokens * HEADS);
    const struct recurrent_layer layer = {.weight = weight, .inputs = inputs, .input_bytes = channels * element,
                                          .log_decay = log_decay, .beta = beta, .output = out, .key_heads = KV_HEADS,
                                          .value_heads = HEADS, .key_dim = DIM, .value_dim = DIM, .taps = taps,
                                          .wide = wide, .lanes = 4, .threads = 1};
    struct recurrent_job first = {.state = state, .channels = journal, .gates = journal_gates, .rows = rows, .count = 5};
    struct recurrent_job second = first;
    second.floor = second.start = second.row = 5;
    second.count = 1;
    if (ferrum_recurrent_step(&layer, &first, 1) || ferrum_recurrent_step(&layer, &second, 1))
        exit(1);
    print("step", wide, out, 6 * HEADS * DIM);
    print("state", 1, state, HEADS * DIM * DIM);
    if (ferrum_recurrent_chunk(&layer, tokens, state))
        exit(1);
    print("chunk", wide, out, tokens * HEADS * DIM);
    print("state", 1, state, HEADS * DIM * DIM);
    const struct gated_rows gated = {.heads = out, .gates = inputs, .out = out, .norm = norm, .rows = ROWS,
                                     .row_bytes = channels * element, .head_bytes = DIM * element, .count = HEADS,
                                     .dim = DIM, .wide = wide, .lanes = 4, .threads = 1, .eps = 1e-6f};
    ferrum_gated_rows(&gated);
    print("gated", wide, out, ROWS * HEADS * DIM);
    free(inputs), free(gates), free(journal), free(out), free(weight), free(heads), free(norm), free(numbers);
    free(journal_gates), free(state);
}

int main(void)
{
    struct ferrum_decode *best = ferrum_decode_new(NULL, DIM), *kernel = ferrum_decode_new("portable", DIM);
    struct ferrum_prefill *prefill = ferrum_prefill_new("portable");
    printf("%s lanes %d pairs %d bytes %d prefill %d\n", ferrum_decode_name(best), ferrum_rows_lanes(DIM),
           ferrum_linear_supported(0), ferrum_linear_supported(1), ferrum_prefill_supported(NULL, DIM));
    setenv("FERRUM_ISA", "portable", 1);
    run_products(PAIRS);
    run_products(BYTES);
    run_products(NIBBLES);
    run_products(FACTORED);
    run_products(MXFP4);
    run_products(IQ4);
    for (int wide = 0; wide <= 1; wide++) {
        run_rows(wide);
        run_attention(kernel, prefill, wide, 0, 0, 0.0f);
        run_attention(kernel, prefill, wide, 0, 700, 5.0f);
        run_attention(kernel, prefill, wide, 1, 0, 0.0f);
        run_recurrent(wide);
    }
    ferrum_decode_free(best);
    ferrum_decode_free(kernel);
    ferrum_prefill_free(prefill);
    return 0;
}
