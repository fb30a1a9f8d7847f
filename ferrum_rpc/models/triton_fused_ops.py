"""What a decoder does between its matrix products, on a CUDA device: one launch where torch makes two to seven.

A decode step of an 8B model on an H200 has 3.8 ms for reading its weights, and 36 layers. In torch a layer has thirteen
small operations besides products and attention; at 2 us each they add a millisecond even in a CUDA graph. These kernels
make four of them, and one of the four (`native.triton_heads`) writes K and V to the cache as well. Arithmetic is
float32, rounded once, as in `fused_ops`, whose torch way is the oracle.

This file imports triton: `fused_ops_choice` says whether it can be imported.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_rpc.models.fused_ops import NATIVE, Heads, activation_name, split_heads
from ferrum_rpc.models.parts.attention import Attention
from ferrum_rpc.models.parts.clamped import Clamped
from ferrum_rpc.models.parts.layer import LayerSpec
from ferrum_rpc.models.triton_gates import decays, gate_heads
from ferrum_rpc.native.triton_heads import CacheRows, HeadNorm, place_heads

GATES_AT_ONCE = 1024
"""Numbers of one program of the gate: few enough that one row occupies several multiprocessors."""


class TritonFusedOps:
    """A `StoringOps`, and a `GatingOps`, for rows on a CUDA device, in any dtype up to float32, with the activations of
    `NATIVE`."""

    name = "triton"

    def __init__(self, layer: LayerSpec) -> None:
        self._norm, self._residual = layer.norm, layer.residual
        self._mixer, self._mlp = layer.mixer, layer.mlp

    def of(self, layer: LayerSpec) -> Self:
        return type(self)(layer)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Tensor | None) -> Tensor:
        out = hidden if norm is None else torch.empty_like(hidden)
        width = hidden.shape[-1]
        padded = triton.next_power_of_2(width)
        if len(hidden) and not (norm is None and delta is None):
            add_norm_kernel[(len(hidden),)](
                hidden,
                hidden if delta is None else delta,
                hidden if norm is None else norm,
                out,
                self._norm.eps,
                self._residual,
                WIDTH=width,
                PADDED=padded,
                HAS_DELTA=delta is not None,
                HAS_NORM=norm is not None,
                CENTRED=self._norm.kind == "layer",
                BIASED=self._norm.bias,
                num_warps=min(16, max(4, padded // 512)),
            )
        return out

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Heads:
        """Query, key and value are views of ``qkv``."""
        return self.heads_stored(None, qkv, norm, cos, sin)

    def heads_stored(
        self, into: CacheRows | None, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None
    ) -> Heads:
        assert isinstance(self._mixer, Attention)  # noqa: S101 - no other layer has heads
        heads = split_heads(qkv, self._mixer)
        head_norm = None if norm is None else HeadNorm(norm, self._norm.eps, self._mixer.qk_norm == "row")
        place_heads(*heads, head_norm, None if cos is None or sin is None else (cos, sin), into)
        return heads

    decays = staticmethod(decays)
    gate_heads = staticmethod(gate_heads)

    def gate(self, gate_up: Tensor) -> Tensor:
        mlp = self._mlp
        limit, slope = mlp.activation if isinstance(mlp.activation, Clamped) else (0.0, 1.0)
        rows, width = len(gate_up), gate_up.shape[-1] // (1 + mlp.gated)
        out = gate_up.new_empty((rows, width))
        if rows:
            gate_kernel[(rows, triton.cdiv(width, GATES_AT_ONCE))](
                gate_up,
                out,
                WIDTH=width,
                AT_ONCE=GATES_AT_ONCE,
                ACTIVATION=NATIVE[activation_name(mlp.activation)],
                GATED=mlp.gated,
                LIMIT=limit,
                SLOPE=slope,
            )
        return out


@triton.jit
def add_norm_kernel(
    hidden: tl.tensor,  # [T, WIDTH], dense, as all here; the sum is left there
    delta: tl.tensor,
    norm: tl.tensor,  # float32 [1 or 2, WIDTH]
    out: tl.tensor,
    eps: tl.tensor,
    residual: tl.tensor,  # what delta is multiplied with
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """One program per row. The sum is rounded before it is normed: what the next layer adds to is what was normed."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED)
    held = column < WIDTH
    x = tl.load(hidden + row + column, mask=held, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + row + column, mask=held, other=0.0).to(tl.float32) * residual
        x = (x.to(tl.float32) + added).to(x.dtype)
        tl.store(hidden + row + column, x, mask=held)
    if HAS_NORM:
        wide = x.to(tl.float32)
        if CENTRED:
            wide = tl.where(held, wide - tl.sum(wide, 0) / WIDTH, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        normed = wide * scale * tl.load(norm + column, mask=held, other=0.0)
        if BIASED:
            normed += tl.load(norm + WIDTH + column, mask=held, other=0.0)
        tl.store(out + row + column, normed.to(x.dtype), mask=held)


@triton.jit
def gate_kernel(
    gate_up: tl.tensor,  # [T, 2 * WIDTH], or without a gate [T, WIDTH]
    out: tl.tensor,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
) -> None:
    """One program per row and AT_ONCE numbers: activation(gate) * up, or as `Clamped`, or activation(up)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    held = column < WIDTH
    begin = gate_up + row * ((1 + GATED) * WIDTH)
    x = tl.load(begin + column, mask=held, other=0.0).to(tl.float32)
    if ACTIVATION == 2:
        result = tl.where(x < 0.0, 0.0, x)
    else:
        s = x
        if ACTIVATION == 3:
            x = tl.where(x > LIMIT, LIMIT, x)
            s = x * SLOPE
        if ACTIVATION == 1:  # the tanh form of gelu: x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))
            s = x * (x * x * 0.0713548163 + 1.59576912)
        result = x / (1.0 + tl.exp(-s))
    if GATED:
        up = tl.load(begin + WIDTH + column, mask=held, other=0.0).to(tl.float32)
        if ACTIVATION == 3:
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        result = result * up
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=held)
