"""Rotary position embeddings: which rotation a configuration means.

``dynamic`` scaling is refused: its frequencies depend on the longest sequence of a batch, so that a sequence's numbers
would change with its neighbours. Within the context of the model it changes nothing, and no sequence is longer here:
a family that nothing else can run may have it. ``longrope`` is frozen for the longest context that is served, as vLLM
does: its long factors where that is longer than the context before scaling, else the short ones.

Sources: RoFormer (2104.09864); linear: kaiokendev; llama3: the Llama 3.1 release; yarn: 2309.00071; longrope:
2402.13753. The arithmetic follows ``transformers.modeling_rope_utils``, which is the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import OF_MODEL, ROPE_IRRELEVANT, refuse_unread
from ferrum_rpc.models.families import Rotation
from ferrum_rpc.models.fields import Fields

Kind = Literal["default", "linear", "llama3", "yarn", "longrope"]
SUPPORTED: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
"""Of families without ``longrope``."""

LONGROPE_TOO = ("su", "yarn")
"""What earlier versions of the families with ``longrope`` called it."""

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """``original_context`` (llama3, yarn, longrope) is the context before scaling; ``attention_factor`` (yarn and
    longrope) multiplies cosines and sines. ``short_factors`` and ``long_factors`` (longrope) divide the frequencies of
    sequences up to that context and beyond: one of them is taken for all, by ``context``, the longest that is served.
    ``score_scale`` (yarn) multiplies the scores of latent attention.
    ``partial`` is the part of a head that is rotated. Fields that a kind does not use keep their defaults."""

    kind: Kind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    score_scale: float = 1.0
    partial: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    context: int = 0

    @property
    def long(self) -> bool:
        """Whether the factors of long sequences are in use."""
        return self.kind == "longrope" and self.context > self.original_context

    def rotary_dim(self, head_dim: int) -> int:
        """How many channels of a head of ``head_dim`` are rotated."""
        return int(head_dim * self.partial)


def read_rope(config: Fields, rotation: Rotation, max_context: int, head_dim: int) -> RopeSpec:
    """The one rotation of a model: ``rope_scaling`` + ``rope_theta`` (transformers 4) or ``rope_parameters`` (5).

    Raises NotSupported for a scaling that cannot be served, InvalidRequest for one that is malformed; both name the
    field.
    """
    rope = _section(config) or Fields(rotation.section, "rope_parameters")
    for layer_type in LAYER_TYPES:
        if layer_type in rope:
            raise NotSupported(f"{rope.name(layer_type)}: one rotation for all layers", field=rope.name(layer_type))
    partial = _partial(rope, config, rotation, head_dim)
    theta = _theta(rope, config, "rope_theta", rotation.theta)
    spec = replace(_of_kind(rope, config, theta, rotation, max_context, int(head_dim * partial)), partial=partial)
    refuse_unread(rope, ROPE_IRRELEVANT | rotation.irrelevant, {}, OF_MODEL)
    return spec


def read_ropes_of_windows(config: Fields, rotation: Rotation, max_context: int) -> tuple[RopeSpec, RopeSpec]:
    """The rotations of layers without a window and with one: a section for each in ``rope_parameters``, or
    ``rope_scaling``, which is of the first alone, ``rope_theta`` and ``rope_local_base_freq``."""
    assert rotation.local is not None  # noqa: S101 - the family has it
    sections = [Fields({}, "rope_parameters")] * 2
    if (new := config.table("rope_parameters")) is not None:
        sections = [new.table(layer_type) or Fields({}, new.name(layer_type)) for layer_type in LAYER_TYPES]
        refuse_unread(new, (), {}, OF_MODEL)
    if (old := config.table("rope_scaling")) is not None:
        if new is not None:
            raise InvalidRequest(
                "rope_scaling and rope_parameters are both set: set one of the two", field="rope_scaling"
            )
        sections[0] = old
    bases = ("rope_theta", rotation.theta), ("rope_local_base_freq", rotation.local)
    found = []
    for rope, (outside, default) in zip(sections, bases, strict=True):
        _refuse_partial(rope, config)
        found.append(_of_kind(rope, config, _theta(rope, config, outside, default), rotation, max_context, 0))
        refuse_unread(rope, ROPE_IRRELEVANT, {}, OF_MODEL)
    return found[0], found[1]


def _theta(rope: Fields, config: Fields, outside: str, default: float) -> float:
    theta = _agreed(rope, config, "rope_theta", outside=outside) or default
    if theta <= 1:
        raise InvalidRequest(f"{outside} must be greater than 1, not {theta}", field=outside)
    return theta


def _refuse_partial(*sections: Fields) -> None:
    for where in sections:
        if where.number("partial_rotary_factor", 1.0) != 1.0:
            field = where.name("partial_rotary_factor")
            raise NotSupported(f"{field}: only whole heads can be rotated", field=field)


def _partial(rope: Fields, config: Fields, rotation: Rotation, head_dim: int) -> float:
    if rotation.partial is None:
        _refuse_partial(rope, config)
        return 1.0
    partial = _agreed(rope, config, "partial_rotary_factor") or rotation.partial
    rotary_dim = int(head_dim * partial)
    if partial > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise InvalidRequest(
            f"partial_rotary_factor {partial}: {rotary_dim} of {head_dim} channels cannot be rotated in pairs",
            field="partial_rotary_factor",
        )
    return partial


def _of_kind(  # noqa: PLR0917
    rope: Fields, config: Fields, theta: float, rotation: Rotation, max_context: int, rotary_dim: int
) -> RopeSpec:
    kind = rope.text("rope_type", rope.text("type", "default"))
    known = SUPPORTED
    if rotation.longrope:
        known = "default", "longrope"
        kind = "longrope" if kind in LONGROPE_TOO else kind
    if rotation.dynamic:
        known = *SUPPORTED, "dynamic"
    given = rope.text("type", kind)
    if kind not in known or (given != kind and not (rotation.longrope and given in LONGROPE_TOO)):
        field = rope.name("rope_type" if "rope_type" in rope else "type")
        raise NotSupported(f"{field} {kind[:80]!r} is not supported; supported: {', '.join(known)}", field=field)
    if kind == "dynamic":
        rope.number("factor")  # of longer sequences
    if kind in {"default", "dynamic"}:
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec("linear", theta, rope.number("factor"))
    before = rotation.original or max_context
    original = int(_agreed(rope, config, "original_max_position_embeddings", whole=True) or before)
    if kind == "llama3":
        return _llama3(rope, theta, original)
    if kind == "longrope":
        return _longrope(rope, theta, original, max_context, rotary_dim)
    return _yarn(rope, theta, original, max_context)


def _longrope(rope: Fields, theta: float, original: int, max_context: int, rotary_dim: int) -> RopeSpec:
    factor = rope.number("factor", max_context / original)
    scaling = rope.optional_number("attention_factor", positive=False)
    if scaling is None:
        scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return RopeSpec(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=scaling,
        short_factors=rope.numbers("short_factor", rotary_dim // 2),
        long_factors=rope.numbers("long_factor", rotary_dim // 2),
        context=max_context,
    )


def _llama3(rope: Fields, theta: float, original: int) -> RopeSpec:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        field = rope.name("high_freq_factor")
        raise InvalidRequest(f"{field} must be greater than low_freq_factor", field=field)
    return RopeSpec("llama3", theta, rope.number("factor"), original, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Fields, theta: float, original: int, max_context: int) -> RopeSpec:
    factor = rope.number("factor", max_context / original)
    scaling = rope.optional_number("attention_factor", positive=False)
    mscale = rope.number("mscale", 0.0, positive=False)
    mscale_all = rope.number("mscale_all_dim", 0.0, positive=False)
    if scaling is None:
        scaling = _yarn_mscale(factor, mscale if mscale and mscale_all else 1.0)
        if mscale and mscale_all:
            scaling /= _yarn_mscale(factor, mscale_all)
    return RopeSpec(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=scaling,
        score_scale=_yarn_mscale(factor, mscale_all) ** 2 if mscale_all else 1.0,
    )


def _section(config: Fields) -> Fields | None:
    """``rope_scaling`` or ``rope_parameters``, whichever there is."""
    old, new = config.table("rope_scaling"), config.table("rope_parameters")
    if old and new and config.value("rope_scaling") != config.value("rope_parameters"):
        raise InvalidRequest("rope_scaling and rope_parameters differ: set one of the two", field="rope_scaling")
    return old or new


def _agreed(
    rope: Fields, config: Fields, field: str, *, whole: bool = False, outside: str | None = None
) -> float | None:
    """A number in the section or in the configuration around it, where its name is ``outside`` (None: the same). If
    both have it, they must agree."""
    outside = outside or field
    found = [
        where.integer(name) if whole else where.number(name)
        for where, name in ((rope, field), (config, outside))
        if where.value(name) is not None
    ]
    if len(set(found)) > 1:
        raise InvalidRequest(f"{rope.name(field)} {found[0]} and {outside} {found[1]} differ", field=rope.name(field))
    return found[0] if found else None


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
