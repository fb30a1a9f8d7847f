"""Whose turn it is in the engine's queue: the order of one caller, what several have of the steps, and of the runs."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ferrum_rpc.core import OutputSpec, RowBlock, RowKind, Rows, Run, Span, Step, StepResult
from ferrum_rpc.engine.api import Submission, WorkState
from ferrum_rpc.engine.backlog import Backlog
from ferrum_rpc.engine.places import Places
from tests.unit.test_loop_overlap import Fake, Loop, Script

ITEMS, TOKENS = 8, 64


def work(caller: int, items: int = 1, tokens: int = 1) -> Submission:
    """``items`` spans of ``tokens`` each."""
    span = Span(caller, np.zeros(tokens, dtype=np.int32), 0, OutputSpec())
    return Submission((span,) * items, lambda *_: None, caller=caller)


def filled(*works: Submission) -> Backlog:
    backlog = Backlog(ITEMS, TOKENS)
    for each in works:
        backlog.add(each)
    return backlog


def step(backlog: Backlog) -> list[Submission]:
    """A step's worth, as `EngineLoop` takes it."""
    claimed: list[Submission] = []
    items = tokens = 0
    while backlog:
        first = backlog.first()
        items, tokens = items + len(first.spans), tokens + first.tokens
        if claimed and (items > ITEMS or tokens > TOKENS):
            break
        claimed.append(backlog.take())
    return claimed


def parts(works: list[Submission]) -> Counter[int]:
    """What each caller had of steps: a whole one is ITEMS * TOKENS."""
    had: Counter[int] = Counter()
    for each in works:
        had[each.caller] += max(len(each.spans) * TOKENS, each.tokens * ITEMS)
    return had


