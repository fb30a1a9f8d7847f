"""AWQ, as AutoAWQ writes it for its "gemm" kernels: ``qweight``, ``qzeros``, ``scales``.

For a matrix [n, k]: ``qweight`` int32 [k, n / 8], ``qzeros`` int32 [groups, n / 8], ``scales`` [groups, n]. A word has
columns 0, 2, 4, 6, 1, 3, 5, 7 of eight, lowest bits first. Source: AutoAWQ 0.2.9, 2306.00978.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.entries import Decode
from ferrum_rpc.weights.quantized.groups import even_groups, group_count, rescaled, unpacked
from ferrum_rpc.weights.quantized.stored import FLOATS, QuantizedTensors, not_supported

PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The positions of columns 0, 1, ... of eight in their word."""

INT: Final = (torch.int32,)
IRRELEVANT: Final = (
    *("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"),
    *("modules_to_not_convert", "lm_head"),  # given by the tensors
)


def read(config: Fields, stored: QuantizedTensors) -> None:
    """Add every matrix to ``stored``. Raises NotSupported for a variant that is not supported."""
    bits = config.integer("bits", config.integer("w_bit", 4))
    size = config.integer("group_size", config.integer("q_group_size", 128, low=-1), low=-1)
    if bits != 4:
        raise not_supported(config.name("bits"), bits, "4")
    if size == 0:
        raise not_supported(config.name("group_size"), size, "-1, or a number of columns")
    form = config.text("version", config.text("format", "gemm")).lower()
    if form != "gemm":
        raise not_supported(config.name("version"), form, "gemm")
    if not config.flag("zero_point", True):
        raise not_supported(config.name("zero_point"), False, "true")
    refuse_unread(config, IRRELEVANT, {})
    for module in stored.modules("qweight"):
        width, words = stored.matrix(module, "qweight", INT)
        groups = group_count(width, size)
        stored.expect(module, "qzeros", INT, [(groups, words)])
        stored.expect(module, "scales", FLOATS, [(groups, 8 * words)])
        of_scale = width if size == -1 else size
        held, parts = even_groups(width, of_scale, bits, zeroed=True), ["qweight", "qzeros", "scales"]
        stored.make(module, parts, (8 * words, width), _decode(of_scale), 8, form=held, integers=_integers)


def _integers(parts: Mapping[str, Tensor]) -> Integers:
    numbers, zeros = (unpacked(parts[role], 4, 1, PLACES).T.to(torch.uint8) for role in ("qweight", "qzeros"))
    return Integers(4, numbers.contiguous(), parts["scales"].T, zeros)


def _decode(size: int) -> Decode:
    def decode(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        words = slice(first // 8, last // 8)
        values, zeros = (unpacked(parts[role][:, words], 4, 1, PLACES) for role in ("qweight", "qzeros"))
        return rescaled(values.T, parts["scales"][:, first:last].T, zeros.T, size)

    return decode
