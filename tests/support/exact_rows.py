"""What lies between a model's products, written out in float64, and the kinds of models that differ in it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.models.parts.clamped import Clamped
from ferrum_rpc.models.parts.layer import LayerSpec, Norm
from ferrum_rpc.models.spec import ModelSpec
from tests.support.checkpoints import TINY

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"mixer": {"qk_norm": "head"}},
    "layer norm": {"norm": {"kind": "layer"}},
    "layer norm with biases": {"norm": {"kind": "layer", "bias": True}, "residual": 0.3},
    "gelu, whole rows": {"mlp": {"activation": "gelu_tanh"}, "mixer": {"qk_norm": "row"}},
    "no gate, half turned": {"mlp": {"activation": "gelu_tanh", "gated": False}, "half": True},
    "relu, half turned, normed": {"mlp": {"activation": "relu"}, "mixer": {"qk_norm": "head"}, "half": True},
    "not turned, normed": {"mixer": {"qk_norm": "head"}, "rope": None},
    "whole rows, half turned": {"mixer": {"qk_norm": "row"}, "half": True},
    "clamped": {"mlp": {"activation": Clamped(limit=3.0, slope=1.7)}},
}
"""Fields of a `LayerSpec` and of its parts; ``half``: of each head."""

ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def close(actual: Tensor, expected: Tensor) -> None:
    """Within the rounding of one result of its type, and float32's own errors."""
    eps = torch.finfo(actual.dtype).eps
    rtol = 0.51 * eps if eps > 1e-4 else 16 * eps
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=4e-6)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: Any = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def one_layer(**config: Any) -> ModelSpec:
    """A Llama of these sizes."""
    usual = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    return ModelSpec.from_config(TINY | usual | {"num_hidden_layers": 1} | config)


def model_of(layer: LayerSpec, model: ModelSpec) -> ModelSpec:
    """``model`` of one such layer."""
    layer = replace(layer, mlp=replace(layer.mlp, hidden=layer.mixer.hidden))
    return replace(model, layers=(layer,), hidden_size=layer.mixer.hidden, norm=layer.norm)


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
    if isinstance(by := layer.mlp.activation, Clamped):
        first, second = gate_up.double().chunk(2, -1)
        first = first.clamp(max=by.limit)
        return first * torch.sigmoid(first * by.slope) * (second.clamp(-by.limit, by.limit) + 1)
    activation = ACTIVATIONS[layer.mlp.activation]
    if not layer.mlp.gated:
        return activation(gate_up.double())
    first, second = gate_up.double().chunk(2, -1)
    return activation(first) * second


def check(  # noqa: PLR0917
    ops: Any, layer: LayerSpec, dtype: torch.dtype, rows: int = 3, close_gate: Any = close, device: Any = "cpu"
) -> None:
    """Hold every operation of ``ops`` to what is exact. ``close_gate(found, exact)``."""
    drawn = partial(draw, device=device)
    mixer, mlp = layer.mixer, layer.mlp
    width, turning = mixer.hidden, mixer.heads + mixer.kv_heads
    norm, delta = drawn(1 + layer.norm.bias, width, seed=1), drawn(rows, width, seed=2, dtype=dtype)
    for each in (delta, None):
        hidden = drawn(rows, width, dtype=dtype) * 3
        total = hidden if each is None else (hidden.float() + each.float() * layer.residual).to(dtype)
        for weights in (norm, None):
            kept = hidden.clone()
            found = ops.add_norm(kept, each, weights)
            if layer.residual == 1:
                assert torch.equal(kept, total)
            close(kept, total.double())
            close(found, kept.double() if weights is None else normed(layer.norm, kept, weights))
    qkv = drawn(rows, (turning + mixer.kv_heads) * mixer.head_dim, seed=3, dtype=dtype)
    qk_norm = drawn(turning, mixer.head_dim, seed=4) if mixer.qk_norm else None
    angles = drawn(rows, 1, mixer.rotary_dim // 2, seed=5)
    cos, sin = torch.cat([angles.cos(), angles.cos()], -1), angles.sin()
    if layer.rope is None:
        cos = sin = None
    found = ops.heads(qkv.clone(), qk_norm, cos, sin)
    query, key, value = heads(layer, qkv, qk_norm, cos, sin)
    close(found[0], query)
    close(found[1], key)
    assert torch.equal(found[2].double(), value)
    gate_up = drawn(rows, (1 + mlp.gated) * mlp.inner, seed=6, dtype=dtype) * 4
    close_gate(ops.gate(gate_up.clone()), gate(layer, gate_up))
