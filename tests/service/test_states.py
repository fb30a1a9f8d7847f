"""Models with recurrent states, as callers see them: slots beside blocks, and what a deep truncation costs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from ferrum_rpc.client import ExecutorClient, KvBlocksExhausted
from ferrum_rpc.core import Caller
from ferrum_rpc.engine.api import Submission
from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, info_pb2, types_pb2
from ferrum_rpc.service import control
from ferrum_rpc.service.records import Resource
from ferrum_rpc.wire.status import STATUS_METADATA_KEY
from tests.support.clients import BOTH_WAYS
from tests.support.serving import Served, serve_identity
from tests.support.states import CHECKPOINT_TOKENS, FREE_TRUNCATION_TOKENS, STATE_BYTES, with_states
from tests.support.wiring import item, pb, prefill, refused, release

SLOTS = 2
PROMPT = list(range(1, 22))

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_identity(made=with_states(SLOTS), positional=True) as served:
        yield served


def slots(pressure: types_pb2.KvPressure) -> tuple[int, int]:
    return pressure.free_slots, pressure.total_slots


async def test_a_model_without_states_has_no_slots_and_any_truncation_is_free() -> None:
    async with serve_identity() as served:
        info = await served.executor.GetInfo(pb.GetInfoRequest())
        assert info.kv_cache.state_bytes == info.limits.checkpoint_tokens == 0
        assert not info.limits.HasField("free_truncation_tokens")
        assert info_pb2.CAPABILITY_KV_TRANSFER in info.capabilities
        answer = await served.prefill(PROMPT)
        assert slots(answer.pressure) == (0, 0)


async def test_get_info_tells_what_states_take_and_what_a_truncation_costs(served: Served) -> None:
    info = await served.executor.GetInfo(pb.GetInfoRequest())
    assert info.kv_cache.state_bytes == STATE_BYTES
    assert info.limits.HasField("free_truncation_tokens")
    limits = info.limits.free_truncation_tokens, info.limits.checkpoint_tokens
    assert limits == (FREE_TRUNCATION_TOKENS, CHECKPOINT_TOKENS)
    async with ExecutorClient(served.target) as client:
        known = await client.info()
    assert known.model.state_bytes == STATE_BYTES
    for each in (known.limits, known.device):
        assert (each.free_truncation_tokens, each.checkpoint_tokens) == limits


async def test_every_answer_has_the_slots_and_a_lack_of_them_is_told_from_one_of_blocks(served: Served) -> None:
    first, second = [await served.prefill(PROMPT) for _ in range(SLOTS)]
    assert [slots(each.pressure) for each in (first, second)] == [(1, SLOTS), (0, SLOTS)]
    status = await served.executor.GetStatus(pb.GetStatusRequest())
    assert slots(status.pressure) == (0, SLOTS)
    error = await refused(served.prefill(PROMPT), Reason.KV_BLOCKS_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (error.number("needed_slots"), error.number("free_slots")) == (1, 0)
    assert "needed_blocks" not in error.metadata
    handle = (await served.decode([5], first.output.handle)).output.handle
    assert handle.seq_len == len(PROMPT) + 1, "who has a slot goes on"
    released = await served.release(handle)
    assert slots(released.pressure) == (1, SLOTS)
    await release(served, second.output.handle)


@pytest.mark.parametrize(("metadata", "kind"), [("needed_slots", "kv_slot"), ("needed_blocks", "kv_block")])
async def test_the_status_names_the_resource_that_is_short(served: Served, metadata: str, kind: str) -> None:
    held = [await prefill(served, PROMPT) for _ in range(SLOTS)] if kind == "kv_slot" else []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.prefill([7] * (5 if held else 2000))
    trailer = dict(caught.value.trailing_metadata() or ())[STATUS_METADATA_KEY]
    resource, info = error_details_pb2.ResourceInfo(), error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(trailer).details:
        for each in (resource, info):
            detail.Unpack(each)
    assert resource.resource_type == kind and metadata in info.metadata
    await release(served, *held)


async def test_tokens_that_are_fed_again_are_told_also_in_a_recorded_answer(served: Served) -> None:
    before = served.server.state.engine.counters.recomputed_tokens
    made = await served.prefill(PROMPT)
    assert made.output.recomputed_tokens == 0
    near = len(PROMPT) - FREE_TRUNCATION_TOKENS
    answer = await served.decode([5], made.output.handle, truncate_to=near)
    assert answer.output.recomputed_tokens == 0, "it is free"
    deep = pb.DecodeRequest(item=item([5], answer.output.handle, truncate_to=11, request_id="deep"))
    answer = await served.executor.Decode(deep)
    assert (answer.output.recomputed_tokens, answer.output.replayed) == (11 - CHECKPOINT_TOKENS, False)
    again = await served.executor.Decode(deep)
    assert (again.output.recomputed_tokens, again.output.replayed) == (11 - CHECKPOINT_TOKENS, True)
    assert served.server.state.engine.counters.recomputed_tokens == before + 11 - CHECKPOINT_TOKENS
    answer = await served.decode([6], answer.output.handle)
    assert answer.output.recomputed_tokens == 0
    await release(served, answer.output.handle)


async def test_a_warm_up_leaves_half_of_the_free_slots(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor may be served already, also while it starts."""
    free, spans = served.server.state.pressure().free_slots, list[int]()
    submit = served.server.state.engine.submit

    def counted(work: Any) -> Any:
        if isinstance(work, Submission):
            spans.append(len(work.spans))
        return submit(work)

    monkeypatch.setattr(served.server.state.engine, "submit", counted)
    assert await control.warm_up(served.server.state, batch_size=100) == 2
    assert spans == [free // 2] * 2
    held = [await prefill(served, [1, 2, 3]) for _ in range(free)]
    assert await control.warm_up(served.server.state) == 0
    await release(served, *held)


async def test_a_run_has_those_of_its_first_step(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    run = forward_pb2.Run(max_tokens=4)
    answer = await served.decode([5], handle, truncate_to=13, run=run, request_id="run")
    assert answer.output.handle.seq_len == 13 + 4 and answer.output.recomputed_tokens == 13 - CHECKPOINT_TOKENS
    await release(served, answer.output.handle)


async def test_one_of_several_callers_has_a_share_of_the_slots() -> None:
    async with serve_identity(made=with_states(6), tokens=("alice a", "bob b")) as served:
        quotas = served.server.state.quotas
        assert quotas.account(Caller("alice", operator=False, shares=True)).most[Resource.SEQUENCES] == 3
        held = [await prefill(served.by("a"), [1]) for _ in range(3)]
        error = await refused(served.by("a").prefill([1]), Reason.QUOTA_EXCEEDED)
        assert error.number("max_sequences_per_caller") == 3
        await release(served.by("a"), *held)


# --- this version's client --------------------------------------------------------------------------------------------


@BOTH_WAYS
async def test_the_client_has_slots_and_what_was_fed_again(served: Served, session: bool) -> None:
    async with ExecutorClient(served.target, session=session) as client, client.sequence() as sequence:
        answer = await sequence.prefill(PROMPT)
        assert (answer.pressure.free_slots, answer.pressure.total_slots) == (SLOTS - 1, SLOTS)
        await client.forward([sequence.item([5], truncate_to=12)])
        answer = await sequence.decode(5)
        assert answer.recomputed_tokens == 0 and "recomputed" not in repr(answer)
        [answer] = (await client.forward([sequence.item([5], truncate_to=3)])).all_answers()
        assert answer.recomputed_tokens == 3 and "recomputed_tokens=3" in repr(answer)


@BOTH_WAYS
async def test_a_stream_without_a_slot_is_refused_once(served: Served, session: bool) -> None:
    """Shorter runs need a slot as well."""
    counters = served.server.state.counters
    async with ExecutorClient(served.target, session=session) as client:
        held = [client.sequence() for _ in range(SLOTS)]
        for each in held:
            await each.prefill(PROMPT)
        before = counters.kv_exhausted
        with pytest.raises(KvBlocksExhausted) as caught:
            await anext(client.sequence().generate(PROMPT, max_tokens=32, stop=()))
        assert caught.value.number("needed_slots") == 1 and counters.kv_exhausted == before + 1
        await client.release(held)
