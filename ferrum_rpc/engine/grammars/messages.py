"""What the engine and the process of a grammar send each other: frames of numbers and bytes. Masks are in memory that
both share.

engine -> grammar   (kind) and the grammar's text, first; then (number of texts that have ended, these, the fields of
                    each `Ask`) and the tokens of these asks, int32, in their order
grammar -> engine   (process id), first; () when it is compiled, or (whether it is too complex) and the error's message;
                    then (text, consumed tokens) for each ask in its order. The last of a frame may have `INVALID` or
                    `TOO_COMPLEX` in place of the tokens: the bytes are the message then, and the state is gone

The steps of a run wait for these messages: they are arrays, which take less time than pickles in a process whose code
has left the processor's caches since the last step.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

READY: Final = b"ready"
"""What the first process sends when it has loaded the tokenizer; anything else is an error."""

MASK_ROWS: Final = 1024
"""Masks in the memory that the engine shares with a process. Memory is what the largest request touches."""

NO_TEXT: Final = -1

INVALID: Final = -1
TOO_COMPLEX: Final = -2

_HEADER: Final = Struct("<II")  # how many numbers, how many bytes
_NUMBER: Final = 8


class Ask(NamedTuple):
    """A request for ``text``: go back to its first ``keep`` tokens and append the next ``size`` of the frame's, as far
    as they are allowed. A text without a state begins with that of ``source``, if that is not `NO_TEXT`. The masks
    behind ``first_mask`` of these tokens and of more go to the rows from ``row`` on, unless fewer are allowed."""

    text: int
    source: int
    keep: int
    size: int
    first_mask: int
    row: int


def pack(numbers: Iterable[int], content: bytes = b"") -> bytes:
    """A frame."""
    packed = array("q", numbers)
    return b"".join((_HEADER.pack(len(packed), len(content)), packed.tobytes(), content))


class Frames:
    """Reads frames from pieces of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[list[int], bytes]]:
        """The numbers and bytes of the frames that are complete now."""
        self._data += data
        while len(self._data) >= _HEADER.size:
            count, size = _HEADER.unpack_from(self._data)
            begin = _HEADER.size + count * _NUMBER
            if len(self._data) < begin + size:
                return
            numbers = array("q", self._data[_HEADER.size : begin])
            content = bytes(self._data[begin : begin + size])
            del self._data[: begin + size]
            yield numbers.tolist(), content


def map_masks(descriptor: int, words: int) -> npt.NDArray[np.int32]:
    """The masks in a file that both processes have, int32 [MASK_ROWS, words]."""
    size = MASK_ROWS * words * 4
    if not os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, size)
    return np.frombuffer(mmap.mmap(descriptor, size), np.int32).reshape(MASK_ROWS, words)
