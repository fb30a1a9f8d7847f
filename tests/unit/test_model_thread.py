"""The model thread alone, with a runner of nothing: queueing, cancellation, deadlines, failure and the end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.core import CacheState, OutputSpec, Span, SpanResult, Step, StepResult
from ferrum_rpc.engine import liveness
from ferrum_rpc.engine.api import Operation, Submission
from ferrum_rpc.engine.liveness import Liveness
from ferrum_rpc.engine.thread import ModelThread
from ferrum_rpc.errors import DeadlineExceeded, DeviceLost, Draining, ExecutorError, KvBlocksExhausted, StepFailed
from tests.faults.waiting import until


class FakeRunner:
    """Records the steps; ``act`` may raise or block."""

    def __init__(self) -> None:
        self.info: Any = None
        self.device: Any = None
        self.depth = 1
        self.steps: list[Step] = []
        self.act: Callable[[Step], None] = lambda step: None

    ranks = list
    look_every_s = None
    follows = False
    in_stages = False
    constraints = None
    on_device = False

    def close(self) -> None:
        pass

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self, step: Step) -> StepResult:
        self.steps.append(step)
        self.act(step)
        return StepResult(tuple(SpanResult(span.end, None) for span in step.spans), 0.001)

    def ready(self, pending: StepResult) -> bool:
        return True

    def finish(self, pending: StepResult) -> StepResult:
        return pending

    def cache_state(self) -> CacheState:
        return CacheState(16, 10, 10 - len(self.steps), 0)


def span(sequence: int, tokens: int = 1) -> Span:
    return Span(sequence, np.zeros(tokens, dtype=np.int32), 0, OutputSpec())


class Harness:
    def __init__(self, items: int = 8, tokens: int = 64, liveness: Liveness | None = None) -> None:
        self.runner = FakeRunner()
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

    def submit(self, *spans: Span, deadline: float | None = None) -> tuple[Submission, asyncio.Future[Any]]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        submission = Submission(spans, lambda outcomes, timing: done.set_result((outcomes, timing)), deadline=deadline)
        self.thread.submit(submission)
        return submission, done

    def operate(self, run: Callable[[Any], object]) -> asyncio.Future[object]:
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.thread.submit(Operation(run, done.set_result))
        return done


async def test_submissions_that_wait_become_one_step_within_its_budget() -> None:
    harness = Harness(items=3, tokens=10)
    waiting = [harness.submit(span(index)) for index in range(3)] + [harness.submit(span(9, tokens=9))]
    assert (harness.thread.queued_items, harness.thread.queued_tokens) == (4, 12)
    harness.thread.start()
    for _, done in waiting:
        await done
    assert [[each.sequence for each in step.spans] for step in harness.runner.steps] == [[0, 1, 2], [9]]
    assert (harness.thread.queued_items, harness.thread.queued_tokens) == (0, 0)
    assert harness.thread.counters.steps == 2 and harness.thread.counters.tokens == 12
    await harness.thread.stop()


async def test_a_submission_is_never_split_and_atomic_groups_are_its_spans() -> None:
    harness = Harness(items=4)
    _, first = harness.submit(span(1))
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    group = Submission((span(2), span(3)), lambda outcomes, timing: done.set_result(outcomes), all_or_nothing=True)
    harness.thread.submit(group)
    harness.thread.start()
    await first
    assert len(await done) == 2
    assert harness.runner.steps[0].atomic == (range(1, 3),)
    await harness.thread.stop()


async def test_cancelled_before_the_claim_never_runs_and_after_it_completes() -> None:
    harness = Harness()
    entered, go = threading.Event(), threading.Event()

    def act(step: Step) -> None:
        entered.set()
        go.wait(10)

    harness.runner.act = act
    running, ran = harness.submit(span(1))
    harness.thread.start()
    await asyncio.to_thread(entered.wait, 10)
    queued, never = harness.submit(span(2))
    assert not harness.thread.cancel(running)
    assert harness.thread.cancel(queued)
    assert harness.thread.queued_items == 0
    go.set()
    await ran
    _, last = harness.submit(span(3))
    await last
    assert [step.spans[0].sequence for step in harness.runner.steps] == [1, 3]
    assert not never.done()
    await harness.thread.stop()


async def test_a_deadline_that_has_passed_is_answered_without_a_step() -> None:
    harness = Harness()
    _, done = harness.submit(span(1), deadline=0.0)
    harness.thread.start()
    (outcome,), timing = await done
    assert isinstance(outcome, DeadlineExceeded) and timing is None
    assert not harness.runner.steps
    await harness.thread.stop()


async def test_a_failed_step_is_answered_and_the_thread_lives() -> None:
    harness = Harness()

    def act(step: Step) -> None:
        if step.spans[0].sequence == 1:
            raise StepFailed("no")

    harness.runner.act = act
    harness.thread.start()
    (outcome,), _ = await harness.submit(span(1))[1]
    assert isinstance(outcome, StepFailed)
    (outcome,), _ = await harness.submit(span(2))[1]
    assert isinstance(outcome, SpanResult)
    assert not harness.failures
    await harness.thread.stop()


@pytest.mark.parametrize("error", [DeviceLost("gone"), RuntimeError("bug"), SystemExit(3)])
async def test_a_lost_device_answers_the_running_the_queued_and_the_later(error: BaseException) -> None:
    harness = Harness(items=1)

    def act(step: Step) -> None:
        raise error

    harness.runner.act = act
    waiting = [harness.submit(span(index))[1] for index in range(3)]
    operation = harness.operate(lambda runner: None)
    harness.thread.start()
    for done in waiting:
        (outcome,), _ = await done
        assert isinstance(outcome, DeviceLost)
    await operation
    (outcome,), _ = await harness.submit(span(9))[1]
    assert isinstance(outcome, DeviceLost)
    assert isinstance(await harness.operate(lambda runner: None), DeviceLost)
    assert harness.failures == [error]
    assert len(harness.runner.steps) == 1


async def test_a_refusal_of_an_operation_is_its_answer_and_the_thread_lives() -> None:
    harness = Harness()
    harness.thread.start()

    def refuse(runner: Any) -> None:
        raise KvBlocksExhausted("none")

    assert isinstance(await harness.operate(refuse), KvBlocksExhausted)
    assert await harness.operate(lambda runner: 7) == 7
    await harness.thread.stop()


async def test_stop_finishes_what_is_queued_and_refuses_what_comes_later() -> None:
    harness = Harness(items=1)
    waiting = [harness.submit(span(index))[1] for index in range(3)]
    harness.thread.start()
    await harness.thread.stop()
    for done in waiting:
        (outcome,), _ = await done
        assert isinstance(outcome, SpanResult)
    (outcome,), _ = await harness.submit(span(9))[1]
    assert isinstance(outcome, Draining)


async def test_a_thread_that_hangs_is_told_from_one_that_waits_for_work_and_left_behind_at_the_end() -> None:
    harness = Harness(liveness=Liveness(stall_timeout_s=1.0))
    entered, go = threading.Event(), threading.Event()

    def act(step: Step) -> None:
        entered.set()
        go.wait(30)

    async def trouble_within(seconds: float) -> str | None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if (hang_reason := harness.thread.hang_reason(time.monotonic())) is not None:
                return hang_reason
            await asyncio.sleep(0.1)
        return None

    harness.thread.start()
    assert await trouble_within(1.5) is None, "idle for longer than the stall timeout"
    harness.runner.act = act
    _, done = harness.submit(span(1))
    await asyncio.to_thread(entered.wait, 10)
    assert await trouble_within(20) is not None
    assert not await harness.thread.stop()
    go.set()
    await done
    assert await harness.thread.stop()
    assert harness.thread.hang_reason(time.monotonic()) == "it has ended"


async def test_a_step_that_waits_for_a_compiler_of_its_process_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go = list[int](), threading.Event()

    def found(process: int) -> bool:
        asked.append(process)
        return True

    monkeypatch.setattr(liveness, "runs_compiler", found)
    harness = Harness(liveness=Liveness(stall_timeout_s=0.5))
    harness.runner.act = lambda step: go.wait(30) or None
    _, done = harness.submit(span(1))
    harness.thread.start()
    try:
        await until(lambda: harness.thread.hang_reason(time.monotonic()) is not None or bool(asked))
        assert harness.thread.hang_reason(time.monotonic()) is None and set(asked) == {os.getpid()}
    finally:
        go.set()
    await done
    assert await harness.thread.stop()


async def test_a_device_that_is_lost_in_an_operation_ends_the_thread() -> None:
    harness = Harness()
    harness.thread.start()

    def lose(runner: Any) -> None:
        raise DeviceLost("gone")

    answer = await harness.operate(lose)
    (outcome,), _ = await harness.submit(span(1))[1]
    assert not harness.runner.steps
    for each in (answer, outcome):
        assert isinstance(each, DeviceLost) and each.message == "gone; the executor must be restarted"
    assert len(harness.failures) == 1


async def test_a_build_that_fails_is_told_and_nobody_waits_for_ever() -> None:
    failures: list[BaseException] = []

    def build() -> Any:
        raise ExecutorError("no such model")

    thread = ModelThread(
        build,
        loop=asyncio.get_running_loop(),
        max_step_items=1,
        max_step_tokens=1,
        on_ready=lambda _: None,
        on_failed=failures.append,
    )
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    thread.submit(Submission((span(1),), lambda outcomes, timing: done.set_result(outcomes)))
    thread.start()
    (outcome,) = await done
    assert isinstance(outcome, DeviceLost)
    assert [str(error) for error in failures] == ["no such model"]
