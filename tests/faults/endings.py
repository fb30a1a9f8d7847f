"""How calls end: thirty-one ways, each of which must leave nothing behind. R15 goes through them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc

from ferrum_rpc.executor.v1 import executor_control_pb2, forward_pb2, model_executor_pb2, session_pb2
from ferrum_rpc.scheduler import Scheduler, TextRequest, TokenStream
from tests.faults.gate import StepGate
from tests.faults.process import dial, program
from tests.faults.raw_session import raw_session
from tests.faults.waiting import until
from tests.serving import Served
from tests.wiring import item, pb, prefill

LATE_S: Final = 0.15
TEXT_TOKENS: Final = 30


class World:
    """A server with a gate in its steps, and a second connection that can be cut."""

    def __init__(self, served: Served, gate: StepGate) -> None:
        self.served = served
        self.gate = gate
        self.executor = served.executor

    async def release(self, handle: Any) -> None:
        await self.executor.Release(pb.ReleaseRequest(handle=handle, any_version=True))

    async def behind_a_step(self, *calls: Callable[[], Awaitable[Any]], end: Callable[[Any], None]) -> None:
        """Hold a step, queue calls behind it, do ``end`` to each of their tasks, let the step go."""
        holder = await prefill(self.served, [9])
        async with self.gate.closed():
            held = asyncio.ensure_future(self.executor.Decode(pb.DecodeRequest(item=item([1], holder))))
            await self.gate.reached()
            tasks = [asyncio.ensure_future(call()) for call in calls]
            queue = self.served.server.state.engine
            await until(lambda: queue.queued_items > 0)
            for task in tasks:
                end(task)
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.noticed(in_flight=1)
        await held
        await self.release(holder)

    async def noticed(self, in_flight: int = 0) -> None:
        """Wait until the server knows that its callers are gone. Were the step done before that, the answer would be on
        its way to nobody: a creation without request id and lease is then found by its idle time-out alone."""
        await until(lambda: self.served.server.calls.in_flight <= in_flight)

    async def in_the_step(self, call: Callable[[], Awaitable[Any]], end: Callable[[Any], None]) -> None:
        """Hold the call's own step, do ``end`` to its task, let the step go."""
        async with self.gate.closed():
            task = asyncio.ensure_future(call())
            # On a machine that is busy elsewhere a deadline may pass before the step begins: an ending too.
            await until(lambda: self.gate.holds or task.done())
            end(task)
            await asyncio.gather(task, return_exceptions=True)
            await self.noticed()


def _creation(**fields: Any) -> model_executor_pb2.PrefillRequest:
    return pb.PrefillRequest(item=item([1, 2, 3, 4, 5], **fields))


def _creations(count: int = 3, *, bad: int = 0, **fields: Any) -> model_executor_pb2.UnifiedForwardRequest:
    items = [item([1, 2, 3, 4, 5]) for _ in range(count)] + [item([9999]) for _ in range(bad)]
    return pb.UnifiedForwardRequest(items=items, **fields)


def _cancel(task: Any) -> None:
    task.cancel()


def _wait(_: Any) -> None:
    """Its deadline ends it."""


async def unary_ok(world: World) -> None:
    handle = await prefill(world.served, [1, 2, 3])
    await world.release((await world.executor.Decode(pb.DecodeRequest(item=item([4], handle)))).output.handle)


async def unary_error(world: World) -> None:
    with suppress(grpc.aio.AioRpcError):
        await world.executor.Prefill(pb.PrefillRequest(item=item([9999])))


async def unary_without_room(world: World) -> None:
    with suppress(grpc.aio.AioRpcError):
        await world.executor.Prefill(_creation(create=forward_pb2.CreateOptions(reserve_tokens=1 << 14)))


async def unary_cancelled_in_the_queue(world: World) -> None:
    await world.behind_a_step(lambda: world.executor.Prefill(_creation()), end=_cancel)


