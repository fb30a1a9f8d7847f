"""How long runs are, and how many shared frames a session client has in flight: enough to keep the executor busy, and
no more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.client import RunPace
from ferrum_rpc.client.pace import FIRST_RUN, FramePace
from ferrum_rpc.core import StepTiming

MOST = 32
STEP_S = st.floats(1e-5, 1.0)
TRIP_S = st.floats(0.0, 2.0)
SHARED = st.integers(1, 256)


def timing(forward_s: float, queue_s: float = 0.0, sequences: int = 1) -> StepTiming:
    return StepTiming(step=1, sequences=sequences, tokens=1, queue_s=queue_s, forward_s=forward_s)


# --- runs -------------------------------------------------------------------------------------------------------------


def measured(trip_s: float, step_s: float, sequences: int = 1) -> RunPace:
    """A pace that has settled."""
    pace = RunPace()
    for _ in range(40):
        pace.note(trip_s + 4 * step_s, timing(4 * step_s, sequences=sequences), 4)
    return pace


@given(st.tuples(TRIP_S, STEP_S, SHARED), st.integers(1, 1000), st.booleans(), st.none() | st.floats(0.0, 1.0))
def test_a_run_is_neither_empty_nor_longer_than_allowed_and_keeps_its_delay(known, most, chains, max_delay_s):
    tokens, step_s = measured(*known).tokens(most, chains=chains, max_delay_s=max_delay_s), known[1]
    assert 1 <= tokens <= most
    if max_delay_s is not None:
        assert (tokens - 1) * step_s <= max_delay_s * (1 + 1e-6), "what the first token waits for the last one"


@given(st.tuples(TRIP_S, TRIP_S), STEP_S, SHARED)
def test_a_farther_executor_gets_runs_that_are_no_shorter(trips_s, step_s, sequences):
    near, far = (measured(each, step_s, sequences).tokens(MOST, chains=True) for each in sorted(trips_s))
    assert near <= far


@given(st.floats(0.0, 0.04), STEP_S, SHARED)
def test_up_to_twenty_milliseconds_each_way_runs_are_as_long_as_beside_the_executor(trip_s, step_s, sequences):
    """Else the client beside it would be the slower one."""
    near, far = (measured(each, step_s, sequences).tokens(MOST, chains=True) for each in (0.0, trip_s))
    assert near == far


@given(TRIP_S, st.floats(1e-4, 1.0), SHARED)
def test_a_run_lasts_until_the_next_one_is_there(trip_s, step_s, sequences):
    for chains, trips in ((True, 1.0), (False, 4.0)):
        tokens = measured(trip_s, step_s, sequences).tokens(MOST, chains=chains)
        assert tokens == MOST or tokens * step_s >= trips * trip_s


@given(STEP_S, st.tuples(SHARED, SHARED))
def test_more_sequences_get_longer_runs_within_a_bound(step_s, sequences):
    few, many = (measured(0.0, step_s, each).tokens(10**6, chains=True) for each in sorted(sequences))
    assert few <= many
    assert (many - 1) * step_s <= 0.25 * (1 + 1e-6)


def test_before_the_first_answer_a_run_is_short_and_with_a_delay_a_single_token():
    pace = RunPace()
    assert (pace.tokens(MOST), pace.tokens(2), pace.tokens(MOST, max_delay_s=0.1)) == (FIRST_RUN, 2, 1)
    pace.note(0.02, None, 4)
    assert pace.tokens(MOST) == FIRST_RUN, "an answer of the record tells no time"
    pace.note(0.02, timing(0.01), 0)
    assert pace.tokens(MOST) == FIRST_RUN, "nor does a prompt tell that of a step"


def test_a_trip_that_becomes_shorter_or_longer_is_noticed():
    pace = measured(0.2, 0.0101)
    assert pace.tokens(MOST, chains=True) == 30
    pace.note(0.001 + 0.04, timing(0.04), 4)
    assert pace.tokens(MOST, chains=True) == 6, "at once: nothing makes an answer too fast"
    for _ in range(20):
        pace.note(0.2 + 0.04, timing(0.04), 4)
    assert pace.tokens(MOST, chains=True) == 30


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elapsed_s", "queue_s", "forward_s", "most"),
    [(0.021, 0.0, 0.020, 1), (0.041, 0.020, 0.020, 1), (0.0305, 0.0, 0.010, 3), (0.002, 0.0, 0.0, 1)],
    ids=["the step is most of it", "another's step is no time to use", "a far executor", "no forward"],
)
def test_frames_in_flight_fill_the_time_around_a_step(elapsed_s, queue_s, forward_s, most):
    pace = FramePace()
    assert pace.most == 1, "nothing is known yet"
    pace.answered(elapsed_s, timing(forward_s, queue_s))
    assert pace.most == most


def test_one_slow_answer_does_not_change_the_pace_and_many_do():
    pace = FramePace()
    for _ in range(5):
        pace.answered(0.011, timing(0.010))
    pace.answered(0.030, timing(0.010))
    assert pace.most == 1
    for _ in range(20):
        pace.answered(0.035, timing(0.010))
    assert pace.most == 3


def test_an_answer_without_a_step_says_nothing():
    pace = FramePace()
    pace.answered(0.0305, timing(0.010))
    pace.answered(5.0, None)
    assert pace.most == 3
