/* Instruction sets, each a list of CPU features. The compiler's target attribute and the check of this machine come from
 * the same list, so code compiled for a feature never runs on a CPU without it.
 *
 * The environment variable FERRUM_ISA hides features, so that a machine can be tested as a lesser one: `avx2` hides
 * AVX-512, `avx512_vnni` what multiplies bfloat16, `portable` every feature, and each of them and `avx512` hide AMX. It is read when a kernel is chosen;
 * ferrum_rpc/native/cpu.py checks its value. */

#ifndef FERRUM_CPU_FEATURES_H
#define FERRUM_CPU_FEATURES_H

#if defined(__x86_64__)

#include <stdlib.h>
#include <string.h>

#define AVX2(EACH) EACH("avx2") EACH("fma") EACH("f16c")
#define AVX512(EACH) EACH("avx512f") EACH("avx512bw") EACH("avx512vl") EACH("avx512dq") EACH("fma")
#define AVX512_BF16(EACH) AVX512(EACH) EACH("avx512bf16")
#define AVX512_VNNI(EACH) AVX512(EACH) EACH("avx512vnni")
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define AMX(EACH) AVX512_BF16(EACH) EACH("avx512vnni") EACH("amx-tile") EACH("amx-bf16") EACH("amx-int8")
#endif

#define LISTED(feature) "," feature
#define HELD(feature) && feature_visible(feature) && __builtin_cpu_supports(feature)
#if defined(__clang__)
#define VECTOR_WIDTH "sse2" /* the compiler has no such option; this set is always there */
#else
#define VECTOR_WIDTH "prefer-vector-width=512"
#endif
#define COMPILED_FOR(SET) __attribute__((target(VECTOR_WIDTH SET(LISTED))))
#define CPU_HAS(SET) (__builtin_cpu_init(), 1 SET(HELD))

static inline int feature_visible(const char *feature)
{
    const char *isa = getenv("FERRUM_ISA");
    if (!isa || !strcmp(isa, "amx"))
        return 1;
    if (!strncmp(feature, "amx", 3) || !strcmp(isa, "portable"))
        return 0;
    if (!strcmp(isa, "avx512_vnni"))
        return strcmp(feature, "avx512bf16");
    return !strcmp(isa, "avx512") || strncmp(feature, "avx512", 6);
}

/* Whether the instruction of AVX-512 BF16 is faster than two multiply-adds of float32. Not on Intel's CPUs, which begin one in
 * two cycles, and four multiply-adds meanwhile: products of 8, 32 and 128 rows take 0.71, 0.65 and 0.61 of the time by floats
 * (a Xeon of family 6, model 207). FERRUM_ISA=avx512 uses the instruction there too. */
static inline int pairs_preferred(void)
{
    const char *isa = getenv("FERRUM_ISA");
    return (isa && !strcmp(isa, "avx512")) || !__builtin_cpu_is("intel");
}

#endif

/* Whether this machine has the set of for_each_isa.h whose vectors hold so many floats. */
static inline int lanes_supported(int lanes)
{
#if defined(__x86_64__)
    if (lanes == 16)
        return CPU_HAS(AVX512);
    if (lanes == 8)
        return CPU_HAS(AVX2);
#endif
    return lanes == 4;
}

/* The lanes of the widest set of this machine whose vectors divide `elements`, or 0. */
static inline int widest_lanes(int elements)
{
    for (int lanes = 16; lanes >= 4; lanes /= 2)
        if (elements % lanes == 0 && lanes_supported(lanes))
            return lanes;
    return 0;
}

#endif
