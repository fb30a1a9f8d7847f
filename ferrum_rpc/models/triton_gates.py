"""The gates of recurrent layers, and of attention whose output is gated, on a CUDA device: one launch where torch makes
three to six. Arithmetic is float32, rounded once, as in `recurrent_rows`, whose torch way is the oracle.

This file imports triton.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 256
"""Gates of one program."""

HEADS_AT_ONCE = 8
"""Heads of one program."""


def decays(written: Tensor, decay: Tensor, speed: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """``speed * softplus(decay + shift)`` and the sigmoid of ``written``, both [T, heads] in float32. Rows of
    ``written`` and ``decay`` [T, heads] may be parts of wider ones; ``speed`` and ``shift``: float32 [heads]."""
    tokens, heads = written.shape
    log_decay, beta = speed.new_empty((2, tokens, heads))
    decays_kernel[(triton.cdiv(tokens * heads, AT_ONCE),)](
        written,
        decay,
        written.stride(0),
        decay.stride(0),
        speed,
        shift,
        log_decay,
        beta,
        tokens * heads,
        HEADS=heads,
        AT_ONCE=AT_ONCE,
    )
    return log_decay, beta


def gate_heads(heads: Tensor, gates: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Of ``heads`` [T, heads, n] each times the sigmoid of its gate; with a ``norm`` (float32 [n]) each over its root
    mean square, times that and the SiLU of its gate. ``gates``: [T, heads, n], the last axis dense."""
    heads = heads.contiguous()
    made = torch.empty_like(heads)
    tokens, count, width = heads.shape
    gate_heads_kernel[tokens, triton.cdiv(count, HEADS_AT_ONCE)](
        heads,
        gates,
        *gates.stride()[:2],
        made,
        heads if norm is None else norm,
        eps,
        HEADS=count,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        AT_ONCE=min(HEADS_AT_ONCE, triton.next_power_of_2(count)),
        HAS_NORM=norm is not None,
    )
    return made


@triton.jit
def decays_kernel(
    written: tl.tensor,
    decay: tl.tensor,
    written_row: tl.tensor,
    decay_row: tl.tensor,
    speed: tl.tensor,
    shift: tl.tensor,
    log_decay: tl.tensor,  # [T, HEADS], dense
    beta: tl.tensor,
    count: tl.tensor,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """One program per AT_ONCE gates."""
    each = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    held, row, head = each < count, each // HEADS, each % HEADS
    x = tl.load(decay + row * decay_row + head, mask=held, other=0.0).to(tl.float32) + tl.load(shift + head)
    softened = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    tl.store(log_decay + each, tl.load(speed + head) * softened, mask=held)
    said = tl.load(written + row * written_row + head, mask=held, other=0.0).to(tl.float32)
    tl.store(beta + each, tl.sigmoid(said), mask=held)


@triton.jit
def gate_heads_kernel(
    heads: tl.tensor,
    gates: tl.tensor,
    gate_row: tl.tensor,
    gate_head: tl.tensor,
    made: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """One program per row and AT_ONCE heads."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE), tl.arange(0, PADDED)
    held = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
    at = (row * HEADS + head)[:, None] * WIDTH + column[None, :]
    x = tl.load(heads + at, mask=held, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * gate_row + head[:, None] * gate_head + column[None, :], mask=held, other=0.0)
    opened = gate.to(tl.float32)
    factor = tl.sigmoid(opened)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + eps)
        x = x * scale[:, None] * tl.load(norm + column, mask=column < WIDTH, other=0.0)[None, :]
        factor = opened * factor
    tl.store(made + at, (x * factor).to(made.dtype.element_ty), mask=held)
