"""A large answer comes in row frames: here they become the arrays that the answer's row blocks stand for.

Each frame is copied once, from its message into its place. A frame that does not fit makes the answer unreadable:
`TransportError`, its step's fate unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import RowBlock
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.executor.v1 import output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.rows import block_from_proto, rows_from_proto
from ferrum_rpc.wire.tensor import NUMPY_BY_DTYPE, tensor_from_proto

Array = npt.NDArray[Any]


def blocks_with_frames(
    row_blocks: Sequence[output_pb2.RowBlock], frames: Sequence[session_pb2.SessionRows]
) -> list[RowBlock]:
    """The blocks of an answer whose large tensors came in ``frames``, in any order."""
    if not frames:
        return rows_from_proto(row_blocks)
    parts: dict[int, dict[int, list[session_pb2.SessionRows]]] = {}
    for frame in frames:
        parts.setdefault(frame.block, {}).setdefault(frame.field, []).append(frame)
    if max(parts) >= len(row_blocks):
        raise _unreadable(f"rows of block {max(parts)} in an answer of {len(row_blocks)}")
    try:
        return [_block(block, parts.get(index, {})) for index, block in enumerate(row_blocks)]
    except (KeyError, ValueError, TypeError) as error:
        raise _unreadable(str(error)) from None
    except TransportError:
        raise
    except ExecutorError as error:
        raise _unreadable(error.message) from None


def _block(block: output_pb2.RowBlock, parts: dict[int, list[session_pb2.SessionRows]]) -> RowBlock:
    def read(rows: Any, name: str) -> Array:
        tensor = getattr(rows, name)
        frames = parts.get(rows.DESCRIPTOR.fields_by_name[name].number)
        return _joined(tensor, frames) if frames else tensor_from_proto(tensor)

    return block_from_proto(block, read)


def _joined(tensor: types_pb2.Tensor, frames: list[session_pb2.SessionRows]) -> Array:
    """The array of the announced shape, filled without gap or overlap."""
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
