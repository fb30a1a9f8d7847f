"""Rotary frequencies are those of transformers, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.families import Rotation
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.rope import SUPPORTED, RopeSpec, read_rope
from ferrum_rpc.models.rotary import Rotary, inverse_frequencies
from tests.support.checkpoints import TINY

CONTEXT = 32768
KINDS = {
    "default": {},
    "linear": {"factor": 2.5},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
}
PARTS = {
    "rope_theta": 500_000,
    "rope_type": "dynamic",
    "partial_rotary_factor": 0.5,
    "factor": 3.0,
    "original_max_position_embeddings": 4096,
    "attention_factor": 0.7,
    "beta_fast": 20,
    "beta_slow": 3,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "truncate": False,
    "mrope_section": [8, 12, 12],
}
"""Another value of every part that transformers knows."""

TOGETHER = {
    "yarn, factor implied": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
    "yarn, mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn, no room between the betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 1},
} | {kind: {"rope_type": kind, **parts} for kind, parts in KINDS.items()}


def check(spec: RopeSpec, section: dict, head_dim: int) -> None:
    """Against transformers, bit for bit."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {name: value for name, value in TINY.items() if name != "rope_theta"}
    fields |= {"head_dim": head_dim, "max_position_embeddings": CONTEXT}
    config = LlamaConfig(**fields, rope_parameters=dict(section))
    of_default = LlamaRotaryEmbedding.compute_default_rope_parameters
    expected, scaling = (ROPE_INIT_FUNCTIONS | {"default": of_default})[section["rope_type"]](config)
    assert torch.equal(inverse_frequencies(spec, head_dim), expected)
    assert spec.attention_factor == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 64), (1_000_000.0, 128)])
@pytest.mark.parametrize("section", TOGETHER)
def test_frequencies_and_scaling_are_those_of_transformers(section, theta, head_dim):
    """In both of the forms that configurations have."""
    parameters = {"rope_theta": theta, **TOGETHER[section]}
    new = read_rope(Fields({"rope_parameters": parameters}), Rotation(), CONTEXT, head_dim)
    old = read_rope(Fields({"rope_theta": theta, "rope_scaling": TOGETHER[section]}), Rotation(), CONTEXT, head_dim)
    assert new == old
    check(new, parameters, head_dim)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_a_rotation_counts_as_in_transformers_or_is_refused_by_name(kind, part):
    section = {"rope_theta": 10_000.0, "rope_type": kind, **KINDS[kind], part: PARTS[part]}
    try:
        spec = read_rope(Fields({"rope_parameters": section}), Rotation(), CONTEXT, 64)
    except (InvalidRequest, NotSupported) as refusal:
        assert refusal.field == f"rope_parameters.{part}"
    else:
        check(spec, section, 64)


def test_every_part_of_transformers_is_tried():
    from transformers.modeling_rope_utils import RopeParameters

    assert RopeParameters.__annotations__.keys() <= PARTS.keys()


def test_transformers_4_calls_the_kind_type():
    scaling = {"type": "linear", "factor": 2.0}
    assert read_rope(Fields({"rope_scaling": scaling}), Rotation(), 100, 64).kind == "linear"


def test_the_same_position_has_the_same_numbers_in_any_company():
    rotary = Rotary([RopeSpec()], 64, torch.device("cpu"))
    together = rotary(torch.arange(1000))
    for position in (0, 1, 511, 999):
        alone = rotary(torch.tensor([position]))
        assert all(torch.equal(a[0, 0], b[0, position]) for a, b in zip(alone, together, strict=True))
