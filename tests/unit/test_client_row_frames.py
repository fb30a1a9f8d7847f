"""Row frames become the arrays that a whole answer would have held; frames that do not fit become an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.client.policy import fate_unknown
from ferrum_rpc.client.row_frames import blocks_with_frames
from ferrum_rpc.core import LogitRows, RowBlock, RowDType, SelectedRows, TokenRows, TopTokenRows
from ferrum_rpc.errors import TransportError
from ferrum_rpc.executor.v1 import output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.rows import fill_block

R, K = 7, 3
DICE = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    return DICE.standard_normal(shape).astype(np.float32)


def tokens(*shape: int) -> Any:
    return DICE.integers(0, 1 << 32, shape, dtype=np.uint32)


BLOCKS: dict[str, RowBlock] = {
    "greedy": TokenRows(tokens(R)),
    "greedy with log-probabilities": TokenRows(tokens(R), floats(R)),
    "top tokens": TopTokenRows(tokens(R, K), floats(R, K), floats(R)),
    "selected tokens": SelectedRows(floats(R, K), floats(R)),
    "logits": LogitRows(RowDType.F32, floats(R, 33)),
    "half logits": LogitRows(RowDType.F16, floats(R, 33).astype(np.float16)),
    "bfloat logits": LogitRows(RowDType.BF16, DICE.integers(0, 1 << 16, (R, 33), dtype=np.uint16)),
}


def block_to_proto(block: RowBlock, low: int, high: int) -> output_pb2.RowBlock:
    message = output_pb2.RowBlock()
    fill_block(message, block, low, high)
    return message


def cut(block: output_pb2.RowBlock, index: int, together: int) -> list[session_pb2.SessionRows]:
    """Take every tensor's bytes out of a block, as an executor does with large ones."""
    frames = []
    rows: Any = getattr(block, block.WhichOneof("kind") or "")
    for field, tensor in rows.ListFields():
        data, row = tensor.data, len(tensor.data) // R
        tensor.ClearField("data")
        for first in range(0, R, together):
            last = min(first + together, R)
            part = types_pb2.Tensor(dtype=tensor.dtype, shape=[last - first, *tensor.shape[1:]])
            part.data = data[first * row : last * row]
            frames.append(session_pb2.SessionRows(block=index, first=first, field=field.number, rows=part))
    return frames


def same(one: RowBlock, other: RowBlock) -> bool:
    names = [name for name in type(one).__slots__ if name != "dtype"]
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return type(one) is type(other) and all(
        a is b is None or (a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.shape == b.shape) for a, b in pairs
    )


@pytest.mark.parametrize("together", [1, 2, R])
@pytest.mark.parametrize("kind", BLOCKS)
def test_frames_in_any_order_are_the_whole_block(kind: str, together: int) -> None:
    whole, framed = BLOCKS["greedy"], BLOCKS[kind]
    protos = [block_to_proto(whole, 0, R), block_to_proto(framed, 0, R)]
    frames = cut(protos[1], 1, together)
    random.Random(together).shuffle(frames)
    first, second = blocks_with_frames(protos, frames)
    assert same(first, whole)
    assert same(second, framed)
    if isinstance(second, LogitRows):
        assert not second.logits.flags.writeable


def test_an_answer_without_frames_is_read_as_ever() -> None:
    [block] = blocks_with_frames([block_to_proto(BLOCKS["logits"], 0, R)], [])
    assert same(block, BLOCKS["logits"])


def test_one_large_tensor_of_a_block_may_come_in_frames_alone() -> None:
    proto = block_to_proto(BLOCKS["top tokens"], 0, R)
    frames = [each for each in cut(block_to_proto(BLOCKS["top tokens"], 0, R), 0, 2) if each.field == 2]
    proto.top_tokens.logits.ClearField("data")
    [block] = blocks_with_frames([proto], frames)
    assert same(block, BLOCKS["top tokens"])


Damage = Callable[[list[session_pb2.SessionRows], output_pb2.RowBlock], object]

DAMAGES: dict[str, Damage] = {
    "a frame is missing": lambda frames, _: frames.pop(),
    "a frame comes twice": lambda frames, _: frames.append(frames[0]),
    "a frame starts elsewhere": lambda frames, _: setattr(frames[1], "first", 1),
    "another block": lambda frames, _: setattr(frames[0], "block", 9),
    "bytes are missing": lambda frames, _: setattr(frames[0].rows, "data", b"\0"),
    "another type": lambda frames, _: setattr(frames[0].rows, "dtype", types_pb2.D_TYPE_I32),
    "no type": lambda _, block: setattr(block.logits.logits, "dtype", 0),
    "no shape": lambda _, block: block.logits.logits.ClearField("shape"),
    "no kind": lambda _, block: block.ClearField("kind"),
    "another kind": lambda _, block: block.tokens.token_ids.shape.append(R),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_frames_that_do_not_fit_are_an_answer_of_unknown_fate(damage: str) -> None:
    proto = block_to_proto(BLOCKS["logits"], 0, R)
    frames = cut(proto, 0, 2)
    DAMAGES[damage](frames, proto)
    with pytest.raises(TransportError) as unreadable:
        blocks_with_frames([proto], frames)
    assert fate_unknown(unreadable.value)
