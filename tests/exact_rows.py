"""What lies between a model's products, written out in float64, and the kinds of models that differ in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.models.parts.layer import LayerSpec, Norm

VARIANTS: dict[str, dict[str, Any]] = {
    "layer norm": {"norm": {"kind": "layer"}},
    "layer norm with biases": {"norm": {"kind": "layer", "bias": True}, "residual": 0.3},
    "gelu, whole rows": {"mlp": {"activation": "gelu_tanh"}, "mixer": {"qk_norm": "row"}},
    "no gate, half turned": {"mlp": {"activation": "gelu_tanh", "gated": False}, "half": True},
    "relu, half turned, normed": {"mlp": {"activation": "relu"}, "mixer": {"qk_norm": "head"}, "half": True},
    "not turned, normed": {"mixer": {"qk_norm": "head"}, "rope": None},
    "whole rows, half turned": {"mixer": {"qk_norm": "row"}, "half": True},
}
"""Fields of a `LayerSpec` and of its parts; ``half``: of each head."""

ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def close(actual: Tensor, expected: Tensor) -> None:
    """Within the rounding of one result of its type, and float32's own errors."""
    eps = torch.finfo(actual.dtype).eps
    rtol = 0.51 * eps if eps > 1e-4 else 16 * eps
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=4e-6)


def variant(layer: LayerSpec, name: str) -> LayerSpec:
    fields = dict(VARIANTS[name])
    half = {"rotary_dim": layer.mixer.head_dim // 2} if fields.pop("half", False) else {}
    for part, more in (("mixer", half), ("mlp", {}), ("norm", {})):
        fields[part] = replace(getattr(layer, part), **fields.get(part, {}), **more)
    return replace(layer, **fields)


def normed(kind: Norm, rows: Tensor, norm: Tensor) -> Tensor:
    """``norm`` [1 or 2, width]."""
    wide = rows.double()
    if kind.kind == "layer":
        wide -= wide.mean(-1, keepdim=True)
    scaled = wide * (wide.square().mean(-1, keepdim=True) + kind.eps).rsqrt() * norm[0].double()
    return scaled + norm[1].double() if len(norm) > 1 else scaled


def heads(layer: LayerSpec, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> list[Tensor]:
    """Query, key and value."""
    mixer = layer.mixer
    parts = list(
        qkv.double().unflatten(-1, (-1, mixer.head_dim)).split((mixer.heads, mixer.kv_heads, mixer.kv_heads), 1)
    )
    for index, first in enumerate((0, mixer.heads)):
        x = parts[index]
        if norm is not None:
            axes = (-2, -1) if mixer.qk_norm == "row" else (-1,)
            x = x * (x.square().mean(axes, keepdim=True) + layer.norm.eps).rsqrt()
            x = x * norm[first : first + x.shape[1]].double()
        if cos is not None and sin is not None:
            half = sin.shape[-1]
            c, s = cos[..., :half].double(), sin.double()
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            x = torch.cat((a * c - b * s, b * c + a * s, rest), -1)
        parts[index] = x
    return parts


def gate(layer: LayerSpec, gate_up: Tensor) -> Tensor:
    activation = ACTIVATIONS[layer.mlp.activation]
    if not layer.mlp.gated:
        return activation(gate_up.double())
    first, second = gate_up.double().chunk(2, -1)
    return activation(first) * second


def check(ops: Any, layer: LayerSpec, draw: Any, close: Any, dtype: torch.dtype) -> None:
    """Hold every operation of ``ops`` to what is exact. ``draw(*shape, seed, dtype)``, ``close(found, exact)``."""
    mixer, mlp = layer.mixer, layer.mlp
    width, turning = mixer.hidden, mixer.heads + mixer.kv_heads
    norm, delta = draw(1 + layer.norm.bias, width, seed=1), draw(3, width, seed=2, dtype=dtype)
    for each in (delta, None):
        hidden = draw(3, width, dtype=dtype) * 3
        total = hidden if each is None else (hidden.float() + each.float() * layer.residual).to(dtype)
        for weights in (norm, None):
            rows = hidden.clone()
            found = ops.add_norm(rows, each, weights)
            close(rows, total.double())
            close(found, rows.double() if weights is None else normed(layer.norm, rows, weights))
    qkv = draw(3, (turning + mixer.kv_heads) * mixer.head_dim, seed=3, dtype=dtype)
    qk_norm = draw(turning, mixer.head_dim, seed=4) if mixer.qk_norm else None
    angles = draw(3, 1, mixer.rotary_dim // 2, seed=5)
    cos, sin = torch.cat([angles.cos(), angles.cos()], -1), angles.sin()
    if layer.rope is None:
        cos = sin = None
    for found, exact in zip(
        ops.heads(qkv.clone(), qk_norm, cos, sin), heads(layer, qkv, qk_norm, cos, sin), strict=True
    ):
        close(found, exact)
    gate_up = draw(3, (1 + mlp.gated) * mlp.inner, seed=6, dtype=dtype) * 4
    close(ops.gate(gate_up.clone()), gate(layer, gate_up))
