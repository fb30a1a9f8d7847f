"""Process settings that a program makes before it imports torch and gRPC: polling of sockets, spinning of threads, the
event loop, kept memory. They are for programs only: a library must not make them. Settings of the user take precedence.

OpenMP: libgomp spins for milliseconds by default. A spinning thread takes the core that the event loop, or another
thread, needs, and then the thread that it waits for: with a second busy process a decode step of 30 ms took 230 to 500.
If threads sleep at once, a step of 200 sections pays for 200 wake-ups: 48 ms instead of 27. `SPINS` is a little more
than the time between two sections of a step, and about the cost of a wake-up.

Sockets: gRPC's event engine passes every read and write to threads of its own, which pass what arrived to the thread
that waits for completions, which wakes the event loop: four wake-ups, two of which do no work. gRPC still has its
previous polling, in which the waiting thread reads by itself. One step of a session then takes 6.5 thread switches in
the server instead of 11.3, and 4.6 instead of 9.1 in its caller (grpcio 1.85). The same switches select it in every
version that this package supports; a version without them would report that on stderr and continue.

Event loop: a call of grpc.aio takes several turns of the loop, and its completion queue wakes it through a socket each
time. A turn of uvloop costs about half: a flood of reset streams, which is little else, takes 70 us per stream, not
140.

Memory: glibc returns a large block to the system when it is freed, and the heap's end too. The rows of the next answer
are then new pages, with a page fault each. An answer of eight float32 rows of a 152k vocabulary took 22 ms that way,
and 8 ms with 128 MiB kept (identity model, two busy cores); intermediate tensors are blocks of such sizes too. Less is
kept now, because of a promise on memory; the gain of 32 MiB has not been measured separately. glibc never returns free
memory below blocks in use by itself: after a burst of 64 MiB, 42 of them stayed resident. So it is asked to once a
second. That takes 0.13 ms if there is little to return, and does not slow such answers down.

Products: oneDNN, which computes what the kernels of this package do not (float32, models on the `hf` backend), caches
code for each shape, 1,024 by default. A prompt of a new length is several shapes: prompts of 175 lengths left 500 MB
(hf, bfloat16, 4 layers), and leave 300 with `PRIMITIVES`, in the same time. Decode steps of up to 32 sequences stay
within them.

GPU memory: torch's allocator keeps the segments that it has, and what is freed in one too small for the next tensor is
of no use. Steps of changing lengths would take more than the largest of them, which is what the cache leaves room for
(`engine/assembly/size.py`). Expandable segments map pages one behind the other instead.

Instruction sets: `FERRUM_ISA` makes a machine a lesser one, for tests. Our library reads it itself; torch, oneDNN and
MKL have variables of their own (`ISA_MASKS`).
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, Literal, NamedTuple

from ferrum_rpc.install import install
from ferrum_rpc.usage import ConfigError, masked_isa

SPIN_VARIABLE: Final = "GOMP_SPINCOUNT"
SPINS: Final = 4000
"""Rounds of libgomp's spin loop, some 15 ns each."""

WAIT_VARIABLES: Final = ("OMP_WAIT_POLICY", SPIN_VARIABLE)
"""Variables of which each decides how OpenMP's threads wait."""

POLLING_VARIABLE: Final = "GRPC_EXPERIMENTS"
POLL_DIRECTLY: Final = "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"
VERBOSITY: Final = "GRPC_VERBOSITY"
TORCH_VERBOSITY: Final = "TORCH_CPP_LOG_LEVEL"
"""Its warnings while ranks wait for each other are stack traces."""

PRIMITIVES_VARIABLE: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
PRIMITIVES: Final = 256

ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's own variables, the present name and the one before, which decide how it allocates GPU memory."""

ALLOCATOR: Final = "expandable_segments:True"

