"""Rows of an 8-bit cache: the key or value of a token in a head is quantized to int8 or fp8, with one scale.

A row is ``head_dim`` numbers followed by their scale as float32 in four bytes. A number times the scale is its value.
The scale is stored with its numbers, so copies of slots and blocks include it.

``attention_decode.c`` writes and reads the same format in int8, and `native.triton_heads` in fp8, bit for bit.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SCALE_BYTES: Final = 4

FP8: Final = torch.uint8
"""Element type of an fp8 cache: bytes, each a float8_e4m3fn. Torch copies bytes by index on every device."""

MAX_MAGNITUDE: Final = {torch.int8: 127.0, FP8: 448.0}
"""The value to which the largest number of a row is scaled."""


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of ``dtype`` that a cache keeps of a head's key or value."""
    return head_dim + SCALE_BYTES if dtype in MAX_MAGNITUDE else head_dim


def to_rows(numbers: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """``dtype`` (int8 or `FP8`) [..., head_dim + 4] of ``numbers`` [..., head_dim], a multiple of 4. A head with a
    number that is not finite becomes all NaN."""
    exact, bound = numbers.float(), MAX_MAGNITUDE[dtype]
    # by a tensor: torch on CUDA multiplies by the reciprocal of a Python number, which rounds another scale
    scale = exact.abs().amax(-1, keepdim=True) / exact.new_full((), bound)
    scale = scale + (exact - exact).sum(-1, keepdim=True)
    inverse = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, 1.0 / scale)
    scaled = (exact * inverse).clamp_(-bound, bound).nan_to_num_(0.0)
    quantized = scaled.to(torch.float8_e4m3fn).view(FP8) if dtype == FP8 else scaled.round_().to(torch.int8)
    return torch.cat((quantized, scale.view(dtype)), -1)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The dequantized values of ``rows``, in ``dtype`` [..., head_dim]."""
    numbers, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].view(torch.float32)
    if rows.dtype == FP8:
        numbers = numbers.view(torch.float8_e4m3fn)
    return (numbers.float() * scale).to(dtype)
