"""The collectives of ranks within a step, independent of the transport.

The models depend on this protocol only. Every rank of a group makes the same calls in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class GroupAborted(RuntimeError):
    """The group was aborted, here or by another rank, or a rank is gone. The output of the call is undefined, and every
    call raises this until all ranks have renewed the group."""


class Group(Protocol):
    """A group of ranks. Tensors are contiguous on the group's device, and the tensors of one call have the same size on
    every rank.

    Make one call at a time; only `abort` may come from another thread. Every call may raise `GroupAborted`. On a GPU a
    call may return before it is executed, in the order of the stream; its result is valid if a later `check` does not
    raise.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, rows: Tensor) -> None:
        """Replace ``rows`` by the sum of all ranks' rows, in place, with the same bits on every rank. The sum is in the
        order of the ranks, in float32 and rounded once; NCCL's equals it within rounding. bfloat16, float16, float32,
        or int64, which is summed as int64."""

    @property
    def native_sum(self) -> tuple[int, int] | None:
        """The addresses of a C function ``int32_t (void *context, void *rows, int64_t elements)`` that all-reduces
        bfloat16 rows, and of its context. Both are valid as long as this object lives. The function returns 0 for
        success, otherwise the error that `all_reduce` would raise. None if there is no such function."""

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, [size, ...], of any dtype."""

    def send(self, rows: Tensor, to: int) -> None:
        """Send ``rows`` to another rank. It may return before they are received. Any dtype."""

    def receive(self, rows: Tensor, source: int) -> None:
        """Overwrite ``rows`` with what ``source`` sent, in the order of sending."""

    def check(self) -> None:
        """Raise if an earlier call may have returned without being executed, because a group on a GPU was aborted
        meanwhile. On other devices a failure raises at once."""

    def abort(self) -> None:
        """Fail the calls that wait in this process, and every later call until `renew`. With shared memory this affects
        all ranks at once; otherwise each rank's own process must abort."""

    def renew(self, epoch: int) -> None:
        """Reset the group as if nothing had been called. Call it on every rank with the same ``epoch``, greater than
        all previous ones (the first is 0)."""

    def close(self) -> None:
        """Free its resources. No other call may be in progress; later ones raise."""


def check_rows(rows: Tensor, device: str = "cpu") -> None:
    """Raise ValueError if ``rows`` are not contiguous on the ``device`` of the group."""
    if rows.device.type != device or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous on {device}, not on {rows.device} with strides {rows.stride()}")


def as_bytes(rows: Tensor, device: str = "cpu") -> Tensor:
    """The memory of ``rows``, uint8 [bytes]: what any transport carries. Raises as `check_rows` does."""
    check_rows(rows, device)
    dense = rows.as_strided((rows.numel(),), (1,))  # a lone element counts as contiguous, whatever its stride
    return dense.view(torch.uint8)


def check_other(group: Group, rank: int) -> None:
    """Raise ValueError unless ``rank`` is another rank of the group."""
    if rank == group.rank or not 0 <= rank < group.size:
        raise ValueError(f"rank {group.rank} of {group.size} has no other rank {rank}")


def sum_in_order(parts: Tensor, rows: Tensor) -> None:
    """Write the sum of ``parts`` [size, ...] to ``rows`` as `Group.all_reduce` defines it. All implementations equal it
    bit for bit."""
    accumulator = torch.float32 if rows.dtype.is_floating_point else rows.dtype
    total = parts[0].to(accumulator, copy=True)
    for part in parts[1:]:
        total += part
    rows.copy_(total)
