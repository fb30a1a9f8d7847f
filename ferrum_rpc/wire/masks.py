"""Token masks and grammars on the wire: those that an output names, and the words of a mask that is sent with it."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np

from ferrum_rpc.core import GRAMMAR_ID_BYTES, Grammar, GrammarKind, Greedy, Sample
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import model_executor_pb2, types_pb2

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


def grammar_of_output(message: Any, field: str) -> tuple[bytes, int]:
    """The grammar of a GreedyOutput or a SampleOutput, and where its text begins: b"" and 0 without one. ``field``
    names the message."""
    grammar: bytes = message.grammar_id
    if not grammar:
        if message.grammar_from:
            raise InvalidRequest("grammar_from is for a grammar_id", field=f"{field}.grammar_from")
        return b"", 0
    if message.token_mask_id or message.row_mask_ids or message.HasField("token_mask"):
        raise InvalidRequest("a grammar stands in place of masks", field=f"{field}.grammar_id")
    if len(grammar) != GRAMMAR_ID_BYTES:
        raise InvalidRequest(f"the id of a grammar has {GRAMMAR_ID_BYTES} bytes", field=f"{field}.grammar_id")
    return grammar, message.grammar_from


def grammar_from_proto(request: model_executor_pb2.RegisterGrammarRequest) -> Grammar:
    """Wire to domain. Raises `InvalidRequest` for an unknown kind, and a text that is empty or not UTF-8."""
    try:
        kind = GrammarKind(request.kind)
    except ValueError:
        raise InvalidRequest(f"invalid kind of grammar: {request.kind}", field="kind") from None
    try:
        if not request.text.decode().strip():
            raise InvalidRequest("the text of the grammar is empty", field="text")
    except UnicodeDecodeError as error:
        message = f"the text of a grammar must be UTF-8: {error.reason} at byte {error.start}"
        raise InvalidRequest(message, field="text") from None
    return Grammar(kind, request.text)


def grammar_to_proto(grammar: Grammar) -> model_executor_pb2.RegisterGrammarRequest:
    """The client's direction."""
    return model_executor_pb2.RegisterGrammarRequest(kind=f"GRAMMAR_KIND_{grammar.kind.name}", text=grammar.text)


def fill_masks(message: Any, kind: Greedy | Sample) -> None:
    """Write the masks or the grammar of an output into its message."""
    message.token_mask_id = kind.mask
    message.row_mask_ids.extend(kind.row_masks)
    message.grammar_id, message.grammar_from = kind.grammar, kind.grammar_from


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
