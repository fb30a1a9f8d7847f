"""Experts that a checkpoint has side by side in one tensor, as tensors of their own.

``mlp.experts.gate_up_proj`` [experts, 2 * inner, hidden] and ``mlp.experts.down_proj`` [experts, hidden, inner] are how
transformers 5 holds them, and how Qwen3.5 is published. Other checkpoints have a module for each expert, as it is named
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from ferrum_rpc.weights.entries import TensorEntry, TensorPiece

PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
MODULE: Final = ".mlp.experts"


def single_experts(entries: Mapping[str, TensorEntry], limit: int) -> dict[str, TensorEntry]:
    """``entries`` with one for each matrix of each expert, in the order of their bytes. A tensor of more than ``limit``
    experts stays as it is, and so do those that are quantized, of odd shapes, or there twice."""
    made: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        pieces = dict(_pieces(name, entry)) if _is_joined(name, entry, limit) else {}
        made |= pieces if pieces and not pieces.keys() & entries.keys() else {name: entry}
    return made


def _is_joined(name: str, entry: TensorEntry, limit: int) -> bool:
    module, _, kind = name.rpartition(".")
    if kind not in PARTS or not module.endswith(MODULE) or entry.encoding is not None or len(entry.shape) != 3:
        return False
    experts, rows, _ = entry.shape
    return experts <= limit and rows % len(PARTS[kind]) == 0


def _pieces(name: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    module, _, kind = name.rpartition(".")
    experts, rows, width = entry.shape
    height = rows // len(PARTS[kind])
    for expert in range(experts):
        for place, part in enumerate(PARTS[kind]):
            piece = TensorPiece(name, expert, place * height, (place + 1) * height)
            yield f"{module}.{expert}.{part}.weight", replace(entry, shape=(height, width), piece=piece)
