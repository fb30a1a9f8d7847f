"""What callers hear when a CUDA device fails, whatever class the error has: DEVICE_LOST from a device that is dead, and
"nothing changed" only from one that works, with everything as before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, Span, SpanResult, Step
from ferrum_rpc.engine.assembly import check
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import DeviceLost, InvalidRequest, StepFailed
from ferrum_rpc.selection import BackendCandidate, select
from tests.support.fake_async_device import ILLEGAL_ACCESS, FakeCuda, late_runner

CONFIG = ModelSettings(path="identity", device="cpu", block_size=4, kv_blocks=14, identity_vocab_size=32)
ERRORS: dict[str, Callable[[], Exception]] = {
    "torch": lambda: torch.AcceleratorError(ILLEGAL_ACCESS),
    "triton": lambda: RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
}
UNTYPED = pytest.mark.parametrize("kind", ["triton", "cublas", "memory"])
STAGES = ("plan", "forward", "select", "commit")


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def span(tokens: int, start: int) -> Span:
    fed = np.arange(1, 1 + tokens, dtype=np.int32) % 32
    return Span(1, fed, start, OutputSpec(Positions.ALL, FullLogits()), not start)


def rows(runner: TorchRunner, tokens: int, start: int) -> Any:
    [outcome] = runner.forward(Step((span(tokens, start),))).outcomes
    assert isinstance(outcome, SpanResult) and outcome.rows is not None
    return outcome.rows.detached().block["logits"]


class Faulty:
    """A runner with ten tokens of sequence 1, and the error that its next step raises at ``stage``."""

    def __init__(self) -> None:
        self.armed: dict[str, Exception] = {}
        self.runner = late_runner(CONFIG, self._stage)
        with self.runner.context():
            rows(self.runner, 10, 0)
        self.free = self.runner.kv.free_blocks

    def _stage(self, name: str) -> None:
        if name in self.armed:
            raise self.armed.pop(name)

    def fail(self, stage: str, error: Exception) -> Exception:
        """What the callers of a step hear that overwrites four tokens."""
        self.armed = {stage: error}
        with self.runner.context(), pytest.raises((StepFailed, DeviceLost)) as raised:
            rows(self.runner, 6, 6)
        self.runner.check()
        assert self.runner.kv.length(1) == 10 and self.runner.kv.free_blocks == self.free
        return raised.value


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ERRORS)
def test_a_dead_device_is_lost_whatever_its_error(cuda, kind, stage):
    faulty = Faulty()
    cuda.lost = True
    answer = faulty.fail(stage, ERRORS[kind]())
    assert type(answer) is DeviceLost and answer.message == "the device failed during a step"


@pytest.mark.parametrize("stage", STAGES)
@UNTYPED
def test_a_device_that_works_fails_the_step_alone_and_has_its_cache(cuda, kind, stage):
    faulty, twin = Faulty(), Faulty()
    answer = faulty.fail(stage, ERRORS[kind]())
    assert type(answer) is StepFailed and answer.message.endswith("nothing changed")
    assert cuda.checks == 1, "no step without an error is waited for"
    with faulty.runner.context():
        np.testing.assert_array_equal(rows(faulty.runner, 1, 10), rows(twin.runner, 1, 10))


def test_out_of_memory_in_the_largest_step_leaves_room_for_the_next(cuda, logs):
    """One that takes every block: nothing of it stays reserved, and the log names the setting that makes it smaller."""
    faulty = Faulty()
    largest = 4 * (faulty.free + 3) - 10
    faulty.armed = {"select": ERRORS["memory"]()}
    with faulty.runner.context():
        with pytest.raises(StepFailed, match="OutOfMemoryError"):
            rows(faulty.runner, largest, 10)
        faulty.runner.check()
        assert faulty.runner.kv.free_blocks == faulty.free
        [entry] = [each for each in logs if each["event"] == "step_failed"]
        assert entry["tokens"] == largest and "--max-batch-tokens" in entry["action"]
        assert len(rows(faulty.runner, largest, 10)) == largest and not faulty.runner.kv.free_blocks


@pytest.mark.parametrize("error", [torch.AcceleratorError(ILLEGAL_ACCESS), RuntimeError("Triton Error [CUDA]: ...")])
def test_a_cache_that_cannot_be_restored_is_never_called_unchanged(cuda, error, monkeypatch):
    faulty = Faulty()

    def restore(_: Any) -> None:
        raise error

    monkeypatch.setattr(faulty.runner.store, "restore", restore)
    assert type(faulty.fail("select", ERRORS["triton"]())) is DeviceLost


@UNTYPED
@pytest.mark.parametrize("lost", [True, False])
def test_an_operation_of_a_dead_device_is_no_failed_one(cuda, kind, lost):
    faulty = Faulty()
    faulty.armed, cuda.lost = {"truncate": ERRORS[kind]()}, lost
    with pytest.raises(DeviceLost if lost else StepFailed):
        faulty.runner.truncate(1, 5)


@pytest.mark.parametrize("kind", ERRORS)
def test_a_probe_that_kills_the_device_is_no_obstacle(cuda, kind):
    """The next candidate would fail too, with an error about something else."""

    def kills() -> None:
        cuda.lost = True
        raise ERRORS[kind]()

    candidates = BackendCandidate("triton", kills), BackendCandidate("torch", lambda: pytest.fail("it was tried"))
    with pytest.raises(DeviceLost, match="small step of attention 'triton'") as raised:
        select(*candidates, what="attention", field="attention")
    assert type(raised.value.__cause__) is type(ERRORS[kind]())


@pytest.mark.parametrize("kind", ERRORS)
def test_a_probe_that_fails_on_a_device_that_works_is_an_obstacle(cuda, kind):
    def fails() -> None:
        raise ERRORS[kind]()

    found = select(BackendCandidate("triton", fails), BackendCandidate("torch", lambda: 1), what="x", field="x")
    assert found.name == "torch" and "triton: a small step failed" in found.reason
    with pytest.raises(InvalidRequest):
        select(BackendCandidate("triton", fails), what="x", field="x")


@UNTYPED
@pytest.mark.parametrize("lost", [True, False])
def test_a_device_that_dies_in_the_first_step_is_no_wrong_configuration(cuda, kind, lost, monkeypatch):
    def fails(*_: Any) -> Any:
        raise ERRORS[kind]()

    monkeypatch.setattr(check, "_errors", fails)
    model: Any = SimpleNamespace(spec=SimpleNamespace(architecture="QwenForCausalLM"))
    nothing: Any = None
    cuda.lost = lost
    with pytest.raises(torch.AcceleratorError if lost else InvalidRequest):
        check.check_parity(model, nothing, nothing, 64)


# --- a device that hangs ----------------------------------------------------------------------------------------------


def test_steps_of_a_model_on_a_gpu_are_waited_for_with_a_limit(monkeypatch):
    """See `Liveness`: the loop reports since when the device of such a runner has had its oldest step."""
    plain = build_runner(CONFIG)
    monkeypatch.setattr(plain.model, "device", torch.device("cuda"))
    parts = plain.model, plain.kv, plain.store, plain.attention
    on_gpu = TorchRunner(*parts, info=plain.info, device=plain.device, compute=plain.compute)
    assert on_gpu.on_device and not plain.on_device
