"""What a recurrent layer computes of its rows before and after the recurrence, and the gate of attention's output.

Each row is computed by itself. The functions of torch round a number by its place in a tensor, vectors of numbers
unlike the rest, so that a row's bits would depend on the rows beside it. Everything is float32 (or wider), and rounded
once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.core import RecurrentShape


class RecurrentWeights(NamedTuple):
    """The floats of a `parts.recurrent.Recurrent`, float32 or wider.

    taps      [channels, 1, taps]: the convolution's weights
    decay     [value_heads]: the logarithm of how fast a state decays
    shift     [value_heads]: added to what a token says of the decay
    out_norm  [value_dim]: the weights of the output's norm
    """

    taps: Tensor
    decay: Tensor
    shift: Tensor
    out_norm: Tensor

    def laid_out(self) -> RecurrentWeights:
        """The same with the weights of one tap side by side, as the convolution reads them."""
        return self._replace(taps=self.taps.transpose(0, 2).contiguous().transpose(0, 2))


class RecurrentRows(NamedTuple):
    """The product of a layer's inputs in its parts: ``channels`` [T, channels] before the convolution, and the output's
    ``gate`` [T, value_heads * value_dim], both of the model's type; ``log_decay`` and ``beta`` [T, value_heads], of the
    weights'."""

    channels: Tensor
    gate: Tensor
    log_decay: Tensor
    beta: Tensor


def recurrent_rows(inputs: Tensor, shape: RecurrentShape, weights: RecurrentWeights) -> RecurrentRows:
    """The parts of ``inputs`` [T, all side by side]."""
    heads = shape.value_heads
    widths = [shape.channels, heads * shape.value_dim, heads, heads]
    channels, gate, written, decay = torch.split(inputs, widths, -1)
    speed, wide = -weights.decay.exp(), weights.decay.dtype
    log_decay = torch.stack([speed * F.softplus(row.to(wide) + weights.shift) for row in decay])
    return RecurrentRows(channels, gate, log_decay, torch.stack([row.to(wide).sigmoid() for row in written]))


def gated_norm(found: Tensor, gate: Tensor, weights: RecurrentWeights, eps: float) -> Tensor:
    """[T, value_heads * value_dim] of what the recurrence ``found`` [T, value_heads, value_dim]: each head over its
    root mean square, times the norm's weights and the SiLU of the gate."""
    norm, made = weights.out_norm, torch.empty_like(gate)
    for row, heads, factors in zip(made, found, gate, strict=True):
        normed = F.rms_norm(heads.to(norm.dtype), norm.shape, norm, eps)
        row.copy_(normed.flatten() * F.silu(factors.to(norm.dtype)))
    return made


def gated(attended: Tensor, gate: Tensor) -> Tensor:
    """``attended`` times the sigmoid of ``gate``, both [T, heads, head_dim]."""
    wide, made = torch.promote_types(attended.dtype, torch.float32), torch.empty_like(attended)
    for row, heads, factors in zip(made, attended, gate, strict=True):
        row.copy_(heads.to(wide) * factors.to(wide).sigmoid())
    return made
