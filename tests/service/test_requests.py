"""A request's way in, over the wire: headers first, then a bounded body, counted before it is parsed; many at once."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import grpc
import pytest

from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.service.guard import accept
from ferrum_rpc.service.guard.bodies import Bodies
from ferrum_rpc.wire.info import SCHEMA_REVISION
from tests.support.raw_session import RawSession
from tests.support.serving import Served, gated, serve_identity
from tests.support.wiring import full, item, pb, prefill, until

SERVICE = "/ferrum_rpc.executor.v1.ModelExecutor/"
HEALTH = "/grpc.health.v1.Health/Check"
MEGABYTE = 1 << 20
DECODE_OF_NOTHING = b"\x0a\x00"
EMPTY_ITEMS = b"\x0a\x00" * (MEGABYTE // 2)


def call(channel: grpc.aio.Channel, path: str) -> Any:
    """A method as bytes to bytes."""
    return channel.unary_unary(path)


async def code_of(answer: Any) -> grpc.StatusCode:
    """How a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value.code()


async def silent(channel: grpc.aio.Channel, path: str) -> Any:
    """A call whose headers have been sent, and whose body never comes."""
    stream = channel.stream_unary(path)()
    await stream.wait_for_connection()
    return stream


async def test_a_megabyte_of_empty_items_is_refused_before_it_is_parsed() -> None:
    async with serve_identity() as served:
        for method in ("BatchPrefill", "BatchDecode", "UnifiedForward"):
            answer = call(served.channel, SERVICE + method)(EMPTY_ITEMS)
            assert await code_of(answer) is grpc.StatusCode.INVALID_ARGUMENT
        request = b"\x12\x80\x80\x40" + EMPTY_ITEMS
        stream = served.channel.stream_stream(SERVICE + "Session")(iter((request,)))
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
        # The items reached no handler: had they, each would have been counted and refused by itself.
        assert all(not count.items for count in served.server.calls.methods.values())


