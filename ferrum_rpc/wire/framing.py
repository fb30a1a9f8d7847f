"""Framing of large rows by hand: the bytes of an answer with complete logits, without copying them through a message.

Filling a message copies a tensor twice (into a bytes object, and into the message) and serializing it a third time.
Each copy of the 9.7 MB of 32 bfloat16 rows of a 152k vocabulary takes a few milliseconds. The bytes of a message may be
assembled: its fields may be in any order, each with its length. So the rest of the answer is serialized as usual, and
the block of rows is written behind it, directly from the step's memory. A client parses the usual format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import RowKind
from ferrum_rpc.executor.v1 import kv_transfer_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.rows import Extent, fill_block
from ferrum_rpc.wire.tensor import DTYPE_BY_NUMPY

M = TypeVar("M")

LARGE_BYTES: Final = 1 << 16
"""Below this size a message is as fast."""

_LENGTH_DELIMITED: Final = 2


@dataclass(frozen=True, slots=True)
class Framed:
    """An answer's ``message``, and the last of its ``row_blocks``, which the message omits."""

    message: Any
    blocks: Sequence[Extent]

    def to_bytes(self) -> bytes:
        pieces = [self.message.SerializeToString()]
        for extent in self.blocks:
            pieces += _pieces(self.message, extent)
        return b"".join(pieces)


def framed(answer: M, extents: Sequence[Extent]) -> M:
    """The answer with its rows; or, from the first large block of logits on, with those that its message omits: a
    handler may return it, and `serializing` accepts it, in place of the message."""
    message: Any = answer
    for index, extent in enumerate(extents):
        block = extent.block
        if block.kind is RowKind.LOGITS and block.bytes_of(extent.high - extent.low) >= LARGE_BYTES:
            return cast(M, Framed(message, extents[index:]))
        fill_block(message.row_blocks.add(), extent)
    return answer


def serializing(plain: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """A handler's serializer that also accepts framed answers, and answers that are bytes already."""
    if plain is None:
        return None

    def serialize(answer: Any) -> bytes:
        if isinstance(answer, bytes):
            return answer
        return answer.to_bytes() if isinstance(answer, Framed) else plain(answer)

    return serialize


def framed_chunk(
    layer: int,
    first_token: int,
    parts: Sequence[tuple[str, Any, tuple[int, ...], Any]],
    crc32c: int,
    *,
    by_name: bool = False,
    first_row: int = 0,
) -> bytes:
    """An `ExportKvResponse` with a chunk. ``parts``: of each of its tensors the field, or ``by_name`` the name, the
    type, shape and bytes."""
    chunk = kv_transfer_pb2.KvChunk(layer=layer, first_token=first_token, crc32c=crc32c, first_row=first_row)
    pieces: list[Any] = [chunk.SerializeToString()]
    for name, dtype, shape, data in parts:
        head, field = types_pb2.Tensor(dtype=dtype, shape=shape).SerializeToString(), name
        head += _opening(types_pb2.Tensor, "data", len(data))
        if by_name:
            part, field = kv_transfer_pb2.KvPart(tensor=name).SerializeToString(), "parts"
            head = part + _opening(kv_transfer_pb2.KvPart, "data", len(head) + len(data)) + head
        pieces += (_opening(kv_transfer_pb2.KvChunk, field, len(head) + len(data)) + head, data)
    return b"".join([_opening(kv_transfer_pb2.ExportKvResponse, "chunk", sum(map(len, pieces))), *pieces])


def _pieces(answer: Any, extent: Extent) -> tuple[Any, ...]:
    """An element of the answer's ``row_blocks``, as consecutive pieces of bytes."""
    block = extent.block
    if block.kind is not RowKind.LOGITS:
        message = output_pb2.RowBlock()
        fill_block(message, extent)
        data = message.SerializeToString()
        return _opening(answer, "row_blocks", len(data)), data
    array: npt.NDArray[Any] = block["logits"][extent.low : extent.high]
    raw = array.reshape(-1).view(np.uint8).data
    head = types_pb2.Tensor(dtype=DTYPE_BY_NUMPY[array.dtype], shape=array.shape).SerializeToString()
    head += _opening(types_pb2.Tensor, "data", len(raw))
    for parent, field in ((output_pb2.LogitRows, "logits"), (output_pb2.RowBlock, "logits"), (answer, "row_blocks")):
        head = _opening(parent, field, len(head) + len(raw)) + head
    return head, raw


def _opening(message: Any, field: str, size: int) -> bytes:
    """The bytes before a field of ``size`` bytes."""
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(size)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
