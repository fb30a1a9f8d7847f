"""MXFP4 as gpt-oss is published: ``quant_method`` "mxfp4", the experts of a layer in one tensor.

For experts [experts, k, n] (multiplied from the right): ``_blocks`` uint8 [experts, n, k / 32, 16], two float4_e2m1
numbers a byte and the first in the low half; ``_scales`` uint8 [experts, n, k / 32] has the exponent of each 32, plus
127. So one expert is stored as it is multiplied from the left, [n, k]. Sources: OCP Microscaling Formats 1.0,
transformers 5.23 (``integrations/mxfp4.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.stored_integers import Code, IntegerFormat, Integers, powers_of_two
from ferrum_rpc.weights.entries import CHUNK, Decode, Encoding, TensorPiece
from ferrum_rpc.weights.quantized.stored import QuantizedTensors, wrong

MATRICES: Final = ("gate_up_proj", "down_proj")
BLOCK: Final = 32
BYTES: Final = (torch.uint8,)
FORMAT: Final = IntegerFormat(4, BLOCK, code=Code.MXFP4)
PAIRS: Final = torch.cartesian_prod(*(torch.tensor(Code.MXFP4.value),) * 2).flip(1)
"""Of each byte the two numbers."""

IRRELEVANT: Final = ("modules_to_not_convert", "dequantize")


def read(config: Fields, stored: QuantizedTensors) -> None:
    """Add the experts of every layer to ``stored``."""
    refuse_unread(config, IRRELEVANT, {})
    for matrix in MATRICES:
        for module in stored.modules(f"{matrix}_blocks"):
            blocks, scales = f"{matrix}_blocks", f"{matrix}_scales"
            shape = stored.shape(module, blocks, BYTES)
            if len(shape) != 4 or 0 in shape or shape[3] != BLOCK // 2:
                expected = f"experts, rows, blocks, {BLOCK // 2}"
                raise wrong(module, f"{blocks} has the shape {[*shape]}, expected {expected}")
            experts, rows, count, _ = shape
            stored.expect(module, scales, BYTES, [(experts, rows, count)])
            made = experts, count * BLOCK, rows
            each = partial(_of_expert, stored, module, (blocks, scales))
            stored.make(module, [blocks, scales], made, _transposed(blocks, scales), name=matrix, expert=each)


def _of_expert(stored: QuantizedTensors, module: str, roles: tuple[str, str], expert: int) -> Encoding:
    """Of one expert's matrix [n, k]."""
    parts = {}
    for role in roles:
        name, entry = stored.part(module, role)
        _, rows, *others = entry.shape
        piece = TensorPiece(name, expert, 0, rows)
        parts[role] = name, replace(entry, shape=(rows, *others), piece=piece)

    def decode(found: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        return floats(*(found[role][first:last] for role in roles))

    return Encoding(parts, decode, form=FORMAT, integers=lambda found: integers(*(found[role] for role in roles)))


def _transposed(blocks: str, scales: str) -> Decode:
    def decode(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        _, rows, count, _ = parts[blocks].shape
        made = torch.empty(last - first, count * BLOCK, rows)
        step = max(1, CHUNK // (count * BLOCK))
        for expert in range(first, last):
            for begin in range(0, rows, step):
                end = min(begin + step, rows)
                part = expert, slice(begin, end)
                made[expert - first, :, begin:end] = floats(parts[blocks][part], parts[scales][part]).T
        return made.view(last - first, -1)

    return decode


def floats(packed: Tensor, scales: Tensor) -> Tensor:
    """float32 [n, k]: the weights of ``packed`` uint8 [n, k / 2] or [n, k / 32, 16], two numbers a byte and the first
    in the low half, and of their exponents, ``scales`` uint8 [n, k / 32]."""
    values = PAIRS.index_select(0, packed.reshape(-1).to(torch.int32)).view(*scales.shape, BLOCK)
    return values.mul_(powers_of_two(scales)[..., None]).flatten(1)


def integers(packed: Tensor, scales: Tensor) -> Integers:
    """The same as they are stored."""
    return Integers(4, torch.stack((packed & 15, packed >> 4), -1).flatten(1), scales, code=Code.MXFP4)
