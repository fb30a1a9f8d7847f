"""Packed rows: one raw tensor per kind for a whole answer, and a row range per item."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import LogitRows, RowBlock, RowDType, Rows, SelectedRows, TokenRows, TopTokenRows
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import output_pb2, types_pb2
from ferrum_rpc.wire.tensor import ROW_DTYPE_FROM_PROTO, ROW_DTYPE_TO_PROTO, fill_tensor, tensor_from_proto

F32 = types_pb2.D_TYPE_F32
U32 = types_pb2.D_TYPE_U32


class RowBlocks(Protocol):
    """The repeated field that an answer's blocks go into."""

    def add(self) -> output_pb2.RowBlock:
        """A new block at its end."""


Put = Callable[[RowBlocks, RowBlock, int, int], None]
"""Adds a block of the rows ``low .. high`` to an answer: `put_block`, or what keeps large rows out of the message."""

Fill = Callable[[Any, str, npt.NDArray[Any], types_pb2.DType], None]
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


def rows_bytes(block: RowBlock, low: int, high: int) -> int:
    """What the rows ``low .. high`` of a block take."""
    return block.nbytes // block.rows * (high - low)


def put_block(row_blocks: RowBlocks, block: RowBlock, low: int, high: int) -> None:
    """Add a block of the rows ``low .. high`` to an answer's message."""
    fill_block(row_blocks.add(), block, low, high)


def fill_block(message: output_pb2.RowBlock, block: RowBlock, low: int, high: int, fill: Fill = fill_tensor) -> None:
    """Write the rows ``low .. high`` of a block into its message."""
    match block:
        case TokenRows(token_ids, logprobs):
            fill(message.tokens, "token_ids", token_ids[low:high], U32)
            if logprobs is not None:
                fill(message.tokens, "logprobs", logprobs[low:high], F32)
        case TopTokenRows(token_ids, logits, logsumexp):
            top = message.top_tokens
            fill(top, "token_ids", token_ids[low:high], U32)
            fill(top, "logits", logits[low:high], F32)
            fill(top, "logsumexp", logsumexp[low:high], F32)
        case SelectedRows(logits, logsumexp):
            selected = message.selected_tokens
            fill(selected, "logits", logits[low:high], F32)
            fill(selected, "logsumexp", logsumexp[low:high], F32)
        case LogitRows(dtype, raw):
            fill(message.logits, "logits", raw[low:high], ROW_DTYPE_TO_PROTO[dtype])


def rows_from_proto(row_blocks: Iterable[output_pb2.RowBlock]) -> list[RowBlock]:
    """The blocks of an answer as numpy views of its bytes (read-only)."""
    return [_block_from_proto(block) for block in row_blocks]


def _block_from_proto(block: output_pb2.RowBlock) -> RowBlock:
    match block.WhichOneof("kind"):
        case "tokens":
            logprobs = tensor_from_proto(block.tokens.logprobs) if block.tokens.HasField("logprobs") else None
            return TokenRows(tensor_from_proto(block.tokens.token_ids), logprobs)
        case "top_tokens":
            top = block.top_tokens
            return TopTokenRows(*(tensor_from_proto(each) for each in (top.token_ids, top.logits, top.logsumexp)))
        case "selected_tokens":
            selected = block.selected_tokens
            return SelectedRows(tensor_from_proto(selected.logits), tensor_from_proto(selected.logsumexp))
        case "logits":
            dtype = ROW_DTYPE_FROM_PROTO[block.logits.logits.dtype]
            return LogitRows(dtype, tensor_from_proto(block.logits.logits))
        case kind:
            raise InvalidRequest(f"an answer carries rows of a kind that this client does not know: {kind}")


def float_rows(rows: LogitRows) -> npt.NDArray[np.float32]:
    """Logits as float32 [R, V], whatever they travelled as."""
    if rows.dtype is RowDType.BF16:
        return (rows.logits.astype(np.uint32) << 16).view(np.float32)
    return rows.logits.astype(np.float32, copy=False)
