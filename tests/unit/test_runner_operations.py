"""Integer operations that fail: the cache is as before, and the error says what became of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrum_rpc.core import Step
from ferrum_rpc.errors import DeviceLost, StepFailed, TruncateBeyondLength
from tests.unit.test_runner_transactions import Sabotage, Twins

OPERATIONS: dict[str, tuple[str, int, Any]] = {
    "truncate": ("truncate", 1, lambda runner: runner.truncate(1, 3)),
    "truncate into a shared tail": ("truncate", 1, lambda runner: runner.truncate(2, 5)),
    "the first child of a fork": ("fork", 1, lambda runner: runner.fork(1, (7, 8, 9), None)),
    "the last child of a fork": ("fork", 3, lambda runner: runner.fork(1, (7, 8, 9), 6)),
    "the last child of a parent with promised blocks": ("fork", 2, lambda runner: runner.fork(4, (7, 8), None)),
    "release": ("release", 1, lambda runner: runner.release([1])),
    "release of several": ("release", 1, lambda runner: runner.release([1, 3])),
    "reserve": ("reserve_kv", 1, lambda runner: runner.reserve(1, 9)),
    "reserve less than before": ("reserve_kv", 1, lambda runner: runner.reserve(4, 1)),
}


def family() -> Twins:
    """1 with its fork 2, 3 alone, 4 with promised blocks and a last block that is not full."""
    twins = Twins()
    twins.step(twins.span(1, 11), twins.span(3, 5), twins.span(4, 6))
    twins.fork(1, [2])
    twins.reserve(4, 10)
    return twins


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, Sabotage()) for name in OPERATIONS),
        *(("the last child of a fork", error) for error in (torch.OutOfMemoryError("so much"), KeyboardInterrupt())),
    ],
)
def test_an_operation_that_fails_changes_nothing_and_works_when_tried_again(name: str, error: BaseException) -> None:
    stage, nth, run = OPERATIONS[name]
    twins = family()
    raised = twins.fail(run, stage, nth, error)
    if isinstance(error, KeyboardInterrupt):
        assert raised is error
    else:
        assert type(raised) is StepFailed and raised.__cause__ is error
    assert twins.both(run) is None
    assert twins.runner.cache_state() == twins.twin.cache_state()


@pytest.mark.parametrize("error", [torch.AcceleratorError("bad"), DeviceLost("gone")])
def test_a_device_that_is_lost_during_an_operation_is_no_failed_step(error: Exception) -> None:
    assert type(family().fail(lambda runner: runner.truncate(1, 3), "truncate", error=error)) is DeviceLost


def test_a_refusal_keeps_its_type_and_is_not_logged_as_a_failure(logs: list[Any]) -> None:
    refusal = family().both(lambda runner: runner.truncate(1, 99))
    assert isinstance(refusal, TruncateBeyondLength)
    assert not logs


def test_a_step_at_a_failpoint_of_a_lost_device_says_so() -> None:
    twins = family()
    raised = twins.fail(Step((twins.span(3, 2),)), "forward", error=DeviceLost("gone"))
    assert type(raised) is DeviceLost
