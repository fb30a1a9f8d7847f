/* Collectives of the ranks of one machine, in shared memory.
 *
 * A decode step of 28 layers sums its rows over the ranks 56 times. By TCP on one machine that takes a fifth of a
 * millisecond or more each time; here a rank writes its part, raises its counter, waits for the others' counters, and
 * reads.
 *
 * A counter counts the exchanges of an epoch. Exchanges alternate between two buffers of a rank, so that one wait is
 * enough: after the wait of exchange n all ranks have read the buffers of n - 1. A waiting rank is not woken: it spins,
 * then yields, then sleeps.
 *
 * An abort ends all epochs up to the present one: one word has the first live epoch. It is checked while waiting and again
 * after reading, because a rank in a new epoch may write where a slower one still reads.
 */

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu_features.h"
#include "group.h"

#define MOST_RANKS 64
#define LINE 128         /* bytes: two cache lines, which are fetched together */
#define BUFFER 65536     /* bytes of an exchange */
#define SLOT 65536       /* bytes of a message's part, and how many may be in flight from one rank to another */
#define SLOTS 16
#define SHARED_FROM 32768 /* bytes from which each of more than two ranks sums a share of the rows */
#define SPIN_NS 50000    /* then yield for a while, then sleep */
#define YIELD_NS 1000000
#define SLEEP_NS 50000

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "a lock does not work between processes");

struct counter {
    _Alignas(LINE) _Atomic int64_t value;
    int64_t bytes[2]; /* of the last two exchanges */
};

/* The segment: this, `exchanged` of each rank, `sent` and `taken` of each pair (from, to), two buffers of each rank, and
 * the slots of each pair. Zeros are a group of epoch 0. Pages that are never touched take no memory. */
struct shared {
    _Alignas(LINE) char name[16]; /* set by Python, to check that it is the right segment */
    _Alignas(LINE) _Atomic int64_t live_from; /* the first live epoch */
};

struct ferrum_group {
    struct shared *shared;
    struct counter *exchanged, *sent, *taken;
    char *buffers, *slots;
    const struct isa *isa;
    int32_t rank, size;
    _Atomic int64_t epoch;
    int64_t exchanges, to[MOST_RANKS], from[MOST_RANKS]; /* of this epoch, and messages */
};

/* What is summed: elements of `of[rank]` each. */
struct parts {
    const char *of[MOST_RANKS];
    int32_t count, wide;
};

struct isa {
    void (*sum_parts)(const struct parts *, int64_t, int64_t, char *);
};

#define ISA_ENTRIES {ISA(sum_parts)}
#define BODY "group_isa.h"
#include "for_each_isa.h"

/* The size of a segment for so many ranks; 0 if they are too many. */
int64_t ferrum_group_bytes(int32_t size)
{
    if (size < 1 || size > MOST_RANKS)
        return 0;
    const int64_t pairs = (int64_t)size * size;
    return (int64_t)sizeof(struct shared) + (size + 2 * pairs) * (int64_t)sizeof(struct counter) +
           (int64_t)size * 2 * BUFFER + pairs * SLOTS * SLOT;
}

/* A rank of the group of this segment. `lanes`: as ferrum_rows_lanes returned. NULL if memory is short. */
struct ferrum_group *ferrum_group_new(void *segment, int32_t rank, int32_t size, int32_t lanes)
{
    struct ferrum_group *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    const int64_t pairs = (int64_t)size * size;
    made->shared = segment;
    made->exchanged = (struct counter *)(made->shared + 1);
    made->sent = made->exchanged + size;
    made->taken = made->sent + pairs;
    made->buffers = (char *)(made->taken + pairs);
    made->slots = made->buffers + (int64_t)size * 2 * BUFFER;
    made->rank = rank;
    made->size = size;
    made->isa = isa_of(lanes);
    return made;
}

void ferrum_group_free(struct ferrum_group *self) { free(self); }

/* Detach from the segment: every later call returns GROUP_ABORTED. */
void ferrum_group_close(struct ferrum_group *self)
{
    static struct shared closed = {.live_from = INT64_MAX};
    self->shared = &closed;
}

/* --- epochs -------------------------------------------------------------------------------------------------------- */

static void end_epochs_below(struct ferrum_group *self, int64_t epoch)
{
    int64_t now = atomic_load(&self->shared->live_from);
    while (now < epoch && !atomic_compare_exchange_weak(&self->shared->live_from, &now, epoch))
        ;
}

/* All waits return GROUP_ABORTED. May be called from any thread. */
void ferrum_group_abort(struct ferrum_group *self) { end_epochs_below(self, atomic_load(&self->epoch) + 1); }

