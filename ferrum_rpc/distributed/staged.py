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

    native_sum = None

    def __init__(self, host: Group, device: torch.device) -> None:
        self.host = host
        self.rank, self.size = host.rank, host.size
        self.check, self.abort, self.renew, self.close = host.check, host.abort, host.renew, host.close
        self._device = device

    def all_reduce(self, rows: Tensor) -> None:
        staged = rows.cpu()
        self.host.all_reduce(staged)
        rows.copy_(staged)

    def all_gather(self, part: Tensor) -> Tensor:
        return self.host.all_gather(part.cpu()).to(self._device)

    def send(self, rows: Tensor, to: int) -> None:
        self.host.send(rows.cpu(), to)

    def receive(self, rows: Tensor, source: int) -> None:
        staged = torch.empty(rows.shape, dtype=rows.dtype)
        self.host.receive(staged, source)
        rows.copy_(staged)
