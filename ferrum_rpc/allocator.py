"""Has the process keep memory that it freed, for the next answer.

glibc gives a large block back to the system when it is freed, and the heap's end too. The rows of the next answer are
then new pages, at a page fault each. An answer of eight float32 rows of a 152k vocabulary took 22 ms that way, and
8 ms with 128 MiB kept (identity model, two busy cores); intermediate tensors are blocks of such sizes too. Less is kept
now, so that a promise on memory holds: what 32 MiB gain has not been measured apart.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

KEPT_BYTES: Final = 32 << 20
"""Free bytes at the heap's end that are kept: what this may cost."""

LARGEST_BYTES: Final = 32 << 20
"""Larger blocks go back to the system as before: glibc takes no higher limit."""

SETTINGS: Final = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""glibc's own variables: whoever sets one decides."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3  # both from glibc's malloc.h


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> str:
    """For the life of the process. Returns what was done, for the log."""
    for name in SETTINGS:
        if name in environment:
            return f"as {name} says"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return "this libc has no mallopt: freed memory is its own affair"
    if not (mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)):
        return "this libc refused to keep freed memory"
    return f"up to {KEPT_BYTES >> 20} MiB that were freed are kept for the next answer"
