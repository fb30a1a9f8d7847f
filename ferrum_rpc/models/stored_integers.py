"""Matrices of small integers as checkpoints store them, before our kernel holds them (`native_linear`).

The kernel multiplies the stored numbers with the groups and scales of the file, so nothing is quantized a second time
and a model takes no more memory than its file. It has groups of 16, 32, 64 and 128 columns; larger ones of a file
become several with the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

GROUPS: Final = (128, 64, 32, 16)
"""Columns that may share a scale in the kernel."""

BITS: Final = (4, 8)
"""Of a number in the kernel."""

SUPER_GROUP: Final = 256
"""Columns that share the factors of a factored matrix."""


class IntegerFormat(NamedTuple):
    """How a matrix is stored in ``bits`` 4 or 8: ``group`` columns share a scale and, if it is ``zeroed``, a zero
    point. ``factored``: scales and minimums are bytes, times a factor for every `SUPER_GROUP` columns (GGUF's Q4_K).
    ``ordered``: its columns are in an order of their own (GPTQ's ``desc_act``)."""

    bits: int
    group: int
    zeroed: bool = False
    factored: bool = False
    ordered: bool = False

    def fitting(self, bounds: Sequence[int]) -> IntegerFormat | None:
        """The format in which our kernel holds the columns between ``bounds`` of a matrix of this one: in the largest
        groups that divide both. None: it cannot."""
        if self.factored:
            return None if any(bound % SUPER_GROUP for bound in bounds) else self
        size = next((each for each in GROUPS if all(bound % each == 0 for bound in (self.group, *bounds))), None)
        return None if size is None else self._replace(group=size)


class Integers(NamedTuple):
    """A matrix [n, k] of small integers. ``numbers`` uint8 [n, k], of 4 bits or 8; ``scales`` and ``zeros`` (uint8) [n,
    groups], of equally many columns each. A weight is (number - zero) * scale; ``zeros`` None: half of the range. With
    ``factors`` float16 [n, k / 256, 2], scales and zeros are uint8 and a weight is number * scale * factor of scales -
    zero * factor of zeros. ``order`` int32 [k]: which column of the weight each column here is."""

    bits: int
    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.numbers.shape

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.numbers.shape[1] // self.scales.shape[1]

    @property
    def middle(self) -> int:
        """The number that stands for 0, where it is the same for all."""
        return 1 << self.bits - 1

    def regrouped(self, group: int) -> Integers:
        """The same in smaller groups, which divide its own."""
        times = self.group // group
        if times == 1:
            return self
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, 1)
        return self._replace(scales=self.scales.repeat_interleave(times, 1), zeros=zeros)

    def floats(self) -> Tensor:
        """float32 [n, k]."""
        scales = self.scales.to(torch.float32)
        made = self.numbers.to(torch.float32).view(*scales.shape, self.group)
        if self.factors is None:
            zeros = self.middle if self.zeros is None else self.zeros.to(torch.float32)[..., None]
            made.sub_(zeros).mul_(scales[..., None])
        else:
            assert self.zeros is not None  # noqa: S101 - see above
            factors = self.factors.to(torch.float32).repeat_interleave(SUPER_GROUP // self.group, 1)
            made.mul_((scales * factors[..., 0])[..., None]).sub_((self.zeros * factors[..., 1])[..., None])
        made = made.view(self.numbers.shape)
        if self.order is None:
            return made
        ordered = torch.empty_like(made)
        ordered[:, self.order.to(torch.int64)] = made
        return ordered

    @classmethod
    def joined(cls, parts: Sequence[Integers]) -> Integers:
        """The rows of ``parts``, one after the other, which have one format and no order, or of one with an order."""
        if len(parts) == 1:
            return parts[0]
        made: list[Any] = [
            None if each[0] is None else torch.cat(each) for each in zip(*(part[1:] for part in parts), strict=True)
        ]
        return cls(parts[0].bits, *made)
