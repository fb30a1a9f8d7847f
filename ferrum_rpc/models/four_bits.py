"""Matrices in 4 bits as checkpoints store them, before our kernel holds them (`native_linear`).

The kernel multiplies the stored numbers with the groups and scales of the file, so nothing is quantized a second time
and a model takes no more memory than its file. It has groups of 32, 64 and 128 columns; larger ones of a file become
several with the same scale.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

GROUPS: Final = (128, 64, 32)
"""Columns that may share a scale in the kernel."""


class StoredGroups(NamedTuple):
    """Of a matrix in 4 bits: ``size`` columns share a scale, and, if it is ``zeroed``, a zero point."""

    size: int
    zeroed: bool


class Nibbles(NamedTuple):
    """A matrix [n, k] in 4 bits, (numbers - zeros) * scales. ``numbers`` uint8 [n, k] of 0 to 15; ``scales`` and
    ``zeros`` (uint8) [n, groups] are of equally many columns each. ``zeros`` None: 8."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.numbers.shape

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.numbers.shape[1] // self.scales.shape[1]

    def regrouped(self, group: int) -> Nibbles:
        """The same in smaller groups, which divide its own."""
        times = self.group // group
        if times == 1:
            return self
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, 1)
        return Nibbles(self.numbers, self.scales.repeat_interleave(times, 1), zeros)

    def floats(self) -> Tensor:
        """float32 [n, k]."""
        grouped = self.numbers.to(torch.float32).view(*self.scales.shape, -1)
        zeros = 8.0 if self.zeros is None else self.zeros.to(torch.float32)[..., None]
        return ((grouped - zeros) * self.scales.to(torch.float32)[..., None]).view(self.numbers.shape)
