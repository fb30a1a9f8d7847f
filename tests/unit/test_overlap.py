"""Two steps under way answer as one after the other: rows, lengths, books and cache, whatever fails in between.

`tests.support.fake_async_device` is the device: rows hold garbage until somebody has waited for their step. A runner
that begins a step behind another is compared with one that never does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrum_rpc.core import (
    Accept,
    FullLogits,
    Greedy,
    OutputKind,
    OutputSpec,
    Positions,
    Sample,
    SelectedTokens,
    Span,
    SpanResult,
    Step,
    StepResult,
    TopTokens,
)
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.step import Pending
from ferrum_rpc.errors import DeviceLost, ExecutorError, KvBlocksExhausted, StepFailed
from tests.support.fake_async_device import late_runner
from tests.support.inside import sequences
from tests.support.poison import poison
from tests.unit.test_runner_transactions import IDENTITY, PARTS, STAGES, Sabotage, Saboteur, Twins, same_outcomes

CONFIG = replace(IDENTITY, kv_blocks=14, identity_vocab_size=32)
SIZE = CONFIG.block_size
KINDS: tuple[OutputKind, ...] = (
    FullLogits(),
    Greedy(),
    Greedy(logprob=True),
    TopTokens(3),
    SelectedTokens((1, 5)),
    Accept(),
    Accept(Sample(temperature=5.0, seed=1, logprob=True)),
)
AT_BEGIN = STAGES[:-1]
AT_FINISH = ("wait", "commit")


class UnderWay(NamedTuple):
    """A step that was begun, and what it must come to: the twin's answer, or the failure that is its fate."""

    step: Step
    pending: Pending
    expected: StepResult | type[ExecutorError]


class Pair(Twins):
    """A runner with two steps under way, and a twin that runs each of them when the other begins it. ``lengths``: as
    they will be, if all goes as it must."""

    def __init__(self) -> None:
        self.saboteur = Saboteur()
        self._commit_fails: list[Any] = []
        self.runner = late_runner(CONFIG, self._stage)
        self.compute: Any = self.runner.compute
        self.saboteur.infiltrate(self.runner)
        self.twin = build_runner(CONFIG)
        self.under_way: list[UnderWay] = []
        self.lengths, self._fed = {}, 0

    def _stage(self, name: str) -> None:
        if name != "commit":
            self.saboteur(name)
        elif self.compute.last in self._commit_fails:
            raise Sabotage(name)

    def span(self, sequence, count, back=0, kind=None, ahead=0, positions=Positions.ALL) -> Span:  # noqa: PLR0917
        start = max(0, self.lengths.get(sequence, 0) - back)
        output = OutputSpec(Positions.ALL if isinstance(kind, Accept) else positions, kind or FullLogits())
        return super().span(sequence, count, start, output, ahead)

    def begin(self, *spans: Span, atomic: tuple[range, ...] = (), fails: str | None = None, nth: int = 1) -> None:
        """Begin a step. ``fails``: at the ``nth`` passage of which stage or part, if it comes to it."""
        step = Step(spans, atomic)
        if fails not in {None, *AT_FINISH}:
            self.saboteur.arm(str(fails), nth)
        marks = len(self.compute.marks)
        try:
            with self.runner.context():
                pending = self.runner.begin(step)
        except StepFailed as error:
            assert self.saboteur.fired and type(error.__cause__) is Sabotage
            self.check()
            return
        finally:
            self.saboteur.disarm()
        if fails in AT_FINISH and len(self.compute.marks) > marks:
            if fails == "commit":
                self._commit_fails.append(self.compute.marks[-1])
            else:
                self.compute.marks[-1].error = Sabotage("wait")
            self.under_way.append(UnderWay(step, pending, StepFailed))
            return
        expected = self._forward(self.twin, step)
        for span, outcome in zip(spans, expected.outcomes, strict=True):
            if isinstance(outcome, SpanResult):
                self.lengths[span.sequence] = outcome.length
        self.under_way.append(UnderWay(step, pending, expected))

    def finish(self) -> None:
        _, pending, expected = self.under_way.pop(0)
        with self.runner.context():
            if not isinstance(expected, StepResult):
                with pytest.raises(expected):
                    self.runner.finish(pending)
            else:
                same_outcomes(self.runner.finish(pending), expected)
        self.check()

    def check(self) -> None:
        self.runner.check()
        if any(each.pending.ended is None for each in self.under_way):
            return
        assert books(self.runner) == books(self.twin)
        assert self.contents(self.runner) == self.contents(self.twin)
        for runner in (self.runner, self.twin):
            poison(runner)

    def end(self) -> None:
        """Finish everything, and let every sequence answer once more."""
        while self.under_way:
            self.finish()
        self.check()
        for sequence in list(self.lengths):
            self.begin(self.span(sequence, 1, back=1))
            self.finish()
            self.release(sequence)
        assert self.runner.cache_state().free_blocks == self.runner.kv.total_blocks


