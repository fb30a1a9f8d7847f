"""What a submission waits for whose tokens must be fed again: pieces between the steps of others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from ferrum_rpc.core import Span, SpanResult, Step
from ferrum_rpc.errors import DeadlineExceeded, DeviceLost, ExecutorError, StepFailed
from tests.unit.test_model_thread import Gate, Harness, span


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


def made(left: dict[int, int]) -> tuple[Harness, Feeding, list[str]]:
    """With one span in a step."""
    harness, log = Harness(items=1), list[str]()
    harness.runner.feeding = feeding = Feeding(log, left)  # type: ignore[assignment]

    def note(step: Step) -> None:
        log.append(f"step of {step.spans[0].sequence}")

    harness.runner.act = note
    return harness, feeding, log


async def test_a_piece_is_fed_between_steps_and_others_go_on() -> None:
    harness, _, log = made({1: 3, 2: 1})
    waiting = [harness.submit(span(sequence))[1] for sequence in (1, 2, 3, 4, 5)]
    harness.thread.start()
    for each in waiting:
        [outcome], _ = await each
        assert isinstance(outcome, SpanResult)
    pieces = ["step of 3", "piece of 1", "step of 4", "piece of 1", "step of 5", "piece of 1"]
    assert log == [*pieces, "step of 1", "piece of 2", "step of 2"]
    assert await harness.thread.stop()


async def test_what_is_fed_is_done_before_the_thread_ends() -> None:
    harness, _, log = made({1: 2})
    _, done = harness.submit(span(1))
    harness.thread.start()
    assert await harness.thread.stop()
    assert log == ["piece of 1", "piece of 1", "step of 1"] and done.done()


@pytest.mark.parametrize("ends", ["cancelled", "late"])
async def test_one_that_is_over_is_fed_no_further(ends: str) -> None:
    harness, feeding, log = made({1: 9})
    gate = Gate()
    feeding.act = lambda piece: gate(Step(())) if piece == 2 else None
    options = {"deadline": time.monotonic() + 1e9}
    work, done = harness.submit(span(1), **options)
    harness.thread.start()
    await gate.reached()
    if ends == "cancelled":
        assert harness.thread.cancel(work)
    else:
        work.deadline = time.monotonic()
    gate.go.set()
    assert isinstance(await harness.outcome(2), SpanResult)
    assert log == ["piece of 1", "piece of 1", "step of 2"]
    if ends == "cancelled":
        assert not done.done()
    else:
        [outcome], _ = await done
        assert isinstance(outcome, DeadlineExceeded)
    assert harness.thread.queued_items == 0
    assert await harness.thread.stop()


async def test_a_piece_that_fails_refuses_its_submission_alone() -> None:
    harness, feeding, log = made({1: 3, 2: 1})

    def fail(piece: int) -> None:
        if piece == 2:
            raise StepFailed("broken")

    feeding.act = fail
    first, second = (harness.submit(span(each))[1] for each in (1, 2))
    harness.thread.start()
    [failed], _ = await first
    assert isinstance(failed, StepFailed)
    [outcome], _ = await second
    assert isinstance(outcome, SpanResult)
    assert log == ["piece of 1", "piece of 2", "step of 2"]
    assert await harness.thread.stop()


async def test_a_device_that_is_lost_within_a_piece_ends_all() -> None:
    harness, feeding, _ = made({1: 3, 2: 3})

    def fail(piece: int) -> None:
        raise DeviceLost("gone")

    feeding.act = fail
    waiting = [harness.submit(span(each))[1] for each in (1, 2)]
    harness.thread.start()
    for each in waiting:
        [outcome], _ = await each
        assert isinstance(outcome, ExecutorError)
    assert [type(each) for each in harness.failures] == [DeviceLost]


async def test_without_a_slot_it_goes_on_and_is_refused_by_the_step() -> None:
    harness, feeding, log = made({1: 3})
    feeding.feed = lambda spans: False  # type: ignore[method-assign]
    _, done = harness.submit(span(1))
    harness.thread.start()
    await done
    assert log == ["step of 1"]
    assert await harness.thread.stop()
