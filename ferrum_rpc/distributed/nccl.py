"""A group of ranks with a GPU each, by NCCL: collectives are queued on the device, and can be captured in a CUDA graph.

As with gloo a group is an object of its own. NCCL waits on the device, without a limit if a rank is gone: whoever
monitors the ranks must abort the group. Then queued calls end with undefined results, so the host calls `check` after
it has waited for the device. Untested on a GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from ferrum_rpc.distributed.group import GroupAborted, as_bytes, check_other, check_rows

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

_MESSAGE: Final = 0
"""The store's key for tags, which NCCL does not have."""


def available() -> str | None:
    """The reason why this torch has no NCCL, or None."""
    return None if c10d.is_nccl_available() else "this torch has no NCCL"


class NcclGroup:
    """A `Group` of all ranks that create one with the same ``store``, each on a ``device`` of its own. Raises
    `GroupAborted` if they do not join."""

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, *, timeout: timedelta = TIMEOUT
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._device, self._timeout = store, device, timeout
        self._changing = threading.Lock()  # who aborts may be another thread
        self._reason = "the group is not connected"
        self._nccl: Any = None
        self._ends: list[threading.Thread] = []
        for name, value in WATCHED_HERE.items():
            os.environ.setdefault(name, value)
        self.renew(0)

    def all_reduce(self, rows: Tensor) -> None:
        """As `Group.all_reduce`, in NCCL's own order."""
        check_rows(rows, CUDA)
        if rows.numel():
            options = c10d.AllreduceOptions()
            options.asyncOp = False  # on the stream of the caller
            self._do(lambda nccl: nccl.allreduce([rows], options))

    @property
    def native_sum(self) -> None:
        """There is none."""

    def all_gather(self, part: Tensor) -> Tensor:
        """As `Group.all_gather`."""
        parts = part.new_empty((self.size, *part.shape))
        if part.numel():
            options = c10d.AllgatherOptions()
            options.asyncOp = False
            whole, own = as_bytes(parts, CUDA), as_bytes(part, CUDA)
            self._do(lambda nccl: nccl._allgather_base(whole, own, options))
        return parts

    def send(self, rows: Tensor, to: int) -> None:
        """As `Group.send`."""
        check_other(self, to)
        if rows.numel():
            self._do(lambda nccl: nccl.send([as_bytes(rows, CUDA)], to, _MESSAGE))

    def receive(self, rows: Tensor, source: int) -> None:
        """As `Group.receive`."""
        check_other(self, source)
        if rows.numel():
            self._do(lambda nccl: nccl.recv([as_bytes(rows, CUDA)], source, _MESSAGE))

    def check(self) -> None:
        """As `Group.check`."""
        self._open()

    def abort(self) -> None:
        """As `Group.abort`, for this rank; the others must be notified otherwise."""
        self._end("this rank aborted the group")

    def renew(self, epoch: int) -> None:
        """As `Group.renew`; waits for the others. Graphs that were captured with the group must be gone: the end of
        NCCL's group waits for them."""
        self._end("the group is being renewed")
        while self._ends:
            self._ends.pop().join(self._timeout.total_seconds())
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        try:
            made = c10d.ProcessGroupNCCL(PrefixStore(f"epoch {epoch}", self._store), self.rank, self.size, options)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            raise GroupAborted(f"rank {self.rank} cannot join its group of {self.size}: {error}") from error
        with self._changing:
            self._nccl = made
        self.all_reduce(torch.ones(1, device=self._device))  # they connect at their first call
        torch.cuda.current_stream(self._device).synchronize()
        self.check()

    def close(self) -> None:
        """As `Group.close`."""
        self._end("the group is closed")

    def _open(self) -> Any:
        group = self._nccl
        if group is None:
            raise GroupAborted(self._reason)
        return group

    def _do(self, call: Callable[[Any], Any]) -> None:
        """Queue ``call`` on the stream. Raises if NCCL detects a failure at once."""
        group = self._open()
        try:
            if (work := call(group)) is not None:
                work.wait()  # the stream, not the host
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            self._end(f"rank {self.rank} lost another: {error}")
            raise GroupAborted(self._reason) from error

    def _end(self, reason: str) -> None:
        """Make NCCL release the device. It does so at once, but its call may return only when graphs are gone, so
        nothing waits for it here."""
        with self._changing:
            group, self._nccl = self._nccl, None
            if group is None:
                return
            self._reason = reason

        def end() -> None:
            with suppress(RuntimeError):
                group.abort()

        self._ends.append(threading.Thread(target=end, daemon=True))
        self._ends[-1].start()
