"""What a decoder does between its matrix products, on a CUDA device: one launch where torch makes two to seven.

A decode step of an 8B model on an H200 has 3.8 ms for reading its weights, and 36 layers. In torch a layer has thirteen
small operations besides products and attention; at 2 us each they add a millisecond even in a CUDA graph. These kernels
make four of them. Arithmetic is float32, rounded once, as in `fused_ops`, whose torch way is the oracle.

This file imports triton: `fused_ops_choice` says whether it can be imported.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_rpc.models.fused_ops import Heads, split_heads
from ferrum_rpc.models.spec import ModelSpec

HEADS_AT_ONCE = 8
"""Heads of one program of the rotation: 2 kB in 16 bits, 16 bytes for each thread of four warps."""

GATES_AT_ONCE = 1024
"""Numbers of one program of the gate: few enough that one row occupies several multiprocessors."""


class TritonFusedOps:
    """A `FusedOps` for rows on a CUDA device, in any dtype up to float32, with silu."""

    name = "triton"

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        width = hidden.shape[-1]
        padded = triton.next_power_of_2(width)
        if len(hidden):
            add_norm_kernel[(len(hidden),)](
                hidden,
                hidden if delta is None else delta,
                weight,
                out,
                self._spec.norm_eps,
                WIDTH=width,
                PADDED=padded,
                HAS_DELTA=delta is not None,
                num_warps=min(16, max(4, padded // 512)),
            )
        return out

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Heads:
        """Query, key and value are views of ``qkv``."""
        spec = self._spec
        rotating = spec.heads + spec.kv_heads
        if len(qkv):
            rotate_kernel[(len(qkv), triton.cdiv(rotating, HEADS_AT_ONCE))](
                qkv,
                qkv if norm is None else norm,
                cos,
                sin,
                spec.norm_eps,
                ROTATING=rotating,
                HEADS=rotating + spec.kv_heads,
                HALF=spec.head_dim // 2,
                PADDED=triton.next_power_of_2(spec.head_dim // 2),
                AT_ONCE=HEADS_AT_ONCE,
                HAS_NORM=norm is not None,
            )
        return split_heads(qkv, spec)

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[-1] // 2
        out = gate_up.new_empty((rows, width))
        if rows:
            gate_kernel[(rows, triton.cdiv(width, GATES_AT_ONCE))](gate_up, out, WIDTH=width, AT_ONCE=GATES_AT_ONCE)
        return out


@triton.jit
def add_norm_kernel(
    hidden: tl.tensor,  # [T, WIDTH], dense, as all here; the sum is left there
    delta: tl.tensor,
    weight: tl.tensor,  # [WIDTH]
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
) -> None:
    """One program per row. The sum is rounded before it is normed: what the next layer adds to is what was normed."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED)
    held = column < WIDTH
    x = tl.load(hidden + row + column, mask=held, other=0.0)
    if HAS_DELTA:
        x = (x.to(tl.float32) + tl.load(delta + row + column, mask=held, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(hidden + row + column, x, mask=held)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = wide * scale * tl.load(weight + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row + column, normed.to(x.dtype), mask=held)


@triton.jit
def rotate_kernel(
    qkv: tl.tensor,  # [T, HEADS, 2 * HALF], of which the first ROTATING heads are normed and rotated where they are
    norm: tl.tensor,  # float32 [ROTATING, 2 * HALF]
    cos: tl.tensor,  # float32 [T, 1, 2 * HALF]: both halves are the same
    sin: tl.tensor,  # float32 [T, 1, HALF]
    eps: tl.tensor,
    ROTATING: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """One program per token and AT_ONCE heads. Channel i is paired with i + HALF."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    dim = tl.arange(0, PADDED)
    in_dim = dim < HALF
    held = (head < ROTATING)[:, None] & in_dim[None, :]
    at = qkv + (token * HEADS + head)[:, None] * (2 * HALF) + dim[None, :]
    first = tl.load(at, mask=held, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=held, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        weight = norm + head[:, None] * (2 * HALF) + dim[None, :]
        first = first * scale * tl.load(weight, mask=held, other=0.0)
        second = second * scale * tl.load(weight + HALF, mask=held, other=0.0)
    c = tl.load(cos + token * (2 * HALF) + dim, mask=in_dim, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + dim, mask=in_dim, other=0.0)[None, :]
    tl.store(at, (first * c - second * s).to(qkv.dtype.element_ty), mask=held)
    tl.store(at + HALF, (second * c + first * s).to(qkv.dtype.element_ty), mask=held)


@triton.jit
def gate_kernel(
    gate_up: tl.tensor,  # [T, 2 * WIDTH]
    out: tl.tensor,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """One program per row and AT_ONCE numbers: silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    held = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=held, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=held)
