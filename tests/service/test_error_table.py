"""One test per row of the error table that this version can reach, across the wire: the sequence is unchanged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.errors import DeviceLost, Reason
from ferrum_rpc.executor.v1 import (
    executor_control_pb2,
    forward_pb2,
    info_pb2,
    kv_transfer_pb2,
    output_pb2,
    types_pb2,
)
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from ferrum_rpc.service.server import ExecutorServer
from ferrum_rpc.wire.info import LIVENESS
from tests.serving import LIMITS, Gate, Served, serve_identity
from tests.wiring import full, item, pb, prefill, refused, top, until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PROMPT = [3, 1, 4, 1, 5]


async def assert_unchanged(served: Served, handle: types_pb2.KvHandle) -> None:
    """The handle is still current, the cache's books agree, and the next row is that of an untouched sequence."""
    await served.check()
    fresh = await prefill(served, PROMPT)
    rows = []
    for each in (handle, fresh):
        answer = await served.executor.Decode(pb.DecodeRequest(item=item([9], each, output=full())))
        assert answer.output.handle.seq_len == len(PROMPT) + 1
        rows.append(answer.row_blocks[0].logits.logits.data)
    assert rows[0] == rows[1]


MALFORMED = {
    "no tokens": {"tokens": []},
    "token at the vocabulary": {"tokens": [256]},
    "token beyond 31 bits": {"tokens": [2**32 - 1]},
    "top_tokens of none": {"tokens": [1], "output": top(0)},
    "top_tokens beyond the limit": {"tokens": [1], "output": top(257)},
    "selected tokens: none": {
        "tokens": [1],
        "output": output_pb2.OutputSpec(selected_tokens=output_pb2.SelectedTokensOutput()),
    },
    "selected token at the vocabulary": {
        "tokens": [1],
        "output": output_pb2.OutputSpec(selected_tokens=output_pb2.SelectedTokensOutput(token_ids=[256])),
    },
    "logits of integers": {"tokens": [1], "output": full(types_pb2.D_TYPE_I32)},
    "positions of a later version": {"tokens": [1], "output": output_pb2.OutputSpec(positions=99)},
    "a request id of 129 bytes": {"tokens": [1], "request_id": "x" * 129},
    "options of a creation": {"tokens": [1], "create": forward_pb2.CreateOptions()},
}


@pytest.mark.parametrize("what", MALFORMED)
async def test_malformed_item_is_invalid_request_and_changes_nothing(served: Served, what: str) -> None:
    handle = await prefill(served, PROMPT)
    fields = dict(MALFORMED[what])
    request = pb.PrefillRequest(item=item(fields.pop("tokens"), handle, **fields))
    error = await refused(served.executor.Prefill(request), Reason.INVALID_REQUEST, INVALID)
    assert error.field
    await assert_unchanged(served, handle)


