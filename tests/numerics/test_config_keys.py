"""Every key of a configuration counts as it does in transformers, or is refused by its name.

The keys are those of transformers' own classes, each with another value than usual: what another version adds fails
here until somebody decides what it means.
"""

from __future__ import annotations

import dataclasses
import os
import random

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.models.families import Rotation
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.rope import SUPPORTED, read_rope
from ferrum_rpc.models.rotary import inverse_frequencies
from ferrum_rpc.models.spec import ModelSpec
from tests.checkpoints import FAMILIES, TINY, config_class, make_model
from tests.numerics.harness import Executor, native, reference_logits, worst

ROUNDS = int(os.environ.get("FERRUM_CONFIG_ROUNDS", "40"))

TOKENS = np.random.default_rng(7).integers(0, 200, size=24)

SWITCHED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
WINDOWS = {"mistral": {"sliding_window": 5}, "ministral": {"sliding_window": 5}, "qwen2": SWITCHED, "qwen3": SWITCHED}

OTHERWISE = {
    "_name_or_path": "somewhere",
    "_sliding_window_pattern": 3,
    "architectures": ["MambaForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.5,
    "attention_multiplier": 0.11,
    "attn_logit_softcapping": 1.5,
    "bos_token_id": 9,
    "chunk_size_feed_forward": 2,
    "dtype": "bfloat16",
    "embd_pdrop": 0.5,
    "embedding_dropout": 0.5,
    "embedding_multiplier": 0.3,
    "eos_token_id": [3, 4],
    "final_logit_softcapping": 1.5,
    "head_dim": 32,
    "hidden_act": "gelu",
    "hidden_activation": "silu",
    "hidden_size": 96,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "initializer_range": 0.5,
    "intermediate_size": 160,
    "is_encoder_decoder": True,
    "label2id": {"a": 0},
    "layer_norm_eps": 0.1,
    "layer_types": ["sliding_attention", "full_attention"],
    "logit_scale": 0.3,
    "logits_scaling": 0.3,
    "max_position_embeddings": 64,
    "max_window_layers": 0,
    "mlp_bias": True,
    "model_type": "gpt2",
    "no_rope_layer_interval": 1,
    "no_rope_layers": [0, 1, 0],
    "norm_epsilon": 0.1,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 16,
    "output_attentions": True,
    "output_hidden_states": True,
    "pad_token_id": 5,
    "pretraining_tp": 2,
    "problem_type": "regression",
    "query_pre_attn_scalar": 3,
    "resid_pdrop": 0.5,
    "residual_dropout": 0.5,
    "residual_multiplier": 0.3,
    "return_dict": False,
    "rms_norm_eps": 0.1,
    "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    "sliding_window": 3,
    "tie_word_embeddings": True,
    "transformers_version": "9.9.9",
    "use_bias": False,
    "use_bidirectional_attention": True,
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 200,
}
"""A value of every key that a class of transformers has, which is not the one that the tests' models have."""

FORM = {"return_dict": True}
"""Keys that change the form of transformers' answer: the oracle keeps them."""


def keys_of(family):
    config = config_class(family)
    return {*config().to_dict(), *(field.name for field in dataclasses.fields(config))}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_transformers_is_tried(family):
    assert keys_of(family) <= OTHERWISE.keys()


FIRST = ("llama", "mistral", "ministral", "qwen2", "qwen3")
"""Families of which every key is tried; of the others those that they do not share with these, and some of those."""

SHARED = {"attention_bias", "head_dim", "num_hidden_layers", "num_key_value_heads", "rope_parameters"}
SHARED |= {"sliding_window", "tie_word_embeddings", "hidden_act", "layer_types", "rms_norm_eps"}


def tried(family):
    keys = keys_of(family)
    return sorted(keys if family in FIRST else keys - set.union(*map(keys_of, FIRST)) | keys & SHARED)


@pytest.mark.parametrize(("family", "key"), [(family, key) for family in FAMILIES for key in tried(family)])
def test_another_value_gives_what_transformers_gives_or_is_refused_by_name(family, key):
    compare(family, [key])


@pytest.mark.parametrize("family", FAMILIES)
def test_other_values_of_several_keys_at_once_too(family):
    rng = random.Random(f"{family} {ROUNDS}")
    keys = sorted(keys_of(family) - {"architectures", "model_type", "is_encoder_decoder"})
    honoured = [compare(family, rng.sample(keys, rng.randint(2, 5))) for _ in range(-(-ROUNDS // len(FAMILIES)))]
    assert any(honoured)


def compare(family, keys):
    """Whether a configuration with other values of ``keys`` is honoured; fails where it is not, and is not refused by
    one of their names."""
    base = make_model(family, **WINDOWS.get(family, {})).config.to_dict()
    base["architectures"] = [f"{FAMILIES[family]}ForCausalLM"]
    for listed in ("layer_types", "no_rope_layers"):
        base.pop(listed, None)
    others = {key: OTHERWISE[key] for key in keys}
    data = base | others
    try:
        ModelSpec.from_config(data)
    except ExecutorError as refusal:
        assert str(refusal.field).split(".", maxsplit=1)[0] in keys
        return False
    named = {name: value for name, value in data.items() if name != "model_type"}
    reference = make_model(family, **named | {name: value for name, value in FORM.items() if name in keys})
    truth = reference_logits(reference.double(), TOKENS, torch.float64)
    reference.config.update(others)
    assert worst(Executor(native(reference)).run(TOKENS, [len(TOKENS)]), truth) <= 2e-5
    return True


PARTS = {
    "rope_theta": 500.0,
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
KINDS = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("part", RopeParameters.__annotations__)
def test_every_part_of_a_rotation_counts_as_in_transformers_or_is_refused_by_name(kind, part):
    section = {"rope_theta": 10_000.0, "rope_type": kind, **KINDS[kind], part: PARTS[part]}
    try:
        spec = read_rope(Fields({"rope_parameters": section}), Rotation(), 32768, 64)
    except (InvalidRequest, NotSupported) as refusal:
        assert refusal.field == f"rope_parameters.{part}"
        return
    fields = {name: value for name, value in TINY.items() if name != "rope_theta"} | {"head_dim": 64}
    fields["max_position_embeddings"] = 32768
    config = transformers.LlamaConfig(**fields, rope_parameters=section)
    if kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        expected, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[kind](config)
    assert torch.equal(inverse_frequencies(spec, 64), expected)
    assert spec.attention_factor == pytest.approx(scaling, rel=1e-12)
