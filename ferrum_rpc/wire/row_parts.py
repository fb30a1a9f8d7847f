"""Large answers of a session in parts: a client that waits for a small one should not wait behind megabytes.

The parts are cut from the rows as they are sent, so that an answer that its client reads slowly takes the memory of its
rows and of one part, and no turn of the event loop copies all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from ferrum_rpc.core import RowBlock
from ferrum_rpc.executor.v1 import session_pb2, types_pb2
from ferrum_rpc.wire.rows import RowBlocks, fill_block
from ferrum_rpc.wire.tensor import DTYPE_BY_NUMPY, fill_tensor


class RowParts:
    """The large tensors of one answer: what is above ``most`` bytes stays out of its message, which gets its type and
    shape."""

    __slots__ = ("_block", "_most", "_shared", "_tensors")

    def __init__(self, most: int) -> None:
        self._most = most
        self._block = -1
        self._shared = False
        self._tensors: list[tuple[int, int, npt.NDArray[Any]]] = []

    def put(self, row_blocks: RowBlocks, block: RowBlock, low: int, high: int) -> None:
        """A `ferrum_rpc.wire.rows.Put`."""
        self._block += 1
        self._shared = 2 * (high - low) < block.rows
        fill_block(row_blocks.add(), block, low, high, self._fill)

    def _fill(self, message: Any, field: str, array: npt.NDArray[Any]) -> None:
        if array.nbytes <= self._most:
            fill_tensor(message, field, array)
            return
        if self._shared:  # the rows of others must not stay until these are read
            array = array.copy()
        tensor: types_pb2.Tensor = getattr(message, field)
        tensor.dtype = DTYPE_BY_NUMPY[array.dtype]
        tensor.shape.extend(array.shape)
        number = message.DESCRIPTOR.fields_by_name[field].number
        self._tensors.append((self._block, number, array))

    def frames(self, step_id: int) -> Iterator[session_pb2.SessionResponse]:
        """The frames, once: each of ``most`` bytes of rows, or of one row."""
        while self._tensors:
            block, field, array = self._tensors.pop(0)
            together = max(1, self._most // (array.nbytes // len(array)))
            for first in range(0, len(array), together):
                frame = session_pb2.SessionResponse(step_id=step_id)
                rows = frame.rows
                rows.block, rows.field, rows.first = block, field, first
                fill_tensor(rows, "rows", array[first : first + together])
                yield frame
