"""A product of one row on a CUDA device.

A lone sequence's decode step reads every weight once, so it is as fast as weights are read. cuBLAS splits such products
over few programs and adds the parts up in a second launch. On an H200, for the four products of a layer of Qwen3-8B in
bfloat16, it took 15.3, 13.6, 48.1 and 29.7 us where this kernel took 13.9, 9.7, 46.1 and 24.5 (reading the weights at
the speed of a copy takes 12.2, 8.2, 49.0 and 24.5): 0.45 ms of a step of 5.1. From four rows on matrix units pay, and
cuBLAS computes them.

This file imports triton; `linear.select_linear` says whether it can be imported.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

from typing import Final

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ferrum_rpc.models.linear import PlainLinear

COLUMNS: Final = 4
"""Of a program's part of the product, rows of the weight."""

AT_ONCE: Final = 1024
"""Numbers of each of these that a program reads at once: 64 bytes for each thread of its four warps."""


class RowLinear(PlainLinear):
    """The weight as it came from the checkpoint. One row is multiplied by the kernel, several by torch."""

    __slots__ = ()
    name = "triton"

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._weight, self._bias
        (n, k), rows = weight.shape, x.shape[:-1]
        if rows.numel() != 1 or x.stride(-1) != 1 or not weight.is_contiguous():
            return F.linear(x, weight, bias)
        out = x.new_empty((*rows, n))
        row_product_kernel[(triton.cdiv(n, COLUMNS),)](
            x, weight, weight if bias is None else bias, out, n, k,
            HAS_BIAS=bias is not None,
            WHOLE=n % COLUMNS == 0 and k % AT_ONCE == 0,
            COLUMNS=COLUMNS,
            AT_ONCE=AT_ONCE,
            num_warps=4,
        )  # fmt: skip
        return out


@triton.jit
def row_product_kernel(
    x: tl.tensor,  # [k]
    weight: tl.tensor,  # [n, k], dense
    bias: tl.tensor,  # [n], where there is one
    out: tl.tensor,  # [n]
    n: tl.tensor,
    k: tl.tensor,
    HAS_BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # no program has columns or numbers beyond the last
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """One program for each of so many columns of the product. Sums are float32, rounded once."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, AT_ONCE)
    own = weight + column[:, None].to(tl.int64) * k + lane[None, :]
    sums = tl.zeros([COLUMNS, AT_ONCE], tl.float32)
    for start in range(0, k, AT_ONCE):
        if WHOLE:
            weights = tl.load(own + start)
            numbers = tl.load(x + start + lane)
        else:
            inside = start + lane < k
            weights = tl.load(own + start, mask=(column < n)[:, None] & inside[None, :], other=0.0)
            numbers = tl.load(x + start + lane, mask=inside, other=0.0)
        sums += weights.to(tl.float32) * numbers.to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < n)
