"""Packed rows: one raw tensor per kind for a whole answer, and a row range per item. Cut here, and read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import RowBlock, RowKind
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import output_pb2, session_pb2
from ferrum_rpc.wire.tensor import describe, fill_tensor, tensor_from_proto

_KINDS: Final[dict[str | None, RowKind]] = {kind.field: kind for kind in RowKind}


@dataclass(slots=True)
class Extent:
    """The rows ``low .. high`` of a block are an answer's, as its block ``index``."""

    block: RowBlock
    low: int
    high: int
    index: int


def fill_block(message: output_pb2.RowBlock, extent: Extent) -> None:
    """Write rows into their message."""
    rows = getattr(message, extent.block.kind.field)
    for name, column in extent.block.columns.items():
        fill_tensor(getattr(rows, name), column[extent.low : extent.high])


class RowParts:
    """The large tensors of one answer of a session, in parts: a client that waits for a small answer should not wait
    behind megabytes. What is above ``most`` bytes stays out of the answer's message, which gets its type and shape.

    The parts are cut from the rows as they are sent, so that an answer that its client reads slowly takes the memory of
    its rows and of one part, and no turn of the event loop copies all of it.
    """

    __slots__ = ("_most", "_tensors")

    def __init__(self, row_blocks: Any, extents: Iterable[Extent], most: int) -> None:
        self._most = most
        self._tensors: list[tuple[int, int, npt.NDArray[Any]]] = []
        for extent in extents:
            block, low, high = extent.block, extent.low, extent.high
            rows = getattr(row_blocks.add(), block.kind.field)
            for name, column in block.columns.items():
                array, tensor = column[low:high], getattr(rows, name)
                if array.nbytes <= most:
                    fill_tensor(tensor, array)
                    continue
                if 2 * (high - low) < len(column):  # the rows of other calls must not stay until these are read
                    array = array.copy()
                describe(tensor, array)
                self._tensors.append((extent.index, rows.DESCRIPTOR.fields_by_name[name].number, array))

    def frames(self, step_id: int) -> Iterator[session_pb2.SessionResponse]:
        """The frames, once: each of ``most`` bytes of rows, or of one row."""
        while self._tensors:
            block, field, array = self._tensors.pop(0)
            together = max(1, self._most // (array.nbytes // len(array)))
            for first in range(0, len(array), together):
                frame = session_pb2.SessionResponse(step_id=step_id)
                rows = frame.rows
                rows.block, rows.field, rows.first = block, field, first
                fill_tensor(rows.rows, array[first : first + together])
                yield frame


def rows_from_proto(row_blocks: Iterable[output_pb2.RowBlock]) -> list[RowBlock]:
    """The blocks of an answer as numpy views of its bytes (read-only)."""
    return [block_from_proto(block, lambda rows, name: tensor_from_proto(getattr(rows, name))) for block in row_blocks]


def block_from_proto(block: output_pb2.RowBlock, read: Callable[[Any, str], npt.NDArray[Any]]) -> RowBlock:
    """A block whose columns ``read`` gets from the fields of a message of rows. Raises `InvalidRequest` for a kind that
    this program does not know."""
    kind = _KINDS.get(block.WhichOneof("kind"))
    if kind is None:
        raise InvalidRequest("an answer carries rows of a kind that this client does not know")
    rows, names = getattr(block, kind.field), kind.columns
    given = [name for index, name in enumerate(names) if index < kind.required or rows.HasField(name)]
    return RowBlock(kind, {name: read(rows, name) for name in given})


def float_rows(logits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Logits as float32 [R, V], whatever they travelled as."""
    if logits.dtype == np.uint16:
        return (logits.astype(np.uint32) << 16).view(np.float32)
    return logits.astype(np.float32, copy=False)
