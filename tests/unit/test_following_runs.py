"""Runs whose next step begins before the device's tokens are known: the tokens, the books and the cache are as without.

`tests.support.fake_async_device` is the device: on the host, rows are garbage until their step was waited for, so a
step that read its tokens there could not answer right. Every run is compared with a runner of its own that takes one
step after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from queue import Empty
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrum_rpc import core
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import LATE, Greedy, OutputSpec, Positions, Run, RunEnd, Sample, Span, SpanResult, Step, StepResult
from ferrum_rpc.engine import compute as engine_compute
from ferrum_rpc.engine import loop as engine_loop
from ferrum_rpc.engine.api import Interrupt, Operation, Submission
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.cuda import compute as cuda_compute
from ferrum_rpc.engine.cuda.compute import StagedCompute
from ferrum_rpc.engine.grammars.constraints import Constraints
from ferrum_rpc.engine.loop import Work
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.places import Places
from ferrum_rpc.engine.runs import Runs
from ferrum_rpc.engine.step import Pending
from ferrum_rpc.errors import Cancelled, ExecutorError, KvBlocksExhausted, StepFailed
from tests.support.fake_async_device import LateCompute, late_runner
from tests.support.inside import in_flight, sequences
from tests.support.rows import answered, columns_of, tokens_of
from tests.unit.test_loop_overlap import Fake, Loop, Script
from tests.unit.test_runner_transactions import IDENTITY, SIZE, Sabotage

VOCABULARY = 32
CONFIG = replace(IDENTITY, kv_blocks=48, identity_vocab_size=VOCABULARY, identity_layers=1, identity_max_context=256)
KINDS = (
    Greedy(),
    Greedy(logprob=True),
    Sample(temperature=6.0, seed=5),
    Sample(temperature=9.0, seed=11, top_k=20, top_p=0.9, logprob=True),
    Sample(temperature=4.0, seed=2, bias=((3, 5.0), (9, -5.0))),
    Greedy(logprobs=core.RowLogprobs(2, (1, 7))),
)
PENALISED = Sample(temperature=5.0, seed=3, repetition_penalty=1.7, presence_penalty=0.5)
AT_BEGIN = ("reserve", "plan", "forward", "select")


def output(kind: core.OutputKind) -> OutputSpec:
    return OutputSpec(Positions.LAST, kind)


def prompt(sequence: int, length: int = 3) -> np.ndarray:
    return ((np.arange(length) * 5 + 3 * sequence) % VOCABULARY).astype(np.int32)


def begun(sequence: int, run: Run | None, kind: core.OutputKind = Greedy(), length: int = 3) -> Span:  # noqa: B008 - it is immutable
    return Span(sequence, prompt(sequence, length), 0, output(kind), create=True, run=run)


def behind(span: Span) -> Span:
    return Span(span.sequence, np.zeros(1, np.int32), span.end, span.output)


@cache
def plain_runner() -> TorchRunner:
    return build_runner(CONFIG)


@contextmanager
def stepping() -> Iterator[TorchRunner]:
    """A runner without sequences, which takes one step after the other."""
    runner = plain_runner()
    with runner.context():
        yield runner
        runner.release([*sequences(runner.kv)])
        runner.forget_prefixes()
    assert runner.cache_state().free_blocks == runner.kv.total_blocks


def alone(span: Span, count: int, at_first: Sequence[Span] = ()) -> list[int]:
    """What a run chooses, one step after the other."""
    chosen = list[int]()
    with stepping() as runner:
        for each in at_first:
            answered(runner, each._replace(run=None))
        each = span._replace(run=None)
        for _ in range(count):
            [columns] = answered(runner, each)
            chosen += columns["token_ids"].tolist()
            each = Span(span.sequence, np.array(chosen[-1:], np.int32), each.end, span.output)
    return chosen


# --- one runner: a step behind a step ---------------------------------------------------------------------------------


class Two:
    """A late runner in which a step of ``spans`` is in flight, and how to begin the next."""

    def __init__(self, *spans: Span, config: ModelSettings = CONFIG) -> None:
        self.fails: set[str] = set()
        self.runner = late_runner(config, self._stage)
        self.compute: Any = self.runner.compute
        assert isinstance(self.compute, LateCompute)
        self.goes_on_with(*spans)

    def _stage(self, name: str) -> None:
        if name in self.fails:
            self.fails.remove(name)
            raise Sabotage(name)

    def begin(self, *spans: Span) -> Pending:
        with self.runner.context():
            return self.runner.begin(Step(spans))

    def goes_on_with(self, *spans: Span) -> None:
        """A step of these is in flight."""
        self.spans, self.first = spans, self.begin(*spans)

    def follow(self, *more: Span, stops: tuple[tuple[int, ...], ...] | None = None) -> Pending:
        """Begin a step that continues all runs of the first, with ``more`` spans."""
        going = [each for each in self.spans if each.run is not None]
        stops = tuple([() for _ in going]) if stops is None else stops
        with self.runner.context():
            return self.runner.begin(Step((*map(behind, going), *more), (), stops))

    def end(self, pending: Pending) -> StepResult:
        with self.runner.context():
            result = self.runner.finish(pending)
        self.runner.check()
        return result

    def chosen(self, pending: Pending) -> list[list[int]]:
        outcomes = self.end(pending).outcomes
        return [[] if each is LATE or not isinstance(each, SpanResult) else tokens_of(each.rows) for each in outcomes]

    def stays(self, *sequences: int) -> None:
        """Nothing is lost: when the runs and their sequences have ended, all blocks are free."""
        self.runner.end_hold(sequences)
        self.runner.check()
        self.runner.release(sequences)
        assert self.runner.cache_state().free_blocks == self.runner.kv.total_blocks


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_follows_with_tokens_that_nobody_has_read(kind, length):
    spans = [begun(1, Run(9), kind, length), begun(2, Run(9), Greedy(), 3), begun(3, None, kind, 2)]
    two = Two(*spans)
    second = two.follow(begun(4, None, kind))
    assert [each.over for each in two.compute.marks] == [False, False]
    two.runner.check()
    first, then = two.chosen(two.first), two.chosen(second)
    for index, span in enumerate(spans[:2]):
        assert first[index] + then[index] == alone(span, 2)
    assert first[2] == alone(spans[2], 1) and then[2] == alone(begun(4, None, kind), 1)
    two.stays(1, 2, 3, 4)


@pytest.mark.parametrize("length", [3, SIZE])
def test_a_run_that_stops_is_left_out_and_what_follows_overwrites_what_it_wrote(length):
    spans = [begun(1, Run(9), length=length), begun(2, Run(9), KINDS[2])]
    expected = [alone(each, 2) for each in spans]
    two = Two(*spans)
    draft = Span(3, prompt(3, 4), 0, OutputSpec(Positions.ALL, core.Accept()), create=True)
    second = two.follow(draft, stops=((expected[0][0],), ()))
    assert two.chosen(two.first) == [each[:1] for each in expected]
    assert two.runner.kv.length(1) == length
    result = two.end(second).outcomes
    assert result[0] is LATE and isinstance(result[1], SpanResult) and isinstance(result[2], SpanResult)
    assert tokens_of(result[1].rows) == expected[1][1:]
    assert two.runner.kv.length(1) == length and len(tokens_of(result[2].rows)) == result[2].length
    more = Span(1, prompt(5, 4), length, output(Greedy()))
    assert two.chosen(two.begin(more)) == [alone(more, 1, [spans[0]])]
    two.stays(1, 2, 3)


def test_where_every_run_stops_the_step_answers_nothing_and_the_next_one_is_right():
    span = begun(1, Run(9))
    two = Two(span)
    second = two.follow(stops=((alone(span, 1)[0],),))
    two.end(two.first)
    two.runner.end_hold([1])
    two.runner.release([1])  # while the device still computes what follows it
    third = two.begin(begun(2, None))
    assert two.end(second).outcomes == (LATE,)
    assert two.chosen(third) == [alone(begun(2, None), 1)]
    two.stays(2)


@pytest.mark.parametrize("at", ["wait", "commit"])
def test_a_step_that_fails_takes_the_runs_along_that_follow_it_and_nobody_else(at):
    spans = [begun(1, Run(9), length=SIZE), begun(2, None)]
    two = Two(*spans)
    two.end(two.first)
    more = Span(1, prompt(4, 1), SIZE, output(Greedy()), run=Run(5))
    two.goes_on_with(more)
    second = two.follow(begun(3, None), Span(2, prompt(9, 2), 3, output(Greedy())))
    if at == "wait":
        two.compute.marks[-2].error = Sabotage("wait")
    else:
        two.fails.add("commit")
    with pytest.raises(StepFailed):
        two.end(two.first)
    assert two.runner.kv.length(1) == SIZE
    outcomes = two.end(second).outcomes
    assert outcomes[0] is LATE
    assert isinstance(outcomes[1], SpanResult) and tokens_of(outcomes[1].rows) == alone(begun(3, None), 1)
    assert two.chosen(two.begin(more)) == [alone(more, 1, [spans[0]])]
    two.stays(1, 2, 3)


@pytest.mark.parametrize("at", AT_BEGIN)
@pytest.mark.parametrize("length", [3, SIZE])
def test_a_step_that_cannot_be_begun_leaves_the_step_in_flight_alone(at, length):
    span = begun(1, Run(9), length=length)
    two = Two(span)
    two.fails.add(at)
    with pytest.raises(StepFailed):
        two.follow(begun(2, None))
    two.runner.check()
    second = two.follow(begun(2, None))
    assert two.chosen(two.first)[0] + two.chosen(second)[0] == alone(span, 2)
    two.stays(1, 2)


@pytest.mark.parametrize("at", ["wait", "commit"])
def test_a_step_that_follows_and_fails_is_undone_alone(at):
    span = begun(1, Run(9), length=SIZE)
    two = Two(span)
    second = two.follow(begun(2, None))
    assert two.chosen(two.first)[0] == alone(span, 1)
    if at == "wait":
        two.compute.marks[-1].error = Sabotage("wait")
    else:
        two.fails.add("commit")
    with pytest.raises(StepFailed):
        two.end(second)
    assert two.runner.kv.length(1) == SIZE
    again = two.begin(behind(span)._replace(tokens=np.array(alone(span, 1), np.int32)))
    assert two.chosen(again)[0] == alone(span, 2)[1:]
    two.stays(1)


@pytest.mark.parametrize(
    "operate",
    [
        lambda runner: runner.fork(1, [9], None),
        lambda runner: runner.fork(2, [9], 2),
        lambda runner: runner.truncate(2, 1),
        lambda runner: runner.reserve(2, 5),
        lambda runner: runner.release([2]),
        lambda runner: runner.forget_prefixes(),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stopped", [True, False])
def test_an_operation_finds_the_books_as_between_steps(operate, when, stopped):
    """It finishes what is in flight, where it must; then the tokens are known, or the run has ended."""
    span = begun(1, Run(9), length=SIZE)
    first, then = alone(span, 2)
    two = Two(span, begun(2, None, length=6))
    stops = ((first,),) if stopped else ((),)
    if when == "before":
        with two.runner.context():
            operate(two.runner)
        second = two.follow(stops=stops)
    else:
        second = two.follow(stops=stops)
        with two.runner.context():
            operate(two.runner)
    assert two.chosen(two.first)[0] == [first]
    assert two.chosen(second)[0] == ([] if stopped else [then])
    assert two.runner.kv.length(1) == SIZE + (not stopped)
    two.stays(*sequences(two.runner.kv))


def test_blocks_that_are_short_are_waited_for_before_anybody_is_refused():
    config = replace(CONFIG, kv_blocks=14)
    two = Two(begun(1, None, length=38), config=config)
    two.end(two.first)
    spans = (begun(2, Run(4)), Span(1, prompt(7, 1), 0, output(Greedy())))  # its commit gives nine blocks back
    two.goes_on_with(*spans)
    second = two.follow(begun(3, None, length=30))
    assert two.first.ended is not None
    assert two.chosen(two.first)[0] + two.chosen(second)[0] == alone(spans[0], 2)
    two.stays(1, 2, 3)


@pytest.mark.parametrize("why", ["no block", "rows on the host"])
def test_a_run_that_lacks_what_it_needs_waits_for_the_step_in_flight(why):
    """As one whose promise a fork has used up (nothing is held here), or one of more rows than the head computes."""
    span = begun(1, Run(1 if why == "no block" else 9), length=SIZE)
    two = Two(span)
    if why == "rows on the host":
        two.first.chosen.clear()
    second = two.follow()
    assert two.first.ended is not None
    assert two.chosen(two.first)[0] + two.chosen(second)[0] == alone(span, 2)
    two.stays(1)


def test_a_run_that_went_back_waits_for_its_first_step():
    """The next token's slot holds what a failure of that step must find."""
    two = Two(begun(1, None, length=9))
    two.end(two.first)
    back = Span(1, prompt(6, 2), 3, output(Greedy()), run=Run(4))
    two.goes_on_with(back)
    second = two.follow()
    assert two.first.ended is not None
    assert two.chosen(two.first)[0] + two.chosen(second)[0] == alone(back, 2, [begun(1, None, length=9)])
    two.stays(1)


