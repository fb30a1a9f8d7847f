"""A request's way in, over the wire: headers first, then a bounded body, counted before it is parsed; many at once."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.service.guard import accept
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.service.guard.bodies import Bodies
from ferrum_rpc.service.server import ExecutorServer
from tests.faults.raw_session import RawSession
from tests.serving import LIMITS, Served, serve_identity
from tests.wiring import full, item, pb, prefill, until

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


@pytest.mark.parametrize("method", ["BatchPrefill", "BatchDecode", "UnifiedForward", "Session"])
async def test_a_megabyte_of_empty_items_is_refused_before_it_is_parsed(method: str) -> None:
    async with serve_identity() as served:
        request = EMPTY_ITEMS if method != "Session" else b"\x12\x80\x80\x40" + EMPTY_ITEMS
        if method == "Session":
            stream = served.channel.stream_stream(SERVICE + method)(iter((request,)))
            assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
        else:
            assert await code_of(call(served.channel, SERVICE + method)(request)) is grpc.StatusCode.INVALID_ARGUMENT
        # The items reached no handler: had they, each would have been counted and refused by itself.
        assert all(not count.items for count in served.server.calls.methods.values())


async def test_a_health_check_is_a_name_and_nothing_longer() -> None:
    async with serve_identity() as served:
        health = call(served.channel, HEALTH)
        assert await health(b"") == b"\x08\x01"
        unknown = b"\x7a\x00"
        assert await health(unknown * 500) == b"\x08\x01"
        assert await code_of(health(unknown * 600)) is grpc.StatusCode.INVALID_ARGUMENT


class Secured(ExecutorServer):
    """A server that asks for tokens, of no model: nobody gets as far."""

    def __init__(self, tokens: Path) -> None:
        def build() -> Any:
            raise RuntimeError("no model")

        super().__init__(build, LIMITS, security=Security(tokens=tokens))


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice a-token\n")
    tokens.chmod(0o600)
    server = Secured(tokens)
    await server.start()
    async with grpc.aio.insecure_channel(server.target) as channel:
        yield channel
    await server.stop()


async def test_who_has_no_token_is_refused_before_a_body_comes(secured: grpc.aio.Channel) -> None:
    for method in ("BatchPrefill", "GetStatus", "Session", "NoSuchMethod"):
        assert await (await silent(secured, SERVICE + method)).code() is grpc.StatusCode.UNAUTHENTICATED


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
async def test_a_grpcio_whose_private_functions_differ_accepts_one_by_one(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(accept, "_SIGNATURES", {"_schedule_rpc_coro": ("another", "signature")})
    accepted: list[str] = []
    loop_of_ours = accept.Acceptors._accept

    async def noted(self: Any, path: str, handler: Any) -> None:
        accepted.append(path)
        await loop_of_ours(self, path, handler)

    monkeypatch.setattr(accept.Acceptors, "_accept", noted)
    async with serve_identity() as served:
        await asyncio.gather(*(call(served.channel, SERVICE + "GetStatus")(b"") for _ in range(32)))
    assert bool(accepted) is known


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
            await served.executor.GetStatus(pb.GetStatusRequest())
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
