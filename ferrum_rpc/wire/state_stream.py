"""The recurrent states of a sequence in the stream of its cache: tensors in chunks of rows, behind those of its tokens.

Up to two images come, what the sequence goes on from and its last checkpoint, each with the same four tensors. The
first, its lengths, says how many rows the others have, so that a receiver takes no more than a slot holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from ferrum_rpc.core import MovedStates, StateImage, StateTensors
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import kv_transfer_pb2, types_pb2
from ferrum_rpc.wire.tensor import DTYPE_BY_NAME, NUMPY_BY_DTYPE

IMAGES: Final = MovedStates._fields
TENSORS: Final = ("lengths", "states", "channels", "gates")
"""Of an image. Lengths are its length, its floor, and what each layer has folded."""


class RowTensor(NamedTuple):
    """A tensor of the whole sequence: ``shape`` is that of a row."""

    name: str
    dtype: types_pb2.DType
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_BY_DTYPE[self.dtype].itemsize


class StateRows(NamedTuple):
    """Rows of a tensor: the ``first`` of them, how many ``rows``, and their bytes."""

    tensor: RowTensor
    first: int
    rows: int
    data: memoryview


def row_tensors(states: StateTensors) -> tuple[RowTensor, ...]:
    """All of them, in the order in which they come."""
    shape, own, wide = states.shape, DTYPE_BY_NAME[states.dtype], DTYPE_BY_NAME[states.wide_dtype]
    dtypes = types_pb2.D_TYPE_U32, wide, own, wide
    shapes = (), (shape.key_dim, shape.value_dim), (shape.channels,), (2, shape.value_heads)
    return tuple(
        [
            RowTensor(f"{image}.{name}", dtype, extents)
            for image in IMAGES
            for name, dtype, extents in zip(TENSORS, dtypes, shapes, strict=True)
        ]
    )


def rows_of(states: StateTensors, moved: MovedStates, most: int) -> Iterator[StateRows]:
    """All rows of ``moved``, at most ``most`` bytes at a time, or one row."""
    tensors = row_tensors(states)
    for place, image in enumerate(moved):
        if image is None:
            continue
        lengths = np.array([image.length, image.floor, *image.folded], "<u4").tobytes()
        parts = lengths, image.states, image.channels, image.gates
        for tensor, part in zip(tensors[place * len(TENSORS) :], parts, strict=False):
            size, step = tensor.row_bytes, max(1, most // tensor.row_bytes)
            rows = len(part) // size
            for first in range(0, rows, step):
                count = min(step, rows - first)
                yield StateRows(tensor, first, count, memoryview(part)[first * size : (first + count) * size])


class StateReceiver:
    """The images of a sequence of ``length`` tokens, as their rows come."""

    def __init__(self, states: StateTensors, length: int) -> None:
        self._states, self._length = states, length
        self._tensors = row_tensors(states)
        self._images: dict[str, StateImage] = {}
        self._numbers: tuple[int, ...] = ()
        self._parts: list[bytearray] = []
        self._place = self._came = 0  # the tensor whose rows come, and how many have

    def take(self, chunk: kv_transfer_pb2.KvChunk) -> tuple[RowTensor, bytes]:
        """Rows of a chunk: their tensor, and their bytes. Raises `InvalidRequest` unless they are the next ones."""
        part, place = chunk.parts[0], self._place
        if not place and not self._came and part.tensor == self._tensors[len(TENSORS)].name:
            place = len(TENSORS)  # a sequence that goes on from its checkpoint
        if len(chunk.parts) > 1 or place == len(self._tensors) or part.tensor != self._tensors[place].name:
            raise _refusal(f"rows of {part.tensor[:64]!r} are not the next ones of the states")
        tensor, came, data = self._tensors[place], self._came if place == self._place else 0, part.data.data
        wanted, [count, *extents] = self._wanted(place), [*part.data.shape] or [0]
        right = part.data.dtype == tensor.dtype and tuple(extents) == tensor.shape
        if not right or len(data) != count * tensor.row_bytes:
            raise _refusal(f"{tensor.name} has rows of shape {[*tensor.shape]}, not {len(data)} bytes of {extents}")
        if chunk.first_row != came or not 0 < count <= wanted - came:
            raise _refusal(f"{came} of {wanted} rows of {tensor.name} have come")
        self._place, self._came = place, came + count
        if not came:
            self._parts.append(bytearray())
        self._parts[-1] += data
        if self._came == wanted:
            self._end_tensor()
        return tensor, data

    def end(self) -> MovedStates:
        """All that has come. Raises `InvalidRequest` if rows of an image are missing."""
        if self._came or self._place % len(TENSORS):
            raise _refusal(f"{self._came} rows of {self._tensors[self._place].name} have come, and the stream ends")
        return MovedStates(**self._images)

    def _wanted(self, place: int) -> int:
        """How many rows a tensor has."""
        layers, kind = self._states.layers, place % len(TENSORS)
        if kind == 0:
            return 2 + layers
        if kind == 1:
            return layers * self._states.shape.value_heads
        return layers * self._states.rows(self._numbers[0], min(self._numbers[2:]))

    def _end_tensor(self) -> None:
        kind = self._place % len(TENSORS)
        if kind == 0:
            self._numbers = self._checked(self._parts.pop())
        self._place, self._came = self._place + 1, 0
        if kind == len(TENSORS) - 1:
            length, floor, *folded = self._numbers
            image = IMAGES[self._place // len(TENSORS) - 1]
            self._images[image] = StateImage(length, floor, tuple(folded), *self._parts)
            self._parts = []

    def _checked(self, lengths: bytearray) -> tuple[int, ...]:
        """Lengths that a slot may have. Raises `InvalidRequest`."""
        length, floor, *folded = numbers = tuple(np.frombuffer(lengths, "<u4").tolist())
        step = self._states.step_tokens
        ordered = max(folded) <= floor <= length <= self._length
        if not ordered or length - floor > step or length - min(folded) > 2 * step:
            raise _refusal(f"no states of {self._length} tokens have the lengths {[*numbers]}")
        return numbers


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="chunk.parts")
