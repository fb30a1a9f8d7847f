"""Whose turn it is in the engine's queue: the order of one caller, and what several have of the steps."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_rpc.core import OutputSpec, Span
from ferrum_rpc.engine.api import State, Submission
from ferrum_rpc.engine.backlog import Backlog
from tests.unit.test_loop_overlap import Fake, Loop, Script

ITEMS, TOKENS = 8, 64


def work(caller: int, items: int = 1, tokens: int = 1) -> Submission:
    """``items`` spans of ``tokens`` each."""
    span = Span(caller, np.zeros(tokens, dtype=np.int32), 0, OutputSpec())
    return Submission((span,) * items, lambda *_: None, caller=caller)


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
def test_each_caller_is_served_in_its_order_and_nothing_is_lost(
    history: list[tuple[int, tuple[int, int]] | str],
) -> None:
    backlog, waiting = Backlog(ITEMS, TOKENS), {caller: deque[Submission]() for caller in range(4)}
    for each in history:
        if not isinstance(each, str):
            caller, size = each
            backlog.add(added := work(caller, *size))
            waiting[caller].append(added)
        elif backlog:
            first = backlog.first()
            assert (
                (backlog.take() if each == "take" else backlog.take(counted=False))
                is first
                is waiting[first.caller].popleft()
            )
    while backlog:
        first = backlog.take()
        assert first is waiting[first.caller].popleft()
    assert not any(waiting.values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(sizes, min_size=12, max_size=12), min_size=2, max_size=3))
def test_while_all_wait_none_has_more_than_another_by_a_whole_step(queues: list[list[tuple[int, int]]]) -> None:
    backlog = Backlog(ITEMS, TOKENS)
    for caller, queue in enumerate(queues):
        for size in queue:
            backlog.add(work(caller, *size))
    had, taken = Counter(dict.fromkeys(range(len(queues)), 0)), Counter[int]()
    while max(taken.values(), default=0) < len(queues[0]):
        assert max(had.values()) - min(had.values()) <= ITEMS * TOKENS, "a submission takes a whole step at most"
        served = backlog.take()
        had += parts([served])
        taken[served.caller] += 1


@pytest.mark.parametrize("flood", [{"items": ITEMS}, {"tokens": TOKENS}, {}])
def test_whoever_comes_beside_a_flood_is_in_the_next_step_but_one(flood: dict[str, int]) -> None:
    backlog = Backlog(ITEMS, TOKENS)
    for _ in range(100):
        backlog.add(work(1, **flood))
    for _ in range(10):
        step(backlog)
        backlog.add(work(2))
        assert 2 in parts([*step(backlog), *step(backlog)])


def test_many_short_calls_are_worth_one_long_one() -> None:
    """Turn by turn, they would wait for a step of the other's each."""
    backlog = Backlog(ITEMS, TOKENS)
    for _ in range(10):
        backlog.add(work(1, tokens=TOKENS))
    for _ in range(ITEMS):
        backlog.add(work(2))
    steps = [step(backlog) for _ in range(3)]
    assert sum(each.caller == 2 for served in steps for each in served) == ITEMS


def test_time_without_work_earns_nothing() -> None:
    backlog = Backlog(ITEMS, TOKENS)
    backlog.add(work(2))
    backlog.take()
    for _ in range(50):
        backlog.add(work(1, ITEMS))
        backlog.take()
    for caller in (1, 2) * 20:
        backlog.add(work(caller, ITEMS))
    had = parts([backlog.take() for _ in range(20)])
    assert abs(had[1] - had[2]) <= ITEMS * TOKENS


def test_the_loop_takes_its_steps_in_that_order_and_what_was_cancelled_counts_for_nothing() -> None:
    runner, order = Fake(depth=1), []
    works = [work(1, ITEMS) for _ in range(6)] + [work(2) for _ in range(3)]
    for number, each in enumerate(works):
        each.done = lambda outcomes, timing, number=number: order.append(number)  # type: ignore[misc]
    works[6].state = State.CANCELLED
    Loop(runner, Script(*works), items=ITEMS).run()
    assert order[0] == 0 and set(order[1:3]) == {7, 8} and order[3:] == [1, 2, 3, 4, 5]