def test_what_a_prefix_has_is_followed_and_published_when_the_run_ends():
    prefixed = begun(1, Run(6), length=2 * SIZE + 1)._replace(prefix=core.PREFIX)
    two = Two(prefixed)
    two.end(two.first)
    two.runner.end_hold([1])
    twin = prefixed._replace(sequence=2)
    two.goes_on_with(twin)
    second = two.follow()
    [outcome] = two.end(two.first).outcomes
    assert isinstance(outcome, SpanResult) and outcome.cached_tokens == 2 * SIZE
    assert tokens_of(outcome.rows) + two.chosen(second)[0] == alone(prefixed, 2)
    two.stays(1, 2)


# --- the loop: which runs follow --------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """What became of a submission."""

    chosen: list[tuple[int, int, int]] = field(default_factory=list)
    answer: Any = None

    def submission(self, *spans: Span, **options: Any) -> Submission:
        return Submission(spans, self.done, on_tokens=self.chosen.extend, **options)

    def done(self, outcomes: Any, timing: Any) -> None:
        assert self.answer is None, "each once"
        self.answer = outcomes, timing

    def run(self, index: int = 0) -> tuple[RunEnd, list[int]]:
        outcome = self.answer[0][index]
        assert isinstance(outcome, SpanResult) and outcome.ended is not None, outcome
        tokens = tokens_of(outcome.rows)
        assert [token for each, _, token in self.chosen if each == index] == tokens
        return outcome.ended.end, tokens