async def test_decode_takes_a_handle_and_exactly_one_token(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    for bad in (item([1, 2], handle), item([1]), item([], handle)):
        await refused(served.executor.Decode(pb.DecodeRequest(item=bad)), Reason.INVALID_REQUEST, INVALID)
    verify = pb.ForwardVerifyRequest(item=item([1, 2]))
    await refused(served.executor.ForwardVerify(verify), Reason.INVALID_REQUEST, INVALID)
    await assert_unchanged(served, handle)


async def test_the_same_sequence_twice_refuses_the_call(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    request = pb.UnifiedForwardRequest(items=[item([1], handle), item([2], handle)])
    await refused(served.executor.UnifiedForward(request), Reason.INVALID_REQUEST, INVALID)
    await assert_unchanged(served, handle)


async def test_a_call_without_items_or_above_the_limits_is_refused_with_the_limit(served: Served) -> None:
    call = served.executor.UnifiedForward
    await refused(call(pb.UnifiedForwardRequest()), Reason.INVALID_REQUEST, INVALID)
    many = pb.UnifiedForwardRequest(items=[item([1])] * (LIMITS.max_batch_items + 1))
    error = await refused(call(many), Reason.INVALID_REQUEST, INVALID)
    assert error.number("max_batch_items") == LIMITS.max_batch_items
    async with serve_identity(max_batch_tokens=64) as small:
        long = pb.UnifiedForwardRequest(items=[item([1] * 33), item([1] * 32)])
        error = await refused(small.executor.UnifiedForward(long), Reason.INVALID_REQUEST, INVALID)
        assert error.number("max_batch_tokens") == 64


async def test_a_request_id_with_other_content_is_refused(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    first = pb.DecodeRequest(item=item([1], handle, request_id="a"))
    after = (await served.executor.Decode(first)).output.handle
    other = pb.DecodeRequest(item=item([2], handle, request_id="a"))
    await refused(served.executor.Decode(other), Reason.REQUEST_ID_REUSED, INVALID)
    truncate = pb.TruncateKvRequest(handle=handle, length=2, request_id="a")
    await refused(served.executor.TruncateKv(truncate), Reason.REQUEST_ID_REUSED, INVALID)
    assert (await served.executor.Decode(first)).output.handle == after


async def test_four_ways_to_be_gone_are_four_answers(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    gone = await prefill(served, PROMPT)
    await served.executor.Release(pb.ReleaseRequest(handle=gone))
    unknown = types_pb2.KvHandle(id=handle.id[:8] + bytes(16), seq_len=5, version=1)
    foreign = types_pb2.KvHandle(id=bytes(8) + handle.id[8:], seq_len=5, version=1)
    garbage = types_pb2.KvHandle(id=b"seven", seq_len=5, version=1)
    not_found, precondition = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION
    for bad, reason, code in (
        (unknown, Reason.HANDLE_UNKNOWN, not_found),
        (gone, Reason.HANDLE_RELEASED, not_found),
        (foreign, Reason.INSTANCE_MISMATCH, precondition),
        (garbage, Reason.INVALID_REQUEST, INVALID),
    ):
        await refused(served.executor.Decode(pb.DecodeRequest(item=item([1], bad))), reason, code)
        await refused(served.executor.TruncateKv(pb.TruncateKvRequest(handle=bad)), reason, code)
        await refused(served.executor.ForkKv(pb.ForkKvRequest(handle=bad)), reason, code)
        await refused(served.executor.ReserveKv(pb.ReserveKvRequest(handle=bad)), reason, code)
        await refused(served.executor.Release(pb.ReleaseRequest(handle=bad)), reason, code)
        await refused(served.executor.Release(pb.ReleaseRequest(handle=bad, any_version=True)), reason, code)
    await assert_unchanged(served, handle)


async def test_a_stale_version_tells_where_the_sequence_stands(served: Served) -> None:
    handle = await prefill(served, PROMPT[:4])
    current = (await served.executor.Decode(pb.DecodeRequest(item=item([5], handle)))).output.handle
    back = pb.TruncateKvRequest(handle=current, length=4)
    same_length = (await served.executor.TruncateKv(back)).handle
    assert same_length.seq_len == handle.seq_len
    aborted = grpc.StatusCode.ABORTED
    mismatch = Reason.SEQUENCE_VERSION_MISMATCH
    for stale in (handle, current):
        error = await refused(served.executor.Decode(pb.DecodeRequest(item=item([1], stale))), mismatch, aborted)
        assert (error.number("version"), error.number("seq_len")) == (same_length.version, 4)
        await refused(served.executor.TruncateKv(pb.TruncateKvRequest(handle=stale, length=1)), mismatch, aborted)
        await refused(served.executor.ForkKv(pb.ForkKvRequest(handle=stale)), mismatch, aborted)
        await refused(served.executor.ReserveKv(pb.ReserveKvRequest(handle=stale)), mismatch, aborted)
        await refused(served.executor.Release(pb.ReleaseRequest(handle=stale)), mismatch, aborted)
    grown = (await served.executor.Decode(pb.DecodeRequest(item=item([5], same_length)))).output.handle
    await assert_unchanged(served, grown)


async def test_context_limit_and_growth_by_truncation_are_out_of_range(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    out_of_range = grpc.StatusCode.OUT_OF_RANGE
    too_long = pb.PrefillRequest(item=item([1] * 124, handle))
    error = await refused(served.executor.Prefill(too_long), Reason.CONTEXT_LENGTH_EXCEEDED, out_of_range)
    assert (error.number("max_context"), error.number("seq_len")) == (128, 5)
    options = forward_pb2.CreateOptions(reserve_tokens=1 << 30)
    too_much = served.executor.Prefill(pb.PrefillRequest(item=item([1] * 3, create=options)))
    error = await refused(too_much, Reason.CONTEXT_LENGTH_EXCEEDED, out_of_range)
    assert error.message == f"0 tokens and 3 more and {1 << 30} of reserve_tokens exceed the context of 128"
    reserve = pb.ReserveKvRequest(handle=handle, tokens=124)
    await refused(served.executor.ReserveKv(reserve), Reason.CONTEXT_LENGTH_EXCEEDED, out_of_range)
    beyond = Reason.TRUNCATE_BEYOND_LENGTH
    truncate = pb.TruncateKvRequest(handle=handle, length=6)
    assert (await refused(served.executor.TruncateKv(truncate), beyond, out_of_range)).number("seq_len") == 5
    inline = pb.DecodeRequest(item=item([1], handle, truncate_to=6))
    await refused(served.executor.Decode(inline), beyond, out_of_range)
    fork = pb.ForkKvRequest(handle=handle, at_length=6)
    await refused(served.executor.ForkKv(fork), beyond, out_of_range)
    await assert_unchanged(served, handle)


async def test_no_blocks_is_resource_exhausted_and_leaves_everything_usable() -> None:
    async with serve_identity(kv_blocks=4, block_size=4) as served:
        handle = await prefill(served, [1] * 8)
        exhausted, code = Reason.KV_BLOCKS_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED
        big = pb.PrefillRequest(item=item([2] * 9))
        error = await refused(served.executor.Prefill(big), exhausted, code)
        assert (error.number("needed_blocks"), error.number("free_blocks")) == (3, 2)
        await refused(served.executor.ReserveKv(pb.ReserveKvRequest(handle=handle, tokens=9)), exhausted, code)
        reserving = item([1], create=forward_pb2.CreateOptions(reserve_tokens=8))
        await refused(served.executor.Prefill(pb.PrefillRequest(item=reserving)), exhausted, code)
        await served.check()
        rest = await prefill(served, [2] * 8)
        assert rest.seq_len == 8


async def test_too_many_sequences_are_refused_before_memory_is(served: Served) -> None:
    async with serve_identity(max_sequences=3) as small:
        handle = await prefill(small, [1])
        await small.executor.ForkKv(pb.ForkKvRequest(handle=handle, count=2))
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        await refused(small.executor.Prefill(pb.PrefillRequest(item=item([1]))), Reason.SEQUENCES_EXHAUSTED, code)
        fork = small.executor.ForkKv(pb.ForkKvRequest(handle=handle))
        error = await refused(fork, Reason.SEQUENCES_EXHAUSTED, code)
        assert error.number("max_sequences") == 3
        assert error.message.startswith("at most 3 sequences may be live: 3 are live, 0 are being created, and 1 more")


async def test_sequences_that_are_being_created_are_counted_in_the_refusal() -> None:
    gate = Gate("forward")
    async with serve_identity(max_sequences=3, stage=gate) as small:
        creations = [pb.PrefillRequest(item=item([1])) for _ in range(4)]
        first = await gate.hold(small.executor.Prefill(creations[0]))
        others = [asyncio.ensure_future(prefill(small, [each])) for each in (2, 3)]
        await until(lambda: len(small.server.state._creating) == 3)
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        error = await refused(small.executor.Prefill(creations[3]), Reason.SEQUENCES_EXHAUSTED, code)
        assert error.message == (
            "at most 3 sequences may be live: 0 are live, 3 are being created, and 1 more are requested; release some, "
            "or wait"
        )
        gate.open()
        await asyncio.gather(first, *others)


async def test_an_answer_too_large_is_refused_before_the_forward() -> None:
    async with serve_identity(max_response_bytes=4096) as served:
        handle = await prefill(served, PROMPT)
        steps = served.server.state.engine.counters.steps
        rows = pb.ForwardVerifyRequest(item=item([1] * 4, handle, output=full()))
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        error = await refused(served.executor.ForwardVerify(rows), Reason.OUTPUT_TOO_LARGE, code)
        assert (error.number("bytes") or 0) > 4096
        assert served.server.state.engine.counters.steps == steps
        await assert_unchanged(served, handle)


async def test_a_second_call_in_flight_on_a_sequence_is_busy() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        handle = await prefill(served, PROMPT)
        first = await gate.hold(served.executor.Decode(pb.DecodeRequest(item=item([1], handle))))
        aborted = grpc.StatusCode.ABORTED
        second = served.executor.Decode(pb.DecodeRequest(item=item([2], handle)))
        await refused(second, Reason.SEQUENCE_BUSY, aborted)
        await refused(served.executor.TruncateKv(pb.TruncateKvRequest(handle=handle)), Reason.SEQUENCE_BUSY, aborted)
        gate.open()
        assert (await first).output.handle.seq_len == 6


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate, max_queued_items=2) as served:
        held = await gate.hold(served.executor.Prefill(pb.PrefillRequest(item=item([1]))))
        waiting = [asyncio.ensure_future(served.executor.Prefill(pb.PrefillRequest(item=item([1])))) for _ in range(2)]
        await until(lambda: served.server.state.engine.queued_items == 2)
        full_queue = served.executor.Prefill(pb.PrefillRequest(item=item([1])))
        error = await refused(full_queue, Reason.QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert error.retry_after_s and error.retry_after_s > 0
        gate.open()
        assert [(await each).output.handle.seq_len for each in (held, *waiting)] == [1, 1, 1]
        await served.check()


async def test_a_full_queue_still_tells_what_was_answered_before_and_what_never_can_be() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate, max_queued_items=1, max_batch_items=2) as served:
        answered = pb.PrefillRequest(item=item(PROMPT, request_id="before"))
        handle = (await served.executor.Prefill(answered)).output.handle
        held = await gate.hold(served.executor.Prefill(pb.PrefillRequest(item=item([1]))))
        waiting = asyncio.ensure_future(served.executor.Prefill(pb.PrefillRequest(item=item([1]))))
        await until(lambda: served.server.state.engine.queued_items == 1)
        again = await served.executor.Prefill(answered)
        assert (again.output.replayed, again.output.handle) == (True, handle)
        batch = pb.UnifiedForwardRequest(items=[item([1])] * 3)
        await refused(served.executor.UnifiedForward(batch), Reason.INVALID_REQUEST, INVALID)
        gate.open()
        await asyncio.gather(held, waiting)


async def test_a_queued_call_whose_deadline_passes_never_runs() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        handle = await prefill(served, PROMPT)
        held = await gate.hold(served.executor.Prefill(pb.PrefillRequest(item=item([1]))))
        late = served.executor.Decode(pb.DecodeRequest(item=item([1], handle)), timeout=0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.open()
        await held
        await assert_unchanged(served, handle)


async def test_starting_is_unavailable_and_health_says_not_serving() -> None:
    release = threading.Event()

    def build() -> Any:
        release.wait(30)
        return build_runner(ModelSettings(path="identity", kv_blocks=8))

    server = ExecutorServer(build, LIMITS)
    await server.start()
    async with grpc.aio.insecure_channel(server.target) as channel:
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        from ferrum_rpc.executor.v1 import model_executor_pb2_grpc

        stub: Any = model_executor_pb2_grpc.ModelExecutorStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        code = grpc.StatusCode.UNAVAILABLE
        error = await refused(stub.Prefill(pb.PrefillRequest(item=item([1]))), Reason.STARTING, code)
        assert error.retry_after_s
        await refused(stub.GetInfo(pb.GetInfoRequest()), Reason.STARTING, code)
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert status.state == info_pb2.EXECUTOR_STATE_STARTING
        assert (
            await health.Check(health_pb2.HealthCheckRequest())
        ).status == health_pb2.HealthCheckResponse.NOT_SERVING
        living = await health.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert living.status == health_pb2.HealthCheckResponse.SERVING
        release.set()
        await server.ready()
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(1)


async def test_draining_refuses_new_sequences_and_serves_the_old(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    served.server.state.drain()
    code = grpc.StatusCode.UNAVAILABLE
    error = await refused(served.executor.Prefill(pb.PrefillRequest(item=item([1]))), Reason.DRAINING, code)
    assert error.retry_after_s
    await refused(served.executor.ForkKv(pb.ForkKvRequest(handle=handle)), Reason.DRAINING, code)
    answer = await served.executor.Decode(pb.DecodeRequest(item=item([1], handle)))
    assert answer.output.handle.seq_len == 6


async def test_a_failed_step_is_internal_and_rolled_back() -> None:
    failing = False

    def stage(name: str) -> None:
        if failing and name == "select":
            raise ValueError("injected")

    async with serve_identity(stage=stage) as served:
        handle = await prefill(served, PROMPT)
        failing = True
        call = served.executor.Decode(pb.DecodeRequest(item=item([1], handle)))
        error = await refused(call, Reason.STEP_FAILED, grpc.StatusCode.INTERNAL)
        assert "injected" not in error.message
        failing = False
        await assert_unchanged(served, handle)


class Fatal(BaseException):
    pass


@pytest.mark.parametrize("error", [Fatal, partial(DeviceLost, "gone"), None], ids=["bug", "device", "failpoint"])
async def test_a_lost_device_answers_everybody_and_health_turns(error: Callable[[], BaseException] | None) -> None:
    lost = False
    failpoints = Failpoints(parse_failpoints("before_forward=device_lost"))

    def fatal(name: str) -> None:
        if lost and name == "forward":
            if error is None:
                failpoints.reach("before_forward")
            else:
                raise error()

    async with serve_identity(stage=fatal) as served:
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        handle = await prefill(served, PROMPT)
        lost = True
        internal = grpc.StatusCode.INTERNAL
        call = served.executor.Decode(pb.DecodeRequest(item=item([1], handle)))
        refusals = [await refused(call, Reason.DEVICE_LOST, internal)]
        await served.server.failed()
        again = served.executor.Decode(pb.DecodeRequest(item=item([1], handle)))
        refusals.append(await refused(again, Reason.DEVICE_LOST, internal))
        release = served.executor.Release(pb.ReleaseRequest(handle=handle))
        refusals.append(await refused(release, Reason.DEVICE_LOST, internal))
        assert [each.message.count("the executor must be restarted") for each in refusals] == [1, 1, 1]
        status = await served.executor.GetStatus(pb.GetStatusRequest())
        assert status.state == info_pb2.EXECUTOR_STATE_FAILED
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        async for update in watch:
            if update.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
        watch.cancel()


NOT_OFFERED: dict[str, tuple[str, Any, str]] = {
    "LoadAdapter": ("control", executor_control_pb2.LoadAdapterRequest(), "ADAPTERS"),
    "UnloadAdapter": ("control", executor_control_pb2.UnloadAdapterRequest(), "ADAPTERS"),
    "ListAdapters": ("control", executor_control_pb2.ListAdaptersRequest(), "ADAPTERS"),
    "ParkKv": ("transfer", kv_transfer_pb2.ParkKvRequest(), "PARK"),
}


async def capabilities(served: Served) -> set[str]:
    answer = await served.executor.GetInfo(pb.GetInfoRequest())
    return {info_pb2.Capability.Name(each).removeprefix("CAPABILITY_") for each in answer.capabilities}


@pytest.mark.parametrize("method", NOT_OFFERED)
async def test_what_is_not_offered_says_so_and_its_capability_is_absent(served: Served, method: str) -> None:
    stub, request, capability = NOT_OFFERED[method]
    call = getattr(getattr(served, stub), method)(request)
    error = await refused(call, Reason.NOT_SUPPORTED, grpc.StatusCode.UNIMPLEMENTED)
    assert error.metadata["capability"] == capability
    assert capability not in await capabilities(served)


OUTPUTS_NOT_OFFERED = {}
OPTIONS_NOT_OFFERED = {
    "ADAPTERS": forward_pb2.CreateOptions(adapter="x"),
}


@pytest.mark.parametrize("capability", [*OUTPUTS_NOT_OFFERED, *OPTIONS_NOT_OFFERED])
async def test_outputs_and_options_that_are_not_offered_say_so(served: Served, capability: str) -> None:
    handle = await prefill(served, PROMPT)
    if capability in OUTPUTS_NOT_OFFERED:
        bad = item([1], handle, output=OUTPUTS_NOT_OFFERED[capability])
    else:
        bad = item([1], create=OPTIONS_NOT_OFFERED[capability])
    call = served.executor.Prefill(pb.PrefillRequest(item=bad))
    error = await refused(call, Reason.NOT_SUPPORTED, grpc.StatusCode.UNIMPLEMENTED)
    assert capability in error.message
    assert capability not in await capabilities(served)
    await assert_unchanged(served, handle)


async def test_no_refusal_carries_an_internal_id(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    stale = types_pb2.KvHandle(id=handle.id, seq_len=5, version=7)
    call = served.executor.Decode(pb.DecodeRequest(item=item([1], stale)))
    error = await refused(call, Reason.SEQUENCE_VERSION_MISMATCH, grpc.StatusCode.ABORTED)
    text = error.message + "".join(error.metadata.values())
    assert handle.id.hex() not in text and handle.id[8:].hex() not in text


async def test_a_request_above_the_message_limit_is_refused_and_the_server_lives(served: Served) -> None:
    handle = await prefill(served, PROMPT)
    huge = pb.PrefillRequest(item=item([200] * (3 << 20)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.executor.Prefill(huge)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await assert_unchanged(served, handle)


async def test_a_bad_item_never_fails_its_neighbours(served: Served) -> None:
    good, stale = await prefill(served, PROMPT), await prefill(served, PROMPT)
    stale.version += 1
    items = [item([1], good, item_id=7), item([1], stale, item_id=8), item([999], item_id=9), item([4], item_id=10)]
    answer = await served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items))
    assert [result.item_id for result in answer.results] == [7, 8, 9, 10]
    assert [result.WhichOneof("result") for result in answer.results] == ["output", "error", "error", "output"]
    assert answer.timing.step_sequences == 2


async def test_all_or_nothing_fails_whole_and_changes_nothing(served: Served) -> None:
    good, stale = await prefill(served, PROMPT), await prefill(served, PROMPT)
    stale.version += 1
    request = pb.UnifiedForwardRequest(items=[item([1], good), item([1], stale)], all_or_nothing=True)
    call = served.executor.UnifiedForward(request)
    await refused(call, Reason.SEQUENCE_VERSION_MISMATCH, grpc.StatusCode.ABORTED)
    await assert_unchanged(served, good)


async def test_all_or_nothing_holds_when_blocks_run_out_in_the_middle() -> None:
    async with serve_identity(kv_blocks=8, block_size=4) as served:
        handle = await prefill(served, PROMPT)
        items = [item([1], handle), item([2] * 8), item([3] * 20)]
        call = served.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items, all_or_nothing=True))
        await refused(call, Reason.KV_BLOCKS_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        status = await served.executor.GetStatus(pb.GetStatusRequest())
        assert (status.pressure.free_blocks, status.pressure.sequences) == (6, 1)
        await assert_unchanged(served, handle)
        loose = pb.UnifiedForwardRequest(items=[item([2] * 4), item([3] * 40), item([4] * 4)])
        results = (await served.executor.UnifiedForward(loose)).results
        assert [result.WhichOneof("result") for result in results] == ["output", "error", "output"]
