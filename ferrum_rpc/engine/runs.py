"""Runs: items that go on by themselves, each step with the token that the one before chose.

A run that is under way has its place in every step, ahead of what waits and outside of the step's budget; others join
and leave between its steps, which are steps like all others. It is in the loop, and not in front of it, because a
token's way to the event loop and back is longer than a small model's step.

Blocks for the whole of a run are held by its first step (`Span.run`). At a step's boundary a run may be
interrupted by the caller, the deadline or the lease. What it has chosen until then is its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ferrum_rpc.core import (
    LATE,
    Greedy,
    RowBlock,
    Rows,
    Run,
    RunEnd,
    RunEnded,
    Sample,
    Span,
    SpanOutcome,
    SpanResult,
    StepTiming,
)
from ferrum_rpc.engine.api import Submission
from ferrum_rpc.engine.places import Places
from ferrum_rpc.errors import DeadlineExceeded, ExecutorError


@dataclass(slots=True, eq=False)
class RunCall:
    """A submission whose runs are under way: ``outcomes`` so far, ``left`` runs that are not over, and what they have
    ``chosen`` in the present step (see `Submission.on_tokens`). ``timing``: of its last step, but for the time in the
    forward pass, which is of all, and in the queue, which is the first's."""

    work: Submission
    outcomes: list[SpanOutcome]
    timing: StepTiming
    left: int = 0
    chosen: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Running:
    """One run: ``span`` is its next step, ``rows`` those of the steps behind it. ``over``: it has ended."""

    call: RunCall
    index: int
    run: Run
    span: Span
    rows: list[Rows]
    over: bool = False

    @property
    def interrupt(self) -> ExecutorError | None:
        """What interrupts it, if anything does."""
        interrupts = self.call.work.interrupts
        return interrupts.get(self.index) or interrupts.get(None)

    def following(self) -> Span:
        """The step behind ``span``, without its token."""
        sequence, _, _, output, *_, adapter = self.span
        return Span(sequence, np.zeros(1, np.int32), self.span.end, output, adapter=adapter)


_NO_STEP: Final = StepTiming(0, 0, 0, 0.0, 0.0)