def logged(runner: TorchRunner) -> list[tuple[str, int, int]]:
    """What the loop asks of a runner, by step: how many spans it has, and how many of them follow."""
    log: list[tuple[str, int, int]] = []
    begin, finish = runner.begin, runner.finish
    steps: dict[int, tuple[int, int]] = {}

    def logged_begin(step: Step) -> Pending:
        log.append(("begin", len(step.spans), len(step.stops)))
        pending = begin(step)
        steps[id(pending)] = len(step.spans), len(step.stops)
        return pending

    def logged_finish(pending: Pending) -> StepResult:
        log.append(("finish", *steps[id(pending)]))
        return finish(pending)

    runner.begin, runner.finish = logged_begin, logged_finish  # type: ignore[method-assign] - logged
    return log


def play(runner: Any, *works: Any, places: int = 64) -> Loop:
    return Loop(runner, Script(*works), items=64, places=places).run_well()


def test_a_device_that_has_nothing_but_runs_always_has_the_next_step():
    """Each step was begun before the tokens of the one before it were fetched."""
    runner, recorded = late_runner(CONFIG), Recorded()
    log = logged(runner)
    play(runner, recorded.submission(begun(1, Run(12)), begun(2, Run(12), KINDS[2])))
    others = [("begin", 2, 2), ("finish", 2, 2)] * 10
    assert log == [("begin", 2, 0), ("begin", 2, 2), ("finish", 2, 0), *others, ("finish", 2, 2)]
    assert recorded.run(0) == (RunEnd.MAX_TOKENS, alone(begun(1, None), 12))
    assert recorded.run(1) == (RunEnd.MAX_TOKENS, alone(begun(2, None, KINDS[2]), 12))
    assert recorded.answer[1].step == 12


