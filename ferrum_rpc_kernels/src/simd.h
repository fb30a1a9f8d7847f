/* Vectors of one instruction set, for the files that are included once per set, with
 *
 *   ISA(name)   name with the set's suffix
 *   TARGET      the function attribute that lets the compiler use it
 *   LANES       floats in a vector: 16, 8 or 4
 *
 * They are the compiler's own vectors (GCC's or Clang's), so that next to nothing here names an instruction. No include
 * guard: each set includes it anew.
 */

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#undef FV
#undef IV
#undef UV
#undef HV
#undef BV
#undef INLINE
#define FV ISA(fv)
#define IV ISA(iv)
#define UV ISA(uv)
#define HV ISA(hv)
#define BV ISA(bv)

typedef float FV __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t IV __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t UV __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t HV __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t BV __attribute__((vector_size(LANES), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE FV ISA(splat)(float x) { return x - (FV){0}; }

INLINE FV ISA(where)(IV mask, FV yes, FV no) { return (FV)((mask & (IV)yes) | (~mask & (IV)no)); }

/* a * b + c, rounded once if the set has an instruction for it. Written out, and compiled with -ffp-contract=off: a compiler
 * may fuse `a * b + c` in one copy of an inlined function and not in another (GCC 13 does where GCC 12 did not), and then a
 * token's bits depend on the step that computes it. */
INLINE FV ISA(fma)(FV a, FV b, FV c)
{
#if LANES == 16
    return (FV)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (FV)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* The same of each element of x: x * by + add. */
INLINE FV ISA(line)(FV x, float by, float add) { return ISA(fma)(x, ISA(splat)(by), ISA(splat)(add)); }

/* LANES elements of a cache or query row as floats; a bfloat16 is the upper half of one. */
INLINE FV ISA(load)(const char *row, int element, int wide)
{
    if (wide)
        return *(const FV *)(row + 4 * (size_t)element);
    const HV half = *(const HV *)(row + 2 * (size_t)element);
    return (FV)(__builtin_convertvector(half, UV) << 16);
}

/* LANES bytes as floats, by an explicit instruction if there is one: GCC 12 would convert byte by byte. */
INLINE FV ISA(load_bytes)(const char *row)
{
#if LANES == 16
    const IV whole = (IV)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)row));
#elif LANES == 8
    const IV whole = (IV)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)row));
#else
    const IV whole = __builtin_convertvector(*(const BV *)row, IV);
#endif
    return __builtin_convertvector(whole, FV);
}

/* The lowest byte of each. */
INLINE void ISA(store_bytes)(char *row, IV x)
{
#if LANES == 16
    _mm_storeu_si128((__m128i *)row, _mm512_cvtepi32_epi8((__m512i)x));
#else
    *(BV *)row = __builtin_convertvector(__builtin_convertvector(x, HV), BV);
#endif
}

/* The bits of the nearest bfloat16, ties to even; a NaN stays one. */
INLINE UV ISA(to_half)(FV x)
{
    const UV bits = (UV)x;
    const UV rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const IV number = x == x;
    return ((UV)number & rounded) | (~(UV)number & 0x7fc0);
}

INLINE void ISA(store)(char *row, int element, int wide, FV x)
{
    if (wide) {
        *(FV *)(row + 4 * (size_t)element) = x;
        return;
    }
    *(HV *)(row + 2 * (size_t)element) = __builtin_convertvector(ISA(to_half)(x), HV);
}

/* e^x for x <= 0, to 2 ulp, and 0 below e^-87; a NaN stays one. 2^n times a polynomial of the rest (Cephes' expf): adding
 * `magic` rounds to an integer n and leaves n + 127, the exponent of 2^n, in the lowest bits. */
INLINE FV ISA(exp)(FV x)
{
    const IV small = x <= -87.0f;
    x = ISA(where)(small, (FV){0}, x);
    const FV magic = ISA(splat)(12582912.0f + 127.0f); /* 1.5 * 2^23, and the exponent of 1 */
    const FV shifted = ISA(fma)(x, ISA(splat)(1.44269504088896341f), magic);
    const FV n = shifted - magic;
    const FV r = ISA(fma)(n, ISA(splat)(2.12194440e-4f), ISA(fma)(n, ISA(splat)(-0.693359375f), x));
    FV y = ISA(line)(r, 1.9875691500e-4f, 1.3981999507e-3f);
    y = ISA(fma)(y, r, ISA(splat)(8.3334519073e-3f));
    y = ISA(fma)(y, r, ISA(splat)(4.1665795894e-2f));
    y = ISA(fma)(y, r, ISA(splat)(1.6666665459e-1f));
    y = ISA(fma)(y, r, ISA(splat)(5.0000001201e-1f));
    y = ISA(fma)(y * r, r, r) + 1.0f;
    return (FV)(~small & (IV)(y * (FV)((UV)shifted << 23)));
}

/* x times the sigmoid of s, which is 1 / (1 + e^-s). */
INLINE FV ISA(times_sigmoid)(FV x, FV s)
{
    const FV t = ISA(exp)(ISA(where)(s < 0.0f, s, -s)); /* e^-|s|: no overflow on either side */
    return ISA(where)(s < 0.0f, x * t, x) / (1.0f + t);
}

