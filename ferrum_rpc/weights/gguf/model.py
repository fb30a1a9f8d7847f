"""A GGUF file as a model: its configuration, and its tensors under Hugging Face's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.weights.entries import TensorEntry, broken
from ferrum_rpc.weights.gguf.blocks import mapped, tensor_entry
from ferrum_rpc.weights.gguf.header import read_header
from ferrum_rpc.weights.gguf.metadata import ROPE_FACTORS, architecture, config, hugging_face_name

MAX_FACTORS = 1 << 16


def read_model(file: Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """``(config, entries)``. Raises InvalidRequest or NotSupported that says what is wrong with the file."""
    header = read_header(file)
    interleaved = architecture(header).interleaved
    try:
        read = config(header, None)
    except InvalidRequest as error:
        raise broken(file, error.message) from None
    entries: dict[str, TensorEntry] = {}
    for name, info in sorted(header.tensors.items(), key=lambda each: each[1].offset):
        to, heads = hugging_face_name(name), 0
        if to in entries:
            raise broken(file, f"tensor {name[:120]!r} is there twice")
        if interleaved and ".self_attn.q_proj." in to:
            heads = read["num_attention_heads"]
        elif interleaved and ".self_attn.k_proj." in to:
            heads = read["num_key_value_heads"]
        entries[to] = tensor_entry(header, file, name, info, heads)
    _check_apart(file, entries)
    factors = entries.pop(ROPE_FACTORS, None)
    if factors is not None:
        if factors.dtype != torch.float32 or factors.encoding is not None or factors.nbytes > 4 * MAX_FACTORS:
            raise broken(file, f"{ROPE_FACTORS} is no list of float32")
        read = config(header, mapped(factors).flatten().clone().numpy())
    return read, entries


def _check_apart(file: Path, entries: dict[str, TensorEntry]) -> None:
    """Raise where tensors share bytes."""
    last, before = 0, ""
    for name, entry in entries.items():
        inner = entry if entry.encoding is None else entry.encoding.parts["blocks"][1]
        if (inner.offset or 0) < last:
            raise broken(file, f"tensors {before[:120]!r} and {name[:120]!r} overlap")
        last, before = (inner.offset or 0) + inner.nbytes, name
