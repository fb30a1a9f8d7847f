"""Token masks on the wire: those that an output names, and the words of one that is sent with it."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np

from ferrum_rpc.core import Greedy, Sample
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import types_pb2

ID_BYTES: Final = 32
"""Bytes of an id: SHA-256 of the words."""


def id_of(words: bytes) -> bytes:
    """The id of a mask."""
    return hashlib.sha256(words).digest()


def words_from_proto(tensor: types_pb2.Tensor, field: str) -> bytes:
    """The words of a mask, I32 [n]. Raises `InvalidRequest`; the service floor checks their number."""
    words = tensor.data
    if tensor.dtype != types_pb2.D_TYPE_I32 or list(tensor.shape) != [len(words) / 4]:
        raise InvalidRequest("the words of a mask are a tensor I32 [n] of 4·n bytes", field=field)
    return words


def words_to_proto(words: bytes) -> types_pb2.Tensor:
    """The client's direction."""
    return types_pb2.Tensor(dtype=types_pb2.D_TYPE_I32, shape=[len(words) // 4], data=words)


def masks_from_proto(message: Any, field: str) -> tuple[bytes, tuple[bytes, ...]]:
    """The mask of a GreedyOutput or a SampleOutput, and those of its rows: at most one of the two is there. ``field``
    names the message."""
    mask, row_masks = message.token_mask_id, tuple(message.row_mask_ids)
    inline = message.HasField("token_mask")
    if (mask != b"") + inline + bool(row_masks) > 1:
        raise InvalidRequest(
            "token_mask_id, token_mask and row_mask_ids stand in place of each other", field=f"{field}.token_mask_id"
        )
    if inline:
        mask = id_of(words_from_proto(message.token_mask, f"{field}.token_mask"))
    elif mask and len(mask) != ID_BYTES:
        raise _no_id(f"{field}.token_mask_id")
    elif any(each and len(each) != ID_BYTES for each in row_masks):
        raise _no_id(f"{field}.row_mask_ids")
    return mask, row_masks


def _no_id(field: str) -> InvalidRequest:
    return InvalidRequest(f"the id of a mask has {ID_BYTES} bytes", field=field)


def fill_masks(message: Any, kind: Greedy | Sample) -> None:
    """Write the masks of an output into its message."""
    message.token_mask_id = kind.mask
    message.row_mask_ids.extend(kind.row_masks)


def pack_mask(mask: Any) -> bytes:
    """The words of a mask given as bools [V], or as words: integers of 32 bits [ceil(V / 32)]. Raises ValueError."""
    array = np.asarray(mask)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"a mask has one dimension and is not empty, not {[*array.shape]}")
    if array.dtype == np.bool_:
        packed = np.packbits(array, bitorder="little")
        return packed.tobytes() + bytes(-len(packed) % 4)
    if array.dtype not in (np.int32, np.uint32):
        raise ValueError(f"a mask is of bools, or of int32 or uint32 words, not of {array.dtype}")
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