async def unary_cancelled_in_its_step(world: World) -> None:
    await world.in_the_step(lambda: world.executor.Prefill(_creation()), _cancel)


async def unary_late_in_the_queue(world: World) -> None:
    await world.behind_a_step(lambda: world.executor.Prefill(_creation(), timeout=LATE_S), end=_wait)


async def unary_late_in_its_step(world: World) -> None:
    await world.in_the_step(lambda: world.executor.Prefill(_creation(), timeout=LATE_S), _wait)


async def unary_asked_again(world: World) -> None:
    request = _creation(request_id=uuid.uuid4().hex)
    await world.in_the_step(lambda: world.executor.Prefill(request), _cancel)
    answer = await world.executor.Prefill(request)
    await world.release(answer.output.handle)


async def batch_ok(world: World) -> None:
    for each in (await world.executor.UnifiedForward(_creations())).results:
        await world.release(each.output.handle)


async def batch_with_errors(world: World) -> None:
    for each in (await world.executor.UnifiedForward(_creations(bad=2))).results:
        if each.HasField("output"):
            await world.release(each.output.handle)


async def batch_all_or_nothing(world: World) -> None:
    with suppress(grpc.aio.AioRpcError):
        await world.executor.UnifiedForward(_creations(bad=1, all_or_nothing=True))


async def batch_cancelled_in_the_queue(world: World) -> None:
    await world.behind_a_step(lambda: world.executor.UnifiedForward(_creations()), end=_cancel)


async def batch_cancelled_in_its_step(world: World) -> None:
    await world.in_the_step(lambda: world.executor.UnifiedForward(_creations()), _cancel)


async def batch_late_in_its_step(world: World) -> None:
    await world.in_the_step(lambda: world.executor.UnifiedForward(_creations(), timeout=LATE_S), _wait)


def _frame(count: int = 2, **fields: Any) -> session_pb2.SessionForward:
    return session_pb2.SessionForward(items=_creations(count).items, **fields)


async def session_closed(world: World) -> None:
    async with raw_session(world.executor) as session:
        await session.ask(forward=_frame())
        await session.ask(close=session_pb2.SessionClose(release_sequences=True))


async def session_with_errors(world: World) -> None:
    async with raw_session(world.executor) as session:
        await session.ask(forward=session_pb2.SessionForward(items=_creations(1, bad=1).items))
        await session.ask(release=session_pb2.SessionRelease())
        await session.ask(close=session_pb2.SessionClose(release_sequences=True))


async def session_step_taken_back(world: World) -> None:
    async with raw_session(world.executor) as session:
        async with world.gate.closed():
            _, first = await session.send(forward=_frame(1))
            await world.gate.reached()
            step, second = await session.send(forward=_frame(2))
            await session.send(cancel=session_pb2.SessionCancel(step_id=step))
            assert (await second).HasField("error")
        await first
        await session.ask(close=session_pb2.SessionClose(release_sequences=True))


async def session_step_late(world: World) -> None:
    async with raw_session(world.executor) as session:
        async with world.gate.closed():
            _, first = await session.send(forward=_frame(1))
            await world.gate.reached()
            late = _frame(2)
            late.timeout.FromMilliseconds(1)
            _, second = await session.send(forward=late)
            await asyncio.sleep(0.02)
        await asyncio.gather(first, second)
        await session.ask(close=session_pb2.SessionClose(release_sequences=True))


async def session_hung_up(world: World) -> None:
    async with raw_session(world.executor) as session:
        await session.ask(forward=_frame())


async def session_hung_up_in_a_step(world: World) -> None:
    async with raw_session(world.executor) as session, world.gate.closed():
        await session.send(forward=_frame())
        await world.gate.reached()
        await session.leave()


async def session_half_closed(world: World) -> None:
    async with raw_session(world.executor) as session:
        await session.ask(forward=_frame())
        await session.call.done_writing()