def books(runner: TorchRunner) -> dict[str, Any]:
    """All of them, but for which blocks it is."""
    return {"state": runner.cache_state()} | {
        str(sequence): (state.length, len(state.table), len(state.spares), state.promised_from, state.promised_tokens)
        for sequence, state in sorted(sequences(runner.kv).items())
    }


# --- one by one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_a_step_that_is_begun_behind_another_answers_as_if_it_were_alone(kind: OutputKind) -> None:
    pair = Pair()
    pair.begin(pair.span(1, 6), pair.span(2, 3))
    for count in range(1, 4):
        pair.begin(pair.span(2 + count, 5, kind=kind))
        assert [each.over for each in pair.compute.marks][-2:] == [False, False]
        pair.finish()
        pair.begin(pair.span(1, 2, back=count, kind=kind), pair.span(2, 1, kind=kind))
        pair.finish()
    pair.end()


@pytest.mark.parametrize("first", [None, *AT_FINISH])
@pytest.mark.parametrize("second", [*AT_BEGIN, *AT_FINISH])
def test_what_fails_is_undone_alone(first: str | None, second: str) -> None:
    """Over what a fork shares, and in place."""
    pair = Pair()
    pair.begin(pair.span(1, 7), pair.span(2, 6), pair.span(3, 6))
    pair.finish()
    pair.fork(1, [4])
    pair.begin(pair.span(1, 2), pair.span(2, 3, back=4), fails=first)
    pair.begin(pair.span(4, 2), pair.span(3, 3, back=2), fails=second)
    pair.end()


def test_blocks_that_a_step_replaced_are_waited_for_before_anybody_is_refused() -> None:
    pair = Pair()
    pair.begin(pair.span(1, 26))
    pair.finish()
    pair.begin(pair.span(1, 1, back=26))  # its commit gives six of seven blocks back
    pair.begin(pair.span(2, 40), pair.span(3, 1))
    assert pair.under_way[0].pending.ended is not None
    pair.end()
    pair = Pair()
    pair.begin(pair.span(1, 30))
    pair.begin(pair.span(2, 40), pair.span(3, 1))
    refused = pair.under_way[1].pending.refused
    assert list(refused) == [0] and isinstance(refused[0], KvBlocksExhausted)
    pair.end()


def test_a_block_that_is_shared_with_a_step_under_way_costs_nobody_a_refusal() -> None:
    """In turn the last of two that share a block need not copy it; beside each other both must."""
    pair = Pair()
    pair.begin(pair.span(1, 6))
    pair.finish()
    pair.fork(1, [2])
    pair.begin(pair.span(3, 44))
    pair.finish()  # one block is left
    pair.begin(pair.span(1, 1))
    pair.begin(pair.span(2, 1))
    pair.end()


def test_a_promise_that_a_commit_renews_is_kept_before_others_take_blocks() -> None:
    """Back into blocks that a fork keeps: their replacement was promised, and only the commit takes it."""
    pair = Pair()
    pair.begin(pair.span(1, 8, ahead=8), pair.span(3, 36))
    pair.finish()
    pair.fork(1, [2])
    assert pair.runner.cache_state().free_blocks == 1
    pair.begin(pair.span(1, 1, back=7))
    pair.begin(pair.span(4, 1))
    [refused] = pair.under_way[1].pending.refused.values()
    assert isinstance(refused, KvBlocksExhausted)
    pair.end()


def test_no_more_than_two_are_under_way() -> None:
    pair = Pair()
    for sequence in range(4):
        pair.begin(pair.span(sequence, 2))
    assert [each.over for each in pair.compute.marks] == [True, True, False, False]
    pair.end()


