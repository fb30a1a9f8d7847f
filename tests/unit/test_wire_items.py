"""Work items off the wire: the short cuts for the usual one say what reading every field says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ferrum_rpc.core import FullLogits, Greedy, HandleRef, OutputSpec, Positions, TopTokens, WorkItem
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import forward_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.items import CallShape, item_from_proto
from ferrum_rpc.wire.output import output_from_proto

POSITIONS = {
    output_pb2.POSITIONS_UNSPECIFIED: None,
    output_pb2.POSITIONS_LAST: Positions.LAST,
    output_pb2.POSITIONS_ALL: Positions.ALL,
    output_pb2.POSITIONS_NONE: Positions.NONE,
}
KINDS = (
    ({}, Greedy()),
    ({"greedy": output_pb2.GreedyOutput()}, Greedy()),
    ({"greedy": output_pb2.GreedyOutput(repetition_penalty=1.0)}, Greedy()),
    ({"greedy": output_pb2.GreedyOutput(logprob=True)}, Greedy(logprob=True)),
    ({"top_tokens": output_pb2.TopTokensOutput(k=3)}, TopTokens(3)),
    ({"full_logits": output_pb2.FullLogitsOutput()}, FullLogits()),
)


@pytest.mark.parametrize(("fields", "kind"), KINDS)
def test_an_output_is_what_its_fields_say(fields, kind) -> None:
    for (proto, positions), default in itertools.product(POSITIONS.items(), (Positions.LAST, Positions.ALL)):
        spec = output_pb2.OutputSpec(positions=proto, **fields)
        assert output_from_proto(spec, default) == OutputSpec(positions or default, kind)


def test_a_decode_is_read_whole() -> None:
    spec = output_pb2.OutputSpec(positions=output_pb2.POSITIONS_LAST, greedy=output_pb2.GreedyOutput())
    handle = types_pb2.KvHandle(id=b"h" * 24, seq_len=300, version=7)
    message = forward_pb2.ForwardItem(
        item_id=1 << 63, handle=handle, token_ids=[70_000], truncate_to=0, output=spec, request_id="id"
    )
    item = item_from_proto(message, CallShape.DECODE, ())
    assert type(item) is WorkItem and type(item.handle) is HandleRef
    assert item.tokens.dtype == np.int32 and item.tokens.tolist() == [70_000]
    assert (item.item_id, item.truncate_to, item.request_id) == (1 << 63, 0, "id")
    assert item.handle == HandleRef(b"h" * 24, 300, 7) and item.output == OutputSpec()
    other = item_from_proto(message, CallShape.DECODE, ())
    other.tokens[0] = 1
    assert item.tokens.tolist() == [70_000], "no two items share their tokens"


def test_a_handle_without_an_id_is_a_handle() -> None:
    message = forward_pb2.ForwardItem(handle=types_pb2.KvHandle(), token_ids=[1])
    assert item_from_proto(message, CallShape.DECODE, ()).handle == HandleRef(b"", 0, 0)
    assert item_from_proto(forward_pb2.ForwardItem(token_ids=[1]), CallShape.ANY, ()).handle is None


@pytest.mark.parametrize("tokens", [[1 << 31], [1, (1 << 32) - 1]])
def test_a_token_that_is_none_of_32_bits_is_refused(tokens) -> None:
    with pytest.raises(InvalidRequest):
        item_from_proto(forward_pb2.ForwardItem(token_ids=tokens), CallShape.ANY, ())
