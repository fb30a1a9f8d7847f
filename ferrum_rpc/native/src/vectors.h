/* Vectors of one instruction set, for the files that are included once per set, with
 *
 *   ISA(name)   name with the set's suffix
 *   TARGET      the function attribute that lets the compiler use it
 *   LANES       floats in a vector: 16, 8 or 4
 *
 * They are GCC's own vectors, so that nothing here names an instruction. No include guard: each set includes it anew.
 */

#undef FV
#undef IV
#undef UV
#undef HV
#undef INLINE
#define FV ISA(fv)
#define IV ISA(iv)
#define UV ISA(uv)
#define HV ISA(hv)

typedef float FV __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t IV __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t UV __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t HV __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE FV ISA(splat)(float x) { return x - (FV){0}; }

INLINE FV ISA(where)(IV mask, FV yes, FV no) { return (FV)((mask & (IV)yes) | (~mask & (IV)no)); }

/* LANES elements of a cache or query row as floats; a bfloat16 is the upper half of one. */
INLINE FV ISA(load)(const char *row, int element, int wide)
{
    if (wide)
        return *(const FV *)(row + 4 * (size_t)element);
    const HV half = *(const HV *)(row + 2 * (size_t)element);
    return (FV)(__builtin_convertvector(half, UV) << 16);
}

/* Round to the nearest bfloat16, ties to even; a NaN stays one. */
INLINE void ISA(store)(char *row, int element, int wide, FV x)
{
    if (wide) {
        *(FV *)(row + 4 * (size_t)element) = x;
        return;
    }
    const UV bits = (UV)x;
    const UV rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const IV number = x == x;
    const UV half = ((UV)number & rounded) | (~(UV)number & 0x7fc0);
    *(HV *)(row + 2 * (size_t)element) = __builtin_convertvector(half, HV);
}

/* e^x for x <= 0, to 2 ulp, and 0 below e^-87: 2^n by the exponent's bits, the rest by a polynomial (Cephes' expf). */
INLINE FV ISA(exp)(FV x)
{
    const IV large = x > -87.0f;
    x = ISA(where)(large, x, (FV){0});
    const FV magic = ISA(splat)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const FV shifted = x * 1.44269504088896341f + magic;
    const FV n = shifted - magic;
    const FV r = x - n * 0.693359375f + n * 2.12194440e-4f;
    FV y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (FV)(large & ((IV)y + (((IV)shifted - (IV)magic) << 23)));
}

INLINE float ISA(total)(FV x)
{
    float sum = 0;
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++)
        sum += x[lane];
    return sum;
}
