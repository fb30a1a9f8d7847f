"""Recurrent states as rows of a stream: what was sent arrives, and what no slot can hold is refused at its lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ferrum_rpc.core import MovedStates, RecurrentShape, StateTensors
from ferrum_rpc.core import StateLengths as Lengths
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import kv_transfer_pb2
from ferrum_rpc.wire.kv_stream import rows_to_proto
from ferrum_rpc.wire.state_stream import StateReceiver, row_tensors, rows_of

STATES = StateTensors(RecurrentShape(1, 2, 3, 5), 2, "bfloat16", "float32", 32)
LENGTH = 200


TENSORS = row_tensors(STATES)


def chunks(moved: MovedStates, most: int = 64) -> list[kv_transfer_pb2.KvChunk]:
    """Of images of these lengths; what else they have is random."""
    dice, found = np.random.default_rng(0), []
    for each in rows_of(STATES, moved, most):
        tensor, [length, floor, folded] = TENSORS[each.name], getattr(moved, each.image)
        data = np.frombuffer(dice.bytes(each.rows * tensor.row_bytes), np.uint8)
        if each.tensor == "lengths":
            data = np.array([length, floor, *folded][each.first : each.first + each.rows], "<u4").view(np.uint8)
        frame = rows_to_proto(tensor, each.first, data, 7)
        found.append(kv_transfer_pb2.ExportKvResponse.FromString(frame).chunk)
    return found


def received(sent: list[kv_transfer_pb2.KvChunk]) -> MovedStates:
    """The lengths; rows are those that were sent, in their order."""
    receiver, came = StateReceiver(STATES, LENGTH), []
    for each in sent:
        rows, tensor, data = receiver.take(each)
        came.append((tensor.name, rows.first, rows.rows, data))
        assert rows.name == tensor.name and len(data) == rows.rows * tensor.row_bytes
    moved = receiver.end()
    parts = [(each.parts[0].tensor, each.first_row, each.parts[0].data) for each in sent]
    assert came == [(name, first, part.shape[0], part.data) for name, first, part in parts]
    return moved


@pytest.mark.parametrize("most", [1, 64, 1 << 20])
def test_what_was_sent_arrives(most: int) -> None:
    one, other, early = Lengths(200, 190, (190, 170)), Lengths(192, 192, (192, 192)), Lengths(2, 1, (0, 0))
    for moved in (MovedStates(one, other), MovedStates(None, early), MovedStates(early), MovedStates()):
        sent = chunks(moved, most)
        assert received(sent) == moved
        assert all(len(each.parts[0].data.data) <= max(most, 60) for each in sent)
        for end in range(1, len(sent)):
            if sent[end].parts[0].tensor != "checkpoint.lengths" or sent[end].first_row:
                with pytest.raises(InvalidRequest):
                    received(sent[:end])


@pytest.mark.parametrize(
    "lengths",
    [
        (201, 201, (201, 201)),
        (100, 67, (67, 67)),
        (100, 101, (100, 100)),
        (100, 90, (90, 91)),
        (100, 90, (35, 90)),
        (2**32 - 1, 2**32 - 1, (2**32 - 1, 2**32 - 1)),
    ],
)
def test_lengths_that_no_slot_can_have_are_refused_before_any_row(lengths: Any) -> None:
    [first, *_] = chunks(MovedStates(Lengths(*lengths)), 1 << 20)
    with pytest.raises(InvalidRequest, match="lengths"):
        received([first])


def test_the_deepest_lengths_that_a_slot_can_have_are_taken() -> None:
    deepest = MovedStates(Lengths(200, 168, (136, 168)), Lengths(200, 168, (168, 136)))
    assert received(chunks(deepest)) == deepest


def rename(chunk: kv_transfer_pb2.KvChunk) -> None:
    chunk.parts[0].tensor = "x"


def multiply(chunk: kv_transfer_pb2.KvChunk) -> None:
    part = chunk.parts[0].data
    part.shape[0], part.data = 4, part.data * 4


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (rename, "chunk.parts.tensor", r"'x' came where those of slot\.states from 1 on were"),
        (lambda each: each.parts.append(each.parts[0]), "chunk.parts", "one part, not 2"),
        (lambda each: setattr(each, "first_row", 2), "chunk.first_row", r"slot\.states must be 1, not 2"),
        (lambda each: each.parts[0].data.shape.append(1), "chunk.parts.data", r"\[3, 5\] in D_TYPE_F32, of 60 bytes"),
        (lambda each: setattr(each.parts[0].data, "dtype", 99), "chunk.parts.data", "in 99"),
        (multiply, "chunk.parts.data", r"1 to 3 rows of slot\.states were expected, not 4"),
    ],
)
def test_a_refusal_says_which_field_is_wrong_and_what_was_expected(change: Any, field: str, message: str) -> None:
    sent = chunks(MovedStates(Lengths(200, 190, (190, 170))), 60)
    second = [each.parts[0].tensor for each in sent].index("slot.states") + 1
    change(sent[second])
    with pytest.raises(InvalidRequest, match=message) as refused:
        received(sent)
    assert refused.value.field == field


def test_an_end_or_a_tensor_that_comes_too_early_is_told_what_was_expected() -> None:
    sent = chunks(MovedStates(Lengths(200, 190, (190, 170))), 1 << 20)
    with pytest.raises(InvalidRequest, match=r"those of slot\.lengths or checkpoint\.lengths were") as refused:
        received(sent[1:])
    assert refused.value.field == "chunk.parts.tensor"
    with pytest.raises(InvalidRequest, match=r"ends where those of slot\.gates from 0 on were") as refused:
        received(sent[:-1])
    assert refused.value.field == "trailer"
    both = MovedStates(Lengths(200, 190, (190, 170)), Lengths(8, 8, (8, 8)))
    with pytest.raises(InvalidRequest, match="where no more rows were"):
        received([*chunks(both), *sent])


def test_rows_of_another_shape_or_type_are_refused() -> None:
    for index in range(4):
        for change in (
            lambda data: data.shape.append(1),
            lambda data: data.shape.insert(0, 1),
            lambda data: setattr(data, "dtype", 5),
            lambda data: setattr(data, "data", data.data[:-1]),
        ):
            sent = chunks(MovedStates(Lengths(200, 190, (190, 170))), 1 << 20)
            change(sent[index].parts[0].data)
            with pytest.raises(InvalidRequest):
                received(sent)
    sent = chunks(MovedStates(Lengths(200, 190, (190, 170))), 1 << 20)
    sent[1].parts[0].data.shape[:] = [4, 5, 3]
    with pytest.raises(InvalidRequest, match="shape"):
        received(sent)
