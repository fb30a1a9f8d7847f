"""A late device on a CPU: what a step computes is there once somebody has waited for it, and garbage until then.

`LateCompute` is a runner's view of it; `FakeCuda` is torch's, with the faults of a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Rows
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.step import Stage
from ferrum_rpc.sampling.transfer import Marker

LOOKS = 8
ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"


class FakeCuda:
    """What torch says of a device. ``lost``: after a failure that it does not survive. ``checks``: how often it was
    waited for as a whole. ``log``: what captures did, in order. ``free``: its bytes of memory that no pool has; what a
    step has launched is kept by torch's allocator until `empty_cache`.

    Steps call `launch` for what they launch, and `wait` where they wait for the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost = False
        self.checks = 0
        self.free = 80 << 30
        self.mode: int | str = 0
        self.stream: Any = SimpleNamespace(wait_stream=lambda other: None)
        self.main = self.stream
        self.log: list[str] = []
        self._capturing = self._invalid = False
        self._peak = self._cached = 0
        none: Callable[..., Any] = lambda *_: None  # noqa: E731
        replaced: dict[str, Any] = {
            "is_initialized": lambda: True,
            "synchronize": self.synchronize,
            "graph_pool_handle": none,
            "Stream": lambda _: SimpleNamespace(wait_stream=lambda other: None),
            "current_stream": lambda: self.stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "stream": self._on_stream,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.log.append("replay")),
            "graph": self._graph,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
            "memory_allocated": lambda _: 0,
            "max_memory_allocated": lambda _: self._peak,
            "reset_peak_memory_stats": lambda _: setattr(self, "_peak", 0),
            "empty_cache": lambda: setattr(self, "_cached", 0),
            "mem_get_info": lambda _: (self.free - self._cached, 80 << 30),
        }
        for name, function in replaced.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def synchronize(self) -> None:
        self.checks += 1
        if self.lost:
            raise torch.AcceleratorError(ILLEGAL_ACCESS)

    def launch(self, nbytes: int = 0) -> None:
        """Launches of a step that has so many bytes at once."""
        self.log.append("captured" if self._capturing else "launched")
        self._peak = max(self._peak, nbytes)
        self._cached = max(self._cached, nbytes)

    def wait(self) -> None:
        """As the copy to the host of `Tensor.item`."""
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self._capturing:
            self._invalid = True
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    @contextmanager
    def _on_stream(self, stream: Any) -> Iterator[None]:
        outer, self.stream = self.stream, stream
        yield
        self.stream = outer  # an error leaves it, like a capture that cannot be ended

    @contextmanager
    def _graph(self, graph: Any, *, stream: Any, **_: Any) -> Iterator[None]:
        self.log.append("capture")
        self.stream, self._capturing, self._invalid = stream, True, False
        try:
            yield
        finally:
            self._capturing = False
            if self._invalid:
                raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        self.stream = self.main


class LateMark(Marker):
    """Passed once it was waited for, or, if it is ``seen``, looked at more than `LOOKS` times. ``error`` is what the
    device then turns out to have failed of."""

    def __init__(self, rows: list[tuple[Any, Any]], waited: Callable[[LateMark], None], seen: bool) -> None:
        self._rows, self._waited, self._seen = rows, waited, seen
        self._looks = 0
        self.error: BaseException | None = None
        self.over = False

    def passed(self) -> bool:
        self._looks += self._seen
        return self.over or self._looks > LOOKS

    def wait(self) -> None:
        self.over = True
        self._waited(self)
        if self.error is not None:
            raise self.error
        for shown, real in self._rows:
            shown[...] = real


class LateCompute(Compute):
    """`Compute` whose rows are late. ``marks``: of all steps, in their order; ``last``: the one waited for last."""

    late = True

    def __init__(self, model: Any, attention: Any, in_stages: bool) -> None:
        super().__init__(model, attention)
        self.in_stages = in_stages
        self.follows = not in_stages
        self._rows: list[tuple[Any, Any]] = []
        self.marks: list[LateMark] = []
        self.last: LateMark | None = None

    def select(self, *step: Any) -> tuple[list[Rows | None], list[int]]:
        rows, drafts = super().select(*step)
        for block in {id(each.block): each.block for each in rows if each is not None}.values():
            for shown in block.columns.values():
                self._rows.append((shown, shown.copy()))
                shown[...] = np.nan if shown.dtype.kind == "f" else -1 & 0xFFFF
        return rows, drafts

    def mark(self) -> LateMark:
        rows, self._rows = self._rows, []
        self.marks.append(LateMark(rows, self._was_waited_for, self.in_stages))
        return self.marks[-1]

    def _was_waited_for(self, mark: LateMark) -> None:
        assert all(each.over for each in self.marks[: self.marks.index(mark)]), "steps end in their order"
        self.last = mark


def late_runner(config: ModelSettings, stage: Stage | None = None, in_stages: bool = False) -> TorchRunner:
    """The runner of ``config`` over a late device, with two steps under way, which may be ``in_stages``."""
    plain = build_runner(config)
    return TorchRunner(
        plain.model,
        plain.kv,
        plain.store,
        plain.attention,
        info=plain.info,
        device=plain.device,
        stage=stage,
        compute=LateCompute(plain.model, plain.attention, in_stages),
        depth=2,
    )
