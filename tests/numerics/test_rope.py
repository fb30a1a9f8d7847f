"""Rotary frequencies are those of transformers, bit for bit; a rotation is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ferrum_rpc.models.families import Rotation
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.rope import RopeSpec, read_rope
from ferrum_rpc.models.rotary import Rotary, inverse_frequencies, rotate
from tests.checkpoints import TINY

ROOT = Path(__file__).parents[2]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SECTIONS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 8192},
    "llama3, whole context": LLAMA3,
    "yarn": YARN | {"original_max_position_embeddings": 8192},
    "yarn, whole context": YARN,
    "yarn, factor implied": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
    "yarn, attention factor": YARN | {"attention_factor": 0.5},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn, mscale alone": YARN | {"mscale": 0.707},
    "yarn, betas": YARN | {"beta_fast": 20, "beta_slow": 3},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, no room between the betas": YARN | {"beta_fast": 1, "beta_slow": 1},
}


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0, 500_000])
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_and_scaling_are_those_of_transformers(section, theta, head_dim):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {name: value for name, value in TINY.items() if name != "rope_theta"} | {"head_dim": head_dim}
    fields["max_position_embeddings"] = 32768
    parameters = {"rope_theta": theta, **SECTIONS[section]}
    config = transformers.LlamaConfig(**fields, rope_parameters=dict(parameters))
    kind = parameters["rope_type"]
    if kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        expected, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[kind](config)
    new = read_rope(Fields({"rope_parameters": parameters}), Rotation(), 32768, head_dim)
    old = read_rope(Fields({"rope_theta": theta, "rope_scaling": SECTIONS[section]}), Rotation(), 32768, head_dim)
    assert new == old
    assert torch.equal(inverse_frequencies(new, head_dim), expected)
    assert new.attention_factor == pytest.approx(scaling, rel=1e-12)


def test_transformers_4_calls_the_kind_type():
    scaling = {"type": "linear", "factor": 2.0}
    assert read_rope(Fields({"rope_scaling": scaling}), Rotation(), 100, 64).kind == "linear"


def test_the_same_position_has_the_same_numbers_in_any_company():
    rotary = Rotary([RopeSpec()], 64, torch.device("cpu"))
    together = rotary(torch.arange(1000))
    for position in (0, 1, 511, 999):
        alone = rotary(torch.tensor([position]))
        assert all(torch.equal(a[0, 0], b[0, position]) for a, b in zip(alone, together, strict=True))


def test_a_rotation_keeps_lengths_and_depends_on_the_distance_only():
    rotary = Rotary([RopeSpec()], 32, torch.device("cpu"))
    q, k = torch.randn(1, 2, 32).expand(50, -1, -1), torch.randn(1, 2, 32).expand(50, -1, -1)
    cos, sin = (each[0] for each in rotary(torch.arange(50)))
    rotated_q, rotated_k = rotate(q, cos, sin), rotate(k, cos, sin)
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1))
    products = torch.einsum("qhd,khd->hqk", rotated_q, rotated_k)
    for offset in (1, 7, 30):
        diagonal = products.diagonal(offset, 1, 2)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
