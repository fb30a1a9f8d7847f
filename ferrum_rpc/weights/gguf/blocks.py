"""The tensors of a GGUF file: plain ones as stored, quantized blocks decoded by the ``gguf`` package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.errors import NotSupported
from ferrum_rpc.install import install
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.entries import Decode, Encoding, TensorEntry, broken
from ferrum_rpc.weights.gguf.changes import UNCHANGED, Change
from ferrum_rpc.weights.gguf.header import Header, TensorInfo
from ferrum_rpc.weights.gguf.integers import FORMATS, integers_of

PLAIN: Final = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
"""ggml's numbers of the types that need no decoding."""

COUNTS_AS: Final = torch.bfloat16
"""The dtype that blocks count as when a compute dtype is chosen: no file says what the weights were, and none of these
types keeps more than bfloat16 does."""


def library() -> Any:
    """The ``gguf`` package. Raises NotSupported where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise NotSupported(
            f"GGUF files are read with the package gguf, which cannot be imported ({error}): {install('gguf')}",
            field="model",
        ) from None
    return gguf


def mapped(entry: TensorEntry) -> Tensor:
    """The tensor of an entry with an offset, reading the mapped file, which is never written to."""
    try:
        content = np.memmap(entry.file, np.uint8, "c", entry.offset or 0, (entry.nbytes,))
    except (OSError, ValueError) as error:
        raise broken(entry.file, f"cannot be read: {str(error)[:120]}") from None
    tensor = torch.from_numpy(content)
    if tensor.data_ptr() % entry.dtype.itemsize:
        tensor = tensor.clone()
    return tensor.view(entry.dtype).view(entry.shape)


def stored_bytes(file: Path, name: str, info: TensorInfo) -> int:
    """Of a tensor. Raises NotSupported for an unknown type."""
    kind, gguf = info.kind, library()
    try:
        per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise NotSupported(
            f"{file.name}: tensor {name[:120]!r} is of ggml's type {kind}, not known here", field="model"
        ) from None
    *rows, width = info.shape
    if width % per_block:
        raise broken(file, f"tensor {name[:120]!r}: rows of {width} numbers must be a multiple of {per_block}")
    return math.prod(rows) * (width // int(per_block)) * int(size)


def tensor_entry(header: Header, file: Path, name: str, info: TensorInfo, change: Change = UNCHANGED) -> TensorEntry:
    """The entry of a tensor."""
    nbytes = stored_bytes(file, name, info)
    kind, gguf, shape, rows = info.kind, library(), change.shape or info.shape, info.shape[:-1]
    kind_name = gguf.GGMLQuantizationType(kind).name
    if info.offset + nbytes > header.size:
        raise broken(file, f"truncated: tensor {name[:120]!r} ends after the file's {header.size} bytes")
    if kind in PLAIN and not change.decodes:
        return TensorEntry(PLAIN[kind], shape, file, info.offset)
    if kind not in PLAIN and not _dequantizes(gguf, kind):
        raise NotSupported(
            f"{file.name}: tensor {name[:120]!r} is {kind_name}, which the package gguf does not decode", field="model"
        )
    if not rows and gguf.GGML_QUANT_SIZES[kind][0] > 1:
        raise broken(file, f"tensor {name[:120]!r}: {kind_name} is for matrices, and this is a list")
    blocks = TensorEntry(torch.uint8, (info.shape[0], nbytes // info.shape[0]), file, info.offset)
    decode = partial(_decode, kind, change)
    form = FORMATS.get(kind_name) if rows and change.columns is None and change.values is None else None
    integers = partial(_integers, kind_name, change.rows, decode)
    encoding = Encoding({"blocks": (name, blocks)}, decode, kind=kind_name, form=form, integers=integers)
    return TensorEntry(PLAIN.get(kind, COUNTS_AS), shape, file, encoding=encoding)


@cache
def _dequantizes(gguf: Any, kind: int) -> bool:
    """Whether the package decodes the type: it has no list, so one block is tried."""
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)][1]), np.uint8)
    try:
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(block, gguf.GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True


def _integers(kind_name: str, order: Tensor | None, decode: Decode, parts: Mapping[str, Tensor]) -> Integers:
    blocks = parts["blocks"]
    return integers_of(kind_name, blocks if order is None else blocks[order], partial(decode, parts))


def _decode(kind: int, change: Change, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
    blocks, order = parts["blocks"], change.rows
    rows = blocks[first:last] if order is None else blocks[order[first:last]]
    if kind in PLAIN:
        made = rows.contiguous().view(PLAIN[kind]).to(torch.float32)
    else:
        gguf = library()
        with np.errstate(all="ignore"):  # what is not finite is refused when weights are loaded
            numbers = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(kind))
        made = torch.from_numpy(np.ascontiguousarray(numbers, np.float32))
    if change.columns is not None:
        made = made[:, change.columns]
    return made if change.values is None else change.values(made)
