"""Which `FusedOps` a device gets, and why: the CUDA kernels, the C kernel of a CPU, or torch.

A driver, a compiler and a processor that were never tested together may compute wrong results. So the kernels must
agree with torch in a small step before they are used. This file can be imported if triton cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.fused_ops import (
    NATIVE,
    FusedOps,
    GatingOps,
    NativeFusedOps,
    StoringOps,
    TorchFusedOps,
    activation_name,
)
from ferrum_rpc.models.parts.attention import Attention
from ferrum_rpc.models.parts.layer import LayerSpec
from ferrum_rpc.models.parts.recurrent import Recurrent
from ferrum_rpc.models.recurrent_rows import RecurrentWeights, gated, gated_norm, recurrent_rows
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.native import cpu
from ferrum_rpc.selection import BackendCandidate, Unsuited, select

WIDEST: Final = 16384
"""Numbers of a row that one program of the CUDA kernels holds in its registers."""

LEAST_TOLERANCE: Final = 4e-6
"""A GPU's exponentials and quotients are good to some units in float32's last place."""

MOST_HEADS: Final = 16
"""Heads of the small step: a model's are alike."""


def select_fused_ops(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, interpreted: bool = False
) -> tuple[str, FusedOps]:
    """``(reason, ops)``: the kernels for ``device`` where they take such rows and agree with torch's answer, else
    torch's. ``interpreted``: the CUDA kernels on a CPU, through Triton's interpreter."""
    if device.type == "cuda" or interpreted:
        reason = "one launch each, every row read and written once"
        kernels = BackendCandidate("triton", lambda: _triton(spec, dtype, device), reason)
    else:
        reason = "each row is read and written once"
        kernels = BackendCandidate(NativeFusedOps.name, lambda: _native(spec, dtype, device), reason)
    plain = BackendCandidate(TorchFusedOps.name, lambda: TorchFusedOps(spec.layers[0], dtype))
    return select(kernels, plain, what="row operations", field="rows")[1:]


def _triton(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> FusedOps:
    if find_spec("triton") is None:
        raise Unsuited("it is not installed")
    if torch.version.hip is not None:
        raise Unsuited("the kernels support CUDA, not ROCm")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Unsuited(f"the kernels do not support {str(dtype).removeprefix('torch.')}")
    if spec.hidden_size > WIDEST:
        raise Unsuited(f"rows of {spec.hidden_size} are wider than {WIDEST}")
    _check_gate(spec)
    from ferrum_rpc.models.triton_fused_ops import TritonFusedOps

    _check_small_step(TritonFusedOps, spec, dtype, device, max(8 * torch.finfo(dtype).eps, LEAST_TOLERANCE))
    return TritonFusedOps(spec.layers[0])


def _native(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> FusedOps:
    cpu.require(device, dtype, torch.bfloat16, torch.float32)
    _check_gate(spec)
    _check_small_step(lambda small: NativeFusedOps(small, dtype), spec, dtype, device, 4 * torch.finfo(dtype).eps)
    return NativeFusedOps(spec.layers[0], dtype)


def _check_gate(spec: ModelSpec) -> None:
    for activation in (activation_name(layer.mlp.activation) for layer in spec.layers):
        if activation not in NATIVE:
            raise Unsuited(f"it supports the activations {', '.join(NATIVE)}, not {activation}")


def _check_small_step(
    make: Callable[[LayerSpec], FusedOps], spec: ModelSpec, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    """Raise Unsuited where a small step of any kind of layer differs from torch's by more than ``tolerance``, over one
    plus its size."""
    kinds = [kind for layer in dict.fromkeys(spec.layers) for kind in (layer, *layer.rotated())]
    for small in dict.fromkeys(map(_small, kinds)):
        expected = _answers(TorchFusedOps(small, dtype), small, dtype, device)
        found = _answers(make(small), small, dtype, device)
        pairs = [each for each in zip(expected, found, strict=True) if each[0].numel()]  # there may be no keys
        differences = [((a - b).abs() / (1 + a.abs())).max() for a, b in pairs]
        error = float(torch.stack(differences).max())
        if not error <= tolerance:  # so that NaN fails too
            raise Unsuited(f"a small step differs from torch's by {error:.1e}, more than {tolerance:.0e}")


def _small(layer: LayerSpec) -> LayerSpec:
    """With fewer heads, and without what row operations do not see."""
    mixer = layer.mixer
    if not isinstance(mixer, Attention):
        return layer
    kv_heads = min(mixer.kv_heads, MOST_HEADS // 4)
    heads = min(mixer.heads, MOST_HEADS - kv_heads)
    return replace(layer, mixer=replace(mixer, heads=heads, kv_heads=kv_heads, window=None))


def _recurrent_answers(
    mixer: Recurrent, gating: GatingOps | None, draw: Callable[..., Tensor], eps: float
) -> Sequence[Tensor]:
    shape, wide = mixer.shape, {"kind": torch.float32}
    heads = shape.value_heads
    taps, speed, shift = (draw(*size, **wide) for size in ((1, 1, 1), (heads,), (heads,)))
    weights = RecurrentWeights(taps, speed, shift, draw(shape.value_dim, **wide))
    rows = recurrent_rows(draw(3, shape.channels + heads * shape.value_dim + 2 * heads), shape, weights, gating)
    found = draw(3, heads, shape.value_dim)
    return rows.log_decay, rows.beta, gated_norm(found, rows.gate, weights, eps, gating)


def _answers(ops: FusedOps, layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixer, mlp = layer.mixer, layer.mlp

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, kind)

    hidden, delta = draw(3, mixer.hidden), draw(3, mixer.hidden)
    weight = draw(1 + layer.norm.bias, mixer.hidden, kind=torch.float32)
    answers = [
        ops.add_norm(hidden.clone(), None, weight),
        ops.add_norm(hidden, delta, weight),
        ops.add_norm(hidden.clone(), delta, None),
        ops.gate(draw(3, (1 + mlp.gated) * mlp.inner) * 4),
    ]
    gating = ops if isinstance(ops, GatingOps) else None
    if isinstance(mixer, Recurrent):
        answers += _recurrent_answers(mixer, gating, draw, layer.norm.eps)
    if not isinstance(mixer, Attention):
        return [answer.float() for answer in answers]
    if mixer.gated:
        attended, gates = (draw(3, mixer.heads, mixer.head_dim) for _ in range(2))
        answers.append(gated(attended, gates, gating))
    rotating = mixer.heads + mixer.kv_heads
    qkv = draw(3, (rotating + mixer.kv_heads) * mixer.head_dim)
    norm = draw(rotating, mixer.head_dim, kind=torch.float32) if mixer.qk_norm else None
    cos = sin = None
    if layer.rope is not None:
        angles = draw(3, 1, mixer.rotary_dim // 2, kind=torch.float32)
        cos, sin = torch.cat([angles.cos(), angles.cos()], -1), angles.sin()
    if isinstance(ops, StoringOps):
        from ferrum_rpc.native.triton_heads import CacheRows

        keys, values = (qkv.new_zeros((1, len(qkv), mixer.kv_heads, mixer.head_dim)) for _ in range(2))
        heads = ops.heads_stored(CacheRows(keys, values, torch.arange(len(qkv), device=device)), qkv, norm, cos, sin)
        cache = keys[0], values[0]
    else:
        heads = ops.heads(qkv, norm, cos, sin)
        cache = heads[1:]
    return [answer.float() for answer in (*answers, *heads, *cache)]
