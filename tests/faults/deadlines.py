"""R6: deadlines and cancellations are honoured: what has not begun by then never does, and leaves nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from ferrum_rpc.engine.api import Operation, Submission
from ferrum_rpc.executor.v1 import session_pb2, types_pb2
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.sizes import Size
from tests.support.inside import creating
from tests.support.raw_session import raw_session
from tests.support.serving import Gate, Served, serve_identity
from tests.support.waiting import until
from tests.support.wiring import decode, item, prefill, release

STEP_S: Final = 0.01
CALLERS: Final = 12
QUEUED: Final = 20
SLACK_S: Final = 0.02
"""Between the claim of a step, which looks at the clock, and the measurement, two threads may take turns four times."""


@dataclass
class Watch:
    """What the model thread was given, and when it began."""

    deadline: dict[int, float] = field(default_factory=dict)
    begun: dict[int, float] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    """The spans, so that no other gets the identity of one."""

    def lateness(self) -> float:
        """The most seconds by which a step began after the deadline of one of its calls; negative is early."""
        return max(self.begun[span] - self.deadline[span] for span in self.begun.keys() & self.deadline.keys())

    def never_begun(self) -> int:
        return len(self.deadline.keys() - self.begun.keys())


@asynccontextmanager
async def _watched(served: Served) -> AsyncIterator[Watch]:
    watch = Watch()
    thread, runner = served.server.state.engine, served.runner
    submit, begin = thread.submit, runner.begin

    def submitted(work: Submission | Operation) -> None:
        if isinstance(work, Submission) and work.deadline is not None:
            for span in work.spans:
                watch.deadline[id(span)] = work.deadline
                watch.kept.append(span)
        submit(work)

    def ran(step: Any) -> Any:
        now = time.monotonic()
        for span in step.spans:
            watch.begun[id(span)] = now
        time.sleep(STEP_S)  # in the model thread: a step that takes its time, so that there is a queue
        return begin(step)

    thread.submit, runner.begin = submitted, ran  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        thread.submit, runner.begin = submit, begin  # type: ignore[method-assign]


async def _late_calls(served: Served, count: int, seed: int) -> Counter[str]:
    """Unary calls, batches and session frames with deadlines from none to ample; how they ended."""
    dice = random.Random(seed)
    ends: Counter[str] = Counter()
    left = count

    async def unary(handle: Any) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            timeout = dice.choice((0.002, STEP_S, 3 * STEP_S, 20 * STEP_S))
            try:
                if dice.random() < 0.5:
                    handle = await decode(served, [1], handle, truncate_to=2, timeout=timeout)
                else:
                    items = item([1], handle, truncate_to=2), item([1, 2])
                    response = await served.unified(*items, timeout=timeout)
                    if response.results[0].HasField("error"):
                        ends["items late"] += 1
                        handle = await _where(served, handle)
                        continue
                    handle = response.results[0].output.handle
                    await release(served, response.results[1].output.handle)
                ends["in time"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1
                handle = await _where(served, handle)
        await release(served, handle)

    async def session() -> None:
        nonlocal left
        async with raw_session(served.executor) as stream:
            while left > 0:
                left -= 1
                frame = session_pb2.SessionForward(items=[item([1, 2])])
                frame.timeout.FromMilliseconds(dice.choice((1, 10, 30, 200)))
                answer = await stream.ask(forward=frame)
                failed = answer.HasField("error") or answer.forward.results[0].HasField("error")
                ends["frame late" if failed else "frame in time"] += 1
            await stream.close()

    handles = [await prefill(served, [1, 2]) for _ in range(CALLERS)]
    await asyncio.gather(*[unary(handle) for handle in handles], *[session() for _ in range(3)])
    return ends


async def _where(served: Served, handle: Any) -> Any:
    """The current handle of a sequence whose call was given up: the server says where it stands."""
    [record] = [each for each in served.server.state.handles.records() if each.id == handle.id]
    await until(lambda: not record.busy)
    return types_pb2.KvHandle(id=handle.id, seq_len=record.length, version=record.version)


async def _cancelled_queue(served: Served, gate: Gate) -> tuple[int, float]:
    """Cancel calls that wait behind a step, and that step's own creation. Items that were still queued when the callers
    knew, before the step ended; and seconds from the step's end until every block was free."""
    state = served.server.state
    calls = lambda: served.prefill([1] * 8), lambda: served.unified(item([1] * 8), item([2] * 8))
    async with gate.shut():
        running = asyncio.ensure_future(served.prefill([3] * 8))
        await gate.held()
        tasks = [asyncio.ensure_future(calls[number % 2]()) for number in range(QUEUED)]
        await until(lambda: state.engine.queued_items >= QUEUED * 3 // 2)
        for task in (running, *tasks):
            task.cancel()
        await asyncio.gather(running, *tasks, return_exceptions=True)
        await until(lambda: served.server.calls.in_flight == 0)
        queued = state.engine.queued_items
    return queued, await until(lambda: not creating(state) and not sum(_held(state)))


def _held(state: Any) -> tuple[int, int]:
    """Sequences, and blocks that are not free."""
    pressure = state.pressure()
    return pressure.sequences, pressure.total_blocks - pressure.free_blocks


async def r6_deadlines_and_cancels_are_honoured(size: Size) -> Figures:
    """A slow server under calls that do not wait for it, then under callers who change their mind."""
    gate = Gate()
    async with serve_identity(stage=gate, kv_blocks=512, max_batch_items=4) as served:
        async with _watched(served) as watch:
            ends = await _late_calls(served, size.deadlines, seed=6)
        state = served.server.state
        await until(lambda: not served.server.calls.in_flight and not creating(state))  # of callers who gave up
        await served.check()
        # A creation whose answer was on its way when its caller gave up waits for its idle time-out.
        await served.reset()
        _, left = _held(state)
        cancelled = [await _cancelled_queue(served, gate) for _ in range(max(3, size.deadlines // 100))]
        await served.check()
    queued, freed = map(max, zip(*cancelled, strict=True))
    return Figures(
        "Deadlines and cancels are honoured",
        at_most("a step began after the deadline of its call", watch.lateness(), SLACK_S, "s"),
        at_least("calls that were dropped before their step", watch.never_begun(), 5),
        exactly("blocks left behind", left, 0),
        at_most("cancelled items that still waited, before the running step ended", queued, 0),
        at_most("from the end of the step to the blocks' freedom", freed, 0.05, "s"),
        facts={"ends": dict(ends), "step s": STEP_S},
    )
