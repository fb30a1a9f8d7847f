"""NCCL on a machine without it: gloo, under the calls that torch's NCCL has. `tests/gpu/test_ranks.py` asks the real
one."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from ferrum_rpc.distributed import nccl
from ferrum_rpc.distributed.gloo import LOOPBACK


class FakeNccl:
    """Its ``abort`` lets go of who waits at once, and returns when ``graphs_are_gone``."""

    Options = SimpleNamespace
    graphs_are_gone = threading.Event()

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        assert options._timeout
        made: Any = ProcessGroupGloo
        its = made._Options()
        its._timeout, its._devices = timedelta(seconds=10), [made.create_device(hostname=LOOPBACK)]
        self._gloo, self._other = made(store, rank, size, its), (rank + 1) % size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def abort(self) -> None:
        """See `GlooGroup._end`."""
        with suppress(RuntimeError):
            self._gloo.recv([torch.empty(1, dtype=torch.uint8)], self._other, 1).wait(timedelta(milliseconds=1))
        self.graphs_are_gone.wait(10)


def use_fake_nccl(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """As long as ``monkeypatch`` lasts, ranks on CPUs take it for NCCL. Returns ``graphs_are_gone``, which is set."""
    monkeypatch.setattr(FakeNccl, "graphs_are_gone", threading.Event())
    FakeNccl.graphs_are_gone.set()
    monkeypatch.setattr(nccl, "CUDA", "cpu")
    monkeypatch.setattr(nccl.c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    for name in nccl.WATCHED_HERE:
        monkeypatch.setenv(name, "0")
    return FakeNccl.graphs_are_gone