def test_runs_of_their_own_lengths_and_those_that_join_are_in_every_step():
    runner, early, late = late_runner(CONFIG), Recorded(), Recorded()
    log = logged(runner)
    play(runner, early.submission(begun(1, Run(6)), begun(2, Run(3))), None, late.submission(begun(3, Run(4))))
    assert [each for each in log if each[0] == "begin"] == [
        *[("begin", 2, 0), ("begin", 3, 2), ("begin", 3, 3)],
        *[("begin", 2, 2), ("begin", 2, 2), ("begin", 1, 1)],
    ]
    for recorded, index, sequence, count in ((early, 0, 1, 6), (early, 1, 2, 3), (late, 0, 3, 4)):
        assert recorded.run(index) == (RunEnd.MAX_TOKENS, alone(begun(sequence, None), count))


def test_a_run_whose_mask_takes_long_holds_up_no_other_run():
    """The others go on without it, and it goes on once its mask is there."""
    runner, recorded, steps = build_runner(CONFIG), Recorded(), list[list[int]]()
    begin = runner.begin
    runner.begin = lambda step: (steps.append([each.sequence for each in step.spans]), begin(step))[1]  # type: ignore[method-assign] - logged
    runner.constraints = Mock(spec=Constraints, active=False, any_slow=True)
    runner.constraints.ask.return_value, runner.constraints.refusal.return_value = False, None
    runner.constraints.may_go_on = lambda span: span.sequence != 1 or len(steps) >= 3
    play(runner, recorded.submission(begun(1, Run(4)), begun(2, Run(4))))
    assert steps == [[1, 2], [2], [2], [1, 2], [1], [1]]
    for index, sequence in enumerate((1, 2)):
        assert recorded.run(index) == (RunEnd.MAX_TOKENS, alone(begun(sequence, None), 4))


@pytest.mark.parametrize("place", [0, 1, 4, 7])
def test_a_stop_id_ends_a_run_at_any_place(place):
    """Its last token is the stop id, and the step that was begun behind it leaves nothing."""
    span = begun(1, Run(8), KINDS[3])
    chosen = alone(span, 8)
    stop = chosen[place]
    count = chosen.index(stop) + 1
    runner, recorded = late_runner(CONFIG), Recorded()
    play(runner, recorded.submission(span._replace(run=Run(8, (stop,))), begun(2, Run(8), KINDS[2])))
    assert recorded.run(0) == (RunEnd.STOP_ID, chosen[:count])
    assert recorded.run(1) == (RunEnd.MAX_TOKENS, alone(begun(2, None, KINDS[2]), 8))
    assert runner.kv.length(1) == 3 + count - 1
    runner.check()
    runner.release([1, 2])
    assert runner.cache_state().free_blocks == runner.kv.total_blocks


