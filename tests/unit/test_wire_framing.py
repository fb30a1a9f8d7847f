"""An answer framed by hand is the answer: byte by byte of the rows, field by field of the rest."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.core import HandleRef, ItemAnswer, RowDType, Rows
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2
from ferrum_rpc.wire.framing import LARGE_BYTES, Framed, framed, serializing
from ferrum_rpc.wire.items import fill_outputs, fill_results
from ferrum_rpc.wire.rows import fill_block
from tests.support.rows import logit_rows, token_rows

ITEMS = [forward_pb2.ForwardItem(item_id=number) for number in range(3)]
RAW = {RowDType.F32: np.float32, RowDType.F16: np.float16, RowDType.BF16: np.uint16}


def logits(dtype, rows, width):
    return logit_rows(np.random.default_rng(0).integers(0, 1000, (rows, width)).astype(RAW[dtype]))


def answers(*rows):
    return [ItemAnswer(HandleRef(b"handle-%d" % number, 5, number), each) for number, each in enumerate(rows)]


def both(outcomes, fill=lambda answer, outcomes: fill_results(answer, ITEMS, outcomes)):
    """The message as it is filled, and what is sent where large rows stay out of it."""
    whole, rest = model_executor_pb2.BatchDecodeResponse(), model_executor_pb2.BatchDecodeResponse()
    for extent in fill(whole, outcomes):
        fill_block(whole.row_blocks.add(), extent)
    rows = fill(rest, outcomes)
    for each in (whole, rest):
        each.timing.forward_micros = 7
    return whole, framed(rest, rows)


@pytest.mark.parametrize(
    ("dtype", "width"), [(RowDType.F32, 1 << 14), (RowDType.F16, 151_936), (RowDType.BF16, (1 << 21) + 1)]
)
def test_the_bytes_are_the_messages(dtype, width):
    block = logits(dtype, 5, width)
    outcomes = answers(Rows(block, 1, 1), Rows(block, 2, 2), None)  # a part of the block, and nothing
    whole, sent = both(outcomes)
    assert isinstance(sent, Framed) and not sent.message.row_blocks
    received = model_executor_pb2.BatchDecodeResponse.FromString(sent.to_bytes())
    assert received == whole
    assert len(sent.to_bytes()) == whole.ByteSize()


def test_a_single_item_is_framed_as_well():
    block = logits(RowDType.F32, 1, LARGE_BYTES)
    whole, sent = both(
        answers(Rows(block, 0, 1)), lambda answer, of: fill_outputs([(answer.results.add().output, of[0])])
    )
    assert isinstance(sent, Framed)
    assert model_executor_pb2.BatchDecodeResponse.FromString(sent.to_bytes()) == whole


SMALL = token_rows(np.arange(3, dtype=np.uint32), np.arange(3, dtype=np.float32))


@pytest.mark.parametrize("large", [0, 1, 2])
def test_blocks_keep_their_order(large):
    blocks = [SMALL, token_rows(np.arange(3, dtype=np.uint32)), SMALL]
    blocks[large] = logits(RowDType.F32, 3, LARGE_BYTES)
    outcomes = answers(*(Rows(block, number, 1) for number, block in enumerate(blocks)))
    whole, sent = both(outcomes)
    assert isinstance(sent, Framed)
    assert model_executor_pb2.BatchDecodeResponse.FromString(sent.to_bytes()) == whole


@pytest.mark.parametrize(
    "blocks",
    [[logits(RowDType.F32, 3, 16)], [token_rows(np.arange(LARGE_BYTES, dtype=np.uint32))], [SMALL]],
    ids=["small", "no logits", "small ids"],
)
def test_other_answers_are_messages(blocks):
    outcomes = answers(*(Rows(blocks[number % len(blocks)], number, 1) for number in range(3)))
    whole, sent = both(outcomes)
    assert sent == whole


def test_a_serializer_takes_both():
    serialize = serializing(model_executor_pb2.DecodeResponse.SerializeToString)
    message = model_executor_pb2.DecodeResponse()
    message.timing.forward_micros = 3
    assert serialize is not None and serialize(message) == message.SerializeToString()
    assert serializing(None) is None
