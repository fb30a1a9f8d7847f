"""The recurrent states of a sequence in the stream of its cache: tensors in chunks of rows, behind those of its tokens.

Up to two images come, what the sequence goes on from and its last checkpoint, each with the same four tensors. The
first, its lengths, says how many rows the others have, so that a receiver takes no more than a slot holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from ferrum_rpc.core import STATE_TENSORS, MovedStates, StateLengths, StateRows, StateTensors
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import kv_transfer_pb2, types_pb2
from ferrum_rpc.wire.tensor import DTYPE_BY_NAME, NUMPY_BY_DTYPE

IMAGES: Final = MovedStates._fields


class RowTensor(NamedTuple):
    """A tensor of the whole sequence: ``shape`` is that of a row."""

    name: str
    dtype: types_pb2.DType
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_BY_DTYPE[self.dtype].itemsize


def row_tensors(states: StateTensors) -> dict[str, RowTensor]:
    """All of them by name, in the order in which they come."""
    shape, own, wide = states.shape, DTYPE_BY_NAME[states.dtype], DTYPE_BY_NAME[states.wide_dtype]
    dtypes = types_pb2.D_TYPE_U32, wide, own, wide
    shapes = (), (shape.key_dim, shape.value_dim), (shape.channels,), (2, shape.value_heads)
    return {
        (name := f"{image}.{tensor}"): RowTensor(name, dtype, extents)
        for image in IMAGES
        for tensor, dtype, extents in zip(STATE_TENSORS, dtypes, shapes, strict=True)
    }


def rows_of(states: StateTensors, moved: MovedStates, most: int) -> Iterator[StateRows]:
    """All rows of images of these lengths in the order in which they move, at most ``most`` bytes at a time, or one
    row."""
    tensors = row_tensors(states)
    for image, lengths in zip(IMAGES, moved, strict=True):
        if lengths is None:
            continue
        for name in STATE_TENSORS:
            rows, step = states.row_count(name, lengths), max(1, most // tensors[f"{image}.{name}"].row_bytes)
            for first in range(0, rows, step):
                yield StateRows(image, name, first, min(step, rows - first))


class StateReceiver:
    """The rows of images of a sequence of ``length`` tokens, as they come. ``moved``: lengths of the images of which
    rows may have come."""

    def __init__(self, states: StateTensors, length: int) -> None:
        self._states, self._length = states, length
        self._tensors = [*row_tensors(states).values()]
        self.moved = MovedStates()
        self._numbers = b""
        self._lengths = StateLengths(0, 0, (0,))  # of the image whose rows come
        self._place = self._came = 0  # the tensor whose rows come, and how many have

    def take(self, chunk: kv_transfer_pb2.KvChunk) -> tuple[StateRows, RowTensor, bytes]:
        """Rows of a chunk, their tensor, and their bytes. Raises `InvalidRequest` unless they are the next ones."""
        part, place = chunk.parts[0], self._place
        if not place and not self._came and part.tensor == self._tensors[len(STATE_TENSORS)].name:
            place = len(STATE_TENSORS)  # a sequence that goes on from its checkpoint
        if len(chunk.parts) > 1:
            raise _refusal(f"a chunk of states has one part, not {len(chunk.parts)}", "chunk.parts")
        if place == len(self._tensors) or part.tensor != self._tensors[place].name:
            raise _refusal(
                f"rows of {part.tensor[:64]!r} came where {self._next()} were expected", "chunk.parts.tensor"
            )
        tensor, came, data = self._tensors[place], self._came if place == self._place else 0, part.data.data
        image, name = tensor.name.split(".")
        wanted, [count, *extents] = self._states.row_count(name, self._lengths), [*part.data.shape] or [0]
        right = part.data.dtype == tensor.dtype and tuple(extents) == tensor.shape
        if not right or len(data) != count * tensor.row_bytes:
            expected = f"rows of shape {[*tensor.shape]} in {_dtype_name(tensor.dtype)}, of {tensor.row_bytes} bytes"
            found = f"{len(data)} bytes of {count} rows of shape {extents} in {_dtype_name(part.data.dtype)}"
            raise _refusal(f"{tensor.name} has {expected}, not {found}", "chunk.parts.data")
        if chunk.first_row != came:
            raise _refusal(f"first_row of {tensor.name} must be {came}, not {chunk.first_row}", "chunk.first_row")
        if not 0 < count <= wanted - came:
            raise _refusal(f"1 to {wanted - came} rows of {tensor.name} were expected, not {count}", "chunk.parts.data")
        self._place, self._came = place, came + count
        if name == "lengths":
            self._numbers += data
        if self._came == wanted:
            if name == "lengths":
                self._lengths, self._numbers = self._checked(self._numbers), b""
                self.moved = self.moved._replace(**{image: self._lengths})
            self._place, self._came = place + 1, 0
        return StateRows(image, name, came, count), tensor, data

    def end(self) -> MovedStates:
        """The lengths of all that has come. Raises `InvalidRequest` if rows of an image are missing."""
        if self._came or self._place % len(STATE_TENSORS):
            raise _refusal(f"the stream ends where {self._next()} were expected", "trailer")
        return self.moved

    def _next(self) -> str:
        """What must come now."""
        if self._place == len(self._tensors):
            return "no more rows"
        name = self._tensors[self._place].name
        if not self._place and not self._came:
            return f"those of {name} or {self._tensors[len(STATE_TENSORS)].name}"
        return f"those of {name} from {self._came} on"

    def _checked(self, numbers: bytes) -> StateLengths:
        """Lengths that a slot may have. Raises `InvalidRequest`."""
        length, floor, *folded = np.frombuffer(numbers, "<u4").tolist()
        step = self._states.step_tokens
        ordered = max(folded) <= floor <= length <= self._length
        if not ordered or length - floor > step or length - min(folded) > 2 * step:
            message = f"no states of {self._length} tokens have the lengths {[length, floor, *folded]}"
            raise _refusal(message, "chunk.parts.data")
        return StateLengths(length, floor, tuple(folded))


def _dtype_name(number: int) -> str:
    """Of what a peer sent."""
    known = types_pb2.DType.DESCRIPTOR.values_by_number.get(number)
    return str(number) if known is None else known.name


def _refusal(message: str, field: str) -> InvalidRequest:
    return InvalidRequest(message, field=field)