ISA_MASKS: Final[Mapping[str, Mapping[str, str]]] = {"amx": {}} | {
    isa: {"ATEN_CPU_CAPABILITY": of_torch, "ONEDNN_MAX_CPU_ISA": of_onednn, "MKL_ENABLE_INSTRUCTIONS": of_mkl}
    for isa, of_torch, of_onednn, of_mkl in (
        ("portable", "default", "SSE41", "SSE4_2"),
        ("avx2", "avx2", "AVX2", "AVX2"),
        ("avx512_vnni", "avx512", "AVX512_CORE_VNNI", "AVX512"),
        ("avx512", "avx512", "AVX512_CORE_FP16", "AVX512"),
    )
}
"""What limits torch, oneDNN and MKL to each of `usage.ISAS`; to the last nothing does. oneDNN's name for `avx512` is
its widest before AMX."""

KEPT_BYTES: Final = 32 << 20
"""Free bytes at the heap's end that are kept: the maximum cost."""

MAX_KEPT_BYTES: Final = 32 << 20
"""Larger blocks are returned to the system as before: glibc accepts no higher limit."""

TRIM_EVERY_S: Final = 1.0

MALLOC_VARIABLES: Final = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""glibc's own variables, of which each decides what is kept."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3  # both from glibc's malloc.h

UVLOOP: Final = "uvloop"


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of this process and its children. Call it before torch and gRPC are imported, because they read
    them once. gRPC's C core then writes no lines, which would mix with our JSON lines, and torch's only errors. Raises
    `ConfigError` for an unknown instruction set."""
    if isa := masked_isa(environment):
        for name, value in ISA_MASKS[isa].items():
            environment.setdefault(name, value)
    environment.setdefault(POLLING_VARIABLE, POLL_DIRECTLY)
    environment.setdefault(VERBOSITY, "NONE")
    environment.setdefault(TORCH_VERBOSITY, "ERROR")
    environment.setdefault(PRIMITIVES_VARIABLE, str(PRIMITIVES))
    if not any(name in environment for name in WAIT_VARIABLES):
        environment[SPIN_VARIABLE] = str(SPINS)
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = ALLOCATOR


def openmp_waits(environment: Mapping[str, str] = os.environ) -> str:
    """How OpenMP's threads wait in this process, for records."""
    found = [f"{name}={environment[name]}" for name in WAIT_VARIABLES if name in environment]
    return ", ".join(found) or "libgomp's default"


def polled(environment: Mapping[str, str] = os.environ) -> str:
    """How sockets are read in this process, for a log line and for records."""
    switches = environment.get(POLLING_VARIABLE)
    if switches is None:
        return "by gRPC's event engine"
    return "by the thread that waits for completions" if switches == POLL_DIRECTLY else f"as {POLLING_VARIABLE} says"


class Loop(NamedTuple):
    """A selected event loop, and the reason."""

    name: str
    reason: str
    make: Callable[[], asyncio.AbstractEventLoop]


def choose_loop(choice: Literal["auto", "asyncio", "uvloop"]) -> Loop:
    """Select the event loop. Raises `ConfigError` if uvloop is requested but missing."""
    there = importlib.util.find_spec(UVLOOP) is not None
    if choice == UVLOOP and not there:
        raise ConfigError(f"event_loop: uvloop is not installed; use auto, or {install(UVLOOP)}")
    if choice == "asyncio" or not there:
        return Loop("asyncio", "uvloop is not installed" if choice == "auto" else "asked for", asyncio.new_event_loop)
    import uvloop

    return Loop(UVLOOP, "it is installed" if choice == "auto" else "asked for", uvloop.new_event_loop)


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> str:
    """Keep freed memory, for the life of the process. Returns what was done, for the log."""
    for name in MALLOC_VARIABLES:
        if name in environment:
            return f"as {name} says"
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        return "this libc has no mallopt: it decides how much freed memory it keeps"
    if not (libc.mallopt(_M_MMAP_THRESHOLD, MAX_KEPT_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)):
        return "this libc refused to keep freed memory"
    threading.Thread(target=_trim, args=(libc,), name="ferrum-memory", daemon=True).start()
    return f"up to {KEPT_BYTES >> 20} MiB that were freed are kept for the next answer, for a second"


def _trim(libc: Any) -> None:
    while True:
        time.sleep(TRIM_EVERY_S)
        libc.malloc_trim(0)
