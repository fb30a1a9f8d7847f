/* Includes BODY once for every instruction set that the compiler can make code for: with ISA(name), a name with the
 * set's suffix, TARGET, the attribute that lets the compiler use it (cpu_features.h), and LANES, the floats of its
 * vectors. */

#define JOINED(name, suffix) name##suffix
#define ISA(name) JOINED(name, _portable)
#define TARGET
#define LANES 4
#include BODY
#undef ISA
#undef TARGET
#undef LANES

#if defined(__x86_64__)
#define ISA(name) JOINED(name, _avx2)
#define TARGET COMPILED_FOR(AVX2)
#define LANES 8
#include BODY
#undef ISA
#undef TARGET
#undef LANES

#define ISA(name) JOINED(name, _avx512)
#define TARGET COMPILED_FOR(AVX512)
#define LANES 16
#include BODY
#undef ISA
#undef TARGET
#undef LANES
#endif
