/* A head of a recurrent layer in blocks of tokens, for one instruction set: included by recurrent_chunk.c once per set. */

#include "recurrent_isa.h"

#undef TILE_ROWS
#undef TILE_VECTORS
#if LANES == 16
#define TILE_ROWS 8
#else
#define TILE_ROWS 4
#endif
#define TILE_VECTORS 2 /* so that sums, vectors of b and an element of a fit the registers */

/* c [rows, columns] = a [rows, inner] b [inner, columns] + `kept` times c, a factor every `kept_step` elements for a row;
 * without `kept` c is not read. Strides are in elements. If `a_lower`, a is zero right of its diagonal; if `c_lower`, only c
 * up to its diagonal is needed. */
struct ISA(product) {
    const float *a, *b, *kept;
    float *c;
    size_t a_stride, b_stride, c_stride;
    int rows, inner, columns, kept_step, a_lower, c_lower;
};

INLINE void ISA(multiply_tile)(const struct ISA(product) *product, int row, int column, const int rows, const int vectors)
{
    const float *a = product->a + row * product->a_stride, *b = product->b + column;
    float *c = product->c + row * product->c_stride + column;
    const size_t a_stride = product->a_stride, b_stride = product->b_stride, c_stride = product->c_stride;
    const int inner = product->a_lower && row + rows < product->inner ? row + rows : product->inner;
    FV sums[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            sums[r][v] = (FV){0};
            if (product->kept)
                sums[r][v] = *(FV *)(c + r * c_stride + v * LANES) * product->kept[(row + r) * product->kept_step];
        }
    for (int i = 0; i < inner; i++, b += b_stride) {
        FV each[TILE_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            each[v] = *(const FV *)(b + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const FV x = ISA(splat)(a[r * a_stride + i]);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sums[r][v] = ISA(fma)(x, each[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(FV *)(c + r * c_stride + v * LANES) = sums[r][v];
}

INLINE void ISA(multiply_columns)(const struct ISA(product) *product, int column, const int vectors)
{
    int row = 0;
    for (; row + TILE_ROWS <= product->rows; row += TILE_ROWS)
        if (!product->c_lower || column < row + TILE_ROWS)
            ISA(multiply_tile)(product, row, column, TILE_ROWS, vectors);
    for (; row < product->rows; row++)
        ISA(multiply_tile)(product, row, column, 1, vectors);
}

static TARGET void ISA(multiply)(const struct ISA(product) *product)
{
    int column = 0;
    for (; column + TILE_VECTORS * LANES <= product->columns; column += TILE_VECTORS * LANES)
        ISA(multiply_columns)(product, column, TILE_VECTORS);
    for (; column < product->columns; column += LANES)
        ISA(multiply_columns)(product, column, 1);
}

/* x = the solution of (1 + system) x = x in n rows, where only what lies below the diagonal of `system` counts; a few
 * columns. */
INLINE void ISA(solve_columns)(const float *system, float *x, int n, int columns, const int vectors)
{
    for (int row = 1; row < n; row++) {
        FV sums[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[v] = *(FV *)(x + (size_t)row * columns + v * LANES);
        for (int i = 0; i < row; i++) {
            const FV factor = ISA(splat)(-system[row * BLOCK + i]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[v] = ISA(fma)(factor, *(FV *)(x + (size_t)i * columns + v * LANES), sums[v]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            *(FV *)(x + (size_t)row * columns + v * LANES) = sums[v];
    }
}

static TARGET void ISA(solve)(const float *system, float *x, int n, int columns)
{
    int column = 0;
    for (; column + 4 * LANES <= columns; column += 4 * LANES)
        ISA(solve_columns)(system, x + column, n, columns, 4);
    for (; column < columns; column += LANES)
        ISA(solve_columns)(system, x + column, n, columns, 1);
}

/* Rows and decays of a head's n tokens from `first` on. */
static TARGET void ISA(fill_block)(const struct recurrent_layer *layer, int64_t first, int n, int head,
                                   const struct block *block)
{
    const int keys = layer->key_dim, row_floats = 2 * keys + layer->value_dim;
    float total = 0.0f;
    for (int i = 0; i < n; i++) {
        const char *window[MOST_TAPS];
        for (int tap = 0; tap < layer->taps; tap++)
            window[tap] = layer->inputs + (first + i + tap) * layer->input_bytes;
        float *row = block->rows + (size_t)i * row_floats;
        ISA(split_head)(layer, window, head, row);
        for (int k = 0; k < keys; k++)
            block->turned[k * BLOCK + i] = row[keys + k];
        total += layer->log_decay[(first + i) * layer->value_heads + head];
        block->total[i] = total;
    }
    for (int i = n; i < BLOCK; i++) {
        block->total[i] = total;
        for (int k = 0; k < keys; k++)
            block->turned[k * BLOCK + i] = 0.0f;
    }
    for (int i = 0; i < BLOCK; i += LANES) {
        const FV each = *(FV *)(block->total + i);
        *(FV *)(block->since + i) = ISA(exp)(each);
        *(FV *)(block->until + i) = ISA(exp)(total - each);
    }
}

/* The products of keys, and of queries with them: each times the decay between its tokens, and for the system times the
 * row's beta. Scores are zero where the column's token is behind the row's; of the system nobody reads that. */
static TARGET void ISA(weigh_pairs)(const struct recurrent_layer *layer, int64_t first, int n, int head,
                                    const struct block *block)
{
    IV columns;
    for (int i = 0; i < LANES; i++)
        columns[i] = i;
    for (int row = 0; row < n; row++) {
        const float beta = layer->beta[(first + row) * layer->value_heads + head];
        for (int column = 0; column < n; column += LANES) {
            const FV between = ISA(exp)(block->total[row] - *(FV *)(block->total + column));
            FV *system = (FV *)(block->system + row * BLOCK + column), *scores = (FV *)(block->scores + row * BLOCK + column);
            *system *= between * beta;
            *scores = ISA(where)(columns + column <= row, *scores * between, (FV){0});
        }
    }
}

static TARGET void ISA(run_block)(const struct recurrent_layer *layer, int64_t first, int n, int head, float *state,
                                  const struct block *block)
{
    const int keys = layer->key_dim, values = layer->value_dim, heads = layer->value_heads, row_floats = 2 * keys + values;
    const int columns = (n + LANES - 1) / LANES * LANES;
    const float *query = block->rows, *key = query + keys, *value = key + keys;
    ISA(fill_block)(layer, first, n, head, block);
    struct ISA(product) product = {.a = key, .a_stride = row_floats, .b = block->turned, .b_stride = BLOCK,
                                   .c = block->system, .c_stride = BLOCK, .rows = n, .inner = keys, .columns = columns,
                                   .c_lower = 1};
    ISA(multiply)(&product);
    product.a = query;
    product.c = block->scores;
    ISA(multiply)(&product);
    ISA(weigh_pairs)(layer, first, n, head, block);

    product = (struct ISA(product)){.a = key, .a_stride = row_floats, .b = state, .b_stride = values, .c = block->written,
                                    .c_stride = values, .rows = n, .inner = keys, .columns = values};
    ISA(multiply)(&product);
    product.a = query;
    product.c = block->found;
    ISA(multiply)(&product);
    for (int row = 0; row < n; row++) {
        const float beta = layer->beta[(first + row) * heads + head], since = block->since[row];
        for (int i = 0; i < values; i += LANES) {
            FV *written = (FV *)(block->written + (size_t)row * values + i);
            *written = (*(const FV *)(value + (size_t)row * row_floats + i) - *written * since) * beta;
        }
    }
    ISA(solve)(block->system, block->written, n, values);

    const struct ISA(product) outputs = {.a = block->scores, .a_stride = BLOCK, .b = block->written, .b_stride = values,
                                         .c = block->found, .c_stride = values, .kept = block->since, .kept_step = 1,
                                         .rows = n, .inner = n, .columns = values, .a_lower = 1};
    ISA(multiply)(&outputs);
    for (int row = 0; row < n; row++) {
        char *out = layer->output + ((first + row) * heads + head) * values * (layer->wide ? 4 : 2);
        for (int i = 0; i < values; i += LANES)
            ISA(store)(out, i, layer->wide, *(const FV *)(block->found + (size_t)row * values + i));
    }
    for (int k = 0; k < keys; k++)
        for (int i = 0; i < columns; i += LANES)
            *(FV *)(block->turned + k * BLOCK + i) *= *(const FV *)(block->until + i);
    const struct ISA(product) states = {.a = block->turned, .a_stride = BLOCK, .b = block->written, .b_stride = values,
                                        .c = state, .c_stride = values, .kept = block->since + n - 1, .rows = keys,
                                        .inner = n, .columns = values};
    ISA(multiply)(&states);
}

static TARGET void ISA(run_head)(const struct recurrent_layer *layer, int64_t tokens, int head, float *state,
                                 const struct block *block)
{
    for (int64_t first = 0; first < tokens; first += BLOCK)
        ISA(run_block)(layer, first, (int)(tokens - first < BLOCK ? tokens - first : BLOCK), head, state, block);
}
