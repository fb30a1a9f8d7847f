"""bitsandbytes: nf4 and fp4 in blocks of one scale, which may be quantized too ("nested"), and int8 with one per row.

4 bits: ``weight`` uint8 [n * k / 2, 1] has two numbers a byte, the first in the high half, as indices into the 16 of
``weight.quant_map``; ``weight.absmax`` has the scale of each block. If nested, ``absmax`` is uint8, an index into the
256 of ``weight.nested_quant_map``, times ``weight.nested_absmax``, plus an offset. Shape and block sizes are JSON in
the bytes of ``weight.quant_state.bitsandbytes__nf4``. 8 bits: ``weight`` int8 [n, k] times ``SCB`` [n] / 127.
Source: bitsandbytes 0.50, 2305.14314.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.weights.entries import Decode
from ferrum_rpc.weights.quantized.stored import QuantizedTensors, not_supported, wrong

TYPES: Final = ("nf4", "fp4")
STATE: Final = "weight.quant_state.bitsandbytes__"
BYTES: Final = (torch.uint8,)
FLOAT: Final = (torch.float32,)
ROW: Final = 0
"""``weight_format`` of int8 that is stored row by row."""

IRRELEVANT: Final = (
    # how a kernel would run
    *("bnb_4bit_compute_dtype", "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
    # given by the tensors
    *("llm_int8_skip_modules", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"),
    *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
)


def read(config: Fields, stored: QuantizedTensors) -> None:
    """Add every matrix to ``stored``. Raises NotSupported for a variant that is not supported."""
    storage = config.text("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        raise not_supported(config.name("bnb_4bit_quant_storage"), storage, "uint8")
    refuse_unread(config, IRRELEVANT, {})
    for kind in TYPES:
        for module in stored.modules(STATE + kind):
            _four_bits(stored, module, kind)
    for module in stored.modules("SCB"):
        rows, width = stored.matrix(module, "weight", (torch.int8,))
        stored.expect(module, "SCB", FLOAT, [(rows,)])
        parts = ["weight", "SCB"]
        if stored.get(module, "weight_format") is not None:
            stored.expect(module, "weight_format", BYTES, [()])
            if int(stored.small(module, "weight_format")) != ROW:
                raise not_supported(f"{module[:160]}.weight_format", "a layout of a GPU", "row by row")
            parts.append("weight_format")
        stored.make(module, parts, (rows, width), _eight_bits)


def _four_bits(stored: QuantizedTensors, module: str, kind: str) -> None:
    state = _state(stored, module, kind)
    shape = state.value("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(each) is int and each > 0 for each in shape):
        raise wrong(module, f"{state.name('shape')} is {str(shape)[:80]}, which is not that of a matrix")
    (rows, width), block = shape, state.integer("blocksize")
    numbers = rows * width
    if numbers % 2:
        raise wrong(module, f"{state.name('shape')}: an odd number of numbers")
    blocks = -(-numbers // block)
    stored.expect(module, "weight", BYTES, [(numbers // 2, 1), (1, numbers // 2)])
    stored.expect(module, "weight.quant_map", FLOAT, [(16,)])
    nested = stored.get(module, "weight.nested_absmax") is not None
    parts = ["weight", "weight.absmax", "weight.quant_map", STATE + kind]
    stored.expect(module, "weight.absmax", BYTES if nested else FLOAT, [(blocks,)])
    outer, offset = 1, 0.0
    if nested:
        outer, offset = state.integer("nested_blocksize"), state.number("nested_offset", positive=False)
        stored.expect(module, "weight.nested_absmax", FLOAT, [(-(-blocks // outer),)])
        stored.expect(module, "weight.nested_quant_map", FLOAT, [(256,)])
        parts += ["weight.nested_absmax", "weight.nested_quant_map"]
    refuse_unread(state, ("dtype", "nested_dtype", "quant_type"), {})
    multiple = math.lcm(block, 2, width) // width  # a slice must begin with a block and a byte
    stored.make(module, parts, (rows, width), _decode(width, block, outer, offset), multiple)


def _state(stored: QuantizedTensors, module: str, kind: str) -> Fields:
    name = f"{module[:160]}.{STATE}{kind}"
    entry = stored.get(module, STATE + kind)
    if entry is None or entry.dtype not in BYTES:
        raise wrong(module, f"{STATE}{kind} is not bytes")
    try:
        state = json.loads(bytes(stored.small(module, STATE + kind).flatten().tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise InvalidRequest(f"{name} is not a JSON object", field="model")
    return Fields(state, name)


def _decode(width: int, block: int, outer: int, offset: float) -> Decode:
    def decode(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        begin, end = first * width, last * width
        pairs = parts["weight"].view(-1)[begin // 2 : end // 2]
        values = parts["weight.quant_map"][torch.stack((pairs >> 4, pairs & 15), -1).view(-1).to(torch.int32)]
        blocks = torch.arange(begin // block, -(-end // block))
        scales = parts["weight.absmax"][blocks]
        if "weight.nested_absmax" in parts:
            nested = parts["weight.nested_quant_map"][scales.to(torch.int32)]
            scales = nested * parts["weight.nested_absmax"][blocks // outer] + offset
        if len(values) == len(blocks) * block:
            values = values.view(-1, block) * scales[:, None]
        else:
            values = values * scales[torch.arange(len(values)) // block]
        return values.view(last - first, width)

    return decode


def _eight_bits(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
    return parts["weight"][first:last].to(torch.float32) * (parts["SCB"][first:last, None] / 127)
