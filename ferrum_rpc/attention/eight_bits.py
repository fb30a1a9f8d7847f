"""Rows of a cache in 8 bits: what each head keeps of a token is rounded to int8 or to fp8, with one scale.

A row is ``head_dim`` numbers and, in the four bytes behind them, their scale as float32: a number times the scale is
what it stands for. The scale lies where its numbers lie, so that copies of slots and blocks take it along.

``attention_decode.c`` writes and reads the same in int8, and `triton_store` in fp8, to the bit.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SCALE_BYTES: Final = 4

FP8: Final = torch.uint8
"""What a cache in fp8 is made of: bytes, each a float8_e4m3fn. Torch copies bytes by index on every device."""

LARGEST: Final = {torch.int8: 127.0, FP8: 448.0}
"""What the largest number of a row is rounded to."""


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of ``dtype`` that a cache keeps of a head's key or value."""
    return head_dim + SCALE_BYTES if dtype in LARGEST else head_dim


def to_rows(numbers: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """``dtype`` (int8 or `FP8`) [..., head_dim + 4] of ``numbers`` [..., head_dim], a multiple of 4. Of a head with a
    number that is not finite, all are NaN."""
    exact, largest = numbers.float(), LARGEST[dtype]
    scale = exact.abs().amax(-1, keepdim=True) / largest
    scale = scale + (exact - exact).sum(-1, keepdim=True)
    inverse = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, 1.0 / scale)
    scaled = (exact * inverse).clamp_(-largest, largest).nan_to_num_(0.0)
    rounded = scaled.to(torch.float8_e4m3fn).view(FP8) if dtype == FP8 else scaled.round_().to(torch.int8)
    return torch.cat((rounded, scale.view(dtype)), -1)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``rows`` stand for, in ``dtype`` [..., head_dim]."""
    numbers, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].view(torch.float32)
    if rows.dtype == FP8:
        numbers = numbers.view(torch.float8_e4m3fn)
    return (numbers.float() * scale).to(dtype)
