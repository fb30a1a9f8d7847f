"""Memory that a server and its engine process share: what both must see at once, and the rows of large answers.

A page of facts, each written by one side only, but for the states of work: those are changed under a lock that the
kernel keeps (and takes back from the dead). And an arena for rows: a pipe would copy 10 MB of logits twice, in pieces
of its own size. Both are anonymous files that the engine inherits: nothing to clean up, whoever dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import insort
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

PAGE: Final = 4096
KEPT_BYTES: Final = 32 << 20
"""Memory at the arena's beginning that stays when rows leave it; what lies behind goes back to the system."""

_SUMS, _SIGNS = 64, 64  # bytes


class Lock:
    """Between two processes: a lock on a file, which the kernel frees when its holder dies. Not between threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> Self:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()

    def leave(self) -> None:
        """Give it back."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def try_enter(self) -> bool:
        """Take it unless the other side has it; never waits."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


class Page:
    """``states`` uint8 [slots]: of each piece of work (see `engine.post`), under ``lock``. ``claimed`` int64 [2]: items
    and tokens that left the queue since the start, by the engine. ``signs`` float64 [2]: when the engine last gave a
    sign of life, and when its step began (0: none), on `time.monotonic`, by the engine."""

    def __init__(self, fd: int, slots: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SUMS + _SIGNS + slots)
        self.claimed: npt.NDArray[np.int64] = np.frombuffer(self._map, np.int64, 2)
        self.signs: npt.NDArray[np.float64] = np.frombuffer(self._map, np.float64, 2, _SUMS)
        self.states = memoryview(self._map)[_SUMS + _SIGNS :]
        self.lock = Lock(fd)

    @classmethod
    def create(cls, slots: int) -> Page:
        """A new one, all zeros."""
        return cls(_file("ferrum-page", _SUMS + _SIGNS + slots), slots)


class Arena:
    """``size`` bytes in blocks of whole pages. The engine takes and gives back; the server only looks. Memory is
    touched when rows are written, not before."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size)
        self.memory = memoryview(self._map)
        self._free = [(0, size)]
        self._taken: dict[int, int] = {}

    @classmethod
    def create(cls, size: int) -> Arena:
        """A new one."""
        return cls(_file("ferrum-rows", size), size)

    def take(self, count: int) -> int | None:
        """Where ``count`` bytes may be written, the lowest place that fits; None where there is none."""
        wanted = -(-count // PAGE) * PAGE
        for index, (first, free) in enumerate(self._free):
            if free >= wanted:
                if free == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (first + wanted, free - wanted)
                self._taken[first] = wanted
                return first
        return None

    def give(self, first: int) -> None:
        """Nobody looks at what was taken at ``first`` any more."""
        size = self._taken.pop(first)
        last = first + size
        if last > KEPT_BYTES and hasattr(mmap, "MADV_REMOVE"):
            low = max(first, KEPT_BYTES)
            self._map.madvise(mmap.MADV_REMOVE, low, last - low)
        insort(self._free, (first, size))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


def _file(name: str, size: int) -> int:
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return fd