/* Begin an epoch above all earlier ones. GROUP_ABORTED if it is over already. */
int32_t ferrum_group_renew(struct ferrum_group *self, int64_t epoch)
{
    end_epochs_below(self, epoch);
    atomic_store(&self->epoch, epoch);
    self->exchanges = 0;
    memset(self->to, 0, sizeof self->to);
    memset(self->from, 0, sizeof self->from);
    return atomic_load(&self->shared->live_from) > epoch ? GROUP_ABORTED : GROUP_DONE;
}

static int over(const struct ferrum_group *self)
{
    return atomic_load_explicit(&self->shared->live_from, memory_order_relaxed) >
           atomic_load_explicit(&self->epoch, memory_order_relaxed);
}

/* After reading: whether the data may have been overwritten meanwhile. */
static int32_t read_in_time(const struct ferrum_group *self)
{
    atomic_thread_fence(memory_order_acquire);
    return over(self) ? GROUP_ABORTED : GROUP_DONE;
}

/* The number of an exchange or message: above those of all epochs before. */
static int64_t number(const struct ferrum_group *self, int64_t count)
{
    return (atomic_load_explicit(&self->epoch, memory_order_relaxed) << 40) + count;
}

/* --- waiting ------------------------------------------------------------------------------------------------------- */

static inline void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Wait until the counter has reached `wanted`, or the epoch is over. */
static int32_t wait_for(const struct ferrum_group *self, const struct counter *counter, int64_t wanted)
{
    int64_t began = 0, waited = 0;
    for (unsigned turn = 1; atomic_load_explicit(&counter->value, memory_order_acquire) < wanted; turn++) {
        if (over(self))
            return GROUP_ABORTED;
        if (waited < SPIN_NS) {
            pause_briefly();
            if (turn % 32)
                continue;
        } else if (waited < YIELD_NS) {
            sched_yield();
        } else {
            nanosleep(&(struct timespec){.tv_nsec = SLEEP_NS}, NULL);
            continue;
        }
        const int64_t now = now_ns();
        began = began ? began : now;
        waited = now - began;
    }
    return over(self) ? GROUP_ABORTED : GROUP_DONE;
}

/* --- exchanges ----------------------------------------------------------------------------------------------------- */

static char *buffer_of(const struct ferrum_group *self, int rank)
{
    return self->buffers + (2 * rank + self->exchanges % 2) * (int64_t)BUFFER;
}

/* Publish this rank's buffer, and wait for the others'. All must have the same number of `bytes`, or the group is aborted,
 * because the ranks' calls differ. */
static int32_t exchange(struct ferrum_group *self, int64_t bytes)
{
    const int64_t wanted = number(self, self->exchanges + 1);
    struct counter *own = self->exchanged + self->rank;
    own->bytes[self->exchanges % 2] = bytes;
    atomic_store_explicit(&own->value, wanted, memory_order_release);
    for (int rank = 0; rank < self->size; rank++) {
        const struct counter *other = self->exchanged + rank;
        if (rank == self->rank)
            continue;
        if (wait_for(self, other, wanted))
            return GROUP_ABORTED;
        if (other->bytes[self->exchanges % 2] != bytes) {
            const int32_t status = read_in_time(self) ? GROUP_ABORTED : GROUP_UNEQUAL;
            ferrum_group_abort(self);
            return status;
        }
    }
    return GROUP_DONE;
}

/* The parts of this exchange; this rank's own is in place. */
static struct parts parts_of(const struct ferrum_group *self, const char *own, int32_t wide)
{
    struct parts parts = {.count = self->size, .wide = wide};
    for (int rank = 0; rank < self->size; rank++)
        parts.of[rank] = rank == self->rank ? own : buffer_of(self, rank);
    return parts;
}

/* Every rank sums all of them: one wait. At most a buffer of them. */
static int32_t reduce_whole(struct ferrum_group *self, char *rows, int64_t elements, int32_t wide)
{
    const int64_t bytes = elements * (wide ? 4 : 2);
    memcpy(buffer_of(self, self->rank), rows, (size_t)bytes);
    const int32_t status = exchange(self, bytes);
    if (status)
        return status;
    const struct parts parts = parts_of(self, rows, wide);
    self->isa->sum_parts(&parts, 0, elements, rows);
    self->exchanges++;
    return read_in_time(self);
}