@pytest.mark.parametrize(
    "kind",
    [PENALISED, Sample(grammar=bytes(32)), Sample(frequency_penalty=0.1)],
    ids=["penalties", "grammar", "frequency"],
)
@pytest.mark.parametrize("claimed", [True, False])
def test_where_a_run_must_wait_none_follows(kind, claimed):
    """Or it would be in every second step only."""
    runs = Runs(Places(9))
    for other, follow in ((kind, []), (KINDS[2], [0, 1])):
        work = Recorded().submission(begun(1, Run(9)), begun(2, Run(9), other), begun(3, Run(1), kind))
        going, works = ([], [work]) if claimed else ([*runs._expect(work).values()], [])
        following = runs.may_follow(going, works, 0.0)
        assert [each.index for each in following] == follow, "the third ends anyway"


def test_adapters_go_along():
    runs, work = Runs(Places(9)), Recorded().submission(begun(1, Run(9))._replace(adapter=7))
    [each] = runs.may_follow([], [work], 0.0)
    assert each.following() == Span(1, each.following().tokens, 3, output(Greedy()), adapter=7)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_runner_that_cannot_is_never_asked_to(depth):
    """Ranks receive their tokens from the host, and a CPU has one step at a time."""
    runner, recorded = build_runner(CONFIG) if depth == 1 else late_runner(CONFIG, in_stages=True), Recorded()
    assert not runner.follows
    log = logged(runner)
    play(runner, recorded.submission(begun(1, Run(5)), begun(2, Run(5))))
    assert all(following == 0 for _, _, following in log)
    assert recorded.run(0)[1] == alone(begun(1, None), 5)


def test_runs_follow_on_a_gpu_whose_rank_has_all_logits(monkeypatch):
    runner = build_runner(CONFIG)
    attention: Any = runner.attention
    part: Any = SimpleNamespace(group=None)
    monkeypatch.setattr(cuda_compute, "Staging", lambda _: None)
    monkeypatch.setattr(engine_compute, "select_sampler", lambda *_: None)
    assert not StagedCompute(runner.model, attention).follows
    monkeypatch.setattr(runner.model, "device", torch.device("cuda"))
    assert StagedCompute(runner.model, attention).follows
    assert not StagedCompute(runner.model, attention, part=part).follows


@pytest.mark.parametrize("index", [0, None])
def test_an_interrupt_ends_runs_at_a_step_and_what_follows_is_not_begun(index):
    runner, recorded = late_runner(CONFIG), Recorded()
    work = recorded.submission(begun(1, Run(9)), begun(2, Run(9)))
    log = logged(runner)
    play(runner, work, None, Interrupt(work, index, Cancelled("no longer wanted")))
    end, tokens = recorded.run(0)
    assert end is RunEnd.CUT and 0 < len(tokens) < 9 and tokens == alone(begun(1, None), 9)[: len(tokens)]
    assert isinstance(recorded.answer[0][0].ended.cause, Cancelled)
    other = recorded.run(1)
    assert other == ((RunEnd.MAX_TOKENS, alone(begun(2, None), 9)) if index == 0 else (RunEnd.CUT, other[1]))
    assert max(following for _, _, following in log) == (1 if index == 0 else 0)
    runner.check()
    assert runner.kv.length(1) == 3 + len(tokens) - 1


def test_a_deadline_is_the_last_moment_to_follow():
    runs = Runs(Places(9))
    work = Recorded().submission(begun(1, Run(9)), deadline=5.0)
    assert [len(runs.may_follow([], [work], now)) for now in (4.9, 5.0)] == [1, 0]


@pytest.mark.parametrize("passage", range(24))
def test_a_failure_at_any_passage_ends_or_spares_a_run_whole(passage):
    """Stages of steps that follow are among them. What the run has chosen until then is right, and so is the next."""
    passages = itertools.count()

    def stage(name: str) -> None:
        if next(passages) == passage:
            raise Sabotage(name)

    runner, first, second = late_runner(CONFIG, stage), Recorded(), Recorded()
    early, late = (begun(1, Run(5)), begun(2, Run(3), KINDS[2])), (begun(3, Run(4)),)
    play(runner, first.submission(*early), None, second.submission(*late))
    runner.check()
    for recorded, spans in ((first, early), (second, late)):
        for index, span in enumerate(spans):
            if isinstance(recorded.answer[0][index], StepFailed):
                assert recorded.chosen == []
                continue
            end, tokens = recorded.run(index)
            assert span.run is not None and tokens == alone(span, span.run.max_tokens)[: len(tokens)]
            assert (end is RunEnd.MAX_TOKENS) == (len(tokens) == span.run.max_tokens)
    runner.release([*sequences(runner.kv)])
    assert runner.cache_state().free_blocks == runner.kv.total_blocks