async def test_a_health_check_is_a_name_and_nothing_longer() -> None:
    async with serve_identity() as served:
        health = call(served.channel, HEALTH)
        assert await health(b"") == b"\x08\x01"
        unknown = b"\x7a\x00"
        assert await health(unknown * 500) == b"\x08\x01"
        assert await code_of(health(unknown * 600)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_who_has_no_token_is_refused_before_a_body_comes() -> None:
    async with serve_identity(tokens=("alice a-token",)) as served:
        for method in ("BatchPrefill", "GetStatus", "Session", "NoSuchMethod"):
            assert await (await silent(served.channel, SERVICE + method)).code() is grpc.StatusCode.UNAUTHENTICATED


async def test_bodies_that_never_come_hold_up_nobody() -> None:
    """More of them than there are slots, of one connection and of many."""
    async with serve_identity(
        max_request_bytes=64 * MEGABYTE
    ) as served:  # 4 slots, and 32 for health checks, 1 a connection
        apart = [grpc.aio.insecure_channel(served.target, options=alone(index)) for index in range(6)]
        streams = [await silent(channel, path) for channel in apart for path in (SERVICE + "GetStatus", HEALTH) * 3]
        for channel in (served.channel, apart[0]):
            for path in (SERVICE + "GetStatus", HEALTH):
                await call(channel, path)(b"")
        for stream in streams:
            stream.cancel()
        for channel in apart:
            await channel.close()


def alone(index: int) -> tuple[tuple[str, Any], ...]:
    """Options that give a channel a connection of its own."""
    return (("grpc.use_local_subchannel_pool", 1), ("ferrum.test", index))


@pytest.mark.parametrize("known", [True, False])
async def test_a_grpcio_whose_private_functions_differ_accepts_one_by_one(known, monkeypatch):
    if not known:
        monkeypatch.setattr(accept, "_SIGNATURES", {"_schedule_rpc_coro": ("another", "signature")})
    ours = accept.Acceptors._accept
    with mock.patch.object(accept.Acceptors, "_accept", autospec=True, side_effect=ours) as accepted:
        async with serve_identity() as served:
            await asyncio.gather(*(call(served.channel, SERVICE + "GetStatus")(b"") for _ in range(32)))
    assert accepted.called is known


async def test_the_time_before_a_call_is_queued_counts_as_queueing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From when the event loop took the call: here its body comes late."""
    read, taken = Bodies.read, asyncio.Event()

    async def noted(self: Bodies, context: Any, *caller: Any) -> bytes:
        taken.set()
        return await read(self, context, *caller)

    async with serve_identity() as served:
        handle = await prefill(served, [1, 2])
        monkeypatch.setattr(Bodies, "read", noted)
        stream = served.channel.stream_unary(SERVICE + "Decode")()
        await taken.wait()
        began = time.monotonic()
        for _ in range(100):
            await served.status()
        late = time.monotonic() - began
        await stream.write(pb.DecodeRequest(item=item([3], handle)).SerializeToString())
        answer = pb.DecodeResponse.FromString(await stream)
        assert answer.timing.queue_micros >= late * 1e6


async def refused_call(served: Served, request: bytes) -> None:
    await code_of(call(served.channel, SERVICE + "Decode")(request))


async def killed_session(served: Served) -> None:
    """Cut off while the answer to a step is on its way."""
    session = RawSession(served.executor.Session())
    await session.open()
    await session.send(forward=session_pb2.SessionForward(items=[item([1, 2, 3], output=full())]))
    await session.leave()
    await until(lambda: not served.server.state.sessions)


@pytest.mark.parametrize(
    "end",
    [
        lambda served: refused_call(served, b"\xff"),
        lambda served: refused_call(served, DECODE_OF_NOTHING),
        killed_session,
    ],
    ids=["no message", "refused", "killed session"],
)
async def test_what_has_ended_leaves_nothing_for_the_collector(end: Callable[[Served], Awaitable[None]]) -> None:
    """A circle of objects holds requests and answers until a collection, which may be gigabytes away."""
    async with serve_identity() as served:
        await end(served)
        gc.collect()
        gc.disable()
        try:
            for _ in range(8):
                await end(served)
            await until(lambda: not served.server.state.engine.queued_items)
            for _ in range(8):  # tasks that are being cancelled
                await asyncio.sleep(0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            ours = [each for each in gc.garbage if type(each).__module__.startswith("ferrum_rpc")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert ours == []


# --- many at once -----------------------------------------------------------------------------------------------------


async def test_what_piles_up_during_a_step_is_the_next_step() -> None:
    async with gated() as (served, gate):
        handles = [await prefill(served, [1, index]) for index in range(8)]
        held = await gate.hold(served.prefill([1]))
        waiting = [asyncio.ensure_future(served.decode([7], handle)) for handle in handles]
        await until(lambda: served.server.state.engine.queued_items == len(handles))
        pressure = (await served.status()).pressure
        assert (pressure.queued_items, pressure.queued_tokens) == (8, 8)
        gate.open()
        timings = [(await each).timing for each in waiting]
        first = (await held).timing.step
        assert {timing.step for timing in timings} == {first + 1}
        assert {timing.step_sequences for timing in timings} == {8}


CALLS = 1500
"""More than gRPC lets wait by its own defaults: beyond 1,000 that wait to be accepted it resets some at random, which a
caller reads as CANCELLED; of so many some sixty. Server and client share an event loop here, and the client starts all
of its calls in one turn of it: nearly all of them wait."""


async def ended(*calls: Awaitable[Any]) -> Counter[object]:
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    return Counter(each.code() if isinstance(each, grpc.aio.AioRpcError) else type(each) for each in answers)


async def test_calls_that_begin_at_once_are_all_answered() -> None:
    async with serve_identity() as served:
        calls = [served.status() for _ in range(CALLS)]
        assert await ended(*calls) == {pb.GetStatusResponse: CALLS}


async def test_sessions_that_begin_at_once_are_all_welcome() -> None:
    async with serve_identity(max_leases=CALLS) as served:
        hello = session_pb2.SessionRequest(step_id=1, hello=session_pb2.SessionHello(client_revision=SCHEMA_REVISION))

        async def begin(call: Any) -> str:
            await call.write(hello)
            return (await call.read()).WhichOneof("frame")

        calls = [served.executor.Session() for _ in range(CALLS)]
        assert await ended(*map(begin, calls)) == {str: CALLS}

        async def end(call: Any) -> str:
            """Wholly: gRPC hands what is left of a call to whatever loop there is, the next test's too."""
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
            return (await call.code()).name

        assert await ended(*map(end, calls)) == {str: CALLS}
