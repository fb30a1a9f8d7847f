"""Messages between processes of this program, over a socket: a header, and a pickle.

Large columns of rows may lie in memory that both ends share; then the message has their places.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from typing import Any, Final

import numpy as np

from ferrum_rpc.core import RowBlock, RowKind, Rows, SpanResult, StepTiming

INLINE_BYTES: Final = 16 << 10
"""Larger columns of rows go through the shared memory."""

_HEADER: Final = Struct("<II")  # bytes of the pickle, number of places
_PLACE: Final = Struct("<QQ")  # of a column in the shared memory: where, and its bytes


def _take_block(block: RowBlock) -> tuple[Any, ...]:
    columns = [
        (name, each.shape, each.dtype.str, pickle.PickleBuffer(each.data)) for name, each in block.columns.items()
    ]
    return block.kind.name, columns


def _make_block(kind: str, columns: list[tuple[str, tuple[int, ...], str, Any]]) -> RowBlock:
    return RowBlock(RowKind[kind], {name: np.ndarray(*column) for name, *column in columns})


_PARTS: Final[tuple[tuple[type, Callable[[Any], Iterable[Any]], Callable[..., Any]], ...]] = (
    (RowBlock, _take_block, _make_block),
    (Rows, lambda of: (of.block, of.first, of.count), Rows),
    (SpanResult, tuple, SpanResult),
    (StepTiming, tuple, StepTiming),
)
"""What every answer has, how it is taken apart and how it is made again. Pickle's own way with arrays, enums,
dataclasses and names of classes costs a single decode 100 µs."""


def _make(part: int, *fields: Any) -> Any:
    return _PARTS[part][2](*fields)


def _reducer(part: int, take: Callable[[Any], Iterable[Any]]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: (_make, (part, *take(value)))


_REDUCERS: Final = {of: _reducer(part, take) for part, (of, take, _) in enumerate(_PARTS)}


def dump(message: object, place: Callable[[memoryview], int | None] | None = None) -> bytes:
    """A message, to be sent. Buffers for which ``place`` finds room lie there; without ``place`` it is plain data."""
    if place is None:
        plain = pickle.dumps(message, 5)
        return _HEADER.pack(len(plain), 0) + plain
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