sizes = st.tuples(st.integers(1, ITEMS), st.integers(1, TOKENS // ITEMS))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), sizes) | st.sampled_from(["take", "drop"])))
def test_each_caller_is_served_in_its_order_and_nothing_is_lost(history):
    backlog, waiting = Backlog(ITEMS, TOKENS), {caller: deque[Submission]() for caller in range(4)}
    for each in history:
        if not isinstance(each, str):
            caller, size = each
            backlog.add(added := work(caller, *size))
            waiting[caller].append(added)
        elif backlog:
            first = backlog.first()
            assert backlog.take(counted=each == "take") is first is waiting[first.caller].popleft()
    while backlog:
        first = backlog.take()
        assert first is waiting[first.caller].popleft()
    assert not any(waiting.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(sizes, min_size=12, max_size=12), min_size=2, max_size=3))
def test_while_all_wait_none_has_more_than_another_by_a_whole_step(queues):
    backlog = filled(*(work(caller, *size) for caller, queue in enumerate(queues) for size in queue))
    had, taken = Counter(dict.fromkeys(range(len(queues)), 0)), Counter[int]()
    while max(taken.values(), default=0) < len(queues[0]):
        assert max(had.values()) - min(had.values()) <= ITEMS * TOKENS, "a submission takes a whole step at most"
        served = backlog.take()
        had += parts([served])
        taken[served.caller] += 1


@pytest.mark.parametrize("flood", [{"items": ITEMS}, {"tokens": TOKENS}, {}])
def test_whoever_comes_beside_a_flood_is_in_the_next_step_but_one(flood):
    backlog = filled(*(work(1, **flood) for _ in range(100)))
    for _ in range(10):
        step(backlog)
        backlog.add(work(2))
        assert 2 in parts([*step(backlog), *step(backlog)])


def test_many_short_calls_are_worth_one_long_one():
    """Turn by turn, they would wait for a step of the other's each."""
    backlog = filled(*(work(1, tokens=TOKENS) for _ in range(10)), *(work(2) for _ in range(ITEMS)))
    steps = [step(backlog) for _ in range(3)]
    assert sum(each.caller == 2 for served in steps for each in served) == ITEMS


def test_time_without_work_earns_nothing():
    backlog = filled(work(2), *(work(1, ITEMS) for _ in range(70)))
    for _ in range(51):
        backlog.take()
    for _ in range(20):
        backlog.add(work(2, ITEMS))
    had = parts([backlog.take() for _ in range(20)])
    assert abs(had[1] - had[2]) <= ITEMS * TOKENS


def test_the_loop_takes_its_steps_in_that_order_and_what_was_cancelled_counts_for_nothing():
    runner, order = Fake(depth=1), []
    works = [work(1, ITEMS) for _ in range(6)] + [work(2) for _ in range(3)]
    for number, each in enumerate(works):
        each.done = lambda outcomes, timing, number=number: order.append(number)  # type: ignore[misc]
    works[6].state = WorkState.CANCELLED
    Loop(runner, Script(*works), items=ITEMS).run()
    assert order[0] == 0 and set(order[1:3]) == {7, 8} and order[3:] == [1, 2, 3, 4, 5]


class Choosing(Fake):
    """Every span chooses token 5."""

    def end_hold(self, sequences: object) -> None:
        pass

    def finish(self, pending: Step) -> StepResult:
        block, done = RowBlock.of(RowKind.TOKENS, np.full(len(pending.spans), 5, np.uint32)), super().finish(pending)
        outcomes = [each._replace(rows=Rows(block, at, 1)) for at, each in enumerate(done.outcomes)]
        return done._replace(outcomes=tuple(outcomes))


def test_who_gets_a_place_waits_for_its_callers_turn_like_the_others():
    """Runs that waited for places went before all that had none to wait for, step for step."""
    runner, order = Choosing(depth=1), list[str]()
    works = {f"large {number}": runs(0, 2, part=2, tokens=1) for number in range(4)}
    works |= {"small": work(1), "another": work(2)}
    for name, each in works.items():
        each.done = lambda outcomes, timing, name=name: order.append(name)  # type: ignore[misc]
    runner.acts["begin 1"] = lambda: setattr(works["large 1"], "state", WorkState.CANCELLED)
    *large, small, another = works.values()
    Loop(runner, Script(*large, None, small, another), items=2, places=2).run_well()
    assert order == ["large 0", "small", "another", "large 2", "large 3"], "large 1 had a place, which is free again"


# --- places of runs ---------------------------------------------------------------------------------------------------

PLACES, PART = 8, 4


def runs(caller: int, count: int, part: int = PART, tokens: int = 2) -> Submission:
    """``count`` runs of ``tokens`` tokens each, of a caller that may have ``part`` of the places."""
    span = Span(caller, np.zeros(1, dtype=np.int32), 0, OutputSpec(), run=Run(tokens))
    return Submission((span,) * count, lambda *_: None, caller=caller, max_running=part)


class Board:
    """Places as the loop uses them: what waits begins where it can, in ``begun``; and what must hold whenever it has.
    ``parts``: how much of the places each caller may have."""

    def __init__(self, *parts: int) -> None:
        self.places, self.parts = Places(PLACES), parts
        self.waiting = [deque[Submission]() for _ in parts]
        self.under_way: list[Submission] = []
        self.begun: list[Submission] = []

    def ask(self, caller: int, count: int) -> Submission:
        work = runs(caller, count, self.parts[caller])
        if self.places.may_begin(work):
            self.begin(work)
        else:
            self.places.add(work)
            self.waiting[caller].append(work)
            self.begin_all()
        return work

    def end(self, work: Submission) -> None:
        self.under_way.remove(work)
        self.places.free(work, work.runs)
        self.begin_all()

    def begin_all(self) -> None:
        def is_over(work: Submission) -> bool:
            if work.state is WorkState.CANCELLED:
                assert self.waiting[work.caller].popleft() is work, "dropped once"
                return True
            return False

        while (work := self.places.first(is_over)) is not None:
            assert self.places.take(work) is work is self.waiting[work.caller].popleft(), "in its caller's order"
            self.begin(work)

    def begin(self, work: Submission) -> None:
        mine = self.held(work.caller)
        assert not mine or mine + work.runs <= self.parts[work.caller]
        self.places.hold(work)
        self.under_way.append(work)
        taken = [min(self.held(caller), part) for caller, part in enumerate(self.parts)]
        assert sum(taken) <= PLACES or sum(taken) == taken[work.caller]
        self.begun.append(work)
        assert self.places.count == sum(each.runs for each in self.under_way)

    def held(self, caller: int) -> int:
        return sum(each.runs for each in self.under_way if each.caller == caller)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([2, PART, 2 * PLACES]), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(["ask", "ask", "end", "cancel"]), st.integers(0, 99), st.integers(1, PLACES))),
)
@example([2], [("ask", 0, 2), ("ask", 0, 1), ("ask", 0, 2), ("cancel", 0, 1)])
def test_runs_begin_in_each_callers_order_within_its_part_and_nothing_waits_for_ever(parts, history):
    board = Board(*parts)
    asked: list[Submission] = []
    for kind, which, count in history:
        if kind == "ask":
            asked.append(board.ask(which % len(parts), count))
        elif kind == "end" and board.under_way:
            board.end(board.under_way[which % len(board.under_way)])
        elif kind == "cancel" and (waiting := [each for works in board.waiting for each in works]):
            waiting[which % len(waiting)].state = WorkState.CANCELLED
    while board.under_way:
        board.end(board.under_way[0])
    places = board.places
    assert not places and not places.count and not places.tokens and not any(board.waiting)
    assert not places._held and not places._turns
    assert {*board.begun} == {each for each in asked if each.state is not WorkState.CANCELLED}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, PLACES), max_size=40), st.integers(1, PART))
def test_a_run_within_its_callers_part_begins_at_once_whatever_one_other_asks_for(many, few):
    board = Board(PART, PART)
    for count in many:
        board.ask(0, count)
    assert board.ask(1, few) in board.begun


def test_of_several_that_wait_the_one_with_fewest_places_is_next_and_a_large_one_is_not_passed_for_ever():
    board = Board(PART, PART, PART)
    first, _ = board.ask(0, PART), board.ask(1, PART)
    for _ in range(20):
        board.ask(0, 1)
        board.ask(1, 1)
    last = board.ask(2, PART)
    board.end(first)
    assert board.begun[2:] == [last], "it came last and has none"
    alone = Board(2 * PLACES)
    one, large = alone.ask(0, 1), alone.ask(0, PLACES)
    small = alone.ask(0, 1)
    assert alone.begun == [one], "there is room for the small one, which came later"
    alone.end(one)
    alone.end(large)
    assert alone.begun == [one, large, small]


def test_more_runs_than_a_part_begin_when_their_caller_has_none_and_keep_nobody_from_the_rest():
    board = Board(PART, PART)
    one, large, other = board.ask(0, 1), board.ask(0, PLACES), board.ask(1, 1)
    assert board.begun == [one, other]
    board.end(one)
    assert board.begun[2:] == [large]
    more = board.ask(1, PART - 1)
    assert board.begun[3:] == [more] and board.places.count == PLACES + PART
    later = board.ask(0, 1)
    board.end(large)
    assert board.begun[4:] == [later]