/* To 2 ulp. Near 0, where 1 - e^-2x would cancel, a polynomial (Cephes' tanhf). */
INLINE FV ISA(tanh)(FV x)
{
    const FV size = ISA(where)(x < 0.0f, -x, x), t = ISA(exp)(size * -2.0f), z = x * x;
    const FV y = (1.0f - t) / (1.0f + t);
    FV p = ISA(line)(z, -5.70498872745e-3f, 2.06390887954e-2f);
    p = ISA(fma)(p, z, ISA(splat)(-5.37397155531e-2f));
    p = ISA(fma)(p, z, ISA(splat)(1.33314422036e-1f));
    p = ISA(fma)(p, z, ISA(splat)(-3.33332819422e-1f));
    return ISA(where)(size < 0.625f, ISA(fma)(p * z, x, x), ISA(where)(x < 0.0f, -y, y));
}

/* Those lanes of x and then y that the numbers say, which are constants. */
#if defined(__clang__)
#define SHUFFLED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLED(x, y, ...) __builtin_shuffle(x, y, (IV){__VA_ARGS__})
#endif

/* The lanes of x, each with the one `by` lanes further on. */
#undef TURNED
#if LANES == 16
#define TURNED(x, by)                                                                                                  \
    SHUFFLED(x, x, (by) & 15, (by + 1) & 15, (by + 2) & 15, (by + 3) & 15, (by + 4) & 15, (by + 5) & 15, (by + 6) & 15, \
             (by + 7) & 15, (by + 8) & 15, (by + 9) & 15, (by + 10) & 15, (by + 11) & 15, (by + 12) & 15,              \
             (by + 13) & 15, (by + 14) & 15, (by + 15) & 15)
#elif LANES == 8
#define TURNED(x, by)                                                                                                  \
    SHUFFLED(x, x, (by) & 7, (by + 1) & 7, (by + 2) & 7, (by + 3) & 7, (by + 4) & 7, (by + 5) & 7, (by + 6) & 7,       \
             (by + 7) & 7)
#else
#define TURNED(x, by) SHUFFLED(x, x, (by) & 3, (by + 1) & 3, (by + 2) & 3, (by + 3) & 3)
#endif

/* MIXED floats times a Hadamard matrix of 16 for each fourth of them: of distances of 32, 16, 8 and 4 in turn, x and y so far
 * apart become x + y and x - y. Twice is 16 times what was there. */
#define MIXED 64
INLINE void ISA(mix)(FV *x)
{
    enum { COUNT = MIXED / LANES };
    for (int by = COUNT / 2; by; by /= 2)
        for (int i = 0; i < COUNT; i++)
            if (!(i & by)) {
                const FV sum = x[i] + x[i + by];
                x[i + by] = x[i] - x[i + by];
                x[i] = sum;
            }
#if LANES == 16
    static const FV signs[] = {{1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
                               {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1}};
    for (int i = 0; i < COUNT; i++)
        x[i] = TURNED(x[i], 8) + x[i] * signs[0];
    for (int i = 0; i < COUNT; i++)
        x[i] = SHUFFLED(x[i], x[i], 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11) + x[i] * signs[1];
#elif LANES == 8
    for (int i = 0; i < COUNT; i++)
        x[i] = TURNED(x[i], 4) + x[i] * (FV){1, 1, 1, 1, -1, -1, -1, -1};
#endif
}

INLINE float ISA(total)(FV x)
{
#if LANES == 16
    x += TURNED(x, 8);
#endif
#if LANES >= 8
    x += TURNED(x, 4);
#endif
    x += TURNED(x, 2);
    x += TURNED(x, 1);
    return x[0];
}

/* x where it is larger, else y: of a NaN and a number the second. One instruction that GCC 12 does not find. */
INLINE FV ISA(larger)(FV x, FV y)
{
#if LANES == 16
    return (FV)_mm512_max_ps((__m512)x, (__m512)y);
#elif LANES == 8
    return (FV)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return ISA(where)(x > y, x, y);
#endif
}

INLINE float ISA(largest)(FV x)
{
#if LANES == 16
    x = ISA(larger)(x, TURNED(x, 8));
#endif
#if LANES >= 8
    x = ISA(larger)(x, TURNED(x, 4));
#endif
    x = ISA(larger)(x, TURNED(x, 2));
    x = ISA(larger)(x, TURNED(x, 1));
    return x[0];
}

INLINE IV ISA(larger_key)(IV x, IV y)
{
    const IV mask = x > y;
    return (mask & x) | (~mask & y);
}

INLINE int32_t ISA(largest_key)(IV x)
{
#if LANES == 16
    x = ISA(larger_key)(x, TURNED(x, 8));
#endif
#if LANES >= 8
    x = ISA(larger_key)(x, TURNED(x, 4));
#endif
    x = ISA(larger_key)(x, TURNED(x, 2));
    x = ISA(larger_key)(x, TURNED(x, 1));
    return x[0];
}
