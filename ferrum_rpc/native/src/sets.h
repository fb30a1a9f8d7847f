/* Which instruction sets this machine has; a set is known by how many floats its vectors hold. */

#ifndef FERRUM_SETS_H
#define FERRUM_SETS_H

static inline int set_supported(int lanes)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (lanes == 16)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (lanes == 8)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return lanes == 4;
}

#endif
