"""How `CudaCapture` fails, over torch's calls of a device that is not there: what would fail is refused before a
capture begins, because a failed one costs the process; and the log names the cost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ferrum_rpc.engine.assembly import build
from ferrum_rpc.engine.cuda import select
from ferrum_rpc.engine.cuda.graphs import SPARE_BYTES, CaptureFailed, CaptureRefused, CudaCapture
from tests.support.fake_async_device import FakeCuda
from tests.support.fixtures import PlannedTorch
from tests.support.rerun import Rerun
from tests.unit.test_staged_runner import CONFIG, replaying

HIDDEN = torch.zeros(1)
GIB = 1 << 30


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def step(cuda: FakeCuda, *faults: Callable[[], object], nbytes: int = 0) -> Callable[[], Tensor]:
    """A step; each of its runs has the next of the ``faults``."""
    left = list(faults)

    def run() -> Tensor:
        cuda.launch(nbytes)
        if left:
            left.pop(0)()
        return HIDDEN

    return run


def none() -> None:
    pass


def raising(error: Exception, *, then: Callable[[], object] = none) -> Callable[[], None]:
    def fail() -> None:
        then()
        raise error

    return fail


def unharmed(cuda: FakeCuda) -> bool:
    return cuda.stream is cuda.main and cuda.mode == 0 and not cuda.lost


def test_a_capture_warms_up_and_then_captures(cuda):
    replay, output = CudaCapture(torch.device("cuda"))(step(cuda))
    assert output is HIDDEN and unharmed(cuda)
    replay()
    assert cuda.log == ["launched", "capture", "captured", "replay"]


def test_a_step_that_waits_is_refused_before_a_capture(cuda):
    with pytest.raises(CaptureRefused, match="called a synchronizing CUDA operation"):
        CudaCapture(torch.device("cuda"))(step(cuda, cuda.wait, cuda.wait))
    assert cuda.log == ["launched"] and unharmed(cuda)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("Triton Error [CUDA]: out of resources")])
def test_a_warm_up_that_fails_is_refused(cuda, error):
    with pytest.raises(CaptureRefused, match=type(error).__name__) as raised:
        CudaCapture(torch.device("cuda"))(step(cuda, raising(error)))
    assert raised.value.__cause__ is error and cuda.log == ["launched"] and unharmed(cuda)


def test_too_little_memory_is_refused_before_a_capture_and_the_pool_counts(cuda):
    capture = CudaCapture(torch.device("cuda"))
    cuda.free = 2 * GIB + SPARE_BYTES - 1
    with pytest.raises(CaptureRefused, match="2111 MiB of device memory are free, and a capture needs 2112"):
        capture(step(cuda, nbytes=2 * GIB))
    assert "capture" not in cuda.log and unharmed(cuda)
    cuda.free += 1
    capture(step(cuda, nbytes=2 * GIB))
    cuda.free = SPARE_BYTES  # the pool has the rest
    capture(step(cuda, nbytes=GIB))


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"),
        torch.OutOfMemoryError("x"),
        RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing"),
    ],
)
def test_a_capture_that_fails_leaves_stream_and_device(cuda, error):
    with pytest.raises(CaptureFailed, match=type(error).__name__):
        CudaCapture(torch.device("cuda"))(step(cuda, none, raising(error)))
    assert cuda.log == ["launched", "capture", "captured"] and unharmed(cuda) and cuda.checks == 1


@pytest.mark.parametrize("at", ["warm-up", "capture"])
def test_a_device_that_dies_is_no_failed_capture(cuda, at):
    dies = raising(RuntimeError("Triton Error [CUDA]: illegal address"), then=lambda: setattr(cuda, "lost", True))
    faults = [dies] if at == "warm-up" else [none, dies]
    with pytest.raises(torch.AcceleratorError):
        CudaCapture(torch.device("cuda"))(step(cuda, *faults))


@pytest.mark.parametrize(
    ("error", "version", "says"),
    [
        (CaptureFailed("x"), "2.12.1+cu130", "restart with --cuda-graphs off"),
        (CaptureFailed("x"), "2.13.0", "stay reserved until the restart"),
        (CaptureRefused("x"), "2.11.0", "none needed"),
        (CaptureRefused("x"), "2.13.0", "none needed"),
    ],
)
def test_the_log_says_when_a_restart_is_due(error, version, says, logs, monkeypatch):
    def capture(run: Callable[[], Tensor]) -> Any:
        raise error

    monkeypatch.setattr(torch, "__version__", version)
    runner = replaying(capture)
    assert runner.choice[0] == "cuda_graphs=off"  # type: ignore[attr-defined]
    [entry] = [each for each in logs if each["event"] == "graph_capture_failed"]
    assert says in entry["action"] and entry["sequences"] == 1, "the smallest shape is tried first"
    assert ("--cuda-graphs off" in entry["action"]) is (says == "restart with --cuda-graphs off")


def test_an_older_torch_is_named_at_the_start(logs):
    select.warn_of_torch("2.13.0+cu130")
    assert not logs
    select.warn_of_torch("2.12.1")
    [entry] = logs
    assert (entry["event"], entry["supported"]) == ("torch_not_supported", "2.13") and "2.12" in entry["torch"]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_torch_is_looked_at_on_a_gpu_before_anything_is_loaded(kind, monkeypatch):
    class Loads(Exception):
        """The weights are being loaded."""

    def load(_: Any) -> Any:
        raise Loads

    looked = list[None]()
    monkeypatch.setattr(build, "warn_of_torch", lambda: looked.append(None))
    monkeypatch.setattr(build, "choose", lambda _: SimpleNamespace(device=torch.device(kind), load=load))
    with pytest.raises(Loads):
        build.build_runner(CONFIG)
    assert len(looked) == (kind == "cuda")


def test_the_first_steps_run_before_any_capture():
    """They compile and allocate what a warm-up, and a caller's step, must not."""
    order: list[str] = []

    def capture(run: Callable[[], Tensor]) -> Any:
        order.append("capture")
        return none, run()

    def first_steps(*arguments: Any) -> None:
        order.append("first steps")
        run(*arguments)

    run = select.run_first_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "run_first_steps", first_steps)
        replaying(capture)
    assert order == ["first steps", *["capture"] * 3]


def test_the_kernels_of_attention_are_compiled_before_the_first_steps(monkeypatch):
    """All of them: the first steps use the tiles of some spans only."""
    order: list[str] = []
    monkeypatch.setattr(PlannedTorch, "warm_up", lambda _: order.append("compiled"))
    monkeypatch.setattr(select, "run_first_steps", lambda *_: order.append("first steps"))
    replaying(Rerun())
    assert order == ["compiled", "first steps"]
