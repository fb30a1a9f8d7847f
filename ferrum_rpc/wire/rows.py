"""Packed rows: one raw tensor per kind for a whole answer, and a row range per item."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import RowBlock, RowKind, Rows
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import output_pb2
from ferrum_rpc.wire.tensor import fill_tensor, tensor_from_proto

_KINDS: Final[dict[str | None, RowKind]] = {kind.field: kind for kind in RowKind}


class RowBlocks(Protocol):
    """The repeated field that an answer's blocks go into."""

    def add(self) -> output_pb2.RowBlock:
        """A new block at its end."""


Put = Callable[[RowBlocks, RowBlock, int, int], None]
"""Adds a block of the rows ``low .. high`` to an answer: `put_block`, or what keeps large rows out of the message."""

Fill = Callable[[Any, str, npt.NDArray[Any]], None]
"""Writes an array into a field of a message of rows: `fill_tensor`, or what keeps its bytes out."""


@dataclass(slots=True)
class _Extent:
    """The rows ``low .. high`` of a block are the answer's, as its block ``index``."""

    index: int
    block: RowBlock
    low: int
    high: int


class RowPacker:
    """Collects the rows of one answer's items.

    Items of one step share blocks, and an answer's rows stand together in them, so that each block leaves as one slice:
    `add` notes the range, `finish` cuts every block once.
    """

    __slots__ = ("_extents", "_latest", "_ranges")

    def __init__(self) -> None:
        self._extents: dict[int, _Extent] = {}
        self._latest: _Extent | None = None
        self._ranges: list[tuple[output_pb2.RowRange, _Extent, int, int]] = []

    def add(self, rows: Rows, target: output_pb2.RowRange) -> None:
        """Note ``rows``; ``target`` is filled by `finish`."""
        block, first, count = rows.block, rows.first, rows.count
        extent = self._latest
        if extent is None or extent.block is not block:
            extent = self._extents.get(id(block))
            if extent is None:
                extent = self._extents[id(block)] = _Extent(len(self._extents), block, first, first + count)
            self._latest = extent
        if first < extent.low:  # noqa: PLR1730 - in a third of the time of `min` and `max`
            extent.low = first
        if first + count > extent.high:  # noqa: PLR1730
            extent.high = first + count
        self._ranges.append((target, extent, first, count))

    def finish(self, row_blocks: RowBlocks, put: Put) -> None:
        """Write the ranges given to `add`, and put the answer's blocks."""
        for target, extent, first, count in self._ranges:
            if extent.index:  # zero is what a field is that nobody set
                target.block = extent.index
            if first != extent.low:
                target.first = first - extent.low
            target.count = count
        for each in self._extents.values():
            put(row_blocks, each.block, each.low, each.high)


def put_block(row_blocks: RowBlocks, block: RowBlock, low: int, high: int) -> None:
    """Add a block of the rows ``low .. high`` to an answer's message."""
    fill_block(row_blocks.add(), block, low, high)


def fill_block(message: output_pb2.RowBlock, block: RowBlock, low: int, high: int, fill: Fill = fill_tensor) -> None:
    """Write the rows ``low .. high`` of a block into its message."""
    rows = getattr(message, block.kind.field)
    for name, column in block.columns.items():
        fill(rows, name, column[low:high])


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
