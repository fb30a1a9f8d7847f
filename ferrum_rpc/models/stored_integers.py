"""Matrices of small integers, or of 4-bit floats, as checkpoints store them, before our kernel holds them
(`native_linear`).

The kernel multiplies the stored numbers with the groups and scales of the file, so nothing is quantized a second time
and a model takes no more memory than its file. It has groups of 16, 32, 64 and 128 columns; larger ones of a file
become several with the same scale.
"""

from __future__ import annotations

import enum
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


class Code(enum.Enum):
    """What each 4 bits stand for where they are no integer."""

    MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
    """float4_e2m1, with a power of two for each 32 (OCP Microscaling Formats 1.0)."""

    IQ4 = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
    """GGUF's IQ4_NL and IQ4_XS."""


class IntegerFormat(NamedTuple):
    """How a matrix is stored in ``bits`` 4 or 8: ``group`` columns share a scale and, if it is ``zeroed``, a zero
    point. ``factored``: scales and minimums are bytes, times a factor for every `SUPER_GROUP` columns (GGUF's Q4_K).
    ``ordered``: its columns are in an order of their own (GPTQ's ``desc_act``). ``code``: see `Integers`."""

    bits: int
    group: int
    zeroed: bool = False
    factored: bool = False
    ordered: bool = False
    code: Code | None = None

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
    zero * factor of zeros. ``order`` int32 [k]: which column of the weight each column here is. With a
    ``code`` a weight is the number of that code * scale; MXFP4's scales are the bits of float8_e8m0fnu, in uint8."""

    bits: int
    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None
    order: Tensor | None = None
    code: Code | None = None

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.numbers.shape

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.numbers.shape[1] // self.scales.shape[1]

    @property
    def form(self) -> IntegerFormat:
        """How it is stored."""
        zeroed, factored = self.zeros is not None, self.factors is not None
        return IntegerFormat(self.bits, self.group, zeroed, factored, self.order is not None, self.code)

    @property
    def middle(self) -> int:
        """The number that stands for 0, where it is the same for all."""
        return 1 << self.bits - 1

    @property
    def extremes(self) -> Tensor:
        """What is finite if all weights can be."""
        if self.code is Code.MXFP4:
            return powers_of_two(self.scales.amax()).mul_(max(self.code.value))
        return self.scales if self.factors is None else self.factors

    def regrouped(self, group: int) -> Integers:
        """The same in smaller groups, which divide its own."""
        times = self.group // group
        if times == 1:
            return self
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, 1)
        return self._replace(scales=self.scales.repeat_interleave(times, 1), zeros=zeros)

    def floats(self) -> Tensor:
        """float32 [n, k]."""
        scales = powers_of_two(self.scales) if self.code is Code.MXFP4 else self.scales.to(torch.float32)
        if self.code is not None:
            numbers = torch.tensor(self.code.value).index_select(0, self.numbers.reshape(-1).to(torch.int32))
            return numbers.view(*scales.shape, self.group).mul_(scales[..., None]).view(self.numbers.shape)
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
        made: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name, each in parts[0]._asdict().items()
            if isinstance(each, Tensor)
        }
        return parts[0]._replace(**made)


def powers_of_two(exponents: Tensor) -> Tensor:
    """float32 of the same shape: 2 to the power of each of the uint8 ``exponents`` less 127. 255 is NaN."""
    bits = (exponents.to(torch.int32) << 23).clamp_(min=1 << 22)  # 2^-127 is subnormal
    return bits.masked_fill_(exponents == 255, 0x7FC00000).view(torch.float32)
