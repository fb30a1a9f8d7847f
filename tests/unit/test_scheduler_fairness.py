"""Turns of tenants: in proportion to their weights, without saved-up time, and in bounded memory."""

from __future__ import annotations

import heapq
import pickle
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.scheduler.fairness import TENANTS_KEPT, FairShares


def served(shares: FairShares, waiting: list[tuple[float, int, str]], count: int) -> Counter[str]:
    """The tenants of the next ``count`` requests in their order."""
    heapq.heapify(waiting)
    found: Counter[str] = Counter()
    for _ in range(count):
        turn, _, tenant = heapq.heappop(waiting)
        shares.began(turn)
        found[tenant] += 1
    return found


def test_a_tenant_that_sends_a_hundred_delays_one_that_comes_later_by_one_request() -> None:
    shares = FairShares()
    waiting = [(shares.turn("many", 100), number, "many") for number in range(100)]
    assert served(shares, waiting, 50)["many"] == 50
    waiting += [(shares.turn("late", 100), 1000 + number, "late") for number in range(10)]
    found = served(shares, waiting, 20)
    assert abs(found["late"] - found["many"]) <= 2


@given(st.lists(st.integers(1, 500), min_size=30, max_size=30), st.integers(1, 4))
def test_tokens_are_divided_by_weight_whatever_the_sizes(sizes: list[int], weight: int) -> None:
    shares, waiting, cost = FairShares(), list[tuple[float, int, str]](), dict[int, int]()
    for number, size in enumerate(sizes):
        for at, (tenant, heavy) in enumerate((("a", 1.0), ("b", float(weight)))):
            cost[2 * number + at] = size
            waiting.append((shares.turn(tenant, size, heavy), 2 * number + at, tenant))
    heapq.heapify(waiting)
    tokens: Counter[str] = Counter()
    while min(sum(each[2] == tenant for each in waiting) for tenant in "ab"):
        _, number, tenant = heapq.heappop(waiting)
        tokens[tenant] += cost[number]
    assert abs(tokens["a"] - tokens["b"] / weight) <= 2 * max(sizes)


def test_idle_time_is_not_saved_up_and_unused_tokens_are_returned() -> None:
    shares = FairShares()
    for _ in range(10):
        shares.began(shares.turn("busy", 100))
    assert shares.turn("fresh", 10) == 900
    assert shares.turn("busy", 10) == 1000
    shares.unused("busy", 10)
    assert shares.turn("busy", 10) == 1000


def test_tenants_without_a_debt_are_forgotten() -> None:
    shares, sizes = FairShares(), []
    for part in range(3):
        for number in range(TENANTS_KEPT):
            shares.began(shares.turn(f"tenant {part} {number}", 1))
            shares.began(float(part * TENANTS_KEPT + number))
        sizes.append(len(pickle.dumps(shares)))
    assert max(sizes) <= 1.01 * sizes[0]
