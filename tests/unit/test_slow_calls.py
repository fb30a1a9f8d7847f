"""The slowest calls of the last minute are those of a list of all calls, whatever comes in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.service.slow_calls import MAX_CALLS, WINDOW_S, SlowestCalls

STEPS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 2.0, 25.0, WINDOW_S]), st.integers(0, 40)), max_size=120)


@given(STEPS)
def test_they_are_the_longest_of_all_that_ended_within_the_window(steps: list[tuple[float, int]]) -> None:
    now, every = 0.0, list[tuple[float, float]]()
    calls = SlowestCalls(lambda: now)
    for number, (passed, elapsed_s) in enumerate(steps):
        now += passed
        calls.note(f"method {number}", "somebody", elapsed_s, "OK")
        every.append((elapsed_s, now))
        recent = sorted((each for each, ended in every if now - ended < WINDOW_S), reverse=True)
        assert [each.elapsed_s for each, _ in calls.slowest()] == recent[:MAX_CALLS]
        assert all(0 <= ago_s < WINDOW_S for _, ago_s in calls.slowest())
