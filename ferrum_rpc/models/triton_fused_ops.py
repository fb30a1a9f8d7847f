"""What a decoder does between its matrix products, on a CUDA device: one launch where torch makes two to seven.

A decode step of an 8B model on an H200 has 3.8 ms for reading its weights, and 36 layers. In torch a layer has thirteen
small operations besides products and attention; at 2 us each they add a millisecond even in a CUDA graph. These kernels
make four of them. Arithmetic is float32, rounded once, as in `fused_ops`, whose torch way is the oracle.

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

from ferrum_rpc.models.fused_ops import NATIVE, Heads, split_heads
from ferrum_rpc.models.parts.layer import LayerSpec

HEADS_AT_ONCE = 8
"""Heads of one program of the rotation: 2 kB in 16 bits, 16 bytes for each thread of four warps."""

GATES_AT_ONCE = 1024
"""Numbers of one program of the gate: few enough that one row occupies several multiprocessors."""


class TritonFusedOps:
    """A `FusedOps` for rows on a CUDA device, in any dtype up to float32, with the activations of `NATIVE`."""

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
        mixer = self._mixer
        rotating = mixer.heads + mixer.kv_heads
        whole = norm is not None and mixer.qk_norm == "row"
        blocks = triton.cdiv(rotating, HEADS_AT_ONCE)
        if len(qkv) and not (norm is None and cos is None):
            rotated = mixer.head_dim if cos is None else cos.shape[-1]
            rotate_kernel[(len(qkv), 1 if whole else blocks)](
                qkv,
                qkv if norm is None else norm,
                qkv if cos is None else cos,
                qkv if sin is None else sin,
                self._norm.eps,
                QUERIES=mixer.heads,
                TURNING=rotating,
                HEADS=rotating + mixer.kv_heads,
                DIM=mixer.head_dim,
                HALF=rotated // 2,
                PADDED=triton.next_power_of_2(rotated // 2),
                REST=triton.next_power_of_2(mixer.head_dim - rotated) if rotated < mixer.head_dim else 0,
                AT_ONCE=HEADS_AT_ONCE,
                BLOCKS=blocks if whole else 1,
                ROW=triton.next_power_of_2(mixer.heads * mixer.head_dim) if whole else 0,
                HAS_NORM=norm is not None,
                HAS_ROPE=cos is not None,
            )
        return split_heads(qkv, mixer)

    def gate(self, gate_up: Tensor) -> Tensor:
        mlp = self._mlp
        rows, width = len(gate_up), gate_up.shape[-1] // (1 + mlp.gated)
        out = gate_up.new_empty((rows, width))
        if rows:
            gate_kernel[(rows, triton.cdiv(width, GATES_AT_ONCE))](
                gate_up,
                out,
                WIDTH=width,
                AT_ONCE=GATES_AT_ONCE,
                ACTIVATION=NATIVE[mlp.activation],
                GATED=mlp.gated,
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
def rotate_kernel(
    qkv: tl.tensor,  # [T, HEADS, DIM], of which the first TURNING heads are normed and rotated where they are
    norm: tl.tensor,  # float32 [TURNING, DIM]
    cos: tl.tensor,  # float32 [T, 1, 2 * HALF]: both halves are the same
    sin: tl.tensor,  # float32 [T, 1, HALF]
    eps: tl.tensor,
    QUERIES: tl.constexpr,
    TURNING: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,  # room for the channels behind the pairs; 0: there are none
    AT_ONCE: tl.constexpr,
    BLOCKS: tl.constexpr,  # of AT_ONCE heads that a program works on
    ROW: tl.constexpr,  # room for a whole query, which is normed as one, as is the key; 0: each head is
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
) -> None:
    """One program per token and BLOCKS times AT_ONCE heads. Channel i is paired with i + HALF."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED)
    in_dim = dim < HALF
    of_query = 0.0
    of_key = 0.0
    if ROW > 0:
        whole = tl.arange(0, ROW)
        at = qkv + token * HEADS * DIM + whole
        query = tl.load(at, mask=whole < QUERIES * DIM, other=0.0).to(tl.float32)
        key = tl.load(at + QUERIES * DIM, mask=whole < (TURNING - QUERIES) * DIM, other=0.0).to(tl.float32)
        of_query = 1.0 / tl.sqrt(tl.sum(query * query, 0) / (QUERIES * DIM) + eps)
        of_key = 1.0 / tl.sqrt(tl.sum(key * key, 0) / ((TURNING - QUERIES) * DIM) + eps)
    for block in tl.static_range(BLOCKS):
        head = (tl.program_id(1) * BLOCKS + block) * AT_ONCE + tl.arange(0, AT_ONCE)
        held = (head < TURNING)[:, None] & in_dim[None, :]
        at = qkv + (token * HEADS + head)[:, None] * DIM + dim[None, :]
        first = tl.load(at, mask=held, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=held, other=0.0).to(tl.float32)
        if HAS_NORM:
            if REST > 0:
                behind = tl.arange(0, REST)
                rest_held = (head < TURNING)[:, None] & (2 * HALF + behind < DIM)[None, :]
                rest_at = (head * DIM)[:, None] + (2 * HALF + behind)[None, :]
                rest = tl.load(qkv + token * HEADS * DIM + rest_at, mask=rest_held, other=0.0).to(tl.float32)
            if ROW > 0:
                scale = tl.where(head < QUERIES, of_query, of_key)[:, None]
            else:
                squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
                if REST > 0:
                    squares += tl.sum(rest * rest, 1)
                scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
            weight = norm + head[:, None] * DIM + dim[None, :]
            first = first * scale * tl.load(weight, mask=held, other=0.0)
            second = second * scale * tl.load(weight + HALF, mask=held, other=0.0)
            if REST > 0:
                rest = rest * scale * tl.load(norm + rest_at, mask=rest_held, other=0.0)
                tl.store(qkv + token * HEADS * DIM + rest_at, rest.to(qkv.dtype.element_ty), mask=rest_held)
        if HAS_ROPE:
            c = tl.load(cos + token * (2 * HALF) + dim, mask=in_dim, other=0.0)[None, :]
            s = tl.load(sin + token * HALF + dim, mask=in_dim, other=0.0)[None, :]
            rotated = first * c - second * s
            second = second * c + first * s
            first = rotated
        tl.store(at, first.to(qkv.dtype.element_ty), mask=held)
        tl.store(at + HALF, second.to(qkv.dtype.element_ty), mask=held)


@triton.jit
def gate_kernel(
    gate_up: tl.tensor,  # [T, 2 * WIDTH], or without a gate [T, WIDTH]
    out: tl.tensor,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """One program per row and AT_ONCE numbers: activation(gate) * up, or activation(up)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    held = column < WIDTH
    begin = gate_up + row * ((1 + GATED) * WIDTH)
    x = tl.load(begin + column, mask=held, other=0.0).to(tl.float32)
    if ACTIVATION == 2:
        result = tl.where(x < 0.0, 0.0, x)
    else:
        s = x
        if ACTIVATION == 1:  # the tanh form of gelu: x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))
            s = x * (x * x * 0.0713548163 + 1.59576912)
        result = x / (1.0 + tl.exp(-s))
    if GATED:
        result = result * tl.load(begin + WIDTH + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=held)