@pytest.mark.parametrize("passage", range(10, 20))
def test_a_step_that_fails_behind_a_stop_id_does_not_end_the_run_twice(passage):
    passages = itertools.count()

    def stage(name: str) -> None:
        if next(passages) == passage:
            raise Sabotage(name)

    runner, recorded, span, other = late_runner(CONFIG, stage), Recorded(), begun(1, Run(8), KINDS[3]), begun(2, Run(8))
    chosen = alone(span, 8)
    loop = play(runner, recorded.submission(span._replace(run=Run(8, (chosen[0],))), other))
    assert loop.counters.running == 0
    if not isinstance(recorded.answer[0][0], StepFailed):
        assert recorded.run(0) == (RunEnd.STOP_ID, chosen[:1])
        end, tokens = recorded.run(1)
        assert tokens == alone(other, 8)[: len(tokens)] and (end is RunEnd.MAX_TOKENS) == (len(tokens) == 8)


@pytest.mark.parametrize("waiting", [True, False])
def test_a_submission_that_waits_for_the_end_of_a_run_loses_no_step(waiting):
    """It begins with the very next step, which therefore begins when its token is known."""
    runner, first, other, second, order = late_runner(CONFIG), Recorded(), Recorded(), Recorded(), list[str]()
    log = logged(runner)
    works = [first.submission(begun(1, Run(4))), other.submission(begun(2, Run(9)))]
    then = Span(1, prompt(1, 1), 6, output(Greedy()), run=Run(3))
    if waiting:
        works.append(second.submission(then, behind=(works[0], 0), begins=lambda: order.append("begins")))
    play(runner, *works)
    assert other.run() == (RunEnd.MAX_TOKENS, alone(begun(2, None), 9))
    chosen = first.run()[1]
    begins = [each[1:] for each in log if each[0] == "begin"]
    if not waiting:
        assert begins == [(2, 0), *[(2, 2)] * 3, *[(1, 1)] * 5]
        return
    assert begins == [(2, 0), *[(2, 2)] * 3, (2, 0), *[(2, 2)] * 2, *[(1, 1)] * 2]
    assert order == ["begins"]
    assert chosen + second.run()[1] == alone(begun(1, None), 7)


def test_a_run_that_was_refused_has_no_next_step():
    """It was expected to go on when the step behind its first one began."""
    runner, recorded = late_runner(replace(CONFIG, kv_blocks=10)), Recorded()
    log = logged(runner)
    play(runner, recorded.submission(begun(1, Run(40)), begun(2, Run(6))))
    assert isinstance(recorded.answer[0][0], KvBlocksExhausted)
    assert recorded.run(1) == (RunEnd.MAX_TOKENS, alone(begun(2, None), 6))
    assert [each[1:] for each in log if each[0] == "begin"] == [(2, 0), (2, 2), (1, 1), (1, 1), (1, 1), (1, 1)]
    runner.check()


def test_runs_that_cannot_follow_begin_when_the_step_before_has_ended():
    """Each time after one attempt, and what came with it is refused."""

    def stage(name: str) -> None:
        if name == "plan" and in_flight(runner):
            raise Sabotage(name)

    runner, recorded, other = late_runner(CONFIG, stage), Recorded(), Recorded()
    log = logged(runner)
    play(runner, recorded.submission(begun(1, Run(4))), None, other.submission(begun(2, None)))
    assert recorded.run() == (RunEnd.MAX_TOKENS, alone(begun(1, None), 4))
    assert isinstance(other.answer[0][0], StepFailed)
    assert [each[0] + str(each[2]) for each in log] == [*("begin0", "begin1", "finish0") * 3, *("begin0", "finish0")]
    runner.check()


# --- the time of the device -------------------------------------------------------------------------------------------

BEGIN_S, FINISH_S, STEP_S = 0.6e-3, 0.1e-3, 5e-3


