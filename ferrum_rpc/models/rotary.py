"""Rotary position embeddings: the frequencies of a `RopeSpec`, and the rotation itself.

Angles, cosines and sines are float32 whatever the model's dtype, as in transformers: in bfloat16 a position above 256
has no exact representation. The rotation is computed in float32 too and rounded once. No table of all positions is
kept: a step's cosines cost microseconds once per step, a table for a million positions costs half a gigabyte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.models.rope import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """float32 [dim / 2] on the host: radians per position of each pair of channels that are rotated."""
    dim = spec.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    periods = spec.theta**exponents
    if spec.kind == "longrope":
        return 1.0 / (torch.tensor(spec.long_factors if spec.long else spec.short_factors) * periods)
    plain = 1.0 / periods
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3_frequencies(spec, plain)
    if spec.kind == "yarn":
        return _yarn_frequencies(spec, periods, dim)
    return plain


def _llama3_frequencies(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Long waves are divided by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    longest = spec.original_context / spec.low_freq_factor
    shortest = spec.original_context / spec.high_freq_factor
    blend = (spec.original_context / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    scaled = torch.where(wavelength > longest, plain / spec.factor, plain)
    blended = (1 - blend) * scaled / spec.factor + blend * scaled
    return torch.where((wavelength >= shortest) & (wavelength <= longest), blended, scaled)


def _yarn_frequencies(spec: RopeSpec, periods: Tensor, head_dim: int) -> Tensor:
    """Channels that rotate often within the original context are kept, those that rotate rarely are interpolated."""

    def channel(turns: float) -> float:
        ratio = math.log(spec.original_context / (turns * 2 * math.pi))
        return head_dim * ratio / (2 * math.log(spec.theta))

    low, high = channel(spec.beta_fast), channel(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (spec.factor * periods) * (1 - keep) + 1.0 / periods * keep


class Rotary:
    """Cosines and sines of a step's positions, for every rotation of a model; all rotate equally many channels."""

    def __init__(self, specs: Sequence[RopeSpec], head_dim: int, device: torch.device) -> None:
        self._frequencies = torch.stack([inverse_frequencies(spec, head_dim) for spec in specs])[:, None, None].to(
            device
        )
        self._scaling = None
        if any(spec.attention_factor != 1.0 for spec in specs):
            self._scaling = torch.tensor([spec.attention_factor for spec in specs]).view(-1, 1, 1, 1).to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``(cos [R, T, 1, dim], sin [R, T, 1, dim / 2])`` float32 of ``positions`` int64 [T]: of each of the R
        rotations, for `rotate`."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scaling is not None:
            cos, sin = cos * self._scaling, sin * self._scaling
        return torch.cat((cos, cos), -1), sin


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of ``heads`` [T, n, head_dim] (float32 or wider), as many as ``cos`` [T, 1, dim] has,
    pairing channel i with i + dim / 2; the same shape."""
    dim = cos.shape[-1]
    half = dim // 2
    first, second = heads[..., :half], heads[..., half:dim]
    rotated = heads * (cos if dim == heads.shape[-1] else F.pad(cos, (0, heads.shape[-1] - dim), value=1.0))
    rotated[..., :half].addcmul_(second, sin, value=-1)
    rotated[..., half:dim].addcmul_(first, sin)
    return rotated
