"""How long the next runs of a scheduler are: those of all requests end together."""

from __future__ import annotations

import pytest

from ferrum_rpc.scheduler.runs import in_step


@pytest.mark.parametrize("most", [1, 2, 3, 5, 31, 32, 64])
def test_runs_end_at_the_same_steps_wherever_they_begin(most: int) -> None:
    half = max(1, most // 2)
    for step in range(3 * most):
        length = in_step(step, most)
        assert most - half < length <= most
        assert (step + length) % half == 0
        assert in_step(step + length, most) > most - most % half - 1, "the next ones are as long as they can be"
