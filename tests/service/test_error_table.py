"""What refusals say besides their reason, across the wire: the sequence is unchanged. Which reason a call is refused
with, and where its sequence stands, `test_state_machine` shows for any history."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.errors import DeviceLost, Reason
from ferrum_rpc.executor.v1 import (
    executor_control_pb2,
    forward_pb2,
    info_pb2,
    model_executor_pb2_grpc,
    output_pb2,
    types_pb2,
)
from ferrum_rpc.service.server import ExecutorServer
from ferrum_rpc.wire.info import LIVENESS
from tests.support.inside import creating
from tests.support.serving import LIMITS, Served, gated, serve_identity
from tests.support.wiring import full, item, pb, prefill, refused, top, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PROMPT = [3, 1, 4, 1, 5]


async def assert_unchanged(served: Served, handle: types_pb2.KvHandle) -> None:
    """The handle is still current, the cache's books agree, and the next row is that of an untouched sequence."""
    await served.check()
    fresh = await prefill(served, PROMPT)
    rows = []
    for each in (handle, fresh):
        answer = await served.decode([9], each, output=full())
        assert answer.output.handle.seq_len == len(PROMPT) + 1
        rows.append(answer.row_blocks[0].logits.logits.data)
    assert rows[0] == rows[1]


def selected(*ids: int) -> output_pb2.OutputSpec:
    return output_pb2.OutputSpec(selected_tokens=output_pb2.SelectedTokensOutput(token_ids=ids))


MALFORMED: dict[str, dict[str, Any]] = {
    "no tokens": {"tokens": []},
    "token at the vocabulary": {"tokens": [256]},
    "token beyond 31 bits": {"tokens": [2**32 - 1]},
    "top_tokens of none": {"output": top(0)},
    "top_tokens beyond the limit": {"output": top(257)},
    "selected tokens: none": {"output": selected()},
    "selected token at the vocabulary": {"output": selected(256)},
    "logits of integers": {"output": full(types_pb2.D_TYPE_I32)},
    "positions of a later version": {"output": output_pb2.OutputSpec(positions=99)},
    "a request id of 129 bytes": {"request_id": "x" * 129},
    "options of a creation": {"create": forward_pb2.CreateOptions()},
}


