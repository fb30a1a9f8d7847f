"""Where every checkpoint tensor goes: Hugging Face names to fused parameters.

The decoder multiplies once where the checkpoint has q, k and v, or gate and up; so a checkpoint tensor is a range of
rows of a parameter. The table is computed from the spec, before anything is allocated: a checkpoint that does not
fit is refused for the price of reading its headers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.spec import ModelSpec

Shape = tuple[int, ...]

NORMS: Final = ("before_attention", "after_attention", "before_mlp", "after_mlp")
"""Fields of `Names`, and what the parameters are called."""

EMBEDDING: Final = "embed_tokens.weight"
"""Below the root of the body."""


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """A checkpoint tensor of ``shape`` fills ``rows`` rows from ``first`` on of ``parameter``; row by row, or all of it
    in every row (``spread``: a head norm's weight serves all heads). ``norm``: it belongs to a norm. ``turned``: so
    many first rows of each ``head_dim`` are neighbours that a rotation pairs, and go where `half_split` says."""

    parameter: str
    first: int
    rows: int
    shape: Shape
    spread: bool = False
    norm: bool = False
    turned: int = 0
    head_dim: int = 0

    @property
    def extent(self) -> Shape:
        """The shape of the rows that it fills."""
        if self.spread:
            return (self.rows, *self.shape)
        return self.shape if self.shape[0] == self.rows else (self.rows, self.shape[0] // self.rows)


def layout(spec: ModelSpec) -> dict[str, TensorPlacement]:
    """Every tensor that the decoder needs, by its checkpoint name."""
    hidden = spec.hidden_size
    table = {
        embedding_name(spec): _whole("embedding", spec.vocab_size, hidden),
        **dict(_norm(spec, "norm", f"{spec.roots.body}norm")),
    }
    if not spec.tied_embeddings:
        table[head_name(spec)] = _whole("head.weight", spec.vocab_size, hidden)
    for layer in range(spec.layers):
        for name, placement in _layer(spec, f"layers.{layer}."):
            table[f"{spec.roots.body}layers.{layer}.{name}"] = placement
    return table


def embedding_name(spec: ModelSpec) -> str:
    """What the checkpoint calls the embedding."""
    return spec.roots.body + EMBEDDING


def head_name(spec: ModelSpec) -> str:
    """What the checkpoint calls a head of its own."""
    return f"{spec.roots.head}weight"


def parameter_shapes(placements: Iterable[TensorPlacement]) -> dict[str, Shape]:
    """The shape of every parameter that the placements fill."""
    shapes: dict[str, Shape] = {}
    for placement in placements:
        rows, *rest = placement.extent
        known = shapes.get(placement.parameter, (0,))
        shapes[placement.parameter] = (max(known[0], placement.first + rows), *rest)
    return shapes


def parameter_count(spec: ModelSpec) -> int:
    """Weights of the model, a tied head counted once."""
    return sum(math.prod(placement.shape) for placement in layout(spec).values())


def _whole(parameter: str, *shape: int) -> TensorPlacement:
    return TensorPlacement(parameter, 0, shape[0], shape)


def half_split(tensor: Tensor, placement: TensorPlacement) -> Tensor:
    """``tensor`` with the channels 0, 1, 2, 3 .. of each head that its placement says are pairs as 0, 2 .. 1, 3 ..: the
    kernels pair channel i with i + half."""
    heads = tensor.view(-1, placement.head_dim, *tensor.shape[1:])
    parts = heads[:, : placement.turned : 2], heads[:, 1 : placement.turned : 2], heads[:, placement.turned :]
    return torch.cat(parts, 1).view(tensor.shape)


def _norm(spec: ModelSpec, parameter: str, name: str) -> Iterator[tuple[str, TensorPlacement]]:
    """One row of weights, and one of biases."""
    shape = (spec.hidden_size,)
    yield f"{name}.weight", TensorPlacement(parameter, 0, 1, shape, spread=True, norm=True)
    if spec.norm_bias:
        yield f"{name}.bias", TensorPlacement(parameter, 1, 1, shape, spread=True, norm=True)


def _layer(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, TensorPlacement]]:
    hidden, inner, names = spec.hidden_size, spec.intermediate_size, spec.names
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for role in NORMS:
        if (name := getattr(names, role)) is not None:
            yield from _norm(spec, prefix + role, name)
    rows = (query, key, key) if len(names.qkv) > 1 else (query + 2 * key,)
    turned = spec.rotary_dim if spec.pairs else 0
    for index, each in enumerate(_fused(prefix + "qkv", zip(names.qkv, rows, strict=True), hidden, spec.qkv_bias)):
        name, placement = each
        yield name, replace(placement, turned=turned, head_dim=spec.head_dim) if _rotates(spec, index) else placement
    yield from _fused(prefix + "output", [("self_attn.o_proj", hidden)], query, spec.output_bias)
    parts = len(names.gate_up)
    widths = [inner * (1 + spec.gated) // parts] * parts
    yield from _fused(prefix + "gate_up", zip(names.gate_up, widths, strict=True), hidden, spec.mlp_bias)
    yield from _fused(prefix + "down", [(names.down, hidden)], inner, spec.mlp_bias)
    for name, first, heads in (("q_norm", 0, spec.heads), ("k_norm", spec.heads, spec.kv_heads)):
        if spec.qk_norm is not None:
            spread = spec.qk_norm == "head"
            shape = (spec.head_dim if spread else heads * spec.head_dim,)
            placement = TensorPlacement(prefix + "qk_norm", first, heads, shape, spread=spread, norm=True)
            yield f"self_attn.{name}.weight", replace(placement, turned=turned, head_dim=spec.head_dim)


def _rotates(spec: ModelSpec, index: int) -> bool:
    """Whether the tensor with this index of q, k and v and their biases is of a query or a key."""
    return spec.pairs and index < 2 * (1 + spec.qkv_bias)


def _fused(
    parameter: str, parts: Iterable[tuple[str, int]], width: int, bias: bool
) -> Iterator[tuple[str, TensorPlacement]]:
    first = 0
    for name, rows in parts:
        yield f"{name}.weight", TensorPlacement(f"{parameter}.weight", first, rows, (rows, width))
        if bias:
            yield f"{name}.bias", TensorPlacement(f"{parameter}.bias", first, rows, (rows,))
        first += rows
