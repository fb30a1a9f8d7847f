"""Ranks on GPUs of their own, by NCCL: what they say is queued on the device, and can be recorded in a CUDA graph.

As with gloo a group is an object of its own. What waits here waits on the device, and a rank that is gone is waited for
without end: whoever watches the ranks gives the group up. Then what was queued ends, having done anything or nothing,
so the host asks `check` once it has waited for the device. No GPU has run this file.
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
"""Its types as torch declares them lack what they have."""

CUDA: Final = "cuda"
TIMEOUT: Final = timedelta(minutes=2)
"""How long ranks wait for each other where the group is made."""

WATCHED_HERE: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""torch has threads of its own that watch NCCL, and end the process where something fails or takes long. Here a rank's
end is noticed otherwise, and callers are answered first."""

_MESSAGE: Final = 0
"""Of the tags, which NCCL does not know."""


def available() -> str | None:
    """Why this torch has no NCCL; None where it has."""
    return None if c10d.is_nccl_available() else "this torch has no NCCL"


class NcclGroup:
    """A `Group` of all that make one with the same ``store``, each on a ``device`` of its own. Raises `GroupAborted`
    where they do not come."""

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
        """As `Group.all_reduce`: in an order of NCCL's own."""
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
        """As `Group.abort`: of this rank; the others are told otherwise."""
        self._end("this rank aborted the group")

    def renew(self, epoch: int) -> None:
        """As `Group.renew`; waits for the others. Graphs that were recorded with the group must be gone: NCCL's end
        waits for them."""
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
        """Queue what ``call`` does behind what is queued already. Raises where NCCL knows at once that it fails."""
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
        """Have NCCL let go of the device. It does so at once, but its call may return only when graphs are gone, so
        that nobody here waits for it."""
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
