"""Row frames become the arrays that a whole answer would have held; frames that do not fit become an error."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.client.retry import fate_unknown
from ferrum_rpc.core import RowBlock, RowKind
from ferrum_rpc.errors import TransportError
from ferrum_rpc.executor.v1 import output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.rows import Extent, RowParts, rows_from_proto
from tests.support.rows import logit_rows, selected_rows, token_rows, top_token_rows

R, K = 7, 3
DICE = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    return DICE.standard_normal(shape).astype(np.float32)


def tokens(*shape: int) -> Any:
    return DICE.integers(0, 1 << 32, shape, dtype=np.uint32)


BLOCKS: dict[str, RowBlock] = {
    "greedy": token_rows(tokens(R)),
    "greedy with log-probabilities": token_rows(tokens(R), floats(R)),
    "tokens with some of what may be beside them": RowBlock(
        RowKind.TOKENS, {"token_ids": tokens(R), "top_token_ids": tokens(R, K), "top_logprobs": floats(R, K)}
    ),
    "tokens with all": token_rows(tokens(R), floats(R), tokens(R, K), floats(R, K), floats(R, 2)),
    "top tokens": top_token_rows(tokens(R, K), floats(R, K), floats(R)),
    "selected tokens": selected_rows(floats(R, K), floats(R)),
    "logits": logit_rows(floats(R, 33)),
    "half logits": logit_rows(floats(R, 33).astype(np.float16)),
    "bfloat logits": logit_rows(DICE.integers(0, 1 << 16, (R, 33), dtype=np.uint16)),
}


def sent(blocks: list[RowBlock], most: int) -> tuple[list[output_pb2.RowBlock], list[session_pb2.SessionRows]]:
    """The row blocks of an executor's answer, and the frames that go ahead of it."""
    answer = session_pb2.SessionForwardAnswer()
    parts = RowParts(answer.row_blocks, [Extent(block, 0, R, index) for index, block in enumerate(blocks)], most)
    return list(answer.row_blocks), [each.rows for each in parts.frames(1)]


def same(one: RowBlock, other: RowBlock) -> bool:
    pairs = zip(one.columns.values(), other.columns.values(), strict=True)
    return (one.kind, list(one.columns)) == (other.kind, list(other.columns)) and all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.shape == b.shape for a, b in pairs
    )


@pytest.mark.parametrize("most", [1, 4 * R, 8 * K, 8 * 33, 1 << 20])
@pytest.mark.parametrize("kind", BLOCKS)
def test_frames_in_any_order_are_the_whole_block(kind: str, most: int) -> None:
    blocks = [BLOCKS["greedy"], BLOCKS[kind]]
    protos, frames = sent(blocks, most)
    for rows in (each.rows for each in frames):
        assert len(rows.data) <= most or rows.shape[0] == 1
    random.Random(most).shuffle(frames)
    first, second = rows_from_proto(protos, frames)
    assert same(first, blocks[0])
    assert same(second, blocks[1])
    assert not any(column.flags.writeable for column in second.columns.values())


def test_rows_that_wait_for_their_reader_keep_no_rows_of_others() -> None:
    block = logit_rows(floats(R, 33))
    answer, others = session_pb2.SessionForwardAnswer(), weakref.ref(block["logits"])
    parts = RowParts(answer.row_blocks, [Extent(block, 2, 4, 0)], 1)
    expected = block.cut(2, 4)
    del block
    assert others() is None
    assert same(rows_from_proto(answer.row_blocks, [each.rows for each in parts.frames(1)])[0], expected)


def test_rows_are_let_go_when_the_last_frame_is_cut() -> None:
    block = logit_rows(floats(R, 33))
    rows = weakref.ref(block["logits"])
    parts = RowParts(session_pb2.SessionForwardAnswer().row_blocks, [Extent(block, 0, R, 0)], 1)
    del block
    assert len(list(parts.frames(1))) == R
    assert rows() is None


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
    [proto], frames = sent([BLOCKS["logits"]], 2 * 4 * 33)
    DAMAGES[damage](frames, proto)
    with pytest.raises(TransportError) as unreadable:
        rows_from_proto([proto], frames)
    assert fate_unknown(unreadable.value)
