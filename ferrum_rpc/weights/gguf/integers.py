"""Quantized blocks of GGUF as the small integers that our kernel multiplies, without decoding them.

Q4_0, Q8_0, Q4_K, Q6_K, IQ4 and MXFP4 keep their numbers and their scales; those of Q6_K and IQ4_XS, a byte times a
float16, are rounded to float16 (by 2e-4 of themselves at most). The kernel has no numbers of 2, 3 and 5 bits, nor
minimums of other groups than Q4_K's: such matrices are decoded and quantized to 8 bits in groups of 32. Layouts:
llama.cpp's ``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.stored_integers import Code, IntegerFormat, Integers
from ferrum_rpc.weights.entries import CHUNK

DecodeRows = Callable[[int, int], Tensor]
"""``decode(first, last)``: rows of the matrix, float32."""

IN_BYTES: Final = IntegerFormat(8, 32)

FORMATS: Final = {
    "Q4_0": IntegerFormat(4, 32),
    "Q4_K": IntegerFormat(4, 32, zeroed=True, factored=True),
    "Q6_K": IntegerFormat(8, 16),
    "MXFP4": IntegerFormat(4, 32, code=Code.MXFP4),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), IntegerFormat(4, 32, code=Code.IQ4)),
    **dict.fromkeys(("Q8_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K"), IN_BYTES),
}
"""By the name of the type. Others are decoded to floats."""


def integers_of(kind: str, blocks: Tensor, decode: DecodeRows) -> Integers:
    """The matrix whose rows are the ``blocks`` uint8 [n, bytes] of a type of `FORMATS`."""
    known = KNOWN.get(kind)
    return _in_bytes(blocks, decode) if known is None else known(blocks)


def _q4_0(blocks: Tensor) -> Integers:
    """A scale in float16, and `_nibbles`."""
    grouped = blocks.reshape(len(blocks), -1, 18)
    return Integers(4, _nibbles(grouped[..., 2:]), _halves(grouped[..., :2]).squeeze(-1))


def _q8_0(blocks: Tensor) -> Integers:
    """A scale in float16 and 32 signed numbers."""
    grouped = blocks.reshape(len(blocks), -1, 34)
    numbers = (grouped[..., 2:] ^ 128).view(len(blocks), -1)  # 128 more, in 8 bits
    return Integers(8, numbers, _halves(grouped[..., :2]).squeeze(-1))


def _q4_k(blocks: Tensor) -> Integers:
    """Factors of scales and minimums; 12 bytes with these of eight groups, in 6 bits each; 128 bytes, of each 32 of
    which the low halves are a group and the high ones the next."""
    grouped = blocks.reshape(len(blocks), -1, 144)
    low, mid, high = grouped[..., 4:16].reshape(*grouped.shape[:2], 3, 4).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    least = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), -1)
    halves = grouped[..., 16:].reshape(*grouped.shape[:2], 4, 1, 32)
    numbers = torch.cat((halves & 15, halves >> 4), -2)
    numbers, scales, least = (each.reshape(len(blocks), -1) for each in (numbers, scales, least))
    return Integers(4, numbers, scales, least, _halves(grouped[..., :4]))


def _q6_k(blocks: Tensor) -> Integers:
    """128 bytes with the low four bits of each number and 64 with the high two, 16 signed scales, and their factor."""
    grouped = blocks.reshape(len(blocks), -1, 210)
    low = grouped[..., :128].reshape(*grouped.shape[:2], 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), -2).flatten(-2)  # [.., 2, 128]
    high = grouped[..., 128:192].reshape(*grouped.shape[:2], 2, 1, 32)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-2)
    numbers = (low | high << 4) + (128 - 32)
    scales = grouped[..., 192:208].contiguous().view(torch.int8).to(torch.float32) * _halves(grouped[..., 208:]).float()
    return Integers(8, numbers.reshape(len(blocks), -1), scales.reshape(len(blocks), -1))


def _mxfp4(blocks: Tensor) -> Integers:
    """An exponent, and `_nibbles`."""
    grouped = blocks.reshape(len(blocks), -1, 17)
    return Integers(4, _nibbles(grouped[..., 1:]), grouped[..., 0].contiguous(), code=Code.MXFP4)


def _iq4_nl(blocks: Tensor) -> Integers:
    """As `_q4_0`, of another code."""
    return _q4_0(blocks)._replace(code=Code.IQ4)


def _iq4_xs(blocks: Tensor) -> Integers:
    """A float16; eight scales of 6 bits, 32 of which is 0: the high two of each in two bytes, the low four in four; and
    `_nibbles` of eight groups."""
    grouped = blocks.reshape(len(blocks), -1, 136)
    places, low = torch.arange(8), grouped[..., 4:8].repeat_interleave(2, -1)
    high = grouped[..., 2:4].repeat_interleave(4, -1) >> places % 4 * 2
    scales = ((low >> places % 2 * 4 & 15) | (high & 3) << 4).to(torch.float32) - 32
    scales *= _halves(grouped[..., :2]).to(torch.float32)
    return Integers(4, _nibbles(grouped[..., 8:].reshape(len(blocks), -1, 16)), scales.flatten(1), code=Code.IQ4)


def _in_bytes(blocks: Tensor, decode: DecodeRows) -> Integers:
    """Decoded and quantized a second time, in groups of 32: their largest magnitude over 127."""
    numbers, scales = list[Tensor](), list[Tensor]()
    rows, size = blocks.shape
    step = max(1, CHUNK // size)
    for first in range(0, rows, step):
        decoded = decode(first, min(first + step, rows))
        grouped = decoded.view(len(decoded), -1, IN_BYTES.group)
        scale = grouped.abs().amax(-1, keepdim=True) / 127.0
        found = (grouped / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-127.0, 127.0)
        numbers.append((found + 128.0).to(torch.uint8).flatten(1))
        scales.append(scale.squeeze(-1))
    return Integers(8, torch.cat(numbers), torch.cat(scales))


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [n, 32 * groups], of [n, groups, 16]: the low halves of 16 bytes are the first 16 numbers."""
    return torch.cat((packed & 15, packed >> 4), -1).flatten(1)


def _halves(pairs: Tensor) -> Tensor:
    """uint8 [.., 2 n] as float16 [.., n]."""
    return pairs.contiguous().view(torch.float16)


KNOWN: Final[dict[str, Callable[[Tensor], Integers]]] = {
    **{"Q4_0": _q4_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k},
    **{"MXFP4": _mxfp4, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs},
}
"""Types of `FORMATS` that keep their numbers."""
