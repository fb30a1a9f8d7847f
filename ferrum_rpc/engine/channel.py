"""Messages between the processes of one executor: a server and its engine process, rank 0 and the other ranks.

A message is a pickle behind a header of its length. Both ends are this program: the socket is one of a pair that the
child inherited, or its ends have shown each other a key. Large columns of rows may lie in memory that both ends share
(`process.ipc`); then the message has their places.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from struct import Struct
from typing import Any, Final

import numpy as np

from ferrum_rpc.core import RowBlock, RowKind, Rows, SpanResult, StepTiming

READ_BYTES: Final = 64 << 10

INLINE_BYTES: Final = 16 << 10
"""Larger columns of rows go through the shared memory, where there is one."""

_HEADER: Final = Struct("<II")  # bytes of the pickle, number of places
_PLACE: Final = Struct("<QQ")  # of a column in the shared memory: where, and its bytes
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """On Linux the kernel kills this process when the one that started it has ended, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def leave_signals() -> None:
    """Leave the signals that ask for an end to the process at the other end of the channel."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _pack_block(block: RowBlock) -> tuple[Any, ...]:
    columns = [
        (name, each.shape, each.dtype.str, pickle.PickleBuffer(each.data)) for name, each in block.columns.items()
    ]
    return block.kind.name, columns


def _unpack_block(kind: str, columns: list[tuple[str, tuple[int, ...], str, Any]]) -> RowBlock:
    return RowBlock(RowKind[kind], {name: np.ndarray(*column) for name, *column in columns})


_PARTS: Final[tuple[tuple[type, Callable[[Any], Iterable[Any]], Callable[..., Any]], ...]] = (
    (RowBlock, _pack_block, _unpack_block),
    (Rows, tuple, Rows),
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


def _nothing_placed(at: int, count: int) -> object:
    raise ValueError("the ends of this channel share no memory")


class Messages:
    """Reads messages from pieces of a stream. ``view(where, bytes)`` is a buffer that was placed."""

    def __init__(self, view: Callable[[int, int], object] = _nothing_placed) -> None:
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
                message = pickle.loads(pickled, buffers=buffers)  # noqa: S301 - of our own program, see above
            del self._data[: first + size]
            yield message


class Channel:
    """One end of a socket, for threads that may wait: any of them sends, one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._messages = Messages()
        self._arrived: deque[Any] = deque()
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Raises OSError where the other end is gone."""
        self.send_dumped(dump(message))

    def send_dumped(self, message: bytes) -> None:
        """Send what `dump` made. Raises as `send`."""
        with self._sending:
            self._socket.sendall(message)

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError where the other end is gone, or this one was closed, and
        TimeoutError where the socket has a timeout."""
        while not self._arrived:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise EOFError
            self._arrived += self._messages.feed(data)
        return self._arrived.popleft()

    def set_timeout(self, seconds: float | None) -> None:
        """What a call may take from now on; None: any time."""
        self._socket.settimeout(seconds)

    def shut_down(self) -> None:
        """Wake the threads that send or receive here, with an OSError or EOFError: the other end may never read."""
        with suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The other end reads that this one is gone."""
        self.shut_down()
        self._socket.close()
