"""Experts that a checkpoint has side by side in one tensor, as tensors of their own.

``mlp.experts.gate_up_proj`` [experts, 2 * inner, hidden] and ``mlp.experts.down_proj`` [experts, hidden, inner] are how
transformers 5 holds them, and how Qwen3.5 is published. Other checkpoints have a module for each expert, as it is named
here. With biases (``mlp.experts.gate_up_proj_bias`` [experts, 2 * inner]) they are gpt-oss's, which are multiplied from
the right: rows and columns are exchanged, and the channels of gate and up take turns. So they become one module here
(`parts.experts`), also where they are quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from ferrum_rpc.weights.entries import TensorEntry, TensorPiece

PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
MODULE: Final = ".mlp.experts"
BIAS: Final = "_bias"


def single_experts(entries: Mapping[str, TensorEntry], limit: int) -> dict[str, TensorEntry]:
    """``entries`` with one for each matrix of each expert, in the order of their bytes. A tensor of more than ``limit``
    experts stays as it is, and so do those of odd shapes, or there twice, or quantized but for `Encoding.expert`."""
    made: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        pieces = {}
        if entry.shape and entry.shape[0] <= limit and name.rpartition(".")[0].endswith(MODULE):
            pieces = dict(_pieces(name, entry, biased=name + BIAS in entries))
        made |= pieces if pieces and not pieces.keys() & entries.keys() else {name: entry}
    return made


def _pieces(name: str, entry: TensorEntry, *, biased: bool) -> Iterator[tuple[str, TensorEntry]]:
    module, _, kind = name.rpartition(".")
    axes, matrix, of_each = len(entry.shape), kind.removesuffix(BIAS), entry.encoding and entry.encoding.expert
    if matrix not in PARTS or axes != (3 if matrix == kind else 2) or (entry.encoding is not None and of_each is None):
        return
    for expert in range(entry.shape[0]):
        own = f"{module}.{expert}.{matrix}"
        if matrix != kind:
            rows = entry.shape[1]
            yield f"{own}.bias", replace(entry, shape=(rows,), piece=TensorPiece(name, expert, 0, rows))
        elif of_each:
            yield f"{own}.weight", replace(entry, shape=entry.shape[:0:-1], encoding=of_each(expert))
        elif biased:
            piece = TensorPiece(name, expert, 0, entry.shape[1], turned=True)
            yield f"{own}.weight", replace(entry, shape=entry.shape[:0:-1], piece=piece)
        else:
            yield from _apart(module, expert, name, entry)


def _apart(module: str, expert: int, name: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    """Of one expert, whose matrices of one input lie one behind the other."""
    parts, (_, rows, width) = PARTS[name.rpartition(".")[2]], entry.shape
    height, rest = divmod(rows, len(parts))
    for place, part in enumerate(() if rest else parts):
        piece = TensorPiece(name, expert, place * height, (place + 1) * height)
        yield f"{module}.{expert}.{part}.weight", replace(entry, shape=(height, width), piece=piece)
