"""A group of ranks on GPUs without NCCL: rows pass through host memory to a group there and back.

It serves two ranks that share one GPU, which NCCL refuses, and as the reference for NCCL. Each call waits for the
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferrum_rpc.distributed.group import Group


class StagedGroup:
    """A `Group` whose tensors are on ``device``; the group ``host`` on the CPU transports them."""

    def __init__(self, host: Group, device: torch.device) -> None:
        self.host = host
        self.rank, self.size = host.rank, host.size
        self._device = device

    def all_reduce(self, rows: Tensor) -> None:
        """As `Group.all_reduce`."""
        staged = rows.cpu()
        self.host.all_reduce(staged)
        rows.copy_(staged)

    @property
    def native_sum(self) -> None:
        """There is none."""

    def all_gather(self, part: Tensor) -> Tensor:
        """As `Group.all_gather`."""
        return self.host.all_gather(part.cpu()).to(self._device)

    def send(self, rows: Tensor, to: int) -> None:
        """As `Group.send`."""
        self.host.send(rows.cpu(), to)

    def receive(self, rows: Tensor, source: int) -> None:
        """As `Group.receive`."""
        staged = torch.empty(rows.shape, dtype=rows.dtype)
        self.host.receive(staged, source)
        rows.copy_(staged)

    def check(self) -> None:
        """As `Group.check`."""
        self.host.check()

    def abort(self) -> None:
        """As `Group.abort`."""
        self.host.abort()

    def renew(self, epoch: int) -> None:
        """As `Group.renew`."""
        self.host.renew(epoch)

    def close(self) -> None:
        """As `Group.close`."""
        self.host.close()
