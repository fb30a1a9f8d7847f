"""A group of ranks with a GPU each, by NCCL: collectives are queued on the device, and can be captured in a CUDA graph.

NCCL waits on the device, without a limit if a rank is gone: the monitor of the ranks must abort the group. Then queued
calls end with undefined results, so the host calls `check` after it has waited for the device. Untested on a GPU.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Store, distributed_c10d

from ferrum_rpc.distributed.connected import MESSAGE, ConnectedGroup
from ferrum_rpc.distributed.group import as_bytes, check_other, check_rows

c10d: Final[Any] = distributed_c10d
"""torch's type declarations lack some of its attributes."""

CUDA: Final = "cuda"
TIMEOUT: Final = timedelta(minutes=2)
"""Timeout for creating the group."""

WATCHED_HERE: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""torch has threads of its own that monitor NCCL, and end the process if something fails or takes long. Here the end of
a rank is detected otherwise, and callers are answered first."""


def available() -> str | None:
    """The reason why this torch has no NCCL, or None."""
    return None if c10d.is_nccl_available() else "this torch has no NCCL"


class NcclGroup(ConnectedGroup):
    """A `Group` of ranks with a ``device`` of their own each, which has an index. It waits on the stream, not on the
    host. NCCL has no tags of messages, and takes the one that there is.

    `send` and `receive` make a communicator for their pair of ranks when they are first called, which a CUDA graph
    cannot capture. Each capture is preceded by a warm-up of the same step (`CudaCapture`), and that one makes it.
    """

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, *, timeout: timedelta = TIMEOUT
    ) -> None:
        self._device = device
        self._ends: list[threading.Thread] = []
        for name, value in WATCHED_HERE.items():
            os.environ.setdefault(name, value)
        super().__init__(store, rank, size, timeout)

    def all_reduce(self, rows: Tensor) -> None:
        """As `Group.all_reduce`, in NCCL's own order."""
        check_rows(rows, CUDA)
        if rows.numel():
            options = c10d.AllreduceOptions()
            options.asyncOp = False  # on the stream of the caller
            self._do(lambda nccl: nccl.allreduce([rows], options))

    def all_gather(self, part: Tensor) -> Tensor:
        parts = part.new_empty((self.size, *part.shape))
        if part.numel():
            options = c10d.AllgatherOptions()
            options.asyncOp = False
            whole, own = as_bytes(parts, CUDA), as_bytes(part, CUDA)
            self._do(lambda nccl: nccl._allgather_base(whole, own, options))
        return parts

    def send(self, rows: Tensor, to: int) -> None:
        check_other(self, to)
        if rows.numel():
            self._do(lambda nccl: nccl.send([as_bytes(rows, CUDA)], to, MESSAGE))

    def receive(self, rows: Tensor, source: int) -> None:
        check_other(self, source)
        if rows.numel():
            self._do(lambda nccl: nccl.recv([as_bytes(rows, CUDA)], source, MESSAGE))

    def check(self) -> None:
        self._open()

    def renew(self, epoch: int) -> None:
        """As `Group.renew`; waits for the others. Graphs that were captured with the group must be gone: the end of
        NCCL's group waits for them."""
        self._end("the group is being renewed")
        while self._ends:
            self._ends.pop().join(self._timeout.total_seconds())
        self._connect(c10d.ProcessGroupNCCL, epoch, c10d.ProcessGroupNCCL.Options())
        self.all_reduce(torch.ones(1, device=self._device))  # they connect at their first call
        torch.cuda.current_stream(self._device).synchronize()
        self.check()

    def _disconnect(self, connected: Any) -> None:
        """Make NCCL release the device. It does so at once, but its call may return only when graphs are gone, so
        nothing waits for it here."""

        def end() -> None:
            with suppress(RuntimeError):
                connected.abort()

        self._ends.append(threading.Thread(target=end, daemon=True))
        self._ends[-1].start()
