"""MXFP4 as gpt-oss is published: ``quant_method`` "mxfp4", the experts of a layer in one tensor.

For experts [experts, k, n] (multiplied from the right): ``_blocks`` uint8 [experts, n, k / 32, 16], two float4_e2m1
numbers a byte and the first in the low half; ``_scales`` uint8 [experts, n, k / 32] has the exponent of each 32, plus
127. Sources: OCP Microscaling Formats 1.0, transformers 5.23 (``integrations/mxfp4.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.weights.entries import CHUNK, Decode
from ferrum_rpc.weights.quantized.stored import QuantizedTensors, wrong

MATRICES: Final = ("gate_up_proj", "down_proj")
BLOCK: Final = 32
BYTES: Final = (torch.uint8,)
BIAS: Final = 127
MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

IRRELEVANT: Final = ("modules_to_not_convert", "dequantize")


def read(config: Fields, stored: QuantizedTensors) -> None:
    """Add the experts of every layer to ``stored``."""
    refuse_unread(config, IRRELEVANT, {})
    for matrix in MATRICES:
        for module in stored.modules(f"{matrix}_blocks"):
            blocks, scales = f"{matrix}_blocks", f"{matrix}_scales"
            shape = stored.shape(module, blocks, BYTES)
            if len(shape) != 4 or 0 in shape or shape[3] != BLOCK // 2:
                raise wrong(module, f"{blocks} has the shape {[*shape]}, expected experts, rows, blocks, {BLOCK // 2}")
            experts, rows, count, _ = shape
            stored.expect(module, scales, BYTES, [(experts, rows, count)])
            made = experts, count * BLOCK, rows
            stored.make(module, [blocks, scales], made, _decode(blocks, scales), name=matrix)


def _decode(blocks: str, scales: str) -> Decode:
    numbers = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)])
    both = torch.arange(256)
    powers = torch.ldexp(torch.ones(256), both - BIAS)
    pairs = torch.stack((numbers[both & 15], numbers[both >> 4]), -1)

    def decode(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        _, rows, count, _ = parts[blocks].shape
        made = torch.empty(last - first, count * BLOCK, rows)
        step = max(1, CHUNK // (count * BLOCK))
        for expert in range(first, last):
            for begin in range(0, rows, step):
                end = min(begin + step, rows)
                values = pairs.index_select(0, parts[blocks][expert, begin:end].reshape(-1).to(torch.int32))
                factors = powers[parts[scales][expert, begin:end].to(torch.int32)]
                scaled = values.view(end - begin, count, BLOCK) * factors[..., None]
                made[expert - first, :, begin:end] = scaled.view(end - begin, -1).T
        return made.view(last - first, -1)

    return decode