async def test_malformed_items_are_invalid_requests_that_name_a_field_and_change_nothing(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    for what, fields in MALFORMED.items():
        call = served.prefill(handle=handle, **{"tokens": [1], **fields})
        assert (await refused(call, Reason.INVALID_REQUEST)).field, what
    await assert_unchanged(served, handle)


async def test_a_call_without_items_or_above_the_limits_is_refused_with_the_limit(served: Served) -> None:
    call = served.executor.UnifiedForward
    await refused(call(pb.UnifiedForwardRequest()), Reason.INVALID_REQUEST)
    many = pb.UnifiedForwardRequest(items=[item([1])] * (LIMITS.max_batch_items + 1))
    assert (await refused(call(many), Reason.INVALID_REQUEST)).number("max_batch_items") == LIMITS.max_batch_items
    async with serve_identity(max_batch_tokens=64) as small:
        error = await refused(small.unified(item([1] * 33), item([1] * 32)), Reason.INVALID_REQUEST)
        assert error.number("max_batch_tokens") == 64


async def test_what_exceeds_the_context_is_told_with_what_was_to_be_reserved(served: Served) -> None:
    options = forward_pb2.CreateOptions(reserve_tokens=1 << 30)
    error = await refused(served.prefill([1] * 3, create=options), Reason.CONTEXT_LENGTH_EXCEEDED)
    assert error.message == f"0 tokens and 3 more and {1 << 30} of reserve_tokens exceed the context of 128"


async def test_sequences_that_are_being_created_are_counted_in_the_refusal() -> None:
    async with gated(max_sequences=3) as (served, gate):
        handle = await prefill(served, [1])
        first = await gate.hold(served.prefill([1]))
        other = asyncio.ensure_future(served.prefill([2]))
        await until(lambda: creating(served.server.state) == 2)
        for call in (served.prefill([3]), served.fork(handle)):
            error = await refused(call, Reason.SEQUENCES_EXHAUSTED)
            assert error.number("max_sequences") == 3
            assert error.message == (
                "at most 3 sequences may be live: 1 are live, 2 are being created, and 1 more are requested; "
                "release some, or wait"
            )
        gate.open()
        await asyncio.gather(first, other)


async def test_a_full_queue_says_when_to_come_back_and_still_tells_what_needs_no_place() -> None:
    """What was answered before, and what never can be."""
    async with gated(max_queued_items=2, max_batch_items=2) as (served, gate):
        before = await served.prefill(PROMPT, request_id="before")
        held = await gate.hold(served.prefill([1]))
        waiting = [asyncio.ensure_future(served.prefill([1])) for _ in range(2)]
        await until(lambda: served.server.state.engine.queued_items == 2)
        assert (await refused(served.prefill([1]), Reason.QUEUE_FULL)).retry_after_s
        again = await served.prefill(PROMPT, request_id="before")
        assert (again.output.replayed, again.output.handle) == (True, before.output.handle)
        await refused(served.unified(*[item([1])] * 3), Reason.INVALID_REQUEST)
        gate.open()
        assert [(await each).output.handle.seq_len for each in (held, *waiting)] == [1, 1, 1]
        await served.check()


async def test_starting_is_unavailable_and_health_says_not_serving() -> None:
    release = threading.Event()

    def build() -> Any:
        release.wait(30)
        return build_runner(ModelSettings(path="identity", kv_blocks=8))

    server = ExecutorServer(build, LIMITS)
    await server.start()
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = model_executor_pb2_grpc.ModelExecutorStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await refused(stub.Prefill(pb.PrefillRequest(item=item([1]))), Reason.STARTING)).retry_after_s
        await refused(stub.GetInfo(pb.GetInfoRequest()), Reason.STARTING)
        assert (await stub.GetStatus(pb.GetStatusRequest())).state == info_pb2.EXECUTOR_STATE_STARTING
        whole, living = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckRequest(service=LIVENESS)
        assert (await health.Check(whole)).status == NOT_SERVING
        assert (await health.Check(living)).status == SERVING
        release.set()
        await server.ready()
        assert (await health.Check(whole)).status == SERVING
    await server.stop(1)


class Fatal(BaseException):
    pass


@pytest.mark.parametrize("error", [Fatal, partial(DeviceLost, "gone")], ids=["bug", "device"])
async def test_a_lost_device_answers_everybody_and_health_turns(error: Callable[[], BaseException]) -> None:
    lost = False

    def fatal(name: str) -> None:
        if lost and name == "forward":
            raise error()

    async with serve_identity(stage=fatal) as served:
        handle = await prefill(served, PROMPT)
        lost = True
        refusals = [await refused(served.decode([1], handle), Reason.DEVICE_LOST)]
        await served.server.failed()
        refusals += [
            await refused(call, Reason.DEVICE_LOST) for call in (served.decode([1], handle), served.release(handle))
        ]
        assert [each.message.count("the executor must be restarted") for each in refusals] == [1, 1, 1]
        assert (await served.status()).state == info_pb2.EXECUTOR_STATE_FAILED
        watch = served.health.Watch(health_pb2.HealthCheckRequest())
        async for update in watch:
            if update.status == NOT_SERVING:
                break
        watch.cancel()


async def test_what_is_not_offered_says_so_and_its_capability_is_absent(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    offered = {info_pb2.Capability.Name(each) for each in (await served.info()).capabilities}
    for call, capability in (
        (served.control.LoadAdapter(executor_control_pb2.LoadAdapterRequest()), "ADAPTERS"),
        (served.control.UnloadAdapter(executor_control_pb2.UnloadAdapterRequest()), "ADAPTERS"),
        (served.control.ListAdapters(executor_control_pb2.ListAdaptersRequest()), "ADAPTERS"),
        (served.park(handle), "PARK"),
    ):
        assert (await refused(call, Reason.NOT_SUPPORTED)).metadata["capability"] == capability
        assert f"CAPABILITY_{capability}" not in offered
    assert "ADAPTERS" in (await refused(served.prefill([1], create={"adapter": "x"}), Reason.NOT_SUPPORTED)).message
    await assert_unchanged(served, handle)


async def test_a_request_above_the_message_limit_is_refused_and_the_server_lives(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.prefill([200] * (3 << 20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await assert_unchanged(served, handle)
