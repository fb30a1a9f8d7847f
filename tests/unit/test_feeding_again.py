"""What a submission waits for whose tokens must be fed again: pieces between the steps of others."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ferrum_rpc.core import Run, Span, SpanResult, Step, StepResult
from ferrum_rpc.errors import DeadlineExceeded, DeviceLost, StepFailed
from tests.unit.test_engines import THREAD, Harness, behind, only, span


class Feeding:
    """So many pieces are ``left`` of each sequence; ``act`` gets the number of a piece, and may raise or block."""

    def __init__(self, log: list[str], left: dict[int, int]) -> None:
        self.log, self.left = log, left
        self.act: Callable[[int], object] = lambda piece: None
        self.pieces = 0

    def missing(self, span: Span) -> int:
        return self.left.get(span.sequence, 0)

    def feed(self, spans: Sequence[Span]) -> bool:
        [span] = spans
        self.pieces += 1
        self.act(self.pieces)
        self.log.append(f"piece of {span.sequence}")
        self.left[span.sequence] -= 1
        return self.left[span.sequence] > 0


@asynccontextmanager
async def made(folder: Path, left: dict[int, int]) -> AsyncIterator[tuple[Harness, Feeding, list[str]]]:
    """A thread that is to be started, with one span in a step."""
    harness, log = Harness(folder, THREAD, items=1), list[str]()
    runner = harness.runner
    assert runner is not None
    runner.feeding = feeding = Feeding(log, left)
    begin = runner.begin

    def noted(step: Step) -> StepResult:
        log.append(f"step of {step.spans[0].sequence}")
        return begin(step)

    runner.begin = noted  # type: ignore[method-assign]
    yield harness, feeding, log
    assert await harness.engine.stop()


async def test_a_piece_is_fed_between_steps_and_others_go_on(tmp_path):
    async with made(tmp_path, {1: 3, 2: 1}) as (harness, _, log):
        waiting = [harness.submit(span(sequence))[1] for sequence in (1, 2, 3, 4, 5)]
        harness.engine.start()
        for each in waiting:
            assert isinstance(await only(each), SpanResult)
        pieces = ["step of 3", "piece of 1", "step of 4", "piece of 1", "step of 5", "piece of 1"]
        assert log == [*pieces, "step of 1", "piece of 2", "step of 2"]


async def test_what_is_fed_is_done_before_the_thread_ends(tmp_path):
    async with made(tmp_path, {1: 2}) as (harness, _, log):
        _, done = harness.submit(span(1))
        harness.engine.start()
        assert await harness.engine.stop()
        assert log == ["piece of 1", "piece of 1", "step of 1"] and done.done()


@pytest.mark.parametrize("ends", ["cancelled", "late"])
async def test_one_that_is_over_is_fed_no_further(ends, tmp_path):
    async with made(tmp_path, {1: 9}) as (harness, feeding, log):
        feeding.act = lambda piece: harness.runner.wait() if piece == 2 else None
        work, done = harness.submit(span(1), deadline=time.monotonic() + 1e9)
        harness.engine.start()
        await harness.reached()
        if ends == "cancelled":
            assert harness.engine.cancel(work)
        else:
            work.deadline = time.monotonic()
        await harness.open()
        assert isinstance(await harness.outcome(span(2)), SpanResult)
        assert log == ["piece of 1", "piece of 1", "step of 2"]
        if ends == "cancelled":
            assert not done.done()
        else:
            assert isinstance(await only(done), DeadlineExceeded)
        assert harness.engine.queued_items == 0


@pytest.mark.parametrize(
    ("error", "outcomes", "what"),
    [
        (StepFailed("broken"), [StepFailed, SpanResult], ["piece of 1", "piece of 2", "step of 2"]),
        (DeviceLost("gone"), [DeviceLost, DeviceLost], ["piece of 1"]),
    ],
)
async def test_a_piece_that_fails_refuses_its_submission_alone_and_a_lost_device_all(error, outcomes, what, tmp_path):
    def fail(piece: int) -> None:
        if piece == 2:
            raise error

    async with made(tmp_path, {1: 3, 2: 1}) as (harness, feeding, log):
        feeding.act = fail
        waiting = [harness.submit(span(each))[1] for each in (1, 2)]
        harness.engine.start()
        assert [type(await only(each)) for each in waiting] == outcomes
        assert log == what
    assert harness.failures == [error] * isinstance(error, DeviceLost)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_run_that_follows_one_whose_piece_fails_is_handed_back(cancelled, tmp_path):
    def fail(piece: int) -> None:
        if cancelled:
            assert harness.engine.cancel(first)
        raise StepFailed("broken")

    async with made(tmp_path, {1: 3}) as (harness, feeding, _):
        feeding.act = fail
        first, done = harness.submit(span(1, run=Run(2)))
        _, follows = harness.submit(behind(1, 2, 3), behind=(first, 0), begins=lambda: None)
        harness.engine.start()
        assert await follows == ((), None)
        assert cancelled != done.done() and harness.engine.queued_items == 0


async def test_without_a_slot_it_goes_on_and_is_refused_by_the_step(tmp_path):
    async with made(tmp_path, {1: 3}) as (harness, feeding, log):
        feeding.feed = lambda spans: False
        _, done = harness.submit(span(1))
        harness.engine.start()
        await done
        assert log == ["step of 1"]
