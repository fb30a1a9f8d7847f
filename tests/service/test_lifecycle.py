"""How a server goes: nothing new, nothing lost, and the end when nobody owns anything any more."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import executor_control_pb2, info_pb2, session_pb2
from ferrum_rpc.wire.info import LIVENESS
from ferrum_rpc.wire.status import error_from_status
from tests.serving import Gate, Served, serve_identity
from tests.wiring import item, pb, prefill, refused, until

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


async def drain(served: Served, grace: float = 60) -> Any:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(grace * 1e9))
    return await served.control.Drain(executor_control_pb2.DrainRequest(grace=duration))


async def health(served: Served) -> tuple[int, int]:
    """Of the whole server, and of what whoever starts it again should ask."""
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    ready, live = [
        (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status for service in ("", LIVENESS)
    ]
    return ready, live


async def test_who_drains_is_not_ready_and_lives_until_its_device_is_lost() -> None:
    lost = False

    class Fatal(BaseException):
        pass

    def stage(name: str) -> None:
        if lost and name == "forward":
            raise Fatal

    async with serve_identity(stage=stage) as served:
        assert await health(served) == (SERVING, SERVING)
        owned = await prefill(served, [1, 2, 3])
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert (await watch.read()).status == SERVING
        await drain(served)
        assert await health(served) == (NOT_SERVING, SERVING)
        lost = True
        await refused(
            served.executor.Decode(pb.DecodeRequest(item=item([4], owned))),
            Reason.DEVICE_LOST,
            grpc.StatusCode.INTERNAL,
        )
        async with asyncio.timeout(5):
            assert (await watch.read()).status == NOT_SERVING
        assert await health(served) == (NOT_SERVING, NOT_SERVING)
        await served.executor.GetStatus(pb.GetStatusRequest())


async def test_a_drain_refuses_what_is_new_and_serves_what_is_owned(served: Served) -> None:
    handle = await prefill(served, [1, 2, 3])
    watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    answer = await drain(served)
    assert (answer.state, answer.sequences) == (info_pb2.EXECUTOR_STATE_DRAINING, 1)
    async with asyncio.timeout(5):
        assert (await watch.read()).status == NOT_SERVING
    for call in (prefill(served, [1]), served.executor.ForkKv(pb.ForkKvRequest(handle=handle))):
        error = await refused(call, Reason.DRAINING, UNAVAILABLE)
        assert error.retry_after_s
    handle = (await served.executor.Decode(pb.DecodeRequest(item=item([4], handle)))).output.handle
    handle = (await served.executor.TruncateKv(pb.TruncateKvRequest(handle=handle, length=2))).handle
    assert not served.server.draining.done.is_set()
    await served.executor.Release(pb.ReleaseRequest(handle=handle))
    async with asyncio.timeout(5):
        await served.server.draining.done.wait()
    await refused(served.executor.GetInfo(pb.GetInfoRequest()), Reason.DRAINING, UNAVAILABLE)


async def test_a_drain_says_when_to_come_back_and_tells_grpc_not_to_try_again_here(served: Served) -> None:
    await prefill(served, [1])
    await drain(served)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill(served, [1])
    trailing = dict(caught.value.trailing_metadata() or ())
    retry = error_details_pb2.RetryInfo()
    details = status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details
    assert any(detail.Unpack(retry) for detail in details)
    assert retry.retry_delay.ToMilliseconds() > 0
    assert trailing["grpc-retry-pushback-ms"] == "-1"


async def test_the_lame_duck_time_ends_and_what_is_in_flight_still_finishes() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        handle, other = await prefill(served, [1, 2]), await prefill(served, [3])
        running = await gate.hold(served.executor.Decode(pb.DecodeRequest(item=item([3], handle))))
        await drain(served, grace=0.01)
        async with asyncio.timeout(5):
            await served.server.draining.done.wait()
        await refused(served.executor.Decode(pb.DecodeRequest(item=item([1], other))), Reason.DRAINING, UNAVAILABLE)
        stopping = asyncio.ensure_future(served.server.stop(grace_s=30))
        await asyncio.sleep(0)
        gate.open()
        assert (await running).output.handle.seq_len == 3
        await stopping


async def test_the_earlier_end_wins(served: Served) -> None:
    await prefill(served, [1])
    await drain(served, grace=1000)
    await drain(served, grace=2000)
    assert not served.server.draining.done.is_set()
    await drain(served, grace=0)
    async with asyncio.timeout(5):
        await served.server.draining.done.wait()


async def test_an_idle_server_is_drained_at_once(served: Served) -> None:
    await drain(served, grace=1000)
    async with asyncio.timeout(5):
        await served.server.draining.done.wait()


async def test_a_session_is_served_to_its_last_sequence_and_then_told(served: Served) -> None:
    call = served.executor.Session()
    await call.write(session_pb2.SessionRequest(step_id=1, hello=session_pb2.SessionHello()))
    await call.read()
    create = session_pb2.SessionForward(items=[item([1, 2])])
    await call.write(session_pb2.SessionRequest(step_id=2, forward=create))
    handle = (await call.read()).forward.results[0].output.handle
    await drain(served)
    await call.write(
        session_pb2.SessionRequest(step_id=3, forward=session_pb2.SessionForward(items=[item([3], handle)]))
    )
    handle = (await call.read()).forward.results[0].output.handle
    await call.write(session_pb2.SessionRequest(step_id=4, forward=create))
    assert (await call.read()).forward.results[0].error.code == UNAVAILABLE.value[0]
    await call.write(session_pb2.SessionRequest(step_id=5, release=session_pb2.SessionRelease(handles=[handle])))
    await call.read()
    async with asyncio.timeout(5):
        await refused(call.read(), Reason.DRAINING, UNAVAILABLE)


@pytest.mark.parametrize("drains", [False, True])
async def test_a_session_ends_with_device_lost_where_the_engine_is(drains: bool) -> None:
    class Fatal(BaseException):
        pass

    def stage(name: str) -> None:
        if name == "forward":
            raise Fatal

    async with serve_identity(stage=stage) as served:
        works, idles = (served.executor.Session() for _ in range(2))
        for call in (works, idles):
            await call.write(session_pb2.SessionRequest(step_id=1, hello=session_pb2.SessionHello()))
            await call.read()
        if drains:  # which waits for a sequence that will never be
            served.server.state.empty.clear()
            await drain(served)
        else:
            create = session_pb2.SessionForward(items=[item([1, 2])])
            await works.write(session_pb2.SessionRequest(step_id=2, forward=create))
            [result] = (await works.read()).forward.results
            assert error_from_status(result.error).reason is Reason.DEVICE_LOST
        served.server._on_failed(Fatal())
        await served.server.stop(5.0)
        for call in (works, idles):
            await refused(call.read(), Reason.DEVICE_LOST, grpc.StatusCode.INTERNAL)


async def test_a_session_that_closes_as_the_last_of_a_drain_hears_goodbye() -> None:
    """Its release ends the drain, and the drain ends sessions: the answer comes first."""
    for _ in range(10):
        async with serve_identity() as served:
            call = served.executor.Session()
            await call.write(session_pb2.SessionRequest(step_id=1, hello=session_pb2.SessionHello()))
            await call.read()
            create = session_pb2.SessionForward(items=[item([1, 2])])
            await call.write(session_pb2.SessionRequest(step_id=2, forward=create))
            await call.read()
            await drain(served)
            close = session_pb2.SessionClose(release_sequences=True)
            await call.write(session_pb2.SessionRequest(step_id=3, close=close))
            async with asyncio.timeout(5):
                assert (await call.read()).goodbye.released_sequences == 1
                assert await call.read() is grpc.aio.EOF


async def test_steps_of_a_session_that_run_when_the_lame_duck_time_ends_are_answered() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        call = served.executor.Session()
        await call.write(session_pb2.SessionRequest(step_id=1, hello=session_pb2.SessionHello()))
        await call.read()
        for step in (2, 3):
            create = session_pb2.SessionForward(items=[item([step, 2])])
            await call.write(session_pb2.SessionRequest(step_id=step, forward=create))
        one, two = [(await call.read()).forward.results[0].output.handle for _ in range(2)]
        decode = session_pb2.SessionForward(items=[item([3], one)])
        await (await gate.hold(call.write(session_pb2.SessionRequest(step_id=4, forward=decode))))
        decode = session_pb2.SessionForward(items=[item([3], two)])
        await call.write(session_pb2.SessionRequest(step_id=5, forward=decode))
        await until(lambda: served.server.state.engine.queued_items == 1)
        await drain(served, grace=0)
        await served.server.draining.done.wait()
        gate.open()
        answers = [await call.read() for _ in range(2)]
        assert [each.forward.results[0].output.handle.seq_len for each in answers] == [3, 3]
        await refused(call.read(), Reason.DRAINING, UNAVAILABLE)


async def test_a_stream_that_never_says_hello_does_not_hold_up_the_end(served: Served) -> None:
    call = served.executor.Session()
    await until(lambda: len(served.server.sessions) == 1)
    await drain(served)
    await refused(call.read(), Reason.DRAINING, UNAVAILABLE)


async def test_a_negative_grace_is_refused(served: Served) -> None:
    await refused(drain(served, -1), Reason.INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT)


async def test_sequences_are_listed_page_by_page_without_a_usable_handle(served: Served) -> None:
    lease = await served.executor.AcquireLease(pb.AcquireLeaseRequest(client_name="night shift"))
    handles = [await prefill(served, [1] * (i + 1)) for i in range(4)]
    leased = item([1] * 9, create={"lease_id": lease.lease_id, "reserve_tokens": 8})
    handles.append((await served.executor.Prefill(pb.PrefillRequest(item=leased))).output.handle)
    listed: list[Any] = []
    token, pages = "", 0
    while token or not pages:
        request = executor_control_pb2.ListSequencesRequest(page_size=2, page_token=token)
        page = await served.control.ListSequences(request)
        listed += page.sequences
        token, pages = page.next_page_token, pages + 1
        if pages == 1:  # what goes meanwhile does not shift the pages
            await served.executor.Release(pb.ReleaseRequest(handle=handles[0]))
    assert pages == 3
    assert [each.seq_len for each in listed] == [1, 2, 3, 4, 9]
    assert [(each.client_name, each.leased, each.blocks) for each in listed][-2:] == [
        ("", False, 1),
        ("night shift", True, 5),
    ]
    assert len({each.label for each in listed}) == 5
    told = b"".join(each.SerializeToString() for each in listed)
    assert not any(handle.id[8:] in told for handle in handles)
    bad = executor_control_pb2.ListSequencesRequest(page_token="x")  # noqa: S106 - not a secret
    await refused(served.control.ListSequences(bad), Reason.INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT)


async def test_a_busy_sequence_is_listed_as_busy() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        handle = await prefill(served, [1, 2])
        running = await gate.hold(served.executor.Decode(pb.DecodeRequest(item=item([3], handle))))
        [listed] = (await served.control.ListSequences(executor_control_pb2.ListSequencesRequest())).sequences
        assert listed.busy
        gate.open()
        await running
        await until(lambda: not served.server.state.handles.records()[0].busy)
