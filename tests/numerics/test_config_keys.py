"""Every key of a configuration counts as it does in transformers, or is refused by its name.

The keys are those of transformers' own classes, each with another value than usual: what another version adds fails
here until somebody decides what it means.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import random

import numpy as np
import pytest

from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.models.spec import ModelSpec
from tests.support.checkpoints import CLASSES, LATENT, RECURRENT, config_class, make_model
from tests.support.harness import Executor, Oracle, native

ROUNDS = int(os.environ.get("FERRUM_CONFIG_ROUNDS", "40"))

TOKENS = np.random.default_rng(7).integers(0, 200, size=24)

SWITCHED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
WINDOWS = {"mistral": {"sliding_window": 5}, "ministral": {"sliding_window": 5}, "qwen2": SWITCHED, "qwen3": SWITCHED}

OTHERWISE = {
    **dict.fromkeys(("attention_bias", "is_encoder_decoder", "mlp_bias", "output_attentions"), True),
    **dict.fromkeys(("output_hidden_states", "tie_word_embeddings", "use_bidirectional_attention"), True),
    **dict.fromkeys(("return_dict", "use_bias", "use_cache", "use_sliding_window"), False),
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon", "rms_norm_eps"), 0.1),
    **dict.fromkeys(("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier"), 0.3),
    **dict.fromkeys(("attention_dropout", "embd_pdrop", "embedding_dropout", "resid_pdrop", "residual_dropout"), 0.5),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 1.5),
    **{"initializer_range": 0.5, "attention_multiplier": 0.11},
    **{"bos_token_id": 9, "eos_token_id": [3, 4], "pad_token_id": 5, "vocab_size": 200},
    **{"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3},
    **{"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 3},
    **{"hidden_act": "gelu", "hidden_activation": "silu", "dtype": "bfloat16"},
    **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "_sliding_window_pattern": 3},
    **{"max_window_layers": 0, "no_rope_layer_interval": 1, "no_rope_layers": [0, 1, 0]},
    **{"max_position_embeddings": 64, "original_max_position_embeddings": 16},
    **{"linear_conv_kernel_dim": 3, "linear_key_head_dim": 24, "linear_value_head_dim": 40},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 6},
    **{"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 40},
    **{"qk_head_dim": 99, "rope_interleave": False, "first_k_dense_replace": 2, "moe_intermediate_size": 48},
    **{"n_group": 2, "topk_group": 3, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{"topk_method": "group_limited_greedy", "norm_topk_prob": False, "routed_scaling_factor": 0.7},
    **{"num_experts": 5, "shared_expert_intermediate_size": 48, "router_aux_loss_coef": 0.5},
    **{"decoder_sparse_step": 2, "mlp_only_layers": [0], "num_local_experts": 5},
    **{"swiglu_alpha": 1.1, "swiglu_limit": 0.2},
    **{"output_router_logits": True, "num_mtp_layers": 2, "num_nextn_predict_layers": 2},
    "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    **{"architectures": ["MambaForCausalLM"], "model_type": "gpt2", "transformers_version": "9.9.9"},
    **{"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0}, "problem_type": "regression"},
    **{"_name_or_path": "somewhere", "chunk_size_feed_forward": 2, "pretraining_tp": 2},
}
"""A value of every key that a class of transformers has, which is not the one that the tests' models have."""

FORM = {"return_dict": True}
"""Keys that change the form of transformers' answer: the oracle keeps them."""


@functools.cache
def keys_of(family):
    config = config_class(family)
    return {*config().to_dict(), *(field.name for field in dataclasses.fields(config))}


@pytest.mark.parametrize("family", CLASSES)
def test_every_key_of_transformers_is_tried(family):
    assert keys_of(family) <= OTHERWISE.keys()


FIRST = ("llama", "mistral", "qwen3")
"""Families of which every key is tried; of the others those that they do not share with these, and some of those."""

SHARED = {"attention_bias", "head_dim", "num_hidden_layers", "num_key_value_heads", "rope_parameters"}
SHARED |= {"sliding_window", "tie_word_embeddings", "hidden_act", "layer_types", "rms_norm_eps"}


def tried(family):
    keys = keys_of(family)
    return sorted(keys if family in FIRST else keys - set.union(*map(keys_of, FIRST)) | keys & SHARED)


@pytest.mark.parametrize("family", CLASSES)
def test_another_value_gives_what_transformers_gives_or_is_refused_by_name(family):
    """No test for each key: which there are, transformers says, whose import collecting tests must not wait for."""
    for key in tried(family):
        try:
            compare(family, [key])
        except AssertionError as error:
            error.add_note(f"of {key}")
            raise


@pytest.mark.parametrize("family", CLASSES)
def test_other_values_of_several_keys_at_once_too(family):
    rng = random.Random(f"{family} {ROUNDS}")
    keys = sorted(keys_of(family) - {"architectures", "model_type", "is_encoder_decoder"})
    honoured = [compare(family, rng.sample(keys, rng.randint(2, 5))) for _ in range(-(-ROUNDS // len(CLASSES)))]
    assert any(honoured)


@functools.cache
def usual(family):
    """A configuration that says nothing of single layers."""
    found = make_model(family, **WINDOWS.get(family, {})).config.to_dict()
    found["architectures"] = [f"{CLASSES[family]}ForCausalLM"]
    if family in RECURRENT:
        found["full_attention_interval"] = 2  # where no list says which layers are recurrent
    implied = {"layer_types", "no_rope_layers", *(("head_dim",) if family in LATENT else ())}
    return {name: value for name, value in found.items() if name not in implied}


def compare(family, keys):
    """Whether a configuration with other values of ``keys`` is honoured; fails where it is not, and is not refused by
    one of their names."""
    if family in LATENT and "num_attention_heads" in keys:
        keys = {*keys, "num_key_value_heads"}  # there are as many
    others = {key: OTHERWISE[key] for key in keys}
    data = copy.deepcopy(usual(family)) | others
    try:
        ModelSpec.from_config(data)
    except ExecutorError as refusal:
        assert str(refusal.field).split(".", maxsplit=1)[0] in keys
        return False
    named = {name: value for name, value in data.items() if name != "model_type"}
    reference = make_model(family, **named | {name: value for name, value in FORM.items() if name in keys})
    oracle = Oracle(reference.double(), tokens=TOKENS)
    reference.config.update(others)
    oracle.check(Executor(native(reference, linear="plain")).run(TOKENS, [len(TOKENS)]))
    return True
