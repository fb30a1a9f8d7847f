"""Packed rows: one raw tensor per kind for a whole answer, and a row range per item."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import LogitRows, RowBlock, RowDType, Rows, SelectedRows, TokenRows, TopTokenRows
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import output_pb2, types_pb2
from ferrum_rpc.wire.tensor import ROW_DTYPE_FROM_PROTO, ROW_DTYPE_TO_PROTO, tensor_from_proto, tensor_to_proto

F32 = types_pb2.D_TYPE_F32
U32 = types_pb2.D_TYPE_U32


class RowPacker:
    """Collects the rows of one answer's items.

    Items of one step share blocks, and an answer's rows stand together in them, so that each block leaves as one slice:
    `add` notes the range, `finish` cuts every block once.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[output_pb2.RowRange, int, Rows]] = []

    def add(self, rows: Rows, target: output_pb2.RowRange) -> None:
        """Note ``rows``; ``target`` is filled by `finish`."""
        self._ranges.append((target, id(rows.block), rows))

    def finish(self) -> list[output_pb2.RowBlock]:
        """The answer's blocks; fills the ranges given to `add`."""
        extents: dict[int, tuple[RowBlock, int, int]] = {}
        for _, key, rows in self._ranges:
            block, low, high = extents.get(key, (rows.block, rows.first, rows.first))
            extents[key] = (block, min(low, rows.first), max(high, rows.first + rows.count))
        order = {key: index for index, key in enumerate(extents)}
        for target, key, rows in self._ranges:
            target.block = order[key]
            target.first = rows.first - extents[key][1]
            target.count = rows.count
        return [block_to_proto(block, low, high) for block, low, high in extents.values()]


def block_to_proto(block: RowBlock, low: int, high: int) -> output_pb2.RowBlock:
    """Rows ``low .. high`` of a block."""
    match block:
        case TokenRows(token_ids, logprobs):
            tokens = output_pb2.TokenRows(token_ids=tensor_to_proto(token_ids[low:high], U32))
            if logprobs is not None:
                tokens.logprobs.CopyFrom(tensor_to_proto(logprobs[low:high], F32))
            return output_pb2.RowBlock(tokens=tokens)
        case TopTokenRows(token_ids, logits, logsumexp):
            top = output_pb2.TopTokenRows(
                token_ids=tensor_to_proto(token_ids[low:high], U32),
                logits=tensor_to_proto(logits[low:high], F32),
                logsumexp=tensor_to_proto(logsumexp[low:high], F32),
            )
            return output_pb2.RowBlock(top_tokens=top)
        case SelectedRows(logits, logsumexp):
            selected = output_pb2.SelectedTokenRows(
                logits=tensor_to_proto(logits[low:high], F32), logsumexp=tensor_to_proto(logsumexp[low:high], F32)
            )
            return output_pb2.RowBlock(selected_tokens=selected)
        case LogitRows(dtype, raw):
            full = output_pb2.LogitRows(logits=tensor_to_proto(raw[low:high], ROW_DTYPE_TO_PROTO[dtype]))
            return output_pb2.RowBlock(logits=full)


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
