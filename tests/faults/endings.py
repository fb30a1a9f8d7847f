"""How calls end: in some thirty ways, each of which must leave nothing behind. R15 goes through them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc

from ferrum_rpc.executor.v1 import forward_pb2, kv_transfer_pb2, session_pb2, types_pb2
from ferrum_rpc.scheduler import Scheduler, TextRequest, TokenStream
from tests.support.process import dial, program
from tests.support.raw_session import raw_session
from tests.support.serving import Gate, Served
from tests.support.transfers import as_import, exported, header
from tests.support.waiting import until
from tests.support.wiring import decode, item, prefill, release

kt = kv_transfer_pb2
LATE_S: Final = 0.15
TEXT_TOKENS: Final = 30
TOKENS: Final = [1, 2, 3, 4, 5]


class World:
    """A server with a gate in its steps, and a second connection that can be cut."""

    def __init__(self, served: Served, gate: Gate) -> None:
        self.served = served
        self.gate = gate

    async def behind_a_step(self, call: Callable[[], Awaitable[Any]], end: Callable[[Any], None]) -> None:
        """Hold a step, queue a call behind it, do ``end`` to its task, let the step go."""
        holder = await prefill(self.served, [9])
        async with self.gate.shut():
            held = asyncio.ensure_future(self.served.decode([1], holder))
            await self.gate.held()
            task = asyncio.ensure_future(call())
            # On a machine that is busy elsewhere a deadline may pass before that: an ending too.
            await until(lambda: self.served.server.state.engine.queued_items > 0 or task.done())
            end(task)
            await asyncio.gather(task, return_exceptions=True)
            await self.noticed(in_flight=1)
        await held
        await release(self.served, holder)

    async def noticed(self, in_flight: int = 0) -> None:
        """Wait until the server knows that its callers are gone. Were the step done before that, the answer would be on
        its way to nobody: a creation without request id and lease is then found by its idle time-out alone."""
        await until(lambda: self.served.server.calls.in_flight <= in_flight)

    async def in_the_step(self, call: Callable[[], Awaitable[Any]], end: Callable[[Any], None]) -> None:
        """Hold the call's own step, do ``end`` to its task, let the step go."""
        async with self.gate.shut():
            task = asyncio.ensure_future(call())
            await until(lambda: self.gate.holds or task.done())
            end(task)
            await asyncio.gather(task, return_exceptions=True)
            await self.noticed()


def _items(count: int = 3, *, bad: int = 0) -> list[forward_pb2.ForwardItem]:
    return [item(TOKENS)] * count + [item([9999])] * bad


def _cancel(task: Any) -> None:
    task.cancel()


def _wait(_: Any) -> None:
    """Its deadline ends it."""


Ending = Callable[[World], Awaitable[None]]
ENDINGS: Final[list[Ending]] = []
CALLS: Final[dict[str, Callable[..., Any]]] = {
    "unary": lambda world, **options: world.served.prefill(TOKENS, **options),
    "batch": lambda world, **options: world.served.unified(*_items(), **options),
}


def ending(run: Ending) -> Ending:
    """One of `ENDINGS`."""
    ENDINGS.append(run)
    return run


for kind, call in CALLS.items():
    for place, hold in (("in_the_queue", World.behind_a_step), ("in_its_step", World.in_the_step)):
        for name, end, options in (("cancelled", _cancel, {}), ("late", _wait, {"timeout": LATE_S})):

            async def run(world: World, hold=hold, call=call, end=end, options=options) -> None:
                await hold(world, lambda: call(world, **options), end)

            run.__name__ = f"{kind}_{name}_{place}"
            ending(run)


@ending
async def unary_ok(world: World) -> None:
    handle = await prefill(world.served, [1, 2, 3])
    await release(world.served, await decode(world.served, [4], handle))


@ending
async def unary_error(world: World) -> None:
    with suppress(grpc.aio.AioRpcError):
        await world.served.prefill([9999])


@ending
async def unary_without_room(world: World) -> None:
    with suppress(grpc.aio.AioRpcError):
        await world.served.prefill(TOKENS, create={"reserve_tokens": 1 << 14})


@ending
async def unary_asked_again(world: World) -> None:
    name = uuid.uuid4().hex
    await world.in_the_step(lambda: world.served.prefill(TOKENS, request_id=name), _cancel)
    await release(world.served, await prefill(world.served, TOKENS, request_id=name))


@ending
async def batch_with_errors(world: World) -> None:
    results = (await world.served.unified(*_items(bad=2))).results
    await release(world.served, *[each.output.handle for each in results if each.HasField("output")])


@ending
async def batch_all_or_nothing(world: World) -> None:
    with suppress(grpc.aio.AioRpcError):
        await world.served.unified(*_items(bad=1), all_or_nothing=True)


def _frame(count: int = 2, *, bad: int = 0) -> session_pb2.SessionForward:
    return session_pb2.SessionForward(items=_items(count, bad=bad))


async def _behind(world: World) -> types_pb2.KvHandle:
    """A sequence that is truncated by more than its last step: recurrent states must be fed again."""
    handle = await decode(world.served, [6], await prefill(world.served, TOKENS))
    return (await world.served.truncate(handle, 3)).handle


for name, end, options in (("cancelled", _cancel, {}), ("late", _wait, {"timeout": LATE_S})):

    async def run(world: World, end=end, options=options) -> None:
        handle = await _behind(world)
        await world.in_the_step(lambda: world.served.decode([6], handle, **options), end)
        await release(world.served, handle)

    run.__name__ = f"unary_{name}_while_states_are_fed_again"
    ending(run)


