"""What lies between a model's products, written out in float64, and the kinds of models that differ in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.models.rope import RopeSpec
from ferrum_rpc.models.spec import ModelSpec, Scales

HALF = (RopeSpec(partial=0.5),)
VARIANTS: dict[str, dict[str, Any]] = {
    "layer norm": {"norm": "layer"},
    "layer norm with biases": {"norm": "layer", "norm_bias": True, "scales": Scales(residual=0.3)},
    "gelu, whole rows": {"activation": "gelu_tanh", "qk_norm": "row"},
    "no gate, half turned": {"activation": "gelu_tanh", "gated": False, "ropes": HALF},
    "relu, half turned, normed": {"activation": "relu", "qk_norm": "head", "ropes": HALF},
    "not turned, normed": {"qk_norm": "head", "layer_ropes": (None, None)},
    "whole rows, half turned": {"qk_norm": "row", "ropes": HALF},
}
"""Fields of a `ModelSpec`. With ``layer_ropes`` nothing is turned."""

ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def close(actual: Tensor, expected: Tensor) -> None:
    """Within the rounding of one result of its type, and float32's own errors."""
    eps = torch.finfo(actual.dtype).eps
    rtol = 0.51 * eps if eps > 1e-4 else 16 * eps
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=4e-6)


def variant(spec: ModelSpec, name: str) -> ModelSpec:
    return replace(spec, **VARIANTS[name])


def normed(spec: ModelSpec, rows: Tensor, norm: Tensor) -> Tensor:
    """``norm`` [1 or 2, width]."""
    wide = rows.double()
    if spec.norm == "layer":
        wide -= wide.mean(-1, keepdim=True)
    scaled = wide * (wide.square().mean(-1, keepdim=True) + spec.norm_eps).rsqrt() * norm[0].double()
    return scaled + norm[1].double() if len(norm) > 1 else scaled


def heads(spec: ModelSpec, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> list[Tensor]:
    """Query, key and value."""
    parts = list(qkv.double().unflatten(-1, (-1, spec.head_dim)).split((spec.heads, spec.kv_heads, spec.kv_heads), 1))
    for index, first in enumerate((0, spec.heads)):
        x = parts[index]
        if norm is not None:
            axes = (-2, -1) if spec.qk_norm == "row" else (-1,)
            x = x * (x.square().mean(axes, keepdim=True) + spec.norm_eps).rsqrt()
            x = x * norm[first : first + x.shape[1]].double()
        if cos is not None and sin is not None:
            half = sin.shape[-1]
            c, s = cos[..., :half].double(), sin.double()
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            x = torch.cat((a * c - b * s, b * c + a * s, rest), -1)
        parts[index] = x
    return parts


def gate(spec: ModelSpec, gate_up: Tensor) -> Tensor:
    activation = ACTIVATIONS[spec.activation]
    if not spec.gated:
        return activation(gate_up.double())
    first, second = gate_up.double().chunk(2, -1)
    return activation(first) * second


def check(ops: Any, spec: ModelSpec, draw: Any, close: Any, dtype: torch.dtype) -> None:
    """Hold every operation of ``ops`` to what is exact. ``draw(*shape, seed, dtype)``, ``close(found, exact)``."""
    width, turning = spec.hidden_size, spec.heads + spec.kv_heads
    norm, delta = draw(1 + spec.norm_bias, width, seed=1), draw(3, width, seed=2, dtype=dtype)
    for each in (delta, None):
        hidden = draw(3, width, dtype=dtype) * 3
        total = hidden if each is None else (hidden.float() + each.float() * spec.scales.residual).to(dtype)
        for weights in (norm, None):
            rows = hidden.clone()
            found = ops.add_norm(rows, each, weights)
            close(rows, total.double())
            close(found, rows.double() if weights is None else normed(spec, rows, weights))
    qkv = draw(3, (turning + spec.kv_heads) * spec.head_dim, seed=3, dtype=dtype)
    qk_norm = draw(turning, spec.head_dim, seed=4) if spec.qk_norm else None
    angles = draw(3, 1, spec.rotary_dim // 2, seed=5)
    cos, sin = torch.cat([angles.cos(), angles.cos()], -1), angles.sin()
    if spec.layer_ropes[0] is None:
        cos = sin = None
    for found, exact in zip(
        ops.heads(qkv.clone(), qk_norm, cos, sin), heads(spec, qkv, qk_norm, cos, sin), strict=True
    ):
        close(found, exact)
    gate_up = draw(3, (1 + spec.gated) * spec.intermediate_size, seed=6, dtype=dtype) * 4
    close(ops.gate(gate_up.clone()), gate(spec, gate_up))