def test_operations_find_the_books_as_between_steps() -> None:
    pair = Pair()
    pair.begin(pair.span(1, 6), pair.span(2, 6), pair.span(3, 4))
    pair.finish()
    for run, settles in (
        (lambda runner: runner.release([3]), False),
        (lambda runner: runner.fork(2, [5], 5), True),
        (lambda runner: runner.truncate(2, 3), True),
        (lambda runner: runner.reserve(2, 30), True),
        (lambda runner: runner.release([1]), True),
    ):
        pair.begin(pair.span(1, 1))
        assert pair.both(run) is None
        assert (pair.under_way[0].pending.ended is not None) == settles
        pair.finish()
    pair.lengths = {2: 3, 5: 5}
    pair.end()


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_device_that_is_lost_is_lost_to_both(asked_first: bool) -> None:
    runner = late_runner(CONFIG)
    pair = Pair()
    with runner.context():
        one, two = runner.begin(Step((pair.span(1, 3),))), runner.begin(Step((pair.span(2, 3),)))
        compute: Any = runner.compute
        for mark in compute.marks:
            mark.error = torch.AcceleratorError("an illegal memory access")
            if asked_first:
                mark.passed = mark.wait
        if asked_first:
            assert runner.ready(one)
        with pytest.raises(DeviceLost):
            runner.release([1])
        for pending in (one, two):
            with pytest.raises(DeviceLost):
                runner.finish(pending)


def test_the_time_of_a_step_begins_when_the_one_before_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, pair, now = late_runner(CONFIG), Pair(), [100.0]
    monkeypatch.setattr("ferrum_rpc.engine.step.time.perf_counter", lambda: now[0])
    with runner.context():
        one = runner.begin(Step((pair.span(1, 3),)))
        now[0] = 101.0
        two = runner.begin(Step((pair.span(2, 3),)))
        now[0] = 103.0
        assert runner.finish(one).forward_s == 3.0
        now[0] = 107.0
        assert runner.finish(two).forward_s == 4.0


def any_step(pair: Pair, data: st.DataObject, new: int) -> tuple[tuple[Span, ...], tuple[range, ...]]:
    chosen = data.draw(st.permutations([*sorted(pair.lengths), new, new + 1]), label="sequences")
    spans = []
    for sequence in chosen[: data.draw(st.integers(1, 3), label="spans")]:
        back = data.draw(st.sampled_from([0, 0, 0, 1, SIZE, 2 * SIZE + 1, 99]), label="back")
        count = data.draw(st.sampled_from([1, 1, 2, SIZE, 2 * SIZE + 1]), label="count")
        ahead = data.draw(st.sampled_from([0, 5]), label="ahead") if sequence not in pair.lengths else 0
        positions = data.draw(st.sampled_from([*2 * [Positions.ALL], Positions.LAST, Positions.NONE]))
        spans.append(pair.span(sequence, count, back, data.draw(st.sampled_from(KINDS)), ahead, positions))
    first = data.draw(st.integers(0, len(spans)), label="group from")
    last = data.draw(st.integers(first, len(spans)), label="group to")
    return tuple(spans), (range(first, last),) if first < last else ()


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_history_is_that_of_one_step_after_the_other(data: st.DataObject) -> None:
    """Sequences of a step whose fate is to fail are left alone until it has: the twin never ran it. In half of
    the histories each step is finished before the next begins."""
    pair, new, serially = Pair(), 1, data.draw(st.booleans(), label="one after the other")
    for _ in range(data.draw(st.integers(1, 14), label="turns")):
        kind = data.draw(st.sampled_from(["begin"] * 5 + ["finish"] * 2 + ["fork", "truncate", "release", "reserve"]))
        known = sorted(pair.lengths)
        if kind == "begin":
            if len(pair.under_way) == 2:
                pair.finish()
            spans, atomic = any_step(pair, data, new)
            new += 2
            fails = data.draw(st.sampled_from([*6 * [None], *AT_BEGIN, *PARTS, *2 * AT_FINISH]), label="fails")
            nth = data.draw(st.integers(1, 3), label="passage") if fails == "reserve" else 1
            pair.begin(*spans, atomic=atomic, fails=fails, nth=nth)
            if serially and pair.under_way:
                pair.finish()
            continue
        if kind == "finish":
            if pair.under_way:
                pair.finish()
            continue
        if not known:
            continue
        sequence = data.draw(st.sampled_from(known), label="sequence")
        if kind == "fork":
            at = data.draw(st.integers(0, pair.lengths[sequence]), label="at")
            if pair.both(lambda runner, s=sequence, n=new, at=at: runner.fork(s, [n], at)) is None:
                pair.lengths[new] = at
            new += 1
        elif kind == "truncate":
            to = data.draw(st.integers(0, pair.lengths[sequence]), label="length")
            assert pair.both(lambda runner, s=sequence, to=to: runner.truncate(s, to)) is None
            pair.lengths[sequence] = to
        elif kind == "reserve":
            tokens = data.draw(st.integers(0, 30), label="reserve")
            pair.both(lambda runner, s=sequence, n=tokens: runner.reserve(s, n))
        else:
            pair.release(sequence)
        pair.check()
    pair.end()
