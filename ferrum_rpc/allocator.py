"""Has the process keep memory that it freed for the next answer, and give back what it kept for a while.

glibc gives a large block back to the system when it is freed, and the heap's end too. The rows of the next answer are
then new pages, at a page fault each. An answer of eight float32 rows of a 152k vocabulary took 22 ms that way, and
8 ms with 128 MiB kept (identity model, two busy cores); intermediate tensors are blocks of such sizes too. Less is kept
now, so that a promise on memory holds: what 32 MiB gain has not been measured apart.

What lies free below blocks in use glibc never gives back by itself: a burst of 64 MiB left 42 of them resident. So it
is asked to, once a second. That takes 0.13 ms where there is little to give, and such answers take no longer for it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

KEPT_BYTES: Final = 32 << 20
"""Free bytes at the heap's end that are kept: what this may cost."""

LARGEST_BYTES: Final = 32 << 20
"""Larger blocks go back to the system as before: glibc takes no higher limit."""

GIVEN_BACK_EVERY_S: Final = 1.0

SETTINGS: Final = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""glibc's own variables: whoever sets one decides."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3  # both from glibc's malloc.h


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> str:
    """For the life of the process. Returns what was done, for the log."""
    for name in SETTINGS:
        if name in environment:
            return f"as {name} says"
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        return "this libc has no mallopt: freed memory is its own affair"
    if not (libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)):
        return "this libc refused to keep freed memory"
    threading.Thread(target=_give_back, args=(libc,), name="ferrum-memory", daemon=True).start()
    return f"up to {KEPT_BYTES >> 20} MiB that were freed are kept for the next answer, for a second"


def _give_back(libc: Any) -> None:
    while True:
        time.sleep(GIVEN_BACK_EVERY_S)
        libc.malloc_trim(0)
