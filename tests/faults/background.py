"""R26: a background task never dies silently. An exception in each of a server's loops: it is logged and counted, and
the loop does its work again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final
from unittest import mock

import grpc
from grpc_health.v1 import health_pb2

from ferrum_rpc.executor.v1 import kv_transfer_pb2, session_pb2
from ferrum_rpc.service import supervisor
from ferrum_rpc.service.forward import ForwardCall
from ferrum_rpc.service.kv_events import KvEvents
from ferrum_rpc.service.lifecycle import Drain, Sweeper
from ferrum_rpc.service.session import Session
from ferrum_rpc.service.supervisor import STUCK_AFTER, BackgroundTask
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.models import IDENTITY, Model
from tests.faults.sizes import Size
from tests.support.failing import Injected, failing
from tests.support.raw_session import raw_session
from tests.support.serving import Served, serve_model
from tests.support.waiting import until
from tests.support.wiring import decode, item, prefill, release

EVERY_S: Final = 0.001


async def _serving(served: Served) -> bool:
    answer = await served.health_check()
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def sweep(served: Served) -> bool:
    """A lease that runs out after the sweep has failed still ends."""
    state = served.server.state
    lease = (await served.acquire()).lease_id
    with failing(state.leases, "due"):
        task = state.supervisor.every(BackgroundTask.SWEEP, EVERY_S, Sweeper(state).turn)
        try:
            await until(lambda: state.supervisor.failures[BackgroundTask.SWEEP] > 0)
            next(each for each in state.leases.due(math.inf) if each.id == lease).expires = 0.0
            await until(lambda: not len(state.leases))
        finally:
            task.cancel()
    return True


async def heartbeat(served: Served) -> bool:
    """While the engine cannot be asked, health does not say SERVING; afterwards it does again."""
    server = served.server
    task = server.state.supervisor.every(BackgroundTask.HEARTBEAT, EVERY_S, server.look)
    try:
        with failing(server.state.engine, "hang_reason", math.inf):
            await until(lambda: server.state.supervisor.failures[BackgroundTask.HEARTBEAT] >= STUCK_AFTER)
            told = await _serving(served)
        await until(lambda: not server.state.supervisor.stuck)
        return not told and await _serving(served)
    finally:
        task.cancel()


async def drain(served: Served) -> bool:
    """A drain that failed comes to its end."""
    draining = Drain(served.server.state, served.server.health, served.server.sessions)
    with (
        mock.patch.object(supervisor, "RESTART_AFTER_S", EVERY_S),
        mock.patch.multiple(served.server.state, close=mock.DEFAULT, drain=mock.DEFAULT) as patched,
    ):
        patched["close"].side_effect = [Injected("close"), None]
        draining.begin(0.0)
        await asyncio.wait_for(draining.done.wait(), 20)
    return True


async def writer(served: Served) -> bool:
    """A session whose answer is lost ends with a status, and its sequence goes on."""
    frame = session_pb2.SessionForward(items=[item([1, 2, 3], request_id="first")])
    with failing(Session, "_answer"):
        async with raw_session(served.executor) as session:
            lease = session.welcome.lease_id
            await session.send(forward=frame)
            code = await asyncio.wait_for(session.call.code(), 20)
    async with raw_session(served.executor, lease_id=lease) as again:
        [result] = (await again.ask(forward=frame)).forward.results
        await again.close()
    served.server.state.leases.remove(served.server.state.leases.find(lease, ""), expired=False)
    await release(served, result.output.handle)
    return code is grpc.StatusCode.INTERNAL and result.output.replayed


async def writer_loop(served: Served) -> bool:
    """A writer that fails before it has begun is begun again."""
    with mock.patch.object(supervisor, "RESTART_AFTER_S", EVERY_S), failing(Session, "_answer_ended"):
        async with raw_session(served.executor) as session:
            return await asyncio.wait_for(session.call.code(), 20) is grpc.StatusCode.INTERNAL


async def completion(served: Served) -> bool:
    """Of two calls one whose end fails is answered too, and its sequence goes on."""
    handles = await prefill(served, [1]), await prefill(served, [2])
    with failing(ForwardCall, "_commit"):
        calls = asyncio.gather(*[decode(served, [5], each) for each in handles], return_exceptions=True)
        answers = await asyncio.wait_for(calls, 20)
    failed = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
    again = await decode(served, [5], handles[0 if isinstance(answers[0], Exception) else 1])
    return [each.code() for each in failed] == [grpc.StatusCode.INTERNAL] and again.seq_len == 2


async def events(served: Served) -> bool:
    """Watchers of the cache's events learn what happens after the look that failed."""
    stream = served.transfer.WatchKvEvents(kv_transfer_pb2.WatchKvEventsRequest())
    await stream.read()
    with mock.patch.object(supervisor, "RESTART_AFTER_S", EVERY_S), failing(KvEvents, "_look"):
        await until(lambda: served.server.state.supervisor.failures[BackgroundTask.EVENTS] > 0)
    await prefill(served, [1] * 9)
    batch = await asyncio.wait_for(stream.read(), 20)
    stream.cancel()
    return len(batch.events) == 2


LOOPS: Final[dict[str, tuple[BackgroundTask, Callable[[Served], Awaitable[bool]]]]] = {
    "the sweep of leases": (BackgroundTask.SWEEP, sweep),
    "the look at the engine": (BackgroundTask.HEARTBEAT, heartbeat),
    "the drain": (BackgroundTask.DRAIN, drain),
    "the look at the cache": (BackgroundTask.EVENTS, events),
    "an answer of a session": (BackgroundTask.SESSION, writer),
    "a session's writer": (BackgroundTask.SESSION, writer_loop),
    "the end of a call": (BackgroundTask.CALLBACK, completion),
}


async def survives(name: str, model: Model) -> tuple[bool, bool]:
    """Inject one: whether the loop did its work again, and whether the failure was counted."""
    task, inject = LOOPS[name]
    async with serve_model(model.config(block_size=4, kv_blocks=256)) as served:
        survived = await inject(served)
        counted = served.server.state.supervisor.failures[task] > 0
    return survived, counted


async def r26_a_background_task_never_dies_silently(size: Size, model: Model = IDENTITY) -> Figures:
    """An exception in every loop, in a server of its own each."""
    dead, silent, tried = [], [], 0
    for _ in range(size.background_rounds):
        for name in LOOPS:
            survived, counted = await survives(name, model)
            tried += 1
            if not survived:
                dead.append(name)
            if not counted:
                silent.append(name)
    return Figures(
        "A background task never dies silently",
        exactly("loops that did not go on", len(dead), 0),
        exactly("failures that were not counted", len(silent), 0),
        at_least("kinds of loops", len(LOOPS), 7),
        facts={"exceptions": tried, "wrong": sorted({*dead, *silent})},
    )
