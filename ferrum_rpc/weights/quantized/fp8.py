"""FP8 as DeepSeek and Qwen publish it, and as AutoFP8 wrote it: ``quant_method`` "fp8".

``weight`` float8_e4m3fn [n, k] times ``weight_scale_inv`` [ceil(n / rows), ceil(k / columns)] of its block
(``weight_block_size``), or times one ``weight_scale`` for all. Sources: 2412.19437, transformers 5.23
(``integrations/finegrained_fp8.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import LARGEST, Fields
from ferrum_rpc.weights.entries import Decode
from ferrum_rpc.weights.quantized.groups import as_float32, rescaled
from ferrum_rpc.weights.quantized.stored import FLOATS, QuantizedTensors, not_supported

FP8: Final = (torch.float8_e4m3fn,)
SCALES: Final = (*FLOATS, torch.float8_e8m0fnu)
ACTIVATIONS: Final = ("input_scale", "k_scale", "v_scale")
"""Scales of activations, not of weights."""

IRRELEVANT: Final = (
    *("activation_scheme", "dequantize", "scale_fmt", "kv_cache_scheme", "expert_dtype"),
    *("modules_to_not_convert", "modules_to_convert", "ignored_layers"),  # given by the tensors
)


def read(config: Fields, stored: QuantizedTensors) -> None:
    """Add every matrix to ``stored``. Raises NotSupported for a variant that is not supported."""
    if config.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise not_supported(config.name("fmt"), config.value("fmt"), "e4m3")
    block = block_size(config, "weight_block_size")
    refuse_unread(config, IRRELEVANT, {})
    for module in stored.modules("weight"):
        entry = stored.get(module, "weight")
        if entry is None or entry.dtype not in FP8:
            continue
        rows, width = stored.matrix(module, "weight", FP8)
        if block is None:
            stored.expect(module, "weight_scale", FLOATS, [(), (1,), (1, 1)])
            stored.make(module, ["weight", "weight_scale"], (rows, width), by_blocks("weight_scale", rows, width))
            continue
        block_rows, block_columns = block
        stored.expect(module, "weight_scale_inv", SCALES, [(-(-rows // block_rows), -(-width // block_columns))])
        stored.make(module, ["weight", "weight_scale_inv"], (rows, width), by_blocks("weight_scale_inv", *block))
    stored.drop(ACTIVATIONS)


def block_size(config: Fields, field: str) -> tuple[int, int] | None:
    """Rows and columns of a block, or None where the field is absent."""
    value = config.value(field)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(each) is int and 0 < each <= LARGEST for each in value)
    ):
        raise not_supported(config.name(field), value, "a list of two numbers, rows and columns")
    return value[0], value[1]


def by_blocks(scale: str, block_rows: int, block_columns: int) -> Decode:
    """``weight`` times ``scale``, which has a number for each block of rows and columns."""

    def decode(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        values, scales = as_float32(parts["weight"][first:last]), parts[scale].to(torch.float32)
        if scales.numel() == 1:
            return values * scales.view(())
        return rescaled(values, scales[torch.arange(first, last) // block_rows], None, block_columns)

    return decode