/* Every rank sums its share and reads the others' sums: two waits, but less to read with many ranks. */
static int32_t reduce_shares(struct ferrum_group *self, char *rows, int64_t elements, int32_t wide)
{
    const int64_t width = wide ? 4 : 2, bytes = elements * width;
    memcpy(buffer_of(self, self->rank), rows, (size_t)bytes);
    int32_t status = exchange(self, bytes);
    if (status)
        return status;
    const struct parts parts = parts_of(self, rows, wide);
    const int64_t own = elements * self->rank / self->size, next = elements * (self->rank + 1) / self->size;
    self->exchanges++;
    char *summed = buffer_of(self, self->rank);
    self->isa->sum_parts(&parts, own, next, summed);
    memcpy(rows + own * width, summed + own * width, (size_t)((next - own) * width));
    status = exchange(self, bytes);
    if (status)
        return status;
    for (int rank = 0; rank < self->size; rank++) {
        const int64_t first = elements * rank / self->size * width, last = elements * (rank + 1) / self->size * width;
        if (rank != self->rank)
            memcpy(rows + first, buffer_of(self, rank) + first, (size_t)(last - first));
    }
    self->exchanges++;
    return read_in_time(self);
}

/* Make rows the sum of all ranks' rows: float32 where `wide`, else bfloat16. An enum group_status. */
int32_t ferrum_group_reduce(struct ferrum_group *self, void *rows, int64_t elements, int32_t wide)
{
    const int64_t width = wide ? 4 : 2, most = BUFFER / width;
    const int shares = self->size > 2 && elements * width >= SHARED_FROM;
    char *at = rows;
    int32_t status = over(self) ? GROUP_ABORTED : GROUP_DONE;
    while (elements > 0 && self->size > 1 && !status) {
        const int64_t count = elements < most ? elements : most;
        status = shares ? reduce_shares(self, at, count, wide) : reduce_whole(self, at, count, wide);
        at += count * width;
        elements -= count;
    }
    return status;
}

/* For layer.c: the same of bfloat16 rows, of any struct ferrum_group. */
int32_t ferrum_group_reduce_pairs(void *group, void *rows, int64_t elements)
{
    return ferrum_group_reduce(group, rows, elements, 0);
}

/* all [ranks, bytes] = every rank's part. An enum group_status. */
int32_t ferrum_group_gather(struct ferrum_group *self, const char *part, int64_t bytes, char *all)
{
    memcpy(all + self->rank * bytes, part, (size_t)bytes);
    int32_t status = over(self) ? GROUP_ABORTED : GROUP_DONE;
    for (int64_t done = 0; done < bytes && self->size > 1 && !status; done += BUFFER) {
        const int64_t count = bytes - done < BUFFER ? bytes - done : BUFFER;
        memcpy(buffer_of(self, self->rank), part + done, (size_t)count);
        status = exchange(self, count);
        if (status)
            break;
        for (int rank = 0; rank < self->size; rank++)
            if (rank != self->rank)
                memcpy(all + rank * bytes + done, buffer_of(self, rank), (size_t)count);
        self->exchanges++;
        status = read_in_time(self);
    }
    return status;
}

/* --- messages ------------------------------------------------------------------------------------------------------ */

static char *slot_of(const struct ferrum_group *self, int64_t pair, int64_t count)
{
    return self->slots + (pair * SLOTS + count % SLOTS) * SLOT;
}

/* Waits while `SLOTS` parts are in flight. An enum group_status. */
int32_t ferrum_group_send(struct ferrum_group *self, const char *rows, int64_t bytes, int32_t to)
{
    const int64_t pair = (int64_t)self->rank * self->size + to;
    int32_t status = over(self) ? GROUP_ABORTED : GROUP_DONE;
    for (int64_t done = 0; done < bytes && !status; done += SLOT) {
        const int64_t count = self->to[to]++;
        if (count >= SLOTS)
            status = wait_for(self, self->taken + pair, number(self, count + 1 - SLOTS));
        if (status)
            break;
        memcpy(slot_of(self, pair, count), rows + done, (size_t)(bytes - done < SLOT ? bytes - done : SLOT));
        atomic_store_explicit(&self->sent[pair].value, number(self, count + 1), memory_order_release);
    }
    return status;
}

/* rows = the message of `source`. An enum group_status. */
int32_t ferrum_group_receive(struct ferrum_group *self, char *rows, int64_t bytes, int32_t source)
{
    const int64_t pair = (int64_t)source * self->size + self->rank;
    int32_t status = over(self) ? GROUP_ABORTED : GROUP_DONE;
    for (int64_t done = 0; done < bytes && !status; done += SLOT) {
        const int64_t count = self->from[source]++;
        status = wait_for(self, self->sent + pair, number(self, count + 1));
        if (status)
            break;
        memcpy(rows + done, slot_of(self, pair, count), (size_t)(bytes - done < SLOT ? bytes - done : SLOT));
        atomic_store_explicit(&self->taken[pair].value, number(self, count + 1), memory_order_release);
        status = read_in_time(self);
    }
    return status;
}
