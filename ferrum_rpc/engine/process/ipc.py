"""Messages and memory between a server (`parent`) and the engine process that it started (`child`).

    server -> engine   (places that are free again, work); work is (slot, packed spans, all or nothing, deadline,
                       caller, arrived) of a submission, (slot, `Command`), or None: stop
    engine -> server   a `Turn` for all that one turn of the engine's loop finished; a `Described` when the runner is
                       built; the error that ends the engine

Messages are pickles, and go between a server and its own child, nowhere else. Large columns of rows lie in shared
memory beside them: a socket would copy 10 MB of logits twice, in pieces of its own size. The memory is an anonymous
file that the child inherits: nothing is left to clean up, whichever side is killed.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import CacheState, OutputSpec, RowBlock, RowKind, Rows, Span, SpanOutcome, SpanResult, StepTiming
from ferrum_rpc.engine.api import EngineCounters

INLINE_BYTES: Final = 16 << 10
"""Larger columns of rows go through the shared memory."""

ROWS_BYTES: Final = 4 << 30
"""Room for rows under way, in address space; what does not fit is part of the message. Memory is what rows touch."""

KEPT_BYTES: Final = 32 << 20
"""Memory at the beginning of that room that stays when rows leave it; what lies behind goes back to the system."""

PAGE: Final = 4096
_HEADER: Final = Struct("<II")  # bytes of the pickle, number of places
_PLACE: Final = Struct("<QQ")  # of a column in the shared memory: where, and its bytes


class Turn(NamedTuple):
    """By slot, ``answers`` of submissions and ``results`` of operations; ``freed``: slots of work that was cancelled.
    ``news``: what else changed, or None."""

    answers: list[tuple[int, tuple[SpanOutcome, ...], StepTiming | None]]
    results: list[tuple[int, object]]
    freed: list[int]
    counters: EngineCounters
    cache: CacheState
    news: object = None


class SharedMemory:
    """What both sides see at once, and room for rows. As a context, a lock between the processes (not their threads)
    that the kernel takes back from the dead.

    ``states`` uint8 [slots]: the `State` of each piece of work, changed under the lock. ``claimed`` int64 [2]: items
    and tokens that left the queue since the start; ``busy_since`` float64 [1]: see `EngineLoop`; both by the engine. It
    alone places and releases rows; the server reads them.
    """

    def __init__(self, fd: int, slots: int, size: int = ROWS_BYTES) -> None:
        self._first = -(-(24 + slots) // PAGE) * PAGE
        if not os.fstat(fd).st_size:
            os.ftruncate(fd, self._first + size)
        self.fd = fd
        self._map = mmap.mmap(fd, self._first + size)
        self.claimed: npt.NDArray[np.int64] = np.frombuffer(self._map, np.int64, 2)
        self.busy_since: npt.NDArray[np.float64] = np.frombuffer(self._map, np.float64, 1, 16)
        self.states = memoryview(self._map)[24 : 24 + slots]
        self._rows = memoryview(self._map)[self._first :]
        self._ends: dict[int, int] = {}  # of what is placed, by where it begins

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
        """Copy ``data`` to the lowest pages that are free, and say where; None where there is no room."""
        at = 0
        for begin in sorted(self._ends):
            if begin - at >= data.nbytes:
                break
            at = self._ends[begin]
        if at + data.nbytes > len(self._rows):
            return None
        self._ends[at] = at + -(-data.nbytes // PAGE) * PAGE
        self._rows[at : at + data.nbytes] = data
        return at

    def release(self, at: int) -> None:
        """What was placed there is not read any more."""
        end = self._ends.pop(at)
        if end > KEPT_BYTES:
            begin = max(at, KEPT_BYTES)
            self._map.madvise(mmap.MADV_REMOVE, self._first + begin, end - begin)

    def view(self, at: int, count: int) -> npt.NDArray[np.uint8]:
        """So many bytes of what was placed there."""
        found: npt.NDArray[np.uint8] = np.frombuffer(self._rows, np.uint8, count, at)
        found.flags.writeable = False
        return found


# --- messages -------------------------------------------------------------------------------------------------------


@lru_cache(64)
def _dumped(output: OutputSpec) -> bytes:
    return pickle.dumps(output)


@lru_cache(64)
def _loaded(output: bytes) -> OutputSpec:
    found: OutputSpec = pickle.loads(output)  # noqa: S301 - by our own server
    return found


def pack_spans(spans: Iterable[Span]) -> list[tuple[Any, ...]]:
    """Plain data: a lone decode's is pickled in a third of the time of its objects."""
    return [
        (sequence, tokens.tobytes(), start, _dumped(output), *options)
        for sequence, tokens, start, output, *options in spans
    ]


