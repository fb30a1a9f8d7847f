"""A group of ranks on any machines, by TCP: torch.distributed's gloo.

A group is an object of its own, and a process has no default group, so tensor-parallel and pipeline-parallel groups can
coexist. gloo's own all-reduce uses its own order and precision. Here parts are gathered and summed as with shared
memory, to the same bits. This is one implementation for all sizes: with two ranks it also moves less than a sum in
float32 would (bfloat16 rows of a decode step), with eight at most twice as much.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from ferrum_rpc.distributed.group import GroupAborted, as_bytes, check_other, sum_in_order

LOOPBACK: Final = "127.0.0.1"
TIMEOUT: Final = timedelta(minutes=1)
"""Timeout of a call if nobody aborts the group."""

UNDER_WAY: Final = 8
"""Maximum number of sent messages that are not received yet."""

_GLOO: Final[Any] = ProcessGroupGloo
"""torch's type declarations lack some of its attributes."""

_MESSAGE, _NOTHING = 0, 1
"""Tags. A message of the second is never sent."""


class GlooGroup:
    """A `Group` of all ranks that create one with the same ``store``. ``host``: this rank's name or address, by which
    others reach it. Raises `GroupAborted` if they do not join."""

    def __init__(
        self, store: Store, rank: int, size: int, *, host: str = LOOPBACK, timeout: timedelta = TIMEOUT
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._host, self._timeout = store, host, timeout
        self._changing = threading.Lock()  # who aborts may be another thread
        self._reason = "the group is not connected"
        self._given_up = False
        self._gloo: Any = None
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self.renew(0)

    def all_reduce(self, rows: Tensor) -> None:
        """As `Group.all_reduce`."""
        sum_in_order(self.all_gather(rows), rows)

    @property
    def native_sum(self) -> None:
        """There is none."""

    def all_gather(self, part: Tensor) -> Tensor:
        """As `Group.all_gather`."""
        parts, group = part.new_empty((self.size, *part.shape)), self._open()
        if part.numel():
            self._do(lambda: group._allgather_base(as_bytes(parts), as_bytes(part)).wait())
        return parts

    def send(self, rows: Tensor, to: int) -> None:
        """As `Group.send`. gloo's own send waits until the other rank receives; here a copy waits instead."""
        check_other(self, to)
        group = self._open()
        if not rows.numel():
            return
        if len(self._sent) == UNDER_WAY:
            self._do(self._sent.popleft()[0].wait)
        copy = rows.clone()
        self._do(lambda: self._sent.append((group.send([as_bytes(copy)], to, _MESSAGE), copy)))

    def receive(self, rows: Tensor, source: int) -> None:
        """As `Group.receive`."""
        check_other(self, source)
        group = self._open()
        if rows.numel():
            self._do(lambda: group.recv([as_bytes(rows)], source, _MESSAGE).wait())

    def check(self) -> None:
        """As `Group.check`: calls are never asynchronous here."""

    def abort(self) -> None:
        """As `Group.abort`: closes this rank's connections, which waiting peers notice. A rank that waits in `renew`
        notices it when the others have joined, or do not."""
        self._given_up = True
        self._end("this rank aborted the group")

    def renew(self, epoch: int) -> None:
        """As `Group.renew`; waits for the others."""
        self._end("the group is being renewed")
        self._given_up = False
        self._sent.clear()
        options = _GLOO._Options()
        options._timeout = self._timeout
        options._devices = [_GLOO.create_device(hostname=self._host)]
        try:
            made = _GLOO(PrefixStore(f"epoch {epoch}", self._store), self.rank, self.size, options)
        except RuntimeError as error:
            raise GroupAborted(f"rank {self.rank} cannot join its group of {self.size}: {error}") from error
        with self._changing:
            self._gloo = made
        if self._given_up:
            self.abort()
            raise GroupAborted(self._reason)

    def close(self) -> None:
        """As `Group.close`. Sent messages are received first, unless the group was aborted."""
        with suppress(GroupAborted):
            while self._sent:
                self._do(self._sent.popleft()[0].wait)
        self._end("the group is closed")

    def _open(self) -> Any:
        group = self._gloo
        if group is None:
            raise GroupAborted(self._reason)
        return group

    def _do(self, call: Callable[[], object]) -> None:
        """A call that gloo fails if a connection is closed, by this rank or by the end of a peer."""
        try:
            call()
        except RuntimeError as error:
            self._end(f"rank {self.rank} lost another: {error}")
            raise GroupAborted(self._reason) from error

    def _end(self, reason: str) -> None:
        """Close the connections, so that gloo returns: it does so only when a call takes too long."""
        with self._changing:
            group, self._gloo = self._gloo, None
            if group is None:
                return
            self._reason = reason
        if self.size > 1:
            nothing = torch.empty(1, dtype=torch.uint8)
            with suppress(RuntimeError):
                group.recv([nothing], (self.rank + 1) % self.size, _NOTHING).wait(timedelta(milliseconds=1))