class Runs:
    """The runs of a loop. ``places``: what they hold. ``ready``: those that no step under way has. ``calls``: whose
    they are."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.ready: list[Running] = []
        self.calls: dict[RunCall, None] = {}
        self._expected: dict[Submission, dict[int, Running]] = {}
        self._over: list[RunCall] = []
        self._ended: list[int] = []

    def take(
        self, now: float, limit: int | None = None, may_go_on: Callable[[Span], bool] | None = None
    ) -> list[Running]:
        """The runs of the next step, at most so many. Those that are interrupted, or whose deadline has passed at
        ``now``, have ended; those that must not go on yet stay."""
        going: list[Running] = []
        held: list[Running] = []
        for each in self.ready[:limit]:
            work = each.call.work
            cause = each.interrupt if work.interrupts else None
            if cause is None and work.deadline is not None and now >= work.deadline:
                cause = DeadlineExceeded("the deadline passed; these are the tokens until then")
            if cause is not None:
                self._end(each, RunEnd.CUT, cause)
            elif may_go_on is None or may_go_on(each.span):
                going.append(each)
            else:
                held.append(each)
        self.ready = held if limit is None else self.ready[limit:] + held
        return going

    def may_follow(self, going: Sequence[Running], claimed: Sequence[Submission], now: float) -> list[Running]:
        """Of a step under way, the runs whose next step may begin before their tokens are known. None, unless all can
        that will go on: a run that must wait would only be in every second step."""
        found = [each for each in going if not self._ends(each, now)]
        for work in claimed:
            if work.runs:
                found += [each for each in self._expect(work).values() if not self._ends(each, now)]
        return found if all(map(_may_follow, found)) else []

    def leave_out(self, following: Sequence[Running]) -> None:
        """These are in a step under way already."""
        there = set(following)
        self.ready = [each for each in self.ready if each not in there]

    def _expect(self, work: Submission) -> dict[int, Running]:
        """The runs of a submission whose first step is under way, by index."""
        runs = self._expected.get(work)
        if runs is None:
            call = RunCall(work, [], _NO_STEP)
            spans = enumerate(work.spans)
            runs = {index: Running(call, index, span.run, span, []) for index, span in spans if span.run is not None}
            self._expected[work] = runs
        return runs

    @staticmethod
    def _ends(each: Running, now: float) -> bool:
        """Whether a run ends with the step under way, as far as is known."""
        work = each.call.work
        if each.over or len(each.rows) + 1 >= each.run.max_tokens or (work.interrupts and each.interrupt is not None):
            return True
        return work.deadline is not None and now >= work.deadline

    def refused(self, work: Submission) -> None:
        """The first step of a submission has failed."""
        self._places.free(work, work.runs)
        for each in self._expected.pop(work, {}).values():
            each.over = True

    def begun(self, work: Submission, outcomes: Sequence[SpanOutcome], timing: StepTiming | None) -> bool:
        """The first step of a submission with runs has ended, and with it those that were refused. False: none of them
        goes on, and the submission is to be answered."""
        going = [i for i, each in enumerate(outcomes) if work.spans[i].run and isinstance(each, SpanResult)]
        self._places.free(work, work.runs - len(going))
        runs = self._expect(work)
        del self._expected[work]
        for index in runs.keys() - going:
            runs[index].over = True
        if not going or timing is None:
            return False
        call = runs[going[0]].call
        call.outcomes, call.timing, call.left = list(outcomes), timing, len(going)
        self.calls[call] = None
        for index in going:
            self.stepped(runs[index], outcomes[index])
        return True

    def stepped(self, each: Running, outcome: SpanOutcome) -> None:
        """A step of a run has ended."""
        if outcome is LATE:
            if not each.over:
                self.ready.append(each)
            return
        if not isinstance(outcome, SpanResult) or outcome.rows is None:
            assert isinstance(outcome, ExecutorError)  # noqa: S101 - a run has a row a step
            if not each.over:
                self._end(each, RunEnd.CUT, outcome)
            return
        call, rows = each.call, outcome.rows
        token = int(rows.block["token_ids"][rows.first])
        if call.work.on_tokens is not None:
            call.chosen.append((each.index, len(each.rows), token))
        each.rows.append(rows)
        sequence, _, _, output, *_, adapter = each.span
        each.span = Span(sequence, np.array((token,), np.int32), outcome.length, output, adapter=adapter)
        if token in each.run.stop_token_ids:
            self._end(each, RunEnd.STOP_ID)
        elif len(each.rows) == each.run.max_tokens:
            self._end(each, RunEnd.CONTEXT if each.run.at_context else RunEnd.MAX_TOKENS)
        else:
            self.ready.append(each)

    def _end(self, each: Running, end: RunEnd, cause: ExecutorError | None = None) -> None:
        each.over = True
        call = each.call
        rows = each.rows[0] if len(each.rows) == 1 else _joined(each.rows)
        begun = call.outcomes[each.index]
        assert isinstance(begun, SpanResult)  # noqa: S101 - a run goes on after its first step
        call.outcomes[each.index] = begun._replace(length=each.span.start, rows=rows, ended=RunEnded(end, cause))
        call.left -= 1
        self._places.free(call.work, 1)
        self._ended.append(each.span.sequence)
        if not call.left:
            self._over.append(call)

    def take_ended(self) -> tuple[list[int], list[RunCall]]:
        """Sequences whose runs have ended since the last time, and the calls that are over."""
        ended, over = self._ended, self._over
        self._ended, self._over = [], []
        for call in over:
            del self.calls[call]
        return ended, over


def _may_follow(each: Running) -> bool:
    """Whether what a run chooses next does not depend on its tokens but through the model."""
    kind = each.span.output.kind
    return isinstance(kind, Greedy) or (isinstance(kind, Sample) and not kind.penalised and not kind.grammar)


def _joined(parts: Sequence[Rows]) -> Rows:
    """Rows of several steps in one block."""
    columns = {
        name: np.concatenate([rows.block[name][rows.first : rows.first + rows.count] for rows in parts])
        for name in parts[0].block.columns
    }
    return Rows(RowBlock(parts[0].block.kind, columns), 0, sum([rows.count for rows in parts]))
