"""A step's integers and their copy to the device: one page-locked buffer, one copy.

A copy to a GPU costs microseconds however small it is, and one from ordinary memory waits for the device as well. So
all integers that a step sends (token ids, positions, slots, the attention's plan) lie in one buffer, which is copied
once and without waiting; on the device it is read through views.

Where a view begins never depends on what is in it: a CUDA graph that was captured over the views of a `Layout` reads
whatever was sent last. What a section has room for and an array does not fill is zero, so that zero must mean nothing:
token 0 at position 0 of the null block, a work item without rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64]

BORDER = 32
"""Every section begins at a multiple of so many bytes. Triton compiles a launch anew where the alignment of an argument
(to 16) is another one."""

_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where sections lie in one buffer. ``sections``: ``(int32 or int64, integers)`` of each. The last one is sent only
    as far as its array goes, and holds anything behind: block tables, of which a graph reserves megabytes."""

    sections: tuple[tuple[type[np.int32] | type[np.int64], int], ...]
    offsets: tuple[int, ...] = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = [-(-np.dtype(kind).itemsize * count // BORDER) * BORDER for kind, count in self.sections]
        *offsets, nbytes = accumulate(sizes, initial=0)
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "nbytes", nbytes)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Each section of ``buffer`` (uint8, at least ``nbytes``)."""
        found = []
        for (kind, count), offset in zip(self.sections, self.offsets, strict=True):
            dtype = np.dtype(kind)
            found.append(buffer[offset : offset + count * dtype.itemsize].view(_TORCH[dtype]))
        return found


class Staging:
    """One step's integers at a time, on ``device``. ``nbytes``: what there is room for from the start; `open` makes
    more where a layout needs it, after which views that were given out before are no longer sent to.

    Nothing here waits for the device's work: only, before the buffer on the host is written again, for the copy out of
    it, which is long through unless steps follow each other without an answer.
    """

    def __init__(self, device: torch.device, nbytes: int = 0) -> None:
        self._device = device
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> None:
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._copied is not None)
        self._bytes = self._host.numpy()
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def open(self, layout: Layout) -> list[Tensor]:
        """The sections of ``layout`` on the device. They hold what is sent last."""
        if layout.nbytes > len(self._host):
            self._wait()
            self._allocate(max(layout.nbytes, 2 * len(self._host)))
        return layout.views(self._buffer)

    def send(self, layout: Layout, arrays: Sequence[Integers]) -> None:
        """Fill the sections of an opened ``layout``, in one copy that nothing waits for. Raises ValueError, with
        nothing sent, where an array has no room in its section."""
        for array, (_, count) in zip(arrays, layout.sections, strict=True):
            if array.size > count:
                raise ValueError(f"{array.size} integers exceed the section of {count}")
        self._wait()
        end = 0
        for array, (kind, count), offset in zip(arrays, layout.sections, layout.offsets, strict=True):
            itemsize = np.dtype(kind).itemsize
            end = offset + array.size * itemsize
            self._bytes[offset:end].view(kind)[:] = array.ravel()
            if offset != layout.offsets[-1]:
                self._bytes[end : offset + count * itemsize] = 0
        self._buffer[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
