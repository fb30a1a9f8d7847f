"""The policy as a pure function: budgets, order, admission, preemption; and that everything comes to an end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.client import HandleRef, Sequence
from ferrum_rpc.scheduler.policy import Budget, Others, Pool, StepPlan, arrivals, plan
from ferrum_rpc.scheduler.request import Request

ROOMY = Pool(free=1000, total=1000, block_size=4)
BUDGET = Budget(tokens=64, items=16, running=8, headroom=8)


def request(index: int, known: int, cached: int = 0, generated: int = 0) -> Request:
    return Request(index, tuple(range(known - generated)), 1000, generated=list(range(generated)), cached=cached)


def decoding(index: int, cached: int) -> Request:
    return request(index, cached + 1, cached, 1)


def fed(step: StepPlan) -> list[tuple[int, int]]:
    return [(feed.request.index, feed.count) for feed in step.feeds]


def victims(step: StepPlan) -> list[int]:
    return [each.index for each in step.preempt]


# --- examples -------------------------------------------------------------------------------------------------------


def test_decodes_come_first_then_chunks_then_the_waiting_with_what_the_budget_leaves():
    running = [request(2, 50, 10), decoding(1, 20), decoding(0, 30)]
    step = plan(running, [request(3, 5), request(4, 500)], ROOMY, BUDGET)
    assert fed(step) == [(0, 1), (1, 1), (2, 40), (3, 5), (4, 17)]
    assert [each.index for each in step.admitted] == [3, 4]
    assert [feed.completes for feed in step.feeds] == [True, True, True, True, False], "what the budget leaves"


def test_admission_waits_until_prompt_and_headroom_of_everybody_fit():
    pool = Pool(free=6, total=20, block_size=4)
    running, newcomer = [decoding(0, 7)], request(1, 8)
    # The decode takes a place in its last block; 2 blocks are promised to its headroom; 2 + 2 are the newcomer's.
    assert fed(plan(running, [newcomer], pool, BUDGET)) == [(0, 1), (1, 8)]
    assert fed(plan(running, [newcomer], replace(pool, free=5), BUDGET)) == [(0, 1)]


def test_an_idle_executor_takes_what_fits_even_without_headroom():
    pool = Pool(free=5, total=5, block_size=4)
    assert fed(plan([], [request(0, 20)], pool, BUDGET)) == [(0, 20)]


def test_drafts_go_where_nothing_else_needs_the_room():
    def drafts(pool: Pool, budget: Budget, *running: Request) -> list[int]:
        for each in running:
            each.draft = (1, 2, 3, 4, 5)
        return [feed.drafted for feed in plan(running, [], pool, budget).feeds]

    both = [decoding(0, 8), decoding(1, 8)]
    assert drafts(ROOMY, BUDGET, *both) == [5, 5]
    assert drafts(ROOMY, replace(BUDGET, tokens=8), *both) == [5, 1]
    assert drafts(ROOMY, replace(BUDGET, tokens=2), *both) == [0, 0]
    assert drafts(Pool(free=3, total=9, block_size=4), BUDGET, *both) == [5, 3]
    assert drafts(Pool(free=2, total=9, block_size=4), BUDGET, *both) == [3, 3]
    assert drafts(ROOMY, BUDGET, request(0, 9, 4, 1), request(1, 9, 0, 1), request(2, 9, 8)) == [0, 5, 0]  # 2, 0, 1


def test_a_decode_without_a_block_takes_the_youngests():
    pool = Pool(free=0, total=12, block_size=4)
    running = [decoding(0, 16), decoding(1, 16), decoding(2, 16)]
    step = plan(running, [request(3, 1)], pool, replace(BUDGET, headroom=0))
    assert victims(step) == [2]
    assert fed(step) == [(0, 1), (1, 1)]
    assert step.admitted == (), "nobody joins while somebody had to leave"


def test_a_request_that_the_whole_pool_cannot_hold_is_unservable_and_stops_nobody():
    pool = Pool(free=10, total=10, block_size=4)
    step = plan([], [request(0, 41), request(1, 8)], pool, BUDGET)
    assert [each.index for each in step.unservable] == [0]
    assert fed(step) == [(1, 8)]
    full = plan([decoding(0, 40)], [], Pool(free=0, total=10, block_size=4), BUDGET)
    assert [each.index for each in full.unservable] == [0]


def test_priority_then_turn_then_age_decide_who_is_served_and_who_is_preempted():
    late, favoured, early = decoding(0, 16), decoding(1, 16), decoding(2, 16)
    late.turn, favoured.priority = 5.0, 1
    step = plan([late, favoured, early], [], Pool(free=1, total=12, block_size=4), replace(BUDGET, headroom=0))
    assert fed(step) == [(1, 1), (2, 1)]
    assert victims(step) == [0]


def test_requests_in_flight_keep_their_places_tokens_and_promised_blocks():
    newcomer, pool = request(9, 8), Pool(free=6, total=20, block_size=4)
    assert fed(plan([], [newcomer], pool, BUDGET, Others(1, 1, promised=2))) == [(9, 8)]
    assert fed(plan([], [newcomer], pool, BUDGET, Others(1, 1, promised=3))) == []
    assert fed(plan([], [newcomer], pool, BUDGET, Others(1, 60, promised=2))) == [(9, 4)]
    assert fed(plan([], [newcomer], pool, BUDGET, Others(1, 64, promised=2))) == []
    assert fed(plan([], [newcomer], pool, replace(BUDGET, running=1), Others(1, 1))) == []


def test_prompts_that_hold_all_blocks_between_them_are_unblocked_for_the_oldest_unless_others_are_in_flight():
    pool = Pool(free=0, total=8, block_size=4)
    blocked = [request(0, 30, 16), request(1, 30, 16)]
    step = plan(blocked, [], pool, BUDGET)
    assert (victims(step), fed(step)) == ([1], [(0, 14)])
    assert victims(plan(blocked, [], pool, BUDGET, Others(1, 1))) == []


def test_a_request_alone_waits_when_others_hold_the_pool():
    step = plan([decoding(0, 16)], [], Pool(free=0, total=100, block_size=4), BUDGET)
    assert victims(step) == [0]
    assert step.unservable == ()


def test_sequences_come_from_elsewhere_while_they_and_headroom_for_everybody_fit():
    pool = Pool(free=9, total=20, block_size=4)
    ready = [decoding(at, 7) for at in (3, 4, 5)]  # 2 blocks and 2 of headroom each; 3 for what already runs
    assert [each.index for each in arrivals(ready, [decoding(0, 7)], [], pool, BUDGET)] == [3]
    assert arrivals(ready, [decoding(0, 7)], [decoding(1, 7)], pool, BUDGET) == []
    assert [each.index for each in arrivals(ready, [], [], pool, BUDGET)] == [3, 4]
    assert [each.index for each in arrivals(ready, [], [], replace(pool, free=2), BUDGET)] == [3], "alone: no headroom"
    assert len(arrivals(ready, [], [], ROOMY, replace(BUDGET, running=2))) == 2


def test_as_many_run_as_a_step_has_room_for_and_a_budget_has_room():
    waiting = [request(at, 1) for at in range(30)]
    for field in ("running", "tokens", "items"):
        assert len(plan([], waiting, ROOMY, replace(BUDGET, **{field: 3})).feeds) == 3
        with pytest.raises(ValueError, match="must be at least 1"):
            replace(BUDGET, **{field: 0})


def test_the_last_places_are_for_tenants_that_have_nothing_running() -> None:
    budget = Budget(tokens=64, items=64, running=32)  # 2 of 32 places

    def some(count: int, tenant: str) -> list[Request]:
        made = [decoding(at, 8) for at in range(count)]
        for each in made:
            each.tenant = tenant
        return made

    def admitted(*waiting: str, others: int = 30, of: str = "a") -> list[str]:
        beside = Others(others, others, tenants=frozenset({of}))
        asked = [replace(request(at, 1), tenant=tenant) for at, tenant in enumerate(waiting, 100)]
        found = [each.tenant for each in plan([], asked, ROOMY, budget, beside).admitted]
        assert [each.tenant for each in arrivals(asked, some(others, of), [], ROOMY, budget)] == found
        assert [each.tenant for each in plan(some(others, of), asked, ROOMY, budget).admitted] == found
        return found

    assert admitted("a") == [], "the last two places are another tenant's"
    assert admitted("b", "a") == ["b"]
    assert admitted("b", "b") == ["b"], "nor may the other one have both"
    assert admitted("b", "c", "d") == ["b", "c"], "no place is left"
    assert admitted("a", "a", others=29) == ["a"]
    assert admitted("", "", of="") == ["", ""], "requests without a tenant may have all places"


def test_a_prompt_of_several_texts_takes_a_place_for_each() -> None:
    def prompt(texts: int) -> Request:
        return replace(request(99, 9), branches=tuple(request(100 + at, 10) for at in range(texts)))

    def admitted(waiting: list[Request], count: int) -> int:
        running = [decoding(at, 8) for at in range(count)]
        assert len(arrivals(waiting, running, [], ROOMY, BUDGET)) == len(plan(running, waiting, ROOMY, BUDGET).admitted)
        assert len(plan([], waiting, ROOMY, BUDGET, Others(count, count)).admitted) == len(
            plan(running, waiting, ROOMY, BUDGET).admitted
        )
        return len(plan(running, waiting, ROOMY, BUDGET).admitted)

    assert admitted([prompt(4), prompt(4), prompt(4)], 0) == 2
    assert admitted([prompt(4)], 4) == 1
    assert admitted([prompt(4)], 5) == 0
    assert admitted([prompt(20)], 0) == 1, "alone it runs, however many texts it has"
    assert admitted([prompt(20)], 1) == 0


# --- slots ----------------------------------------------------------------------------------------------------------


def with_slot(request: Request) -> Request:
    """It has a sequence at the executor."""
    request.sequence = cast(Sequence, SimpleNamespace(handle=HandleRef(b"", request.cached, 1)))
    return request


def unborn(request: Request) -> Request:
    """It has one that no item has made yet."""
    request.sequence = cast(Sequence, SimpleNamespace(handle=None))
    return request


def texts_of_one_prompt(count: int) -> Request:
    return replace(request(99, 9), branches=tuple(request(100 + at, 10) for at in range(count)))


def test_requests_join_while_slots_are_free():
    waiting = [request(at, 8) for at in (7, 8, 9)]
    running = [with_slot(decoding(0, 8)), with_slot(decoding(1, 8))]
    for slots in range(4):
        pool = replace(ROOMY, slots=slots)
        assert [each.index for each in plan(running, waiting, pool, BUDGET).admitted] == [7, 8, 9][:slots]
        assert [each.index for each in arrivals(waiting, running, [], pool, BUDGET)] == [7, 8, 9][:slots]
        assert len(fed(plan(running, waiting, pool, BUDGET))) == 2 + slots, "who has one goes on"
    assert arrivals(waiting[:1], running, waiting[1:], replace(ROOMY, slots=2), BUDGET) == []
    assert plan([], waiting, replace(ROOMY, slots=0), BUDGET).feeds == ()


def test_a_prompt_of_several_texts_waits_for_a_slot_for_each_and_its_own_or_runs_alone():
    prompt, running = texts_of_one_prompt(3), [with_slot(decoding(0, 8))]
    for slots, admitted in ((3, 0), (4, 1)):
        pool = replace(ROOMY, slots=slots)
        assert len(plan(running, [prompt], pool, BUDGET).admitted) == admitted
        assert len(arrivals([prompt], running, [], pool, BUDGET)) == admitted
    one = replace(ROOMY, slots=1)
    assert len(plan([], [prompt], one, BUDGET).admitted) == len(arrivals([prompt], [], [], one, BUDGET)) == 1
    assert plan([], [prompt], replace(ROOMY, slots=0), BUDGET).feeds == ()


def test_slots_that_running_requests_will_need_are_not_given_away():
    newcomer, branching = request(7, 8), with_slot(replace(texts_of_one_prompt(2), cached=4))
    assert plan([branching], [newcomer], replace(ROOMY, slots=2), BUDGET).admitted == ()
    assert plan([branching], [newcomer], replace(ROOMY, slots=3), BUDGET).admitted == (newcomer,)
    assert arrivals([newcomer], [branching], [], replace(ROOMY, slots=2), BUDGET) == []
    assert plan([], [newcomer], replace(ROOMY, slots=2), BUDGET, Others(1, 1, slots=2)).admitted == ()
    assert plan([], [newcomer], replace(ROOMY, slots=3), BUDGET, Others(1, 1, slots=2)).admitted == (newcomer,)
    children = [unborn(decoding(at, 8)) for at in (0, 1)]
    for slots, joins in ((2, ()), (3, (newcomer,))):
        step = plan(children, [newcomer], replace(ROOMY, slots=slots), replace(BUDGET, items=3))
        assert (fed(step)[:2], step.admitted) == ([(0, 1), (1, 1)], joins)
    again = unborn(request(0, 90, 16))
    again.pieces.fed(16, 70, 1)
    again.computed = 86  # it goes on in a span of 70 tokens, for which this step has no room
    for slots, joins in ((1, ()), (2, (newcomer,))):
        running, budget = [again, with_slot(decoding(1, 8))], replace(BUDGET, exact=1)
        assert plan(running, [newcomer], replace(ROOMY, slots=slots), budget).admitted == joins


def test_who_has_no_slot_yet_waits_for_others_and_takes_one_only_where_nothing_else_goes_on():
    full = replace(ROOMY, slots=0)
    child, other = unborn(decoding(0, 8)), with_slot(decoding(1, 8))
    step = plan([child, other], [], full, BUDGET)
    assert (fed(step), victims(step)) == ([(1, 1)], []), "it waits until a text ends"
    prompt, blocked = unborn(request(0, 30, 16)), with_slot(request(1, 30, 16))
    step = plan([prompt, blocked], [], Pool(free=0, total=8, block_size=4, slots=0), BUDGET)
    assert (victims(step), fed(step)) == ([1], [(0, 14)])
    for each, others, gone in ((prompt, Others(), [0]), (prompt, Others(1, 1), []), (child, Others(), [0])):
        step = plan([each], [], full, BUDGET, others)
        assert (victims(step), fed(step)) == (gone, []), "others have the slots"


# --- properties -----------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Request], list[Request], Pool, Budget]:
    """Any state that a scheduler can be in: running requests hold their blocks, others may hold some too."""
    size = draw(st.integers(1, 8))
    budget = Budget(
        tokens=draw(st.integers(1, 40)),
        items=draw(st.integers(1, 10)),
        running=draw(st.integers(1, 10)),
        headroom=draw(st.integers(0, 20)),
    )
    lengths = st.integers(1, 40)
    running = []
    for index in range(draw(st.integers(0, budget.at_once))):
        cached = draw(st.integers(0, 40))
        owed = draw(st.one_of(st.just(1), lengths))
        running.append(request(index, cached + owed, cached))
    waiting = [request(len(running) + at, draw(lengths)) for at in range(draw(st.integers(0, 6)))]
    held = sum(-(-each.cached // size) for each in running)
    free, others = draw(st.integers(0, 30)), draw(st.integers(0, 10))
    return draw(st.permutations(running)), waiting, Pool(free, held + free + others, size), budget


@given(worlds())
def test_every_plan_keeps_the_rules(world):
    running, waiting, pool, budget = world
    before = [(each.index, each.cached, each.known, each.stage) for each in (*running, *waiting)]
    step = plan(running, waiting, pool, budget)
    assert step == plan(list(reversed(running)), waiting, pool, budget), "it always says the same"
    assert before == [(each.index, each.cached, each.known, each.stage) for each in (*running, *waiting)]
    gone = [each for each in (*step.preempt, *step.unservable) if each in running]
    left = {each.index for each in (*step.preempt, *step.unservable)}
    places = [feed.request.index for feed in step.feeds]

    # it keeps to its budgets
    assert sum(feed.count for feed in step.feeds) <= budget.tokens
    assert len(step.feeds) <= budget.items
    assert all(1 <= feed.count <= feed.request.owed for feed in step.feeds)
    assert len(set(places)) == len(places)
    assert len(running) - len(gone) + len(step.admitted) <= max(budget.at_once, len(running))

    # it needs no more blocks than are free
    free = pool.free + sum(pool.blocks(each.cached) for each in gone)
    assert sum(pool.growth(feed.request.cached, feed.count) for feed in step.feeds) <= free
    assert all(pool.blocks(feed.request.cached + feed.count) <= pool.total for feed in step.feeds)

    # every decode runs, before all others, or its request leaves
    assert {each.index for each in running if each.owed == 1} <= left | set(places)
    order = [feed.request.owed > 1 for feed in step.feeds if feed.request in running]
    assert order == sorted(order)

    # the youngest leave, nobody joins when somebody has to, and whoever joins has waited longest
    kept = [each.index for each in running if each.index not in left]
    assert not step.preempt or max(kept, default=-1) < min(each.index for each in step.preempt)
    assert not (step.preempt and step.admitted)
    joined = [each.index for each in step.admitted]
    assert joined == [each.index for each in waiting if each.index not in left][: len(joined)]

    # there is always progress
    if running:
        assert step.feeds or step.preempt or step.unservable
    elif waiting and pool.free == pool.total:
        assert step.feeds or step.unservable


@given(st.data())
def test_every_request_comes_to_its_end_in_whatever_pool(data):
    """A simulated executor: blocks are counted exactly, every fed request that owes nothing gets a token."""
    size = data.draw(st.integers(1, 5))
    total = data.draw(st.integers(4, 25))
    budget = Budget(
        tokens=data.draw(st.integers(1, 30)), items=8, running=data.draw(st.integers(1, 8)),
        headroom=data.draw(st.integers(0, 12)), exact=data.draw(st.integers(0, 6)),
    )  # fmt: skip
    wanted = [
        Request(at, tuple(range(data.draw(st.integers(1, 40)))), data.draw(st.integers(1, 20)))
        for at in range(data.draw(st.integers(1, 8)))
    ]
    waiting, running, cut = list(wanted), [], []
    work = sum(len(each.prompt) + each.max_new_tokens for each in wanted)
    for _ in range(40 * work):
        if not (waiting or running):
            break
        free = total - sum(-(-each.cached // size) for each in running)
        step = plan(running, waiting, Pool(free, total, size), budget)
        for each in step.unservable:
            (running if each in running else waiting).remove(each)
            each.cached = 0
            cut.append(each)
        for each in step.preempt:
            running.remove(each)
            each.cached = 0
            waiting = sorted([*waiting, each], key=lambda request: request.index)
        for each in step.admitted:
            waiting.remove(each)
            running.append(each)
        for feed in step.feeds:
            request, completes = feed.request, feed.completes
            request.fed(feed.count, request.cached + feed.count, budget.exact)
            if completes:
                request.generated.append(0)
                if len(request.generated) == request.max_new_tokens:
                    running.remove(request)
                    request.cached = 0
        assert sum(-(-each.cached // size) for each in running) <= total
    assert not waiting
    assert not running
    for each in wanted:
        assert len(each.generated) == each.max_new_tokens or each in cut
        assert each not in cut or -(-(each.known + 1) // size) > total


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 6), st.lists(st.integers(1, 12)))
def test_what_is_computed_again_goes_in_the_spans_that_it_was_or_in_short_ones(spans, exact, room):
    """``kind[i]``: the span that computed token i, where it was longer than ``exact``."""

    def run(request: Request, count: int) -> list[tuple[int, int] | None]:
        start = request.cached
        request.fed(count, start + count, exact)
        return [(start, count) if count > exact else None] * count

    request = Request(0, tuple(range(sum(spans))), 1)
    kind = [each for count in spans for each in run(request, count)]
    request.cached = 0
    again: list[tuple[int, int] | None] = []
    while request.owed:
        most = room.pop() if room else 12
        count = request.span(most, exact)
        assert count <= most
        again += run(request, count) if count else []
    assert again == kind


# --- requests -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9)), st.data())
def test_what_is_owed_is_fed_in_order_across_prompt_and_generated(prompt, generated, data):
    known = prompt + generated
    request = Request(0, tuple(prompt), 5, generated=generated)
    out: list[int] = []
    while request.owed:
        count = data.draw(st.integers(1, request.owed))
        out += request.next_tokens(count)
        request.cached += count
    assert out == known
