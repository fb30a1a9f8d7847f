"""Rotary position embeddings: which frequencies a configuration means, and the rotation itself.

Angles, cosines and sines are float32 whatever the model's dtype, as in transformers: in bfloat16 a position above 256
has no exact representation. The rotation is computed in float32 too and rounded once. No table of all positions is
kept: a step's cosines cost microseconds once per step, a table for a million positions costs half a gigabyte.

``dynamic`` and ``longrope`` scaling are refused: their frequencies depend on the longest sequence of a batch, so that a
sequence's numbers would change with its neighbours.

Sources: RoFormer (2104.09864); linear: kaiokendev; llama3: the Llama 3.1 release; yarn: 2309.00071. The arithmetic
follows ``transformers.modeling_rope_utils``, which is the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import ROPE_IRRELEVANT, refuse_unread
from ferrum_rpc.models.fields import Fields

Kind = Literal["default", "linear", "llama3", "yarn"]
SUPPORTED: tuple[Kind, ...] = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """``original_context`` (llama3, yarn) is the context before scaling; ``attention_factor`` (yarn) multiplies cosines
    and sines. Fields that a kind does not use keep their defaults."""

    kind: Kind = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_config(cls, config: Fields, max_context: int) -> RopeSpec:
        """Read ``rope_scaling`` + ``rope_theta`` (transformers 4) or ``rope_parameters`` (5).

        Raises NotSupported for a scaling that cannot be served, InvalidRequest for one that is malformed; both name the
        field.
        """
        rope = _section(config)
        theta = _agreed(rope, config, "rope_theta") or DEFAULT_THETA
        if theta <= 1:
            raise InvalidRequest(f"rope_theta must be greater than 1, not {theta}", field="rope_theta")
        kind = rope.text("rope_type", rope.text("type", "default"))
        if kind not in SUPPORTED or rope.text("type", kind) != kind:
            field = rope.name("rope_type" if "rope_type" in rope else "type")
            raise NotSupported(f"{field} {kind!r} is not supported; supported: {', '.join(SUPPORTED)}", field=field)
        for where in (rope, config):
            if where.number("partial_rotary_factor", 1.0) != 1.0:
                field = where.name("partial_rotary_factor")
                raise NotSupported(f"{field}: only whole heads are rotated", field=field)
        for layer_type in ("full_attention", "sliding_attention"):
            if layer_type in rope:
                raise NotSupported(f"{rope.name(layer_type)}: one rotation for all layers", field=rope.name(layer_type))
        spec = cls._of_kind(kind, theta, rope, config, max_context)
        refuse_unread(rope, ROPE_IRRELEVANT, {})
        return spec

    @classmethod
    def _of_kind(cls, kind: str, theta: float, rope: Fields, config: Fields, max_context: int) -> RopeSpec:
        if kind == "default":
            return cls(theta=theta)
        if kind == "linear":
            return cls("linear", theta, rope.number("factor"))
        original = int(_agreed(rope, config, "original_max_position_embeddings", whole=True) or max_context)
        if kind == "llama3":
            return cls._llama3(rope, theta, original)
        return cls._yarn(rope, theta, original, max_context)

    @classmethod
    def _llama3(cls, rope: Fields, theta: float, original: int) -> RopeSpec:
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            field = rope.name("high_freq_factor")
            raise InvalidRequest(f"{field} must be greater than low_freq_factor", field=field)
        return cls("llama3", theta, rope.number("factor"), original, low_freq_factor=low, high_freq_factor=high)

    @classmethod
    def _yarn(cls, rope: Fields, theta: float, original: int, max_context: int) -> RopeSpec:
        factor = rope.number("factor", max_context / original)
        scaling = rope.optional_number("attention_factor", positive=False)
        mscale = rope.number("mscale", 0.0, positive=False)
        mscale_all = rope.number("mscale_all_dim", 0.0, positive=False)
        if scaling is None:
            scaling = _yarn_mscale(factor, mscale if mscale and mscale_all else 1.0)
            if mscale and mscale_all:
                scaling /= _yarn_mscale(factor, mscale_all)
        return cls(
            "yarn",
            theta,
            factor,
            original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            attention_factor=scaling,
        )


def _section(config: Fields) -> Fields:
    """``rope_scaling`` or ``rope_parameters``, whichever there is."""
    old, new = config.table("rope_scaling"), config.table("rope_parameters")
    if old and new and config.value("rope_scaling") != config.value("rope_parameters"):
        raise InvalidRequest("rope_scaling and rope_parameters differ: which counts?", field="rope_scaling")
    return old or new or Fields({}, "rope_parameters")


def _agreed(rope: Fields, config: Fields, field: str, *, whole: bool = False) -> float | None:
    """A number that stands in the section or beside it; where it stands in both, they must be one."""
    found = [
        where.integer(field) if whole else where.number(field)
        for where in (rope, config)
        if where.value(field) is not None
    ]
    if len(set(found)) > 1:
        raise InvalidRequest(f"{rope.name(field)} {found[0]} and {field} {found[1]} differ", field=rope.name(field))
    return found[0] if found else None


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """float32 [head_dim / 2] on the host: radians per position of each pair of channels."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = spec.theta**exponents
    plain = 1.0 / periods
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3_frequencies(spec, plain)
    if spec.kind == "yarn":
        return _yarn_frequencies(spec, periods, head_dim)
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
    """Channels that turn often within the original context are kept, those that turn rarely are interpolated."""

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
    """Cosines and sines of a step's positions. ``head_dim`` must be even."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim).to(device)
        self._scaling = spec.attention_factor

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``(cos [T, 1, head_dim], sin [T, 1, head_dim / 2])`` float32 of ``positions`` int64 [T], for `rotate`."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return torch.cat((cos, cos), -1), sin


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``heads`` [T, n, head_dim] (float32 or wider), pairing channel i with i + head_dim / 2; the same shape."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    rotated = heads * cos
    rotated[..., :half].addcmul_(second, sin, value=-1)
    rotated[..., half:].addcmul_(first, sin)
    return rotated
