"""GPTQ, as AutoGPTQ and GPTQModel write it: ``qweight``, ``qzeros``, ``scales``, ``g_idx``.

Of a matrix [n, k]: ``qweight`` int32 [k * bits / 32, n] has words of consecutive k; ``qzeros`` int32
[groups, n * bits / 32] words of consecutive n, and ``scales`` [groups, n]. ``g_idx`` int32 [k] is the group of each
column, which differs from k // group_size if columns were quantized in the order of their activations (``desc_act``).
The format ``gptq`` stores zero points minus one, subtracted from whole words as GPTQModel does; ``gptq_v2`` stores them
unchanged. Source: GPTQModel 7.7, 2210.17323.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.entries import AsIntegers, Decode
from ferrum_rpc.weights.quantized.groups import (
    checked_columns,
    column_order,
    even_groups,
    group_count,
    rescaled,
    unpacked,
)
from ferrum_rpc.weights.quantized.stored import FLOATS, QuantizedTensors, not_supported, wrong

BITS: Final = (2, 4, 8)
FORMATS: Final = ("gptq", "gptq_v2")
INT: Final = (torch.int32,)

IRRELEVANT: Final = (
    # how it was quantized
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse", "dataset", "tokenizer"),
    *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id"),
    *("act_group_aware", "meta", "quantizer", "model_name_or_path", "model_file_base_name", "adapter", "mock"),
    *("modules_in_block_to_quantize", "offload_to_disk", "offload_to_disk_path", "hyb_act", "device", "parallel"),
    # how it would run
    *("use_cuda_fp16", "backend", "use_exllama", "disable_exllama", "exllama_config", "max_input_length"),
    *("cache_block_outputs", "sym", "lm_head", "method"),  # given by the tensors
)


def read(config: Fields, stored: QuantizedTensors) -> None:
    """Add every matrix to ``stored``. Raises NotSupported for a variant that is not supported."""
    bits, size = config.integer("bits"), config.integer("group_size", 128, low=-1)
    if bits not in BITS:
        raise not_supported(config.name("bits"), bits, ", ".join(map(str, BITS)))
    if size == 0:
        raise not_supported(config.name("group_size"), size, "-1, or a number of columns")
    form = config.text("checkpoint_format", config.text("format", "gptq"))
    if form not in FORMATS or config.text("format", form) != form:
        raise not_supported(config.name("checkpoint_format"), form, ", ".join(FORMATS))
    if config.text("pack_dtype", "int32") != "int32":
        raise not_supported(config.name("pack_dtype"), config.value("pack_dtype"), "int32")
    if config.flag("is_marlin_format", False):
        raise not_supported(config.name("is_marlin_format"), True, "the format before it is repacked for Marlin")
    overridden = [name for name in config.names("dynamic") if not name.startswith("-:")]  # these are left out
    if overridden:
        raise not_supported(config.name("dynamic"), overridden[0], "one scheme for all matrices")
    ordered = config.flag("desc_act", False)
    refuse_unread(config, IRRELEVANT, {})
    for module in stored.modules("qweight"):
        _matrix(stored, module, bits, size, minus_one=form == "gptq", ordered=ordered)


def _matrix(stored: QuantizedTensors, module: str, bits: int, size: int, *, minus_one: bool, ordered: bool) -> None:
    per_word = 32 // bits
    words, rows = stored.matrix(module, "qweight", INT)
    width = words * per_word
    groups = group_count(width, size)
    if rows % per_word:
        raise wrong(module, f"qweight's {rows} columns must be a multiple of {per_word}")
    stored.expect(module, "scales", FLOATS, [(groups, rows)])
    stored.expect(module, "qzeros", INT, [(groups, rows // per_word)])
    parts = ["qweight", "qzeros", "scales"]
    if stored.get(module, "g_idx") is not None:
        stored.expect(module, "g_idx", INT, [(width,)])
        parts.append("g_idx")
    elif ordered:
        raise wrong(module, "desc_act is set and g_idx is missing")
    size = width if size == -1 else size
    less = sum(1 << bits * place for place in range(per_word)) if minus_one else 0
    form = even_groups(width, size, bits, zeroed=True, ordered=ordered)
    decode, integers = _decode(module, bits, size, less), _integers(module, bits, size, less)
    stored.make(module, parts, (rows, width), decode, per_word, form=form, integers=integers)


def _zeros(words: Tensor, bits: int, less: int) -> Tensor:
    return unpacked((words.to(torch.int64) + less).to(torch.int32), bits, 1)


def _integers(module: str, bits: int, size: int, less: int) -> AsIntegers:
    def integers(parts: Mapping[str, Tensor]) -> Integers | None:
        scales = parts["scales"]
        order = column_order(module, parts.get("g_idx"), scales.shape[0], size)
        if order is None:
            return None
        numbers, zeros = unpacked(parts["qweight"], bits, 0).to(torch.uint8), _zeros(parts["qzeros"], bits, less).T
        if len(order):
            numbers = numbers.index_select(0, order)
        numbers = numbers.T.contiguous()
        return Integers(bits, numbers, scales.T, zeros.to(torch.uint8), order=order if len(order) else None)

    return integers


def _decode(module: str, bits: int, size: int, less: int) -> Decode:
    def decode(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        scales = parts["scales"][:, first:last]
        zeros = _zeros(parts["qzeros"][:, first * bits // 32 : last * bits // 32], bits, less)
        columns = checked_columns(module, parts["g_idx"], scales.shape[0]) if "g_idx" in parts else None
        if columns is not None and torch.equal(columns, torch.arange(len(columns)) // size):
            columns = None
        values = unpacked(parts["qweight"][:, first:last], bits, 0)
        return rescaled(values.T, scales.T, zeros.T, size, columns)

    return decode
