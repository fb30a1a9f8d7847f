"""What ranks say to each other in the middle of a step, however it travels.

The models know this protocol and no more of the floor. Every rank of a group makes the same calls in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class GroupAborted(RuntimeError):
    """The group was given up, here or by another rank, or a rank of it is gone. What the call was to write is
    undefined, and every call ends so until all ranks have renewed the group."""


class Group(Protocol):
    """Some ranks. Tensors lie on the group's device and are contiguous, and of one call have the same size on every
    rank.

    One call at a time; `abort` alone may come from another thread. Every call raises `GroupAborted`. On a GPU a call
    may return before it is carried out, in the order of the stream; what it did counts where a later `check` raises
    nothing.
    """

    @property
    def rank(self) -> int:
        """Which of them this is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_reduce(self, rows: Tensor) -> None:
        """Make ``rows`` the sum of all ranks' rows, in place, with the same bits on every rank: in the order of the
        ranks, in float32 and rounded once; NCCL's is equal to that within rounding. bfloat16, float16, float32, or
        int64, which is summed as it is."""

    @property
    def native_sum(self) -> tuple[int, int] | None:
        """The addresses of a C function ``int32_t (void *context, void *rows, int64_t elements)`` that does the same to
        bfloat16 rows, and of its context, both as long as this object lives; 0 is success, a number above it is what
        would be raised. None: there is no such function."""

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, [size, ...], of any dtype."""

    def send(self, rows: Tensor, to: int) -> None:
        """Send ``rows`` to another rank. It may return before they are received. Any dtype."""

    def receive(self, rows: Tensor, source: int) -> None:
        """Overwrite ``rows`` with what ``source`` sent, in the order in which it did."""

    def check(self) -> None:
        """Raise where an earlier call may not have been carried out though it returned: a group on a GPU was given up
        meanwhile. Elsewhere what fails raises at once."""

    def abort(self) -> None:
        """Give up what waits in this process, and every later call until `renew`. In shared memory that is so on all
        ranks at once; elsewhere each is told by its own process."""

    def renew(self, epoch: int) -> None:
        """Begin anew, as if nothing had been called: on every rank, with the same ``epoch``, above all before (the
        group's first is 0)."""

    def close(self) -> None:
        """Free what it holds. No other call may be under way; later ones raise."""


def check_rows(rows: Tensor, device: str = "cpu") -> None:
    """Raise ValueError where a group of this kind of ``device`` cannot take ``rows`` as they lie."""
    if rows.device.type != device or not rows.is_contiguous():
        raise ValueError(f"a group on {device} takes contiguous tensors there, not on {rows.device}, {rows.stride()}")


def as_bytes(rows: Tensor, device: str = "cpu") -> Tensor:
    """The memory of ``rows``, uint8 [bytes]: what any transport carries. Raises as `check_rows` does."""
    check_rows(rows, device)
    dense = rows.as_strided((rows.numel(),), (1,))  # a lone element counts as contiguous, whatever its stride
    return dense.view(torch.uint8)


def check_other(group: Group, rank: int) -> None:
    """Raise ValueError where ``rank`` is none of the others."""
    if rank == group.rank or not 0 <= rank < group.size:
        raise ValueError(f"rank {group.rank} of {group.size} has no other rank {rank}")


def sum_in_order(parts: Tensor, rows: Tensor) -> None:
    """``rows`` become the sum of ``parts`` [size, ...] as `Group.all_reduce` wants it: what all of its implementations
    are equal to, bit by bit."""
    wide = torch.float32 if rows.dtype.is_floating_point else rows.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    rows.copy_(total)