async def client_gone_in_its_step(world: World) -> None:
    async with world.gate.closed():
        async with dial(world.served.target) as other:
            call = asyncio.ensure_future(other.executor.UnifiedForward(_creations()))
            await world.gate.reached()
        await asyncio.gather(call, return_exceptions=True)
        await world.noticed()


async def lease_revoked(world: World) -> None:
    lease = (await world.executor.AcquireLease(pb.AcquireLeaseRequest())).lease_id
    await world.executor.Prefill(_creation(create=forward_pb2.CreateOptions(lease_id=lease)))
    await world.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease))


async def lease_run_out(world: World) -> None:
    lease = (await world.executor.AcquireLease(pb.AcquireLeaseRequest())).lease_id
    await world.executor.Prefill(_creation(create=forward_pb2.CreateOptions(lease_id=lease)))


async def forked_and_reset(world: World) -> None:
    handle = await prefill(world.served, [1, 2, 3, 4, 5])
    await world.executor.ForkKv(pb.ForkKvRequest(handle=handle, count=3))
    await world.served.control.Reset(executor_control_pb2.ResetRequest())


async def released_while_busy(world: World) -> None:
    handle = await prefill(world.served, [1, 2, 3])
    async with world.gate.closed():
        decode = asyncio.ensure_future(world.executor.Decode(pb.DecodeRequest(item=item([4], handle))))
        await world.gate.reached()
        release = asyncio.ensure_future(world.release(handle))
        records = world.served.server.state.handles.records
        await until(lambda: any(record.pending_end is not None for record in records()))
    await asyncio.gather(decode, release)


@asynccontextmanager
async def _texts(world: World, **fields: Any) -> AsyncIterator[tuple[Scheduler, list[TokenStream]]]:
    """Texts of a scheduler, one alone and three of one prompt, while one of their steps is held."""
    request = TextRequest(prompt=range(1, 22), max_tokens=TEXT_TOKENS, stop=(), **fields)
    async with Scheduler(world.served.target, run_tokens=4, token_budget=8) as scheduler:
        streams = [scheduler.submit(request), *scheduler.submit_choices(request, 3)]
        await anext(streams[0], None)  # none comes before the deadline on a machine that is busy elsewhere
        async with world.gate.closed():
            await until(lambda: world.gate.holds or all(each.end is not None for each in streams))
            yield scheduler, streams


async def scheduler_cancels(world: World) -> None:
    async with _texts(world) as (_, streams):
        for each in streams:
            each.cancel()


async def scheduler_is_late(world: World) -> None:
    async with _texts(world, deadline_s=LATE_S) as (_, streams):
        await until(lambda: all(each.end is not None for each in streams))


async def scheduler_closed(world: World) -> None:
    async with _texts(world):
        pass


async def scheduler_streams_dropped(world: World) -> None:
    async with _texts(world) as (scheduler, streams):
        streams.clear()
        world.gate.open()
        await scheduler.drain()


async def scheduler_killed(world: World) -> None:
    """It stands still with runs in flight, and ends there."""
    async with program("tests.faults.unread", world.served.target, "1", "0", "0", "1") as process:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"asked\n"


ENDINGS: Final[tuple[Callable[[World], Awaitable[None]], ...]] = (
    unary_ok,
    unary_error,
    unary_without_room,
    unary_cancelled_in_the_queue,
    unary_cancelled_in_its_step,
    unary_late_in_the_queue,
    unary_late_in_its_step,
    unary_asked_again,
    batch_ok,
    batch_with_errors,
    batch_all_or_nothing,
    batch_cancelled_in_the_queue,
    batch_cancelled_in_its_step,
    batch_late_in_its_step,
    session_closed,
    session_with_errors,
    session_step_taken_back,
    session_step_late,
    session_hung_up,
    session_hung_up_in_a_step,
    session_half_closed,
    client_gone_in_its_step,
    lease_revoked,
    lease_run_out,
    forked_and_reset,
    released_while_busy,
    scheduler_cancels,
    scheduler_is_late,
    scheduler_closed,
    scheduler_streams_dropped,
    scheduler_killed,
)
