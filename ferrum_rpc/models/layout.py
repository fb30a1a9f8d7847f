"""Where every checkpoint tensor goes: Hugging Face names to fused parameters.

The decoder multiplies once where the checkpoint has q, k and v, or gate and up; so a checkpoint tensor is a range of
rows of a parameter. The table is computed from the spec, before anything is allocated: a checkpoint that does not
fit is refused for the price of reading its headers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ferrum_rpc.models.spec import ModelSpec

Shape = tuple[int, ...]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Placement:
    """A checkpoint tensor of ``shape`` fills ``rows`` rows from ``first`` on of ``parameter``; row by row, or all of it
    in every row (``spread``: a head norm's weight serves all heads)."""

    parameter: str
    first: int
    rows: int
    shape: Shape
    spread: bool = False

    @property
    def extent(self) -> Shape:
        """The shape of the rows that it fills."""
        return (self.rows, *self.shape) if self.spread else self.shape


def layout(spec: ModelSpec) -> dict[str, Placement]:
    """Every tensor that the decoder needs, by its checkpoint name."""
    hidden = spec.hidden_size
    table = {
        EMBEDDING: _whole("embedding", spec.vocab_size, hidden),
        "model.norm.weight": _whole("norm", hidden),
    }
    if not spec.tied_embeddings:
        table[HEAD] = _whole("head.weight", spec.vocab_size, hidden)
    for layer in range(spec.layers):
        for name, placement in _layer(spec, f"layers.{layer}."):
            table[f"model.layers.{layer}.{name}"] = placement
    return table


def parameter_shapes(table: dict[str, Placement]) -> dict[str, Shape]:
    """The shape of every parameter that the placements fill."""
    shapes: dict[str, Shape] = {}
    for placement in table.values():
        rows, *rest = placement.extent
        known = shapes.get(placement.parameter, (0,))
        shapes[placement.parameter] = (max(known[0], placement.first + rows), *rest)
    return shapes


def parameter_count(spec: ModelSpec) -> int:
    """Weights of the model, a tied head counted once."""
    return sum(math.prod(placement.shape) for placement in layout(spec).values())


def _whole(parameter: str, *shape: int) -> Placement:
    return Placement(parameter, 0, shape[0], shape)


def _layer(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Placement]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "input_layernorm.weight", _whole(prefix + "input_norm", hidden)
    yield "post_attention_layernorm.weight", _whole(prefix + "post_norm", hidden)
    qkv = (("self_attn.q_proj", query), ("self_attn.k_proj", key), ("self_attn.v_proj", key))
    yield from _fused(prefix + "qkv", qkv, hidden, spec.qkv_bias)
    yield from _fused(prefix + "output", (("self_attn.o_proj", hidden),), query, spec.output_bias)
    yield from _fused(prefix + "gate_up", (("mlp.gate_proj", inner), ("mlp.up_proj", inner)), hidden, spec.mlp_bias)
    yield from _fused(prefix + "down", (("mlp.down_proj", hidden),), inner, spec.mlp_bias)
    if spec.qk_norm:
        parameter, shape = prefix + "qk_norm", (spec.head_dim,)
        yield "self_attn.q_norm.weight", Placement(parameter, 0, spec.heads, shape, spread=True)
        yield "self_attn.k_norm.weight", Placement(parameter, spec.heads, spec.kv_heads, shape, spread=True)


def _fused(
    parameter: str, parts: tuple[tuple[str, int], ...], width: int, bias: bool
) -> Iterator[tuple[str, Placement]]:
    first = 0
    for name, rows in parts:
        yield f"{name}.weight", Placement(f"{parameter}.weight", first, rows, (rows, width))
        if bias:
            yield f"{name}.bias", Placement(f"{parameter}.bias", first, rows, (rows,))
        first += rows
