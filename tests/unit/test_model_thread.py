"""The model thread alone, with a runner of nothing: queueing, cancellation, the end, and hangs. What its loop does is
in test_loop_overlap.py, and in test_engine_process.py, whose engine has the same one."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ferrum_rpc.core import OutputSpec, Span, SpanResult, Step
from ferrum_rpc.engine import liveness
from ferrum_rpc.engine.api import Operation, Submission
from ferrum_rpc.engine.liveness import Liveness
from ferrum_rpc.engine.thread import ModelThread
from ferrum_rpc.errors import DeviceLost, Draining
from tests.support.waiting import until
from tests.unit.test_loop_overlap import Fake


class Runner(Fake):
    """Records the steps; ``act`` may raise or block."""

    def __init__(self) -> None:
        super().__init__(depth=1, ready=True)
        self.steps: list[Step] = []
        self.act: Callable[[Any], object] = lambda step: None

    def begin(self, step: Step) -> Step:
        self.steps.append(step)
        self.act(step)
        return step


def span(sequence: int, tokens: int = 1) -> Span:
    return Span(sequence, np.zeros(tokens, dtype=np.int32), 0, OutputSpec())


class Harness:
    """A thread that is to be started, and its runner."""

    def __init__(self, items: int = 8, tokens: int = 64, liveness: Liveness | None = None) -> None:
        self.runner = Runner()
        self.failures: list[BaseException] = []
        self.thread = ModelThread(
            lambda: self.runner,
            loop=asyncio.get_running_loop(),
            max_step_items=items,
            max_step_tokens=tokens,
            on_ready=lambda _: None,
            on_failed=self.failures.append,
            liveness=liveness,
        )

    def submit(self, *spans: Span, **options: Any) -> tuple[Submission, asyncio.Future[Any]]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        submission = Submission(spans, lambda outcomes, timing: done.set_result((outcomes, timing)), **options)
        self.thread.submit(submission)
        return submission, done

    async def outcome(self, sequence: int) -> Any:
        return (await self.submit(span(sequence))[1])[0][0]

    def hang_reason(self) -> str | None:
        return self.thread.hang_reason(time.monotonic())

    def operate(self, run: Callable[[Any], object]) -> asyncio.Future[object]:
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.thread.submit(Operation(run, done.set_result))
        return done


@asynccontextmanager
async def harness(**options: Any) -> AsyncIterator[Harness]:
    """One that runs, and has ended well."""
    made = Harness(**options)
    made.thread.start()
    yield made
    assert await made.thread.stop()


class Gate:
    """A step stands at it until it is opened."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, step: Step) -> None:
        self.entered.set()
        self.go.wait(30)

    async def reached(self) -> None:
        await asyncio.to_thread(self.entered.wait, 10)


async def test_submissions_that_wait_become_one_step_within_its_budget() -> None:
    made = Harness(items=3, tokens=10)
    waiting = [made.submit(span(index)) for index in range(3)] + [made.submit(span(9, tokens=9))]
    assert (made.thread.queued_items, made.thread.queued_tokens) == (4, 12)
    made.thread.start()
    for _, done in waiting:
        await done
    assert [[each.sequence for each in step.spans] for step in made.runner.steps] == [[0, 1, 2], [9]]
    assert (made.thread.queued_items, made.thread.queued_tokens) == (0, 0)
    assert made.thread.counters.steps == 2 and made.thread.counters.tokens == 12
    await made.thread.stop()


async def test_cancelled_before_the_claim_never_runs_and_after_it_completes() -> None:
    async with harness() as made:
        made.runner.act = gate = Gate()
        running, ran = made.submit(span(1))
        await gate.reached()
        queued, never = made.submit(span(2))
        assert not made.thread.cancel(running)
        assert made.thread.cancel(queued)
        assert made.thread.queued_items == 0
        gate.go.set()
        await ran
        await made.outcome(3)
        assert [step.spans[0].sequence for step in made.runner.steps] == [1, 3]
        assert not never.done()


@pytest.mark.parametrize("error", [DeviceLost("gone"), RuntimeError("bug"), SystemExit(3)])
async def test_a_lost_device_answers_the_running_the_queued_and_the_later(error: BaseException) -> None:
    made = Harness(items=1)
    made.runner.act = Mock(side_effect=error)
    waiting = [made.submit(span(index))[1] for index in range(3)]
    operation = made.operate(lambda runner: None)
    made.thread.start()
    for done in waiting:
        (outcome,), _ = await done
        assert isinstance(outcome, DeviceLost)
    await operation
    assert isinstance(await made.outcome(9), DeviceLost)
    assert isinstance(await made.operate(lambda runner: None), DeviceLost)
    assert made.failures == [error]
    assert len(made.runner.steps) == 1


async def test_stop_finishes_what_is_queued_and_refuses_what_comes_later() -> None:
    made = Harness(items=1)
    waiting = [made.submit(span(index))[1] for index in range(3)]
    made.thread.start()
    await made.thread.stop()
    for done in waiting:
        (outcome,), _ = await done
        assert isinstance(outcome, SpanResult)
    assert isinstance(await made.outcome(9), Draining)


async def test_a_thread_that_hangs_is_told_from_one_that_waits_for_work_and_left_behind_at_the_end() -> None:
    made = Harness(liveness=Liveness(stall_timeout_s=1.0))
    made.thread.start()
    with pytest.raises(TimeoutError):  # idle for longer than the stall timeout
        await until(lambda: made.hang_reason() is not None, 1.5)
    made.runner.act = gate = Gate()
    _, done = made.submit(span(1))
    await gate.reached()
    await until(lambda: made.hang_reason() is not None)
    assert not await made.thread.stop()
    gate.go.set()
    await done
    assert await made.thread.stop()
    assert made.hang_reason() == "it has ended"


async def test_a_step_that_waits_for_a_compiler_of_its_process_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(liveness, "runs_compiler", lambda process: asked.append(process) or True)
    async with harness(liveness=Liveness(stall_timeout_s=0.5)) as made:
        made.runner.act = gate = Gate()
        _, done = made.submit(span(1))
        try:
            await until(lambda: made.hang_reason() is not None or bool(asked))
            assert made.hang_reason() is None and set(asked) == {os.getpid()}
        finally:
            gate.go.set()
        await done
