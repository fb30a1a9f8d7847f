"""Large rows framed by hand: the bytes of an answer with whole logits, without passing them through a message.

Filling a message copies a tensor twice (into a bytes object, and into the message) and serializing it a third time;
each copy of the 9.7 MB of 32 bfloat16 rows of a 152k vocabulary is a few milliseconds. A message's bytes may be put
together: its fields stand in any order, each with its length. So the rest of the answer is serialized as ever, and the
block of rows is written behind it, from where the step left it. A client parses what it always did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import LogitRows
from ferrum_rpc.executor.v1 import output_pb2, types_pb2
from ferrum_rpc.wire.tensor import ROW_DTYPE_TO_PROTO

M = TypeVar("M")

LARGE_BYTES: Final = 1 << 16
"""Below, a message is as cheap."""

_LENGTH_DELIMITED: Final = 2


@dataclass(frozen=True, slots=True)
class Apart:
    """The rows ``low .. high`` of a block that stay out of the message: the only block of their answer."""

    block: LogitRows
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Framed:
    """An answer ``message`` whose ``row_blocks`` are still empty, and the block that belongs there."""

    message: Any
    rows: Apart

    def to_bytes(self) -> bytes:
        """The answer, serialized."""
        array: npt.NDArray[Any] = self.rows.block.logits[self.rows.low : self.rows.high]
        dtype = ROW_DTYPE_TO_PROTO[self.rows.block.dtype]
        data = array.reshape(-1).view(np.uint8).data
        head = types_pb2.Tensor(dtype=dtype, shape=array.shape).SerializeToString()
        head += _opening(types_pb2.Tensor, "data", len(data))
        for message, field in (
            (output_pb2.LogitRows, "logits"),
            (output_pb2.RowBlock, "logits"),
            (self.message, "row_blocks"),
        ):
            head = _opening(message, field, len(head) + len(data)) + head
        return b"".join((self.message.SerializeToString(), head, data))


def framed(message: M, apart: list[Apart]) -> M:
    """The message itself, or with the rows that `ferrum_rpc.wire.items` left out of it: what a handler returns, and
    `serializing` takes, in place of the message."""
    return cast(M, Framed(message, apart[0])) if apart else message


def serializing(plain: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """A handler's serializer that takes framed answers too."""
    if plain is None:
        return None

    def serialize(answer: Any) -> bytes:
        return answer.to_bytes() if isinstance(answer, Framed) else plain(answer)

    return serialize


def _opening(message: Any, field: str, size: int) -> bytes:
    """What stands before a field of ``size`` bytes."""
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(size)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