@ending
async def released_behind_its_length(world: World) -> None:
    handle = await _behind(world)
    [child] = (await world.served.fork(handle)).handles
    await release(world.served, handle, await decode(world.served, [6], child))


@ending
async def export_left(world: World) -> None:
    handle = await prefill(world.served, TOKENS)
    export = world.served.transfer.ExportKv(kt.ExportKvRequest(handle=handle, chunk_tokens=1))
    await export.read()
    export.cancel()
    await release(world.served, handle)


@ending
async def import_left(world: World) -> None:
    handle = await prefill(world.served, TOKENS)
    frames = await exported(world.served, handle)
    await release(world.served, handle)
    call = world.served.transfer.ImportKv()
    lease = (await world.served.acquire()).lease_id
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # without room it ends first
        for frame in (header(frames[0].layout, uuid.uuid4().hex, lease_id=lease), *as_import(frames[:-1])):
            await call.write(frame)
    call.cancel()
    await world.noticed()
    await world.served.revoke(lease)


@ending
async def parked_and_released(world: World) -> None:
    handle = (await world.served.park(await prefill(world.served, TOKENS))).handle
    await release(world.served, handle)


@ending
async def parked_and_back(world: World) -> None:
    handle = (await world.served.park(await _behind(world))).handle
    await release(world.served, await decode(world.served, [6], handle))


@ending
async def session_with_errors(world: World) -> None:
    async with raw_session(world.served.executor) as session:
        await session.ask(forward=_frame(1, bad=1))
        await session.ask(release=session_pb2.SessionRelease())
        await session.close()


@ending
async def session_step_taken_back(world: World) -> None:
    async with raw_session(world.served.executor) as session:
        async with world.gate.shut():
            _, first = await session.send(forward=_frame(1))
            await world.gate.held()
            step, second = await session.send(forward=_frame())
            await session.send(cancel=session_pb2.SessionCancel(step_id=step))
            assert (await second).HasField("error")
        await first
        await session.close()


@ending
async def session_step_late(world: World) -> None:
    async with raw_session(world.served.executor) as session:
        async with world.gate.shut():
            _, first = await session.send(forward=_frame(1))
            await world.gate.held()
            late = _frame()
            late.timeout.FromMilliseconds(1)
            _, second = await session.send(forward=late)
            await asyncio.sleep(0.02)
        await asyncio.gather(first, second)
        await session.close()


@ending
async def session_hung_up(world: World) -> None:
    async with raw_session(world.served.executor) as session:
        await session.ask(forward=_frame())


@ending
async def session_hung_up_in_a_step(world: World) -> None:
    async with raw_session(world.served.executor) as session, world.gate.shut():
        await session.send(forward=_frame())
        await world.gate.held()
        await session.leave()


@ending
async def session_half_closed(world: World) -> None:
    async with raw_session(world.served.executor) as session:
        await session.ask(forward=_frame())
        await session.call.done_writing()


@ending
async def client_gone_in_its_step(world: World) -> None:
    async with world.gate.shut():
        async with dial(world.served.target) as other:
            call = asyncio.ensure_future(other.unified(*_items()))
            await world.gate.held()
        await asyncio.gather(call, return_exceptions=True)
        await world.noticed()


async def _leased(world: World) -> str:
    """A lease with a sequence."""
    lease: str = (await world.served.acquire()).lease_id
    await world.served.prefill(TOKENS, create={"lease_id": lease})
    return lease


@ending
async def lease_revoked(world: World) -> None:
    await world.served.revoke(await _leased(world))


@ending
async def lease_run_out(world: World) -> None:
    await _leased(world)


@ending
async def forked_and_reset(world: World) -> None:
    handle = await prefill(world.served, TOKENS)
    await world.served.fork(handle, count=3)
    await world.served.reset()


@ending
async def released_while_busy(world: World) -> None:
    handle = await prefill(world.served, [1, 2, 3])
    async with world.gate.shut():
        step = asyncio.ensure_future(decode(world.served, [4], handle))
        await world.gate.held()
        releasing = asyncio.ensure_future(release(world.served, handle))
        records = world.served.server.state.handles.records
        await until(lambda: any(record.pending_end is not None for record in records()))
    await asyncio.gather(step, releasing)


@asynccontextmanager
async def _texts(world: World, **fields: Any) -> AsyncIterator[tuple[Scheduler, list[TokenStream]]]:
    """Texts of a scheduler, one alone and three of one prompt, while one of their steps is held."""
    request = TextRequest(prompt=range(1, 22), max_tokens=TEXT_TOKENS, stop=(), **fields)
    async with Scheduler(world.served.target, run_tokens=4, token_budget=8) as scheduler:
        streams = [scheduler.submit(request), *scheduler.submit_choices(request, 3)]
        await anext(streams[0], None)  # none comes before the deadline on a machine that is busy elsewhere
        async with world.gate.shut():
            await until(lambda: world.gate.holds or all(each.end is not None for each in streams))
            yield scheduler, streams


@ending
async def scheduler_cancels(world: World) -> None:
    async with _texts(world) as (_, streams):
        for each in streams:
            each.cancel()


@ending
async def scheduler_is_late(world: World) -> None:
    async with _texts(world, deadline_s=LATE_S) as (_, streams):
        await until(lambda: all(each.end is not None for each in streams))


@ending
async def scheduler_closed(world: World) -> None:
    async with _texts(world):
        pass


@ending
async def scheduler_streams_dropped(world: World) -> None:
    async with _texts(world) as (scheduler, streams):
        streams.clear()
        world.gate.open()
        await scheduler.drain()


@ending
async def scheduler_killed(world: World) -> None:
    """It stands still with runs in flight, and ends there."""
    async with program("tests.faults.unread", world.served.target, 1, 0, 0, 1, says="asked"):
        pass
