"""What a recurrent layer computes of its rows before and after the recurrence, and the gate of attention's output.

On a CPU the functions of torch round a number by its place in a tensor, vectors of numbers unlike the rest, so that a
row's bits would depend on the rows beside it. So torch computes each row by itself there, which takes long for a
prompt, and on other devices all at once. On a CPU a C
kernel (``recurrent_rows.c``) computes every number alike, wherever it is. Everything is float32 (or wider), and rounded
once.
"""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.models.fused_ops import GatingOps
from ferrum_rpc.native import library

DTYPES: Final = (torch.bfloat16, torch.float32)
"""Of the rows that the kernel takes."""

LANES: Final = 16
"""No vectors hold more floats."""


class RecurrentWeights(NamedTuple):
    """The floats of a `parts.recurrent.Recurrent`, float32 or wider.

    taps      [channels, 1, taps]: the convolution's weights
    speed     [value_heads]: minus how fast a state decays
    shift     [value_heads]: added to what a token says of the decay
    out_norm  [value_dim]: the weights of the output's norm
    """

    taps: Tensor
    speed: Tensor
    shift: Tensor
    out_norm: Tensor

    @classmethod
    def of(cls, taps: Tensor, decay: Tensor, shift: Tensor, out_norm: Tensor) -> RecurrentWeights:
        """Of those of a checkpoint, where ``decay`` is the logarithm of the speed. The weights of one tap are side by
        side then, as the convolution reads them."""
        return cls(taps.transpose(0, 2).contiguous().transpose(0, 2), -decay.exp(), shift, out_norm)

    def in_c(self, shape: RecurrentShape, eps: float) -> library.RecurrentWeightsStruct | None:
        """For layers in C, of rows in bfloat16; None: these do not take such heads."""
        step = library.recurrent_lanes(shape.key_dim, shape.value_dim, shape.taps)
        gate = library.row_lanes(shape.value_dim)
        if not step or not gate:
            return None
        addresses = (each.data_ptr() for each in self)
        heads = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.taps
        return library.RecurrentWeightsStruct(*addresses, *heads, step, library.row_lanes(LANES), gate, eps)


class RecurrentRows(NamedTuple):
    """The product of a layer's inputs in its parts: ``channels`` [T, channels] before the convolution, and the output's
    ``gate`` [T, value_heads * value_dim], both of the model's type; ``log_decay`` and ``beta`` [T, value_heads], of the
    weights'."""

    channels: Tensor
    gate: Tensor
    log_decay: Tensor
    beta: Tensor


def recurrent_rows(
    inputs: Tensor, shape: RecurrentShape, weights: RecurrentWeights, ops: GatingOps | None = None
) -> RecurrentRows:
    """The parts of ``inputs`` [T, all side by side]. ``ops``, here and below: what computes on a GPU, if anything of
    ours does."""
    heads = shape.value_heads
    widths = [shape.channels, heads * shape.value_dim, heads, heads]
    channels, gate, written, decay = torch.split(inputs, widths, -1)
    speed, wide = weights.speed, weights.speed.dtype
    if ops is not None:
        return RecurrentRows(channels, gate, *ops.decays(written, decay, speed, weights.shift))
    if lanes := _lanes(inputs, wide, LANES):
        log_decay, beta = speed.new_empty((2, len(inputs), heads))
        numbers = (each.data_ptr() for each in (written, decay, speed, weights.shift, log_decay, beta))
        rows = library.DecayRows(*numbers, *_rows(written), heads, inputs.dtype == torch.float32, lanes)
        library.load().ferrum_decay_rows(ctypes.addressof(rows))
        return RecurrentRows(channels, gate, log_decay, beta)
    if inputs.device.type != "cpu":
        return RecurrentRows(channels, gate, *_gates(written, decay, weights))
    each = [_gates(*row, weights) for row in zip(written, decay, strict=True)]
    log_decay, beta = map(torch.stack, zip(*each, strict=True))
    return RecurrentRows(channels, gate, log_decay, beta)


def gated_norm(
    found: Tensor, gate: Tensor, weights: RecurrentWeights, eps: float, ops: GatingOps | None = None
) -> Tensor:
    """[T, value_heads * value_dim] of what the recurrence ``found`` [T, value_heads, value_dim]: each head over its
    root mean square, times the norm's weights and the SiLU of the gate."""
    norm = weights.out_norm
    if ops is not None:
        return ops.gate_heads(found, gate.view(found.shape), norm, eps).flatten(1)
    if lanes := _lanes(found, norm.dtype, found.shape[2]):
        return _gate_heads(found, gate.view(found.shape), lanes, norm, eps).flatten(1)
    if found.device.type != "cpu":
        return _normed(found, gate, norm, eps)
    return torch.stack([_normed(*row, norm, eps) for row in zip(found, gate, strict=True)])


def gated(attended: Tensor, gate: Tensor, ops: GatingOps | None = None) -> Tensor:
    """``attended`` times the sigmoid of ``gate``, both [T, heads, head_dim]."""
    if ops is not None:
        return ops.gate_heads(attended, gate)
    if lanes := _lanes(attended, torch.float32, attended.shape[2]):
        return _gate_heads(attended, gate, lanes)
    if attended.device.type != "cpu":
        return _opened(attended, gate)
    return torch.stack([_opened(*row) for row in zip(attended, gate, strict=True)])


def _gates(written: Tensor, decay: Tensor, weights: RecurrentWeights) -> tuple[Tensor, Tensor]:
    """The logarithm of the decay, and beta, of one row or of all."""
    wide = weights.speed.dtype
    return weights.speed * F.softplus(decay.to(wide) + weights.shift), written.to(wide).sigmoid()


def _normed(found: Tensor, gate: Tensor, norm: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(found.to(norm.dtype), norm.shape, norm, eps)
    return (normed.flatten(-2) * F.silu(gate.to(norm.dtype))).to(gate.dtype)


def _opened(attended: Tensor, gate: Tensor) -> Tensor:
    wide = torch.promote_types(attended.dtype, torch.float32)
    return (attended.to(wide) * gate.to(wide).sigmoid()).to(attended.dtype)


def _lanes(rows: Tensor, wide: torch.dtype, elements: int) -> int:
    """Of the kernel's vectors, which divide ``elements``; 0: it does not take such rows."""
    if rows.device.type != "cpu" or rows.dtype not in DTYPES or wide != torch.float32:
        return 0
    return library.row_lanes(elements)


def _rows(tensor: Tensor) -> tuple[int, int]:
    """How many rows, and the bytes from one to the next."""
    return len(tensor), tensor.stride(0) * tensor.element_size()


def _gate_heads(heads: Tensor, gates: Tensor, lanes: int, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    heads = heads.contiguous()
    made = torch.empty_like(heads)
    rows = library.GatedRows(
        heads.data_ptr(),
        gates.data_ptr(),
        made.data_ptr(),
        None if norm is None else norm.data_ptr(),
        *_rows(gates),
        gates.stride(1) * gates.element_size(),
        *heads.shape[1:],
        heads.dtype == torch.float32,
        lanes,
        torch.get_num_threads(),
        eps,
    )
    library.load().ferrum_gated_rows(ctypes.addressof(rows))
    return made