def unpack_spans(packed: Iterable[tuple[Any, ...]]) -> tuple[Span, ...]:
    """What `pack_spans` packed."""
    return tuple(
        [
            Span(sequence, np.frombuffer(tokens, np.int32), start, _loaded(output), *options)
            for sequence, tokens, start, output, *options in packed
        ]
    )


def _make_block(kind: str, columns: list[tuple[tuple[int, ...], str, Any]]) -> RowBlock:
    return RowBlock.of(RowKind[kind], *[np.ndarray(*column) for column in columns])


def _take_block(block: RowBlock) -> tuple[Any, ...]:
    columns = [(each.shape, each.dtype.str, pickle.PickleBuffer(each.data)) for each in block.columns.values()]
    return block.kind.name, columns


_PARTS: Final[tuple[tuple[type, Callable[[Any], Iterable[Any]], Callable[..., Any]], ...]] = (
    (RowBlock, _take_block, _make_block),
    (Rows, lambda of: (of.block, of.first, of.count), Rows),
    (EngineCounters, lambda of: (of.steps, of.tokens, of.rows, of.blocks_copied, of.forward_s), EngineCounters),
    *((each, tuple, each) for each in (SpanResult, StepTiming, CacheState, Turn)),
)
"""What every step has, how it is taken apart and how it is made again. Pickle's own way with arrays, enums, dataclasses
and names of classes costs a lone decode 100 µs."""


def _make(part: int, *fields: Any) -> Any:
    return _PARTS[part][2](*fields)


def _reducer(part: int, take: Callable[[Any], Iterable[Any]]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: (_make, (part, *take(value)))


_REDUCERS: Final = {of: _reducer(part, take) for part, (of, take, _) in enumerate(_PARTS)}


def dump(message: object) -> bytes:
    """A message of plain data, to be sent."""
    pickled = pickle.dumps(message, 5)
    return _HEADER.pack(len(pickled), 0) + pickled


def dump_turn(message: object, place: Callable[[memoryview], int | None]) -> bytes:
    """A message of any data, to be sent. Buffers for which ``place`` finds room lie there."""
    places: list[bytes] = []

    def inline(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw()
        at = place(data) if data.nbytes > INLINE_BYTES else None
        if at is not None:
            places.append(_PLACE.pack(at, data.nbytes))
        return at is None

    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=inline)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(message)
    pickled = file.getbuffer()
    return b"".join([_HEADER.pack(len(pickled), len(places)), *places, pickled])


class Messages:
    """Reads messages from pieces of a stream. ``view(where, bytes)`` is a buffer that was placed."""

    def __init__(self, view: Callable[[int, int], object]) -> None:
        self._view = view
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now."""
        self._data += data
        while len(self._data) >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._data)
            first = _HEADER.size + count * _PLACE.size
            if len(self._data) < first + size:
                break
            buffers = [self._view(*place) for place in _PLACE.iter_unpack(self._data[_HEADER.size : first])]
            with memoryview(self._data)[first : first + size] as pickled:
                message = pickle.loads(pickled, buffers=buffers)  # noqa: S301 - by our own server or engine
            del self._data[: first + size]
            yield message
