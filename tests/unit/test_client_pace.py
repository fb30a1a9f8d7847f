"""How many shared frames a session client has in flight: enough to keep the executor busy, and no more."""

import pytest

from ferrum_rpc.client.pace import FramePace
from ferrum_rpc.core import StepTiming


def timing(forward_s: float, queue_s: float = 0.0) -> StepTiming:
    return StepTiming(step=1, sequences=1, tokens=1, queue_s=queue_s, forward_s=forward_s)


@pytest.mark.parametrize(
    ("elapsed_s", "queue_s", "forward_s", "most"),
    [(0.021, 0.0, 0.020, 1), (0.041, 0.020, 0.020, 1), (0.0305, 0.0, 0.010, 3), (0.002, 0.0, 0.0, 1)],
    ids=["the step is most of it", "another's step is no time to use", "a far executor", "no forward"],
)
def test_frames_in_flight_fill_the_time_around_a_step(
    elapsed_s: float, queue_s: float, forward_s: float, most: int
) -> None:
    pace = FramePace()
    assert pace.most == 1, "nothing is known yet"
    pace.answered(elapsed_s, timing(forward_s, queue_s))
    assert pace.most == most


def test_one_slow_answer_does_not_change_the_pace_and_many_do() -> None:
    pace = FramePace()
    for _ in range(5):
        pace.answered(0.011, timing(0.010))
    pace.answered(0.030, timing(0.010))
    assert pace.most == 1
    for _ in range(20):
        pace.answered(0.035, timing(0.010))
    assert pace.most == 3


def test_an_answer_without_a_step_says_nothing() -> None:
    pace = FramePace()
    pace.answered(0.0305, timing(0.010))
    pace.answered(5.0, None)
    assert pace.most == 3
