"""compressed-tensors, as llm-compressor writes it: integers of 8 bits, packed ones of 2, 4 and 8, FP8 and MXFP4.

``config_groups`` has one or more ways in which weights were quantized. A matrix [n, k] is stored as ``weight`` int8 or
float8_e4m3fn [n, k], or as ``weight_packed`` int32 [n, ceil(k * bits / 32)] with ``weight_shape``; ``weight_scale`` is
[1] (strategy tensor), [n, 1] (channel), [n, groups] (group) or [ceil(n / rows), ceil(k / columns)] (block).
``weight_zero_point`` is like the scale; packed along n if weights are packed. Each matrix belongs to the first group
that its tensors fit. A matrix in MXFP4 is ``weight_packed`` uint8 [n, k / 2] and ``weight_scale`` uint8 [n, k / 32]
(`mxfp4`). Source: compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.entries import AsIntegers, Decode
from ferrum_rpc.weights.quantized import mxfp4
from ferrum_rpc.weights.quantized.fp8 import ACTIVATIONS, block_size, by_blocks
from ferrum_rpc.weights.quantized.groups import checked_columns, column_order, even_groups, rescaled, unpacked
from ferrum_rpc.weights.quantized.stored import FLOATS, QuantizedTensors, not_supported, wrong

FORMATS: Final = (
    *("int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    *("mxfp4-pack-quantized", "mixed-precision", "dense"),
)
STRATEGIES: Final = ("tensor", "channel", "group", "block")
PACKED_BITS: Final = (2, 4, 8)
INT: Final = (torch.int32,)
FLOATS_OF_BITS: Final = (("float", 4), ("float", 8))
MXFP4_PARTS: Final = ("weight_packed", "weight_scale")

IRRELEVANT: Final = (
    *("global_compression_ratio", "version", "quantization_status", "run_compressed", "dequantize"),
    *("ignore", "kv_cache_scheme"),  # given by the tensors; the type of the cache is a setting
)
OFF: Final[Mapping[str, tuple[object, ...]]] = {"transform_config": ({},), "moe_sparsity_config": ({},)}
GROUP_IRRELEVANT: Final = (
    "targets",
    "input_activations",
    "output_activations",
)  # activations are not quantized
WEIGHTS_IRRELEVANT: Final = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "symmetric", "is_global")


@dataclass(frozen=True, slots=True)
class QuantizationArgs:
    """How a group's weights were quantized. ``size``: columns that share a scale; ``block``: rows and columns that do.
    ``ordered``: an index assigns columns to groups."""

    name: str
    bits: int
    dtype: torch.dtype
    strategy: str
    size: int
    block: tuple[int, int] | None
    ordered: bool

    def scales(self, rows: int, width: int) -> list[tuple[int, ...]]:
        """The valid shapes of the scales of a matrix."""
        if self.strategy == "tensor":
            return [(1,), (), (1, 1)]
        if self.strategy == "channel":
            return [(rows, 1), (rows,)]
        if self.strategy == "group":
            return [(rows, -(-width // self.size))]
        block_rows, block_columns = self.block or (1, 1)
        return [(-(-rows // block_rows), -(-width // block_columns))]


def read(config: Fields, stored: QuantizedTensors) -> None:
    """Add every matrix to ``stored``. Raises NotSupported for a variant that is not supported."""
    _check_format(config)
    sparsity = config.table("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise not_supported(sparsity.name("format"), sparsity.value("format"), "dense")
    groups = config.table("config_groups")
    if groups is None:
        raise InvalidRequest(f"{config.name('config_groups')} is missing or empty", field=config.name("config_groups"))
    found = [_quantization_args(groups, name) for name in groups.unread()]
    arguments = [each for each in found if each is not None]
    refuse_unread(config, IRRELEVANT, OFF)
    for module in stored.modules("weight_packed"):
        _packed(stored, module, arguments)
    for module in stored.modules("weight_scale"):
        weight = stored.get(module, "weight")
        if weight is not None and weight.dtype in (torch.int8, torch.float8_e4m3fn):
            _plain(stored, module, arguments)
    stored.drop((*ACTIVATIONS, "q_scale", "input_zero_point", "output_scale", "output_zero_point"))


def _check_format(config: Fields) -> None:
    form = config.text("format", "dense")
    if form not in FORMATS:
        raise not_supported(config.name("format"), form, ", ".join(FORMATS))


def _quantization_args(groups: Fields, name: str) -> QuantizationArgs | None:
    """None for a group whose weights are not quantized."""
    group = groups.table(name)
    if group is None:
        return None
    _check_format(group)
    weights = group.table("weights")
    refuse_unread(group, GROUP_IRRELEVANT, {})
    if weights is None:
        return None
    bits, kind = weights.integer("num_bits", 8), weights.text("type", "int").lower()
    if (kind, bits) not in FLOATS_OF_BITS and (kind != "int" or bits not in PACKED_BITS):
        raise not_supported(
            weights.name("num_bits"), f"{kind} of {bits} bits", "int of 2, 4 and 8 bits, float of 4 and 8"
        )
    size = weights.integer("group_size", -1, low=-1)
    strategy = weights.text("strategy", "group" if size > 0 else "channel" if size == -1 else "tensor").lower()
    if strategy not in STRATEGIES:
        raise not_supported(weights.name("strategy"), strategy, ", ".join(STRATEGIES))
    if kind == "float" and bits == 4 and (strategy, size) != ("group", mxfp4.BLOCK):
        raise not_supported(weights.name("group_size"), f"{strategy} of {size}", f"MXFP4, groups of {mxfp4.BLOCK}")
    if strategy == "group" and size < 1:
        raise InvalidRequest(f"{weights.name('group_size')}: groups of {size} columns", field="quantization_config")
    block = block_size(weights, "block_structure")
    if strategy == "block" and block is None:
        raise InvalidRequest(f"{weights.name('block_structure')} is missing", field="quantization_config")
    if weights.value("dynamic") not in (None, False):
        raise not_supported(weights.name("dynamic"), weights.value("dynamic"), "weights with stored scales")
    order = weights.value("actorder")
    if order not in (None, False, True, "weight", "static", "group", "dynamic"):
        raise not_supported(weights.name("actorder"), order, "null, weight, group")
    refuse_unread(weights, WEIGHTS_IRRELEVANT, {})
    dtype = torch.int8 if kind == "int" else torch.uint8 if bits == 4 else torch.float8_e4m3fn
    return QuantizationArgs(name, bits, dtype, strategy, size, block, order in (True, "group", "dynamic"))


def _plain(stored: QuantizedTensors, module: str, arguments: list[QuantizationArgs]) -> None:
    weight, scale = stored.get(module, "weight"), stored.get(module, "weight_scale")
    assert weight is not None and scale is not None  # noqa: S101 - the caller looked
    rows, width = stored.matrix(module, "weight", (torch.int8, torch.float8_e4m3fn))
    for each in arguments:
        if each.dtype == weight.dtype and each.bits == 8 and scale.shape in each.scales(rows, width):
            break
    else:
        raise _unlike(module, arguments, f"weight {weight.dtype} {[*weight.shape]}, weight_scale {[*scale.shape]}")
    stored.expect(module, "weight_scale", FLOATS, [scale.shape])
    parts = ["weight", "weight_scale"]
    if each.strategy == "block":
        assert each.block is not None  # noqa: S101 - read so
        stored.make(module, parts, (rows, width), by_blocks("weight_scale", *each.block))
        return
    if stored.get(module, "weight_zero_point") is not None:
        stored.expect(module, "weight_zero_point", (torch.int8, torch.float8_e4m3fn), [scale.shape])
        parts.append("weight_zero_point")
    _add_order(stored, module, each, parts, width)
    size = each.size if each.strategy == "group" else width
    form, integers = None, None
    if weight.dtype == torch.int8:
        form = even_groups(width, size, 8, zeroed="weight_zero_point" in parts, ordered=each.ordered)
        integers = _integers(module, 8, size, (rows, width))
    stored.make(module, parts, (rows, width), _decode(module, size, 0, width), form=form, integers=integers)


def _add_order(stored: QuantizedTensors, module: str, each: QuantizationArgs, parts: list[str], width: int) -> None:
    """The group of each column, if the file has it."""
    if stored.get(module, "weight_g_idx") is not None:
        stored.expect(module, "weight_g_idx", INT, [(width,)])
        parts.append("weight_g_idx")
    elif each.ordered:
        raise wrong(module, "weight_g_idx is missing, and actorder is group")


def _mxfp4(stored: QuantizedTensors, module: str, arguments: list[QuantizationArgs]) -> None:
    rows, size = stored.matrix(module, "weight_packed", mxfp4.BYTES)
    if not any(each.dtype == torch.uint8 for each in arguments):
        raise _unlike(module, arguments, f"weight_packed uint8 {[rows, size]}")
    if size % (mxfp4.BLOCK // 2):
        raise wrong(module, f"weight_packed has {size} bytes a row, expected a multiple of {mxfp4.BLOCK // 2}")
    stored.expect(module, "weight_scale", mxfp4.BYTES, [(rows, 2 * size // mxfp4.BLOCK)])

    def decode(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        return mxfp4.floats(*(parts[each][first:last] for each in MXFP4_PARTS))

    def integers(parts: Mapping[str, Tensor]) -> Integers:
        return mxfp4.integers(*(parts[each] for each in MXFP4_PARTS))

    stored.make(module, MXFP4_PARTS, (rows, 2 * size), decode, form=mxfp4.FORMAT, integers=integers)


def _packed(stored: QuantizedTensors, module: str, arguments: list[QuantizationArgs]) -> None:
    packed = stored.get(module, "weight_packed")
    if packed is not None and packed.dtype == torch.uint8:
        _mxfp4(stored, module, arguments)
        return
    rows, words = stored.matrix(module, "weight_packed", INT)
    stored.expect(module, "weight_shape", (torch.int64, torch.int32), [(2,)])
    shape = tuple(stored.small(module, "weight_shape").tolist())
    width, scale = shape[1], stored.get(module, "weight_scale")
    if shape[0] != rows or not 0 < width <= words * 32:
        raise wrong(module, f"weight_shape is {[*shape]} for {rows} rows of {words} words")
    if scale is None:
        raise wrong(module, "weight_scale is missing")
    for each in arguments:
        fits = -(-width * each.bits // 32) == words and each.strategy != "block"
        if each.dtype == torch.int8 and fits and scale.shape in each.scales(rows, width):
            break
    else:
        raise _unlike(module, arguments, f"{words} words for {width} numbers, weight_scale {[*scale.shape]}")
    stored.expect(module, "weight_scale", FLOATS, [scale.shape])
    parts, zero = ["weight_packed", "weight_scale", "weight_shape"], stored.get(module, "weight_zero_point")
    if zero is not None:
        if zero.dtype == torch.int32 and each.strategy != "tensor":
            stored.expect(module, "weight_zero_point", INT, [(-(-rows * each.bits // 32), scale.shape[-1])])
        else:
            stored.expect(module, "weight_zero_point", (torch.int8,), [scale.shape])
        parts.append("weight_zero_point")
    _add_order(stored, module, each, parts, width)
    size = each.size if each.strategy == "group" else width
    form = even_groups(width, size, each.bits, zeroed=zero is not None, ordered=each.ordered)
    decode, integers = _decode(module, size, each.bits, width), _integers(module, each.bits, size, (rows, width))
    stored.make(module, parts, (rows, width), decode, 32 // each.bits, form=form, integers=integers)


def _integers(module: str, bits: int, size: int, shape: tuple[int, int]) -> AsIntegers:
    rows, width = shape

    def integers(parts: Mapping[str, Tensor]) -> Integers | None:
        scales, zeros = _rows(parts["weight_scale"], 0, rows), parts.get("weight_zero_point")
        order = column_order(module, parts.get("weight_g_idx"), scales.shape[1], size)
        if order is None:
            return None
        half = 1 << bits - 1
        if (packed := parts.get("weight_packed")) is None:
            numbers = (parts["weight"].to(torch.int16) + half).to(torch.uint8)
        else:
            numbers = unpacked(packed, bits, 1)[:, :width].to(torch.uint8)
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpacked(zeros, bits, 0)[:rows].to(torch.uint8)
        elif zeros is not None:
            zeros = (_rows(zeros, 0, rows).to(torch.int16) + half).to(torch.uint8)
        if len(order):
            numbers = numbers.index_select(1, order)
        return Integers(bits, numbers, scales, zeros, order=order if len(order) else None)

    return integers


def _decode(module: str, size: int, bits: int, width: int) -> Decode:
    """``bits`` is 0 for weights that are not packed."""
    half = 1 << bits - 1 if bits else 0

    def decode(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        scales = _rows(parts["weight_scale"], first, last)
        columns = checked_columns(module, parts["weight_g_idx"], scales.shape[1]) if "weight_g_idx" in parts else None
        zeros = parts.get("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpacked(zeros[first * bits // 32 : -(-last * bits // 32)], bits, 0)[: last - first] - half
        elif zeros is not None:
            zeros = _rows(zeros.to(torch.float32), first, last)
        if bits:
            values = unpacked(parts["weight_packed"][first:last], bits, 1)[:, :width] - half
        else:
            values = parts["weight"][first:last]
        return rescaled(values, scales, zeros, size, columns)

    return decode


def _rows(scales: Tensor, first: int, last: int) -> Tensor:
    """[last - first, groups], from a scale for each row or one for all."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(last - first, 1)
    return scales.view(scales.shape[0], -1)[first:last]


def _unlike(module: str, arguments: list[QuantizationArgs], found: str) -> InvalidRequest:
    ways = (
        ", ".join(
            f"{each.name[:40]} ({str(each.dtype).removeprefix('torch.')}, {each.bits} bits, {each.strategy})"
            for each in arguments[:8]
        )
        or "none"
    )
    return wrong(module, f"{found} fits no group of config_groups: {ways}")
