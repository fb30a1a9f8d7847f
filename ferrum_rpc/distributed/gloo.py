"""A group of ranks on any machines, by TCP: torch.distributed's gloo.

gloo's own all-reduce uses its own order and precision. Here parts are gathered and summed as with shared memory, to the
same bits. This is one implementation for all sizes: with two ranks it also moves less than a sum in float32 would
(bfloat16 rows of a decode step), with eight at most twice as much.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

from ferrum_rpc.distributed.connected import MESSAGE, ConnectedGroup
from ferrum_rpc.distributed.group import GroupAborted, as_bytes, check_other, sum_in_order

LOOPBACK: Final = "127.0.0.1"
TIMEOUT: Final = timedelta(minutes=1)
"""Timeout of a call if the group is not aborted."""

UNDER_WAY: Final = 8
"""Maximum number of sent messages that are not received yet."""

_GLOO: Final[Any] = ProcessGroupGloo
"""torch's type declarations lack some of its attributes."""

_NOTHING: Final = 1
"""A tag. A message of it is never sent."""


class GlooGroup(ConnectedGroup):
    """A `Group`. ``host``: this rank's name or address, by which others reach it."""

    def __init__(
        self, store: Store, rank: int, size: int, *, host: str = LOOPBACK, timeout: timedelta = TIMEOUT
    ) -> None:
        self._host = host
        self._given_up = False
        self._sent: deque[tuple[Work, Tensor]] = deque()
        super().__init__(store, rank, size, timeout)

    def all_reduce(self, rows: Tensor) -> None:
        sum_in_order(self.all_gather(rows), rows)

    def all_gather(self, part: Tensor) -> Tensor:
        parts = part.new_empty((self.size, *part.shape))
        self._open()
        if part.numel():
            self._do(lambda gloo: gloo._allgather_base(as_bytes(parts), as_bytes(part)))
        return parts

    def send(self, rows: Tensor, to: int) -> None:
        """As `Group.send`. gloo's own send waits until the other rank receives; here a copy waits instead."""
        check_other(self, to)
        self._open()
        if not rows.numel():
            return
        if len(self._sent) == UNDER_WAY:
            self._do(lambda _: self._sent.popleft()[0])
        copy = rows.clone()
        self._do(lambda gloo: self._sent.append((gloo.send([as_bytes(copy)], to, MESSAGE), copy)))

    def receive(self, rows: Tensor, source: int) -> None:
        check_other(self, source)
        self._open()
        if rows.numel():
            self._do(lambda gloo: gloo.recv([as_bytes(rows)], source, MESSAGE))

    def check(self) -> None:
        """Calls are never asynchronous here."""

    def abort(self) -> None:
        """Closes this rank's connections, which waiting peers notice. A rank that waits in `renew` notices it when the
        others have joined, or do not."""
        self._given_up = True
        super().abort()

    def renew(self, epoch: int) -> None:
        self._end("the group is being renewed")
        self._given_up = False
        self._sent.clear()
        options = _GLOO._Options()
        options._devices = [_GLOO.create_device(hostname=self._host)]
        self._connect(_GLOO, epoch, options)
        if self._given_up:
            self.abort()
            raise GroupAborted(self._reason)

    def close(self) -> None:
        """Sent messages are received first, unless the group was aborted."""
        with suppress(GroupAborted):
            while self._sent:
                self._do(lambda _: self._sent.popleft()[0])
        super().close()

    def _disconnect(self, connected: Any) -> None:
        """gloo closes its connections only when a call takes too long."""
        if self.size > 1:
            nothing = torch.empty(1, dtype=torch.uint8)
            with suppress(RuntimeError):
                connected.recv([nothing], (self.rank + 1) % self.size, _NOTHING).wait(timedelta(milliseconds=1))
