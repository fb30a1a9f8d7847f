"""Packed rows: one raw tensor per kind for a whole answer, and a row range per item. They are cut and read here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import RowBlock, RowKind
from ferrum_rpc.errors import InvalidRequest, TransportError
from ferrum_rpc.executor.v1 import output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.tensor import NUMPY_BY_DTYPE, describe, fill_tensor, tensor_from_proto

_KINDS: Final[dict[str | None, RowKind]] = {kind.field: kind for kind in RowKind}


@dataclass(slots=True)
class Extent:
    """The rows ``low .. high`` of a block, which are block ``index`` of an answer."""

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
    behind megabytes. What is above ``max_bytes`` stays out of the answer's message, which gets its type and
    shape.

    The parts are cut from the rows as they are sent, so that an answer that its client reads slowly takes the memory of
    its rows and of one part, and no turn of the event loop copies all of it.
    """

    __slots__ = ("_max_bytes", "_tensors")

    def __init__(self, row_blocks: Any, extents: Iterable[Extent], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tensors: list[tuple[int, int, npt.NDArray[Any]]] = []
        for extent in extents:
            block, low, high = extent.block, extent.low, extent.high
            rows = getattr(row_blocks.add(), block.kind.field)
            for name, column in block.columns.items():
                array, tensor = column[low:high], getattr(rows, name)
                if array.nbytes <= max_bytes:
                    fill_tensor(tensor, array)
                    continue
                if 2 * (high - low) < len(column):  # the rows of other calls must not stay until these are read
                    array = array.copy()
                describe(tensor, array)
                self._tensors.append((extent.index, rows.DESCRIPTOR.fields_by_name[name].number, array))

    def frames(self, step_id: int) -> Iterator[session_pb2.SessionResponse]:
        """The frames, once: each of ``max_bytes`` bytes of rows, or of one row."""
        while self._tensors:
            block, field, array = self._tensors.pop(0)
            together = max(1, self._max_bytes // (array.nbytes // len(array)))
            for first in range(0, len(array), together):
                frame = session_pb2.SessionResponse(step_id=step_id)
                rows = frame.rows
                rows.block, rows.field, rows.first = block, field, first
                fill_tensor(rows.rows, array[first : first + together])
                yield frame


Frames = dict[int, list[session_pb2.SessionRows]]
"""Row frames of one block, by the field that they are parts of."""


def rows_from_proto(
    row_blocks: Sequence[output_pb2.RowBlock], frames: Sequence[session_pb2.SessionRows] = ()
) -> list[RowBlock]:
    """The blocks of an answer: numpy views of its bytes (read-only), or arrays filled from the row frames that came
    before it, in any order, each copied once. Raises `InvalidRequest` for a kind that this program does not know, and
    `TransportError` for frames that do not fit: then the answer cannot be read, and its step's fate is unknown."""
    if not frames:
        return [_block_from_proto(block, {}) for block in row_blocks]
    blocks: dict[int, Frames] = {}
    for frame in frames:
        blocks.setdefault(frame.block, {}).setdefault(frame.field, []).append(frame)
    if max(blocks) >= len(row_blocks):
        raise _unreadable(f"rows of block {max(blocks)} in an answer of {len(row_blocks)}")
    try:
        return [_block_from_proto(block, blocks.get(index, {})) for index, block in enumerate(row_blocks)]
    except (KeyError, ValueError, TypeError) as error:
        raise _unreadable(str(error)) from None
    except InvalidRequest as error:
        raise _unreadable(error.message) from None


def _block_from_proto(block: output_pb2.RowBlock, frames: Frames) -> RowBlock:
    kind = _KINDS.get(block.WhichOneof("kind"))
    if kind is None:
        raise InvalidRequest("an answer carries rows of a kind that this client does not know")
    rows, columns = getattr(block, kind.field), {}
    for index, name in enumerate(kind.columns):
        if index < kind.required or rows.HasField(name):
            tensor = getattr(rows, name)
            parts = frames.get(rows.DESCRIPTOR.fields_by_name[name].number) if frames else None
            columns[name] = _joined(tensor, parts) if parts else tensor_from_proto(tensor)
    return RowBlock(kind, columns)


def _joined(tensor: types_pb2.Tensor, frames: list[session_pb2.SessionRows]) -> npt.NDArray[Any]:
    """The array of the announced shape, filled without gaps or overlaps."""
    array = np.empty(tuple(tensor.shape), NUMPY_BY_DTYPE[tensor.dtype])
    filled = 0
    for frame in sorted(frames, key=lambda each: each.first):
        rows = tensor_from_proto(frame.rows)
        end = filled + len(rows)
        if frame.first != filled or end > len(array) or rows.dtype != array.dtype or rows.shape[1:] != array.shape[1:]:
            raise _unreadable(
                f"row frame {list(rows.shape)} at {frame.first} does not fit {list(array.shape)} after {filled}"
            )
        array[filled:end] = rows
        filled = end
    if filled != len(array):
        raise _unreadable(f"{filled} of {len(array)} rows came")
    array.flags.writeable = False
    return array


def _unreadable(what: str) -> TransportError:
    return TransportError(f"the executor's row frames cannot be read: {what}", metadata={"grpc_code": "INTERNAL"})


def float_rows(logits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Logits as float32 [R, V], whatever type was sent."""
    if logits.dtype == np.uint16:
        return (logits.astype(np.uint32) << 16).view(np.float32)
    return logits.astype(np.float32, copy=False)
