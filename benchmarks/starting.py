"""How long `ferrum-rpc serve` takes until its model answers, beside a plain read of the weights' file.

The file's pages are dropped from the kernel's cache before each start and each read, where the system offers that:
weights are to be read once, at disk speed. What a start takes without weights (the identity model: Python, torch, the
server) is told apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

import numpy as np

from benchmarks.process import served
from benchmarks.remote import serve_flags, vocabulary
from benchmarks.workload import IDENTITY
from ferrum_rpc.client.channel import open_channel

PIECE_BYTES: Final = 8 << 20


class Start(TypedDict):
    """Seconds, medians of the starts. ``loading_s``: beyond the start without weights. ``cold``: whether the pages were
    dropped; otherwise the file was in memory. ``starts_s``: all of them."""

    weight_bytes: int
    cold: bool
    starts_s: list[float]
    ready_s: float
    without_weights_s: float
    loading_s: float
    plain_read_s: float


async def starting(model: Path, settings: dict[str, Any], times: int) -> Start:
    """Alternate: read the file, start with the model, start without one."""
    files = _weights(model)
    plain, ready, bare = [], [], []
    cold = True
    for _ in range(times):
        cold &= _drop(files)
        plain.append(_read(files))
        cold &= _drop(files)
        ready.append(await _start(str(model), settings))
        bare.append(await _start(IDENTITY, settings))
    loading = float(np.median(ready) - np.median(bare))
    return {
        "weight_bytes": sum(file.stat().st_size for file in files),
        "cold": cold,
        "starts_s": [round(each, 3) for each in ready],
        "ready_s": round(float(np.median(ready)), 3),
        "without_weights_s": round(float(np.median(bare)), 3),
        "loading_s": round(loading, 3),
        "plain_read_s": round(float(np.median(plain)), 3),
    }


async def _start(model: str, settings: dict[str, Any]) -> float:
    began = time.perf_counter()
    async with served(*serve_flags(model, settings)) as target, open_channel(target, None) as channel:
        await vocabulary(channel)
        return time.perf_counter() - began


def _weights(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def _drop(files: Sequence[Path]) -> bool:
    """Out of the page cache with them; False where the system has no such call."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only clean pages can go
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def _read(files: Sequence[Path]) -> float:
    """Seconds of reading them once into one small buffer."""
    buffer = bytearray(PIECE_BYTES)
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - began
