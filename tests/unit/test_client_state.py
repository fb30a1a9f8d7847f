"""The client's view of a sequence: it advances with answers only, and repeats a doubtful call under the same id."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ferrum_rpc.client import Greedy, HandleRef, NextToken, OutputSpec, Positions, RowLogprobs, Sample
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.state import Item, SequenceMisuseError, SequenceState
from ferrum_rpc.errors import (
    HandleReleased,
    KvBlocksExhausted,
    QueueFull,
    SequenceBusy,
    StepFailed,
    TransportError,
    TruncateBeyondLength,
)
from ferrum_rpc.executor.v1 import forward_pb2, info_pb2
from ferrum_rpc.wire.items import handle_to_proto

LOST = TransportError("lost", metadata={"grpc_code": "UNAVAILABLE"})
SPEC = OutputSpec()


async def no_repeat(_: Any) -> list[HandleRef]:
    return []


def handle(version: int, length: int, name: bytes = b"id") -> HandleRef:
    return HandleRef(name, length, version)


def state(**fields: Any) -> SequenceState:
    return SequenceState(forward_pb2.CreateOptions(), **fields)


def item(of: SequenceState, tokens: list[int], truncate_to: int | None = None) -> Item:
    return of.item(1, tokens, SPEC, truncate_to)


def test_the_handle_advances_with_an_answer_and_with_nothing_else():
    sequence = state()
    first = item(sequence, [1, 2])
    sequence.failed(first, KvBlocksExhausted("no"), no_repeat)
    assert sequence.handle is None
    sequence.committed(first, handle(1, 2), 0)
    assert (sequence.handle, sequence.length) == (handle(1, 2), 2)
    sequence.failed(item(sequence, [3]), LOST, no_repeat)
    assert sequence.handle == handle(1, 2)


def test_a_late_replay_of_an_older_answer_does_not_turn_the_handle_back():
    sequence = state(tokens=[])
    first = item(sequence, [1])
    sequence.committed(first, handle(1, 1), 0)
    second = item(sequence, [2])
    sequence.committed(second, handle(2, 2), 0)
    sequence.committed(first, handle(1, 1), 0)
    assert sequence.handle == handle(2, 2)
    assert sequence.tokens == [1, 2]


def test_every_item_has_a_request_id_of_its_own():
    sequence = state()
    ids = {item(sequence, [1]).request_id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 32 for each in ids)


@pytest.mark.parametrize("error", [LOST, asyncio.CancelledError(), QueueFull("no"), SequenceBusy("no")])
def test_the_same_call_after_an_unknown_fate_carries_the_same_request_id(error):
    sequence = state(handle=handle(1, 4))
    lost = item(sequence, [7])
    sequence.failed(lost, error, no_repeat)
    assert item(sequence, [7]).request_id == lost.request_id
    assert item(sequence, [8]).request_id != lost.request_id
    assert item(sequence, [7], truncate_to=2).request_id != lost.request_id
    sequence.committed(lost, handle(2, 5), 0)
    following = item(sequence, [7])
    assert following.request_id != lost.request_id
    sequence.failed(following, KvBlocksExhausted("no"), no_repeat)
    assert item(sequence, [7]).request_id != following.request_id, "it was refused for good"


def test_a_doubtful_creation_stays_known_until_it_is_settled():
    sequence = state()
    lost = item(sequence, [1])
    sequence.failed(lost, LOST, no_repeat)
    assert sequence.creation is not None
    assert sequence.creation.repeat is no_repeat
    other = item(sequence, [2])
    sequence.failed(other, QueueFull("no"), no_repeat)
    assert sequence.creation.request_id == lost.request_id, "it may have created a sequence; the other one did not"
    sequence.committed(lost, handle(1, 1), 0)
    assert sequence.creation is None
    refused = state()
    refused.failed(item(refused, [1]), QueueFull("no"), no_repeat)
    assert refused.creation is not None and refused.creation.repeat is None, "there is nothing to be released"


@pytest.mark.parametrize("error", [KvBlocksExhausted("no"), SequenceBusy("no"), QueueFull("no")])
def test_what_another_call_is_told_does_not_settle_an_unknown_fate(error):
    sequence = state(handle=handle(1, 4))
    lost = item(sequence, [7])
    sequence.failed(lost, LOST, no_repeat)
    sequence.failed(item(sequence, [8]), error, no_repeat)
    assert item(sequence, [7]).request_id == lost.request_id


def test_kept_tokens_follow_feeding_and_rolling_back():
    sequence = state(tokens=[])
    sequence.committed(item(sequence, [1, 2, 3]), handle(1, 3), 0)
    sequence.committed(item(sequence, [9], truncate_to=1), handle(2, 2), 0)
    assert sequence.tokens == [1, 9]
    sequence.rolled_back(handle(3, 1))
    assert sequence.tokens == [1]


def test_an_item_that_the_sequence_has_left_behind_is_refused_but_the_last_one_may_be_sent_again():
    sequence = state(handle=handle(1, 4))
    stale, last = item(sequence, [1]), item(sequence, [2])
    sequence.committed(last, handle(2, 5), 0)
    sequence.check(last)
    with pytest.raises(SequenceMisuseError, match="moved on"):
        sequence.check(stale)


def test_one_call_at_a_time_and_none_after_the_release():
    sequence = state()
    sequence.claim("decode")
    with pytest.raises(SequenceMisuseError, match="truncate while decode is in flight"):
        sequence.claim("truncate")
    sequence.busy = ""
    sequence.claim("truncate")
    sequence.busy = ""
    sequence.released = True
    with pytest.raises(SequenceMisuseError, match="released"):
        sequence.claim("decode")


@pytest.mark.parametrize("ends_first", [0, 1])
def test_an_item_may_be_sent_again_while_its_follower_is_in_flight(ends_first):
    """Two resent one after the other would have to wait for each other."""
    sequence = state(handle=handle(1, 4))
    first, other = item(sequence, [1]), item(sequence, [2])
    second = sequence.item_behind(first, 3, [7], OutputSpec(Positions.NONE, Sample()), run=None, max_context=99)
    sequence.claim_item(first, "forward")
    sequence.claim_item(second, "forward")
    sequence.leave_item(first)
    with pytest.raises(SequenceMisuseError, match="in flight"):
        sequence.claim_item(other, "forward")
    sequence.claim_item(first, "forward")
    with pytest.raises(SequenceMisuseError, match="in flight"):
        sequence.claim_item(first, "forward")
    both = [first, second]
    sequence.leave_item(both.pop(ends_first))
    with pytest.raises(SequenceMisuseError, match="in flight"):
        sequence.claim_item(other, "forward")
    sequence.leave_item(both.pop())
    sequence.claim_item(other, "forward")


def test_creation_options_travel_only_with_the_creation():
    sequence = SequenceState(forward_pb2.CreateOptions(reserve_tokens=9))
    creation = item(sequence, [1])
    assert creation.proto.create.reserve_tokens == 9
    sequence.committed(creation, handle(1, 1), 0)
    assert not item(sequence, [2]).proto.HasField("create")
    assert not item(state(), [1]).proto.HasField("create")


def test_a_child_is_made_by_its_first_item_and_by_no_other():
    parent = state(handle=handle(3, 7), tokens=[1, 2, 3, 4, 5, 6, 7], lease_id="mine")
    whole, part = parent.child(7), parent.child(5)
    assert (whole.length, part.length, part.tokens, part.lease_id) == (7, 5, [1, 2, 3, 4, 5], "mine")
    first = part.item(1, [9], SPEC)
    assert (first.start, first.proto.truncate_to, first.proto.create.fork) == (5, 5, True)
    assert first.proto.handle == handle_to_proto(handle(3, 7)) and list(first.needs) == [info_pb2.CAPABILITY_STEP_FORK]
    assert not whole.item(1, [9], SPEC).proto.HasField("truncate_to")
    assert part.item(1, [9], SPEC, 4).proto.truncate_to == 4
    with pytest.raises(TruncateBeyondLength):
        part.item(1, [9], SPEC, 6)
    assert first.leaves(100) == HandleRef(b"", 6, 1)
    part.committed(first, handle(1, 6, b"child"), 1)
    assert (part.length, part.tokens, parent.length) == (6, [1, 2, 3, 4, 5, 9], 7)
    second = part.item(2, [8], SPEC)
    assert second.proto.handle.id == b"child" and not second.proto.HasField("create") and not second.needs
    part.restart([])
    again = part.item(3, [1], SPEC)
    assert (part.length, again.start, again.proto.HasField("handle"), again.proto.create.fork) == (0, 0, False, False)


def test_outputs_that_an_older_executor_would_take_for_others_name_what_they_need():
    sequence = state()
    for kind, needs in (
        (Greedy(), []),
        (Greedy(logprobs=RowLogprobs(1)), [26]),
        (Sample(), []),
        (NextToken(), [25]),
        (NextToken(logprobs=RowLogprobs(1)), [25, 26]),
    ):
        made = sequence.item(1, [1], OutputSpec(Positions.ALL, kind))
        assert list(made.needs) == list(made.proto.needs) == needs
        output = made.proto.output
        assert output.HasField("next_token") == (output.positions == 0) == isinstance(kind, NextToken)


async def test_a_release_waits_for_a_sequence_that_is_still_busy():
    outcomes: list[list[Any]] = [[SequenceBusy("no"), HandleReleased("no"), StepFailed("no")], [SequenceBusy("no")]]
    sent: list[tuple[int, str]] = []

    class Transport:
        async def operate(self, requests: Any, deadline: Any) -> Any:
            sent.append((len(requests), requests[0].request_id))
            return outcomes.pop(0) if outcomes else [[] for _ in requests]

    transport: Any = Transport()
    unused: Any = None
    states = [state(handle=handle(3, 7, name)) for name in (b"busy", b"gone", b"failed")]
    refusals = await Connection(unused, unused, transport, 5.0).release(states)
    assert [type(each) for each in refusals] == [type(None), type(None), StepFailed]
    assert [count for count, _ in sent] == [3, 1, 1]
    assert len({request_id for _, request_id in sent}) == 1
    assert all(each.released for each in states)