class Timed(Fake):
    """A device that takes `STEP_S` for a step, on a clock of its own. ``idle_s``: how long it had nothing to do before
    each step but the first. Its steps choose token 1."""

    def __init__(self, follows: bool, now: list[float]) -> None:
        super().__init__()
        self.follows = follows
        self.now = now
        self.idle_s: list[float] = []
        self._free_at = 0.0

    def begin(self, step: Step) -> Any:
        self.now[0] += BEGIN_S
        began = max(self.now[0], self._free_at)
        if self._free_at:
            self.idle_s.append(began - self._free_at)
        self._free_at = began + STEP_S
        return step, self._free_at

    def ready(self, pending: Any) -> bool:
        return self.now[0] >= pending[1]

    def finish(self, pending: Any) -> StepResult:
        step, ends = pending
        self.now[0] = max(self.now[0], ends) + FINISH_S
        block = core.RowBlock(core.RowKind.TOKENS, {"token_ids": np.ones(len(step.spans), np.uint32)})
        rows = [SpanResult(span.end, core.Rows(block, index, 1)) for index, span in enumerate(step.spans)]
        return StepResult(tuple(rows), STEP_S)

    def end_hold(self, sequences: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("follows", [False, True])
def test_the_device_does_not_idle_between_the_steps_of_runs(follows, monkeypatch):
    now, tokens = [1000.0], 40

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    runner, recorded = Timed(follows, now), Recorded()
    play(runner, recorded.submission(*(begun(each, Run(tokens)) for each in range(3))))
    assert recorded.run(2) == (RunEnd.MAX_TOKENS, [1] * tokens)
    first, second, *others = runner.idle_s
    assert len(others) == tokens - 3
    without = BEGIN_S + FINISH_S
    assert others == pytest.approx([0.0 if follows else without] * len(others), abs=1e-9)
    if follows:
        assert first == 0 and second < BEGIN_S, "the length of the first step includes its begin"


# --- any history ------------------------------------------------------------------------------------------------------


@dataclass
class Track:
    """A sequence: what was fed and came of it, in order, and how many pieces of work are out."""

    sequence: int
    length: int = 0
    made: bool = False
    out: int = 0
    done: list[tuple[Span, SpanResult]] = field(default_factory=list)


class Players:
    """An inbox that draws work when the loop looks: runs and plain items of several sequences in a submission, runs
    that follow one of those, forks, truncations, releases, and interrupts of what is out. What fails is not repeated:
    the next work begins where its sequences then stand."""

    def __init__(self, data: st.DataObject, turns: int) -> None:
        self.data, self.turns = data, turns
        self._numbers = itertools.count(1)
        self.tracks = [Track(next(self._numbers)) for _ in range(4)]
        self.ended: list[Track] = []
        self.out: list[Submission] = []
        self._followed: list[Submission] = []
        self.handed_back = self.begun = 0
        self._next: Work = None

    def empty(self) -> bool:
        if self._next is None and self.data.draw(st.booleans(), label="arrives"):
            self._next = self._draw()
        return self._next is None

    def get(self, block: bool = True, timeout: float | None = None) -> Work:
        if self._next is None and not block:
            raise Empty
        work, self._next = self._next or self._draw(), None
        return work

    def _draw(self) -> Work:
        data = self.data
        if not self.turns:
            return None
        self.turns -= 1
        idle = [each for each in self.tracks if not each.out]
        kinds = ["items"] * 6 + ["follow"] * 3 + ["interrupt", "fork", "truncate", "release"]
        kind = data.draw(st.sampled_from(kinds), label="work")
        if kind == "interrupt" and self.out:
            work = data.draw(st.sampled_from(self.out), label="of")
            index = data.draw(st.sampled_from([None, *range(len(work.spans))]), label="index")
            return Interrupt(work, index, Cancelled("no"))
        followed = [each for each in self.out if each.behind is None and each not in self._followed]
        followed = [each for each in followed if all(span.output.positions is Positions.LAST for span in each.spans)]
        if kind == "follow" and followed:
            return self._follower(data.draw(st.sampled_from(followed), label="of"))
        made = [each for each in idle if each.made]
        if kind in {"fork", "truncate", "release"} and made:
            return self._operation(kind, data.draw(st.sampled_from(made), label="track"))
        if not idle:
            return None if not self.out else Interrupt(None, None, Cancelled("of nothing"))
        return self._items(data.draw(st.lists(st.sampled_from(idle), min_size=1, max_size=3, unique_by=id)))

    def _operation(self, kind: str, track: Track) -> Operation:
        to = self.data.draw(st.integers(0, track.length), label="to")
        track.out += 1

        def done(result: object) -> None:
            track.out -= 1
            if isinstance(result, ExecutorError):
                return
            if kind == "truncate":
                track.length = to
            elif kind == "release":
                self.tracks[self.tracks.index(track)] = Track(next(self._numbers))
                self.ended.append(track)
            else:
                self.tracks.append(Track(child, to, made=True, done=[*track.done]))

        if kind == "truncate":
            return Operation(lambda runner: runner.truncate(track.sequence, to), done)
        if kind == "release":
            return Operation(lambda runner: runner.release([track.sequence]), done)
        child = next(self._numbers)
        return Operation(lambda runner: runner.fork(track.sequence, [child], to), done)

    def _items(self, tracks: list[Track]) -> Submission:
        data, spans = self.data, list[Span]()
        for track in tracks:
            back = data.draw(st.sampled_from([0, 0, 0, 0, 1, SIZE]), label="back")
            start = max(0, track.length - back)
            count = data.draw(st.sampled_from([1, 1, 2, SIZE, SIZE + 1]), label="tokens")
            tokens = ((np.arange(count) * 7 + start + 3 * track.sequence) % VOCABULARY).astype(np.int32)
            run, wanted = None, output(data.draw(st.sampled_from([*KINDS, *KINDS, PENALISED]), label="kind"))
            kind = data.draw(st.sampled_from(["run"] * 6 + ["item", "all rows"]), label="a run")
            if kind == "all rows":
                wanted = OutputSpec(Positions.ALL, core.FullLogits())
            if kind == "run":
                stops = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=5), label="stops")
                run = Run(data.draw(st.integers(1, 9), label="max"), tuple(stops))
            spans.append(Span(track.sequence, tokens, start, wanted, create=not track.made, run=run))
        return self._submission(tracks, spans, all_or_nothing=data.draw(st.booleans(), label="all or nothing"))

    def _follower(self, before: Submission) -> Submission:
        """Of a span that has no more than the foreseen length, wherever it ends."""
        self._followed.append(before)
        index = self.data.draw(st.integers(0, len(before.spans) - 1), label="span")
        span = before.spans[index]
        [track] = [each for each in self.tracks if each.sequence == span.sequence]
        start = span.end + (0 if span.run is None else span.run.max_tokens - 1)
        run = Run(self.data.draw(st.integers(1, 9), label="max"))
        then = Span(span.sequence, np.zeros(1, np.int32), start, span.output, run=run)

        def begins() -> None:
            self.begun += 1

        return self._submission([track], [then], behind=(before, index), begins=begins)

    def _submission(self, tracks: list[Track], spans: list[Span], **options: Any) -> Submission:
        for track in tracks:
            track.out += 1

        def done(outcomes: Any, timing: Any) -> None:
            self.out.remove(work)
            if work.behind is not None and not outcomes:
                self.handed_back += 1
                outcomes = (None,)
            for track, span, outcome in zip(tracks, work.spans, outcomes, strict=True):
                assert track.out, "each once"
                track.out -= 1
                if isinstance(outcome, SpanResult):
                    assert timing.queue_s >= 0
                    chosen = 1 if span.output.positions is Positions.ALL else len(tokens_of(outcome.rows))
                    assert outcome.length == span.end + chosen - 1
                    track.done.append((span, outcome))
                    track.made, track.length = True, outcome.length

        work = Submission(tuple(spans), done, on_tokens=lambda chosen: None, **options)
        self.out.append(work)
        return work


