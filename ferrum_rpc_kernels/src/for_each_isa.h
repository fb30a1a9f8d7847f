/* Includes BODY once for every instruction set that the compiler can make code for, with ISA(name), a name with the set's
 * suffix, ISA_NAME, TARGET, the attribute that lets the compiler use it (cpu_features.h), and LANES, the floats of its vectors.
 *
 * Before it the file defines `struct isa`, what it calls in such code, and ISA_ENTRIES, the initializer of one in terms of
 * ISA. Behind it `isa_of` chooses. */

#define JOINED(name, suffix) name##suffix

#define ISA(name) JOINED(name, _portable)
#define ISA_NAME "portable"
#define TARGET
#define LANES 4
#include BODY
static const struct isa ISA(isa) = ISA_ENTRIES;
#undef ISA
#undef ISA_NAME
#undef TARGET
#undef LANES

#if defined(__x86_64__)
#define ISA(name) JOINED(name, _avx2)
#define ISA_NAME "avx2"
#define TARGET COMPILED_FOR(AVX2)
#define LANES 8
#include BODY
static const struct isa ISA(isa) = ISA_ENTRIES;
#undef ISA
#undef ISA_NAME
#undef TARGET
#undef LANES

#define ISA(name) JOINED(name, _avx512)
#define ISA_NAME "avx512"
#define TARGET COMPILED_FOR(AVX512)
#define LANES 16
#include BODY
static const struct isa ISA(isa) = ISA_ENTRIES;
#undef ISA
#undef ISA_NAME
#undef TARGET
#undef LANES
#endif

/* The set whose vectors hold so many floats; portable code if there is none. */
static inline const struct isa *isa_of(int lanes)
{
#if defined(__x86_64__)
    if (lanes == 16)
        return &isa_avx512;
    if (lanes == 8)
        return &isa_avx2;
#endif
    (void)lanes;
    return &isa_portable;
}
