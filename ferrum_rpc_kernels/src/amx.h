/* The tile registers of AMX, and the operations on them.
 *
 * A CPU has 8 of up to 16 rows of 64 bytes. Linux gives a process their state when it asks once (`amx_permitted`). A thread
 * says how large each is before it uses them, and releases them in the end. Written as assembly, because the intrinsics of
 * GCC 12 do not say that a load reads memory. Tests compile the kernels with `TILE_LOAD` and the others as C functions
 * (tests/numerics/emulated_amx.h), so that any CPU with AVX-512 runs them.
 */

#ifndef FERRUM_AMX_H
#define FERRUM_AMX_H

#include <stddef.h>
#include <stdint.h>

/* What LDTILECFG reads: the rows and the bytes of a row of each register. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

#if !defined(TILE_LOAD)

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* Whether this process may use tiles: ARCH_REQ_XCOMP_PERM for XTILEDATA. */
static inline int amx_permitted(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#else
static inline int amx_permitted(void) { return 0; }
#endif

/* Registers are numbers of the instruction, so they are constants here. */
#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(const struct tile_config *)(config)) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")
#define TILE_ZERO(to) __asm__ volatile("tilezero %%tmm" #to ::: "memory")
#define TILE_LOAD(to, from, stride)                                                                                    \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #to ::"r"(from), "r"((size_t)(stride)) : "memory")
#define TILE_STORE(from, to, stride)                                                                                   \
    __asm__ volatile("tilestored %%tmm" #from ", (%0,%1,1)" ::"r"(to), "r"((size_t)(stride)) : "memory")
/* to += rows x columns: pairs of bfloat16, or fours of bytes, of which those of rows are signed and the others not. */
#define TILE_PAIRS(to, rows, columns) __asm__ volatile("tdpbf16ps %%tmm" #columns ", %%tmm" #rows ", %%tmm" #to ::: "memory")
#define TILE_BYTES(to, rows, columns) __asm__ volatile("tdpbsud %%tmm" #columns ", %%tmm" #rows ", %%tmm" #to ::: "memory")

#endif
#endif
