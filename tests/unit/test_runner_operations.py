"""Integer operations that fail: the cache is as before, and the error says what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
import torch

from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import DeviceLost, StepFailed, TruncateBeyondLength
from tests.unit.test_runner_transactions import Sabotage, Twins

Operation = Callable[[TorchRunner], object]

OPERATIONS: dict[str, tuple[str, int, Operation]] = {
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


@pytest.fixture(autouse=True)
def silence() -> Iterator[list[Any]]:
    """A failed operation is logged with its stack."""
    with structlog.testing.capture_logs() as logs:
        yield logs


def family() -> Twins:
    """1 with its fork 2, 3 alone, 4 with promised blocks and a last block that is not full."""
    twins = Twins()
    twins.step(twins.span(1, 11), twins.span(3, 5), twins.span(4, 6))
    assert twins.both(lambda runner: runner.fork(1, (2,), None)) is None
    twins.lengths[2] = 11
    assert twins.both(lambda runner: runner.reserve(4, 10)) is None
    return twins


def fail(twins: Twins, stage: str, nth: int, run: Operation, error: BaseException) -> BaseException:
    before = twins.snapshot()
    twins.saboteur.arm(stage, nth, error)
    with pytest.raises(type(error) if isinstance(error, KeyboardInterrupt) else Exception) as caught:
        run(twins.runner)
    assert twins.saboteur.fired
    twins.saboteur.disarm()
    assert twins.snapshot() == before
    twins.check()
    return caught.value


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("error", [Sabotage(), torch.OutOfMemoryError("so much"), MemoryError(), KeyboardInterrupt()])
def test_an_operation_that_fails_changes_nothing_and_works_when_tried_again(name: str, error: BaseException) -> None:
    stage, nth, run = OPERATIONS[name]
    twins = family()
    raised = fail(twins, stage, nth, run, error)
    if not isinstance(error, KeyboardInterrupt):
        assert type(raised) is StepFailed and raised.__cause__ is error
    assert twins.both(run) is None
    assert twins.runner.cache_state() == twins.twin.cache_state()


@pytest.mark.parametrize("error", [torch.AcceleratorError("bad"), DeviceLost("gone")])
def test_a_device_that_is_lost_during_an_operation_is_no_failed_step(error: Exception) -> None:
    twins = family()
    assert type(fail(twins, "truncate", 1, lambda runner: runner.truncate(1, 3), error)) is DeviceLost


def test_a_refusal_keeps_its_type_and_is_not_logged_as_a_failure(silence: list[Any]) -> None:
    refusal = family().both(lambda runner: runner.truncate(1, 99))
    assert isinstance(refusal, TruncateBeyondLength)
    assert not silence


def test_a_step_at_a_failpoint_of_a_lost_device_says_so() -> None:
    twins = family()
    from ferrum_rpc.core import Step

    raised = twins.fail(Step((twins.span(3, 2),)), "forward", error=DeviceLost("gone"))
    assert type(raised) is DeviceLost
