"""The tensors of a GGUF file: plain ones as stored, quantized blocks decoded by the ``gguf`` package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.errors import NotSupported
from ferrum_rpc.install import install
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.entries import Decode, Encoding, TensorEntry, broken
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


def tensor_entry(
    header: Header, file: Path, name: str, info: TensorInfo, heads: int = 0, *, shifted: bool = False
) -> TensorEntry:
    """The entry of a tensor. ``heads``: of how many heads its rows are, where each has the halves of its channels
    interleaved; 0 where they are not. ``shifted``: one was added to it."""
    kind, gguf = info.kind, library()
    try:
        per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise NotSupported(
            f"{file.name}: tensor {name[:120]!r} is of ggml's type {kind}, not known here", field="model"
        ) from None
    kind_name = gguf.GGMLQuantizationType(kind).name
    *rows, width = info.shape
    if width % per_block:
        raise broken(file, f"tensor {name[:120]!r}: rows of {width} numbers must be a multiple of {per_block}")
    nbytes = math.prod(rows) * (width // per_block) * size
    if info.offset + nbytes > header.size:
        raise broken(file, f"truncated: tensor {name[:120]!r} ends after the file's {header.size} bytes")
    if kind in PLAIN and not heads and not shifted:
        return TensorEntry(PLAIN[kind], info.shape, file, info.offset)
    if kind not in PLAIN and not _dequantizes(gguf, kind):
        raise NotSupported(
            f"{file.name}: tensor {name[:120]!r} is {kind_name}, which the package gguf does not decode", field="model"
        )
    if not rows and per_block > 1:
        raise broken(file, f"tensor {name[:120]!r}: {kind_name} is for matrices, and this is a list")
    if heads and info.shape[0] % (2 * heads):
        raise broken(file, f"tensor {name[:120]!r}: {kind_name} {[*info.shape]} for {heads} heads")
    blocks = TensorEntry(torch.uint8, (info.shape[0], nbytes // info.shape[0]), file, info.offset)
    decode = partial(_decode_shifted, kind) if shifted else partial(_decode, kind, heads)
    form = None if shifted or not rows else FORMATS.get(kind_name)
    integers = partial(_integers, kind_name, heads, decode)
    encoding = Encoding({"blocks": (name, blocks)}, decode, kind=kind_name, form=form, integers=integers)
    return TensorEntry(PLAIN.get(kind, COUNTS_AS), info.shape, file, encoding=encoding)


def _dequantizes(gguf: Any, kind: int) -> bool:
    """Whether the package decodes the type: it has no list, so one block is tried."""
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)][1]), np.uint8)
    try:
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(block, gguf.GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True


def _decode_shifted(kind: int, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
    return _decode(kind, 0, parts, first, last) - 1.0


def _rows(heads: int, blocks: Tensor, first: int, last: int) -> Tensor:
    if not heads:
        return blocks[first:last]
    # llama.cpp pairs neighbouring channels where Hugging Face pairs the halves of a head
    order = torch.arange(len(blocks)).view(heads, -1, 2).transpose(1, 2).reshape(-1)
    return blocks[order[first:last]]


def _integers(kind_name: str, heads: int, decode: Decode, parts: Mapping[str, Tensor]) -> Integers:
    blocks = parts["blocks"]
    return integers_of(kind_name, _rows(heads, blocks, 0, len(blocks)), partial(decode, parts))


def _decode(kind: int, heads: int, parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
    gguf, rows = library(), _rows(heads, parts["blocks"], first, last)
    if kind in PLAIN:
        return rows.contiguous().view(PLAIN[kind]).to(torch.float32)
    with np.errstate(all="ignore"):  # what is not finite is refused where weights are loaded
        made = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(np.ascontiguousarray(made, np.float32))
