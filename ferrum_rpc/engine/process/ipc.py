"""Messages and memory between a server (`parent`) and the engine process that it started (`child`).

    server -> engine   (slot, a submission's spans, all or nothing, deadline, caller, arrived, tokens wanted, most
                       running, the slot and the index of what it follows, or None), (slot, `Command`),
                       (slot, `Interrupt`), or None: stop
    engine -> server   ((chosen, answers, steps), counters, cache, ranks, news) for all that one turn of the engine's
                       loop finished: by slot, what ``on_tokens`` gets (None: call ``begins``) and what ``done`` gets,
                       and nothing where the work was cancelled; by step, what ``on_step`` gets; the `RankState`s or
                       None, where they were sent within the last second; what else changed, or None. A `Described`
                       when the runner is built; the error that ends the engine

Messages are pickles, and only a server and its own child exchange them. Large columns of rows are in shared memory
instead: a socket would copy 10 MB of logits twice, in pieces of its own size. The memory is an anonymous file that the
child inherits: nothing is left to clean up, whichever side is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import weakref
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import OutputSpec, Span

ROWS_BYTES: Final = 4 << 30
"""Room for rows under way, in address space; what does not fit is part of the message. Memory is what rows touch."""

UNIT: Final = 64 << 10
"""Bytes of that room that are given out together: a multiple of a page."""

KEPT_BYTES: Final = 32 << 20
"""Memory at the beginning of that room that stays when rows leave it; what lies behind goes back to the system."""


class SharedMemory:
    """What both sides see at once, and room for rows. As a context, a lock between the processes (not their threads)
    that the kernel takes back from the dead.

    ``states`` uint8 [slots]: the `WorkState` of each piece of work, changed under the lock. ``claimed`` int64 [2]:
    items and tokens that left the queue since the start; ``busy_since`` and ``waiting_since`` float64 [1]: see
    `EngineLoop`; all by the engine.
    Only the engine places rows; only the server reads and releases them.
    """

    def __init__(self, fd: int, slots: int, size: int = ROWS_BYTES) -> None:
        self._first = -(-(32 + slots + size // UNIT) // UNIT) * UNIT
        if not os.fstat(fd).st_size:
            os.ftruncate(fd, self._first + size)
        self.fd = fd
        self._map = mmap.mmap(fd, self._first + size)
        whole = memoryview(self._map)
        self.claimed: npt.NDArray[np.int64] = np.frombuffer(whole, np.int64, 2)
        self.busy_since: npt.NDArray[np.float64] = np.frombuffer(whole, np.float64, 1, 16)
        self.waiting_since: npt.NDArray[np.float64] = np.frombuffer(whole, np.float64, 1, 24)
        self.states = whole[32 : 32 + slots]
        self._used = whole[32 + slots : 32 + slots + size // UNIT]  # by unit, 1 where rows lie
        self._rows = whole[self._first :]

    @classmethod
    def create(cls, slots: int, size: int = ROWS_BYTES) -> SharedMemory:
        """A new one, all zeros."""
        return cls(os.memfd_create("ferrum-engine"), slots, size)

    def __enter__(self) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def try_enter(self) -> bool:
        """Take the lock unless the other side has it; never waits."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def place(self, data: memoryview) -> int | None:
        """Copy ``data`` to the lowest units that are free, and return where; None where there is no room."""
        units = -(-data.nbytes // UNIT)
        first = self._used.tobytes().find(bytes(units))
        if first < 0:
            return None
        self._used[first : first + units] = b"\1" * units
        at = first * UNIT
        self._rows[at : at + data.nbytes] = data
        return at

    def view(self, at: int, count: int) -> npt.NDArray[np.uint8]:
        """So many bytes of what was placed there. They are released when the last array over them is gone."""
        found: npt.NDArray[np.uint8] = np.frombuffer(self._rows, np.uint8, count, at)
        found.flags.writeable = False
        weakref.finalize(found, self._release, at, count).atexit = False
        return found

    def _release(self, at: int, count: int) -> None:
        first, units = at // UNIT, -(-count // UNIT)
        begin, end = max(at, KEPT_BYTES), at + units * UNIT
        if end > begin:
            self._map.madvise(mmap.MADV_REMOVE, self._first + begin, end - begin)
        self._used[first : first + units] = bytes(units)


# --- messages -------------------------------------------------------------------------------------------------------


@lru_cache(64)
def _dumped(output: OutputSpec) -> bytes:
    return pickle.dumps(output)


@lru_cache(64)
def _loaded(output: bytes) -> OutputSpec:
    found: OutputSpec = pickle.loads(output)  # noqa: S301 - by our own server
    return found


def pack_span(span: Span) -> tuple[Any, ...]:
    """Plain data for `unpack_span`, which is pickled in half the time of the objects."""
    sequence, tokens, start, output, *options = span
    return sequence, tokens.tobytes(), start, _dumped(output), *options


def unpack_span(sequence: int, tokens: bytes, start: int, output: bytes, *options: Any) -> Span:
    """The span that `pack_span` packed."""
    return Span(sequence, np.frombuffer(tokens, np.int32), start, _loaded(output), *options)
