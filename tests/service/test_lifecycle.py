"""How a server goes: nothing new, nothing lost, and the end when nobody owns anything any more."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from ferrum_rpc.errors import DeviceLost, QueueFull, Reason
from ferrum_rpc.executor.v1 import executor_control_pb2, info_pb2, session_pb2
from ferrum_rpc.serve import warm_up
from ferrum_rpc.service import control
from ferrum_rpc.wire.info import LIVENESS
from tests.service.test_session import opened
from tests.support.inside import set_stage
from tests.support.serving import Served, gated, serve_identity
from tests.support.wiring import item, prefill, reason_of, refused, until

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


async def health(served: Served) -> tuple[int, int]:
    """Of the whole server, and of what whoever starts it again should ask."""
    asked = [health_pb2.HealthCheckRequest(service=service) for service in ("", LIVENESS)]
    ready, live = [(await served.health.Check(each)).status for each in asked]
    return ready, live


def lose(stage: str) -> None:
    if stage == "forward":
        raise DeviceLost("gone")


async def test_who_drains_is_not_ready_and_lives_until_its_device_is_lost(served: Served) -> None:
    assert await health(served) == (SERVING, SERVING)
    owned = await prefill(served, [1, 2, 3])
    watch = served.health.Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
    assert (await watch.read()).status == SERVING
    await served.drain()
    assert await health(served) == (NOT_SERVING, SERVING)
    set_stage(served.runner, lose)
    await refused(served.decode([4], owned), Reason.DEVICE_LOST)
    async with asyncio.timeout(5):
        assert (await watch.read()).status == NOT_SERVING
    assert await health(served) == (NOT_SERVING, NOT_SERVING)
    await served.status()


async def test_a_drain_refuses_what_is_new_and_serves_what_is_owned(served: Served) -> None:
    handle = await prefill(served, [1, 2, 3])
    watch = served.health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    answer = await served.drain()
    assert (answer.state, answer.sequences) == (info_pb2.EXECUTOR_STATE_DRAINING, 1)
    async with asyncio.timeout(5):
        assert (await watch.read()).status == NOT_SERVING
    for call in (prefill(served, [1]), served.fork(handle)):
        assert (await refused(call, Reason.DRAINING)).retry_after_s
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill(served, [1])
    trailing = dict(caught.value.trailing_metadata() or ())
    assert trailing["grpc-retry-pushback-ms"] == "-1", "gRPC shall not try again here"
    handle = (await served.decode([4], handle)).output.handle
    handle = (await served.truncate(handle, length=2)).handle
    assert not served.server.draining.done.is_set()
    await served.release(handle)
    await asyncio.wait_for(served.server.draining.done.wait(), 5)
    await refused(served.info(), Reason.DRAINING)


async def test_the_lame_duck_time_ends_and_what_is_in_flight_still_finishes() -> None:
    async with gated() as (served, gate):
        handle, other = await prefill(served, [1, 2]), await prefill(served, [3])
        running = await gate.hold(served.decode([3], handle))
        await served.drain(0.01)
        await asyncio.wait_for(served.server.draining.done.wait(), 5)
        await refused(served.decode([1], other), Reason.DRAINING)
        stopping = asyncio.ensure_future(served.server.stop(grace_s=30))
        await asyncio.sleep(0)
        gate.open()
        assert (await running).output.handle.seq_len == 3
        await stopping


async def test_an_idle_server_is_drained_at_once(served: Served) -> None:
    await served.drain(1000)
    await asyncio.wait_for(served.server.draining.done.wait(), 5)


async def test_a_session_is_served_to_its_last_sequence_and_then_told(served: Served) -> None:
    async with opened(served) as stream:
        handle = await stream.prefill([1, 2])
        await served.drain()
        handle = (await stream.forward(item([3], handle))).results[0].output.handle
        [new] = (await stream.forward(item([1, 2]))).results
        assert reason_of(new) is Reason.DRAINING
        await stream.ask(release=session_pb2.SessionRelease(handles=[handle]))
        await refused(stream.read(), Reason.DRAINING)


@pytest.mark.parametrize("drains", [False, True])
async def test_a_session_ends_with_device_lost_where_the_engine_is(drains: bool) -> None:
    async with serve_identity() as served, opened(served) as works, opened(served) as idles:
        if drains:  # which waits for a sequence that will never be
            served.server.state.empty.clear()
            await served.drain()
            with pytest.raises(DeviceLost):
                await served.between_steps(lambda runner: lose("forward"))
        else:
            set_stage(served.runner, lose)
            [result] = (await works.forward(item([1, 2]))).results
            assert reason_of(result) is Reason.DEVICE_LOST
        await served.server.failed()
        await served.server.stop(5.0)
        for stream in (works, idles):
            await refused(stream.read(), Reason.DEVICE_LOST)


async def test_a_session_that_closes_as_the_last_of_a_drain_hears_goodbye() -> None:
    """Its release ends the drain, and the drain ends sessions: the answer comes first."""
    for _ in range(10):
        async with serve_identity() as served, opened(served) as stream:
            await stream.prefill([1, 2])
            await served.drain()
            goodbye = await stream.ask(close=session_pb2.SessionClose(release_sequences=True))
            assert goodbye.goodbye.released_sequences == 1
            async with asyncio.timeout(5):
                assert await stream.call.read() is grpc.aio.EOF


async def test_steps_of_a_session_that_run_when_the_lame_duck_time_ends_are_answered() -> None:
    async with gated() as (served, gate), opened(served) as stream:
        one, two = await stream.prefill([2, 2]), await stream.prefill([3, 2])
        await (await gate.hold(stream.step(item([3], one))))
        await stream.step(item([3], two))
        await until(lambda: served.server.state.engine.queued_items == 1)
        await served.drain(0)
        await served.server.draining.done.wait()
        gate.open()
        answers = [await stream.read() for _ in range(2)]
        assert [each.forward.results[0].output.handle.seq_len for each in answers] == [3, 3]
        await refused(stream.read(), Reason.DRAINING)


async def test_a_stream_that_never_says_hello_does_not_hold_up_the_end(served: Served) -> None:
    call = served.executor.Session()
    await until(lambda: len(served.server.sessions) == 1)
    await served.drain()
    await refused(call.read(), Reason.DRAINING)


async def test_a_negative_grace_is_refused(served: Served) -> None:
    await refused(served.drain(-1), Reason.INVALID_REQUEST)


async def test_sequences_are_listed_page_by_page_without_a_usable_handle(served: Served) -> None:
    lease = await served.acquire(client_name="night shift")
    handles = [await prefill(served, [1] * (i + 1)) for i in range(4)]
    handles.append(await prefill(served, [1] * 9, create={"lease_id": lease.lease_id, "reserve_tokens": 8}))
    listed: list[Any] = []
    token, pages = "", 0
    while token or not pages:
        request = executor_control_pb2.ListSequencesRequest(page_size=2, page_token=token)
        page = await served.control.ListSequences(request)
        listed += page.sequences
        token, pages = page.next_page_token, pages + 1
        if pages == 1:  # what goes meanwhile does not shift the pages
            await served.release(handles[0])
    assert pages == 3
    assert [each.seq_len for each in listed] == [1, 2, 3, 4, 9]
    told = [(each.client_name, each.leased, each.blocks) for each in listed]
    assert told[-2:] == [("", False, 1), ("night shift", True, 5)]
    assert len({each.label for each in listed}) == 5
    sent = b"".join(each.SerializeToString() for each in listed)
    assert not any(handle.id[8:] in sent for handle in handles)
    for token in ("x", "9" * 5000):
        bad = executor_control_pb2.ListSequencesRequest(page_token=token)
        await refused(served.control.ListSequences(bad), Reason.INVALID_REQUEST)


async def test_a_busy_sequence_is_listed_as_busy() -> None:
    async with gated() as (served, gate):
        handle = await prefill(served, [1, 2])
        running = await gate.hold(served.decode([3], handle))
        [listed] = await served.listed()
        assert listed.busy
        gate.open()
        await running
        await until(lambda: not served.server.state.handles.records()[0].busy)


# --- the warm-up takes nobody's share, and nobody's refusal stops the start -------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [{"max_sequences": 5}, {"max_sequences_per_caller": 2}, {"max_blocks_per_caller": 2}, {"max_sequences": 1}],
)
async def test_a_warm_up_counts_against_no_limit_and_no_quota(limits: dict[str, int]) -> None:
    async with serve_identity(**limits) as served:
        await prefill(served, [1, 2, 3])
        assert await control.warm_up(served.server.state, 8, 16) == 2
        assert served.server.state.pressure().sequences == 1
        await served.check()


async def test_a_start_goes_on_where_its_warm_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> int:
        raise QueueFull("no room")

    monkeypatch.setattr(control, "warm_up", refuse)
    async with serve_identity() as served:
        await warm_up(served.server)
        await prefill(served, [1])