def replay(track: Track) -> None:
    """The same, one step after the other: the same tokens and the same bits of the rest. A fork is its parent, cut."""
    with stepping() as runner:
        for number, (span, outcome) in enumerate(track.done):
            rows = outcome.rows
            assert rows is not None
            each, found = span._replace(sequence=1, create=not number, run=None), columns_of(rows)
            if span.output.positions is Positions.ALL:
                [mine] = answered(runner, each)
                assert np.isfinite(mine["logits"]).all() and mine["logits"].tobytes() == found["logits"].tobytes()
                continue
            for at in range(rows.count):
                [mine] = answered(runner, each)
                for name, column in found.items():
                    assert mine[name][0].tobytes() == column[at].tobytes(), name
                each = Span(1, found["token_ids"][at : at + 1].astype(np.int32), each.end, span.output)
            tokens = tokens_of(rows)
            if span.run is not None:
                assert outcome.ended is not None
                assert not set(tokens[:-1]) & set(span.run.stop_token_ids)
                stopped = tokens[-1] in span.run.stop_token_ids
                full = len(tokens) == span.run.max_tokens
                expected = RunEnd.STOP_ID if stopped else RunEnd.MAX_TOKENS if full else RunEnd.CUT
                assert outcome.ended.end is expected


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_history_of_runs_is_that_of_one_step_after_the_other(data):
    """By a device that is late and has the next step, by stages that share what waits, and by one step at a time."""
    fails = data.draw(st.sets(st.integers(1, 90), max_size=6), label="passages that fail")
    passages = itertools.count(1)

    def stage(name: str) -> None:
        if next(passages) in fails:
            raise Sabotage(name)

    config = replace(CONFIG, kv_blocks=data.draw(st.sampled_from([18, 30, 200]), label="blocks"))
    how = data.draw(st.sampled_from(["late", "late", "in stages", "one by one"]), label="steps")
    runner = build_runner(config, stage=stage) if how == "one by one" else late_runner(config, stage, how != "late")
    players = Players(data, turns=25)
    items, places = (data.draw(st.sampled_from([1, 3, 64]), label=each) for each in ("items", "places"))
    Loop(runner, players, items=items, places=places).run_well()
    assert not any(each.out for each in players.tracks) and not players.out
    runner.check()
    fails.clear()
    for track in [*players.tracks, *players.ended]:
        replay(track)
    for track in players.tracks:
        assert not track.made or runner.kv.length(track.sequence) == track.length
    runner.release([each.sequence for each in players.tracks if each.made])
    assert runner.cache_state().free_blocks == runner.kv.total_blocks
