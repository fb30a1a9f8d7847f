"""A step's integers and their copy to the device: one page-locked buffer, one copy.

A copy to a GPU costs microseconds however small it is, and a copy from pageable memory also waits for the device. So
all integers that a step sends (token ids, positions, slots, the attention's plan) are in one buffer, which is copied
once and asynchronously; on the device it is read through views.

A view's offset does not depend on its contents: a CUDA graph captured over the views of a `Layout` reads whatever was
sent last. The unused end of a section is zero, so zeros must have no effect: token 0 at position 0 of the null block, a
work item without rows.
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
    """The offsets of sections in one buffer. ``sections``: ``(int32 or int64, integers)`` of each. Of the last one only
    its array is sent, and the rest is undefined: block tables, for which a graph reserves megabytes."""

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
    """One step's integers at a time, on ``device``. ``nbytes``: initial size; `open` grows the buffer if a layout needs
    more, after which earlier views are no longer updated.

    Nothing here waits for kernels. Before the host buffer is written again, `send` waits for the last copy out of it,
    which has long ended unless steps follow each other without an answer.
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
        """The sections of ``layout`` on the device. They have the contents of the last `send`."""
        if layout.nbytes > len(self._host):
            self._wait()
            self._allocate(max(layout.nbytes, 2 * len(self._host)))
        return layout.views(self._buffer)

    def send(self, layout: Layout, arrays: Sequence[Integers]) -> None:
        """Fill the sections of an opened ``layout``, in one asynchronous copy. Raises ValueError, with nothing sent, if
        an array is longer than its section."""
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
