"""Rows of a cache in 8 bits: what each head keeps of a token is rounded to int8, with one scale.

A row is ``head_dim`` numbers and, in the four bytes behind them, their scale as float32: a number times the scale is
what it stands for. The scale lies where its numbers lie, so that copies of slots and blocks take it along.

``attention_decode.c`` writes and reads the same, to the bit.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SCALE_BYTES: Final = 4


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of ``dtype`` that a cache keeps of a head's key or value."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def to_rows(numbers: Tensor) -> Tensor:
    """int8 [..., head_dim + 4] of ``numbers`` [..., head_dim], a multiple of 4. Of a head with a number that is not
    finite, all are NaN."""
    exact = numbers.float()
    scale = exact.abs().amax(-1, keepdim=True) / 127.0
    scale = scale + (exact - exact).sum(-1, keepdim=True)
    inverse = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, 1.0 / scale)
    rounded = (exact * inverse).clamp_max_(127.0).round_().nan_to_num_(0.0)
    return torch.cat((rounded.to(torch.int8), scale.view(torch.int8)), -1)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``rows`` stand for, in ``dtype`` [..., head_dim]."""
    numbers, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].view(torch.float32)
    return (numbers.float() * scale).to(dtype)
