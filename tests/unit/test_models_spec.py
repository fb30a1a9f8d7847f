"""Configurations: what transformers means by them, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import UnknownKey, refuse_unread
from ferrum_rpc.models.families import FAMILIES
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.parts.recurrent import Recurrent
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.with_images import WITH_IMAGES
from tests.support.checkpoints import FAMILIES as TEST_FAMILIES
from tests.support.checkpoints import make_model

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096}
LLAMA |= {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
LLAMA |= {"rope_scaling": ROPE | {"rope_type": "llama3"}}
LLAMA |= {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_scaling": None}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = QWEN2 | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def without(config, *fields):
    return {name: value for name, value in config.items() if name not in fields}


def heads(spec):
    """Of query, of key and value, and the channels of each."""
    mixer = spec.layers[0].mixer
    return mixer.heads, mixer.kv_heads, mixer.head_dim


def windows_of(spec):
    return tuple(layer.mixer.window for layer in spec.layers)


def ropes_of(spec):
    return tuple(layer.rope for layer in spec.layers)


def test_llama_3_1():
    spec = ModelSpec.from_config(LLAMA)
    assert (len(spec.layers), *heads(spec)) == (32, 32, 8, 128)
    assert spec.ropes[0].kind == "llama3" and spec.ropes[0].theta == 500000.0 and spec.ropes[0].original_context == 8192
    assert spec.eos_token_ids == (128001, 128008, 128009) and spec.bos_token_id == 128000
    mixer, mlp = spec.layers[0].mixer, spec.layers[0].mlp
    assert not (mixer.bias or mixer.output_bias or mlp.bias or mixer.qk_norm or spec.tied_embeddings)
    assert spec.dtype == "bfloat16" and spec.norm.eps == 1e-5 and mlp.activation == "silu"
    assert windows_of(spec) == (None,) * 32
    assert spec.attention_specs[31].scale == 128**-0.5


def test_a_whole_number_may_be_written_as_a_float():
    floats = {name: float(value) for name, value in LLAMA.items() if type(value) is int and "token" not in name}
    assert ModelSpec.from_config(LLAMA | floats) == ModelSpec.from_config(LLAMA)
    with pytest.raises(InvalidRequest, match="hidden_size"):
        ModelSpec.from_config(LLAMA | {"hidden_size": 4096.5})


def test_what_the_families_differ_in():
    qwen2, qwen3, mistral = (ModelSpec.from_config(config) for config in (QWEN2, QWEN3, MISTRAL))
    one, other, third = (each.layers[0].mixer for each in (qwen2, qwen3, mistral))
    assert one.bias and not one.output_bias and not one.qk_norm
    assert other.qk_norm and not other.bias and other.head_dim == 128
    assert not third.bias and windows_of(mistral) == (4096,) * 32
    biased = ModelSpec.from_config(QWEN3 | {"attention_bias": True}).layers[0].mixer
    assert biased.bias and biased.output_bias
    assert ModelSpec.from_config(LLAMA | {"mlp_bias": True}).layers[0].mlp.bias
    assert ModelSpec.from_config(MISTRAL | {"mlp_bias": False, "attention_bias": False}) == mistral


def test_windows():
    def windows(config, **fields):
        return windows_of(ModelSpec.from_config(config | {"num_hidden_layers": 4} | fields))

    assert windows(MISTRAL, sliding_window=None) == (None,) * 4
    assert windows(MISTRAL, sliding_window=100) == (100,) * 4
    assert windows(QWEN2, sliding_window=100, use_sliding_window=False) == (None,) * 4
    assert windows(QWEN2, sliding_window=100, use_sliding_window=True, max_window_layers=3) == (None, None, None, 100)
    assert windows(QWEN2, use_sliding_window=True, max_window_layers=0) == (4096,) * 4
    listed = ["full_attention", "sliding_attention"] * 2
    assert windows(QWEN3, sliding_window=7, use_sliding_window=True, layer_types=listed) == (None, 7, None, 7)
    assert windows(QWEN3, layer_types=["full_attention"] * 4) == (None,) * 4
    assert windows(QWEN3, layer_types=None) == (None,) * 4
    assert windows(MISTRAL, sliding_window=7, layer_types=listed) == (None, 7, None, 7)
    assert windows(MISTRAL | {"model_type": "ministral"}, sliding_window=7, layer_types=listed) == (None, 7, None, 7)
    # what a conversion from Qwen2 leaves behind
    assert windows(LLAMA, sliding_window=7, use_sliding_window=False, max_window_layers=2) == (None,) * 4
    assert windows(LLAMA, layer_types=["full_attention"] * 4) == (None,) * 4


@pytest.mark.parametrize("family", TEST_FAMILIES)
def test_configurations_as_transformers_5_writes_them(family, tmp_path):
    scaled = {} if family == "phi3" else {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    model = make_model(family, **scaled, eos_token_id=[2, 5])
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    spec = ModelSpec.from_config(json.loads((tmp_path / "config.json").read_text()))
    if scaled:
        assert spec.ropes[0].kind == "linear" and spec.ropes[0].factor == 2.0
    assert spec.ropes[-1].theta == 10000.0
    assert (*heads(spec)[1:], spec.eos_token_ids, spec.bos_token_id) == (2, 16, (2, 5), 1)


def test_the_architecture_may_be_told_by_the_model_type():
    assert ModelSpec.from_config(without(QWEN3, "architectures")).architecture == "Qwen3ForCausalLM"


def test_absent_fields_mean_what_they_mean_in_transformers():
    bare = without(LLAMA, "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "eos_token_id")
    spec = ModelSpec.from_config(without(bare, "bos_token_id", "torch_dtype"))
    assert (heads(spec)[1], spec.norm.eps, spec.ropes[0].theta, spec.eos_token_ids) == (32, 1e-6, 10000.0, ())
    assert spec.bos_token_id is None and spec.dtype is None
    assert heads(ModelSpec.from_config(without(MISTRAL, "num_key_value_heads")))[1] == 8
    assert heads(ModelSpec.from_config(MISTRAL | {"num_key_value_heads": None}))[1] == 32
    assert heads(ModelSpec.from_config(QWEN3 | {"hidden_size": 1024, "num_attention_heads": 16}))[2] == 128


def scaled(**parts):
    return {"rope_scaling": parts}


def longrope(short, long):
    return scaled(type="longrope", short_factor=short, long_factor=long)


def refused(config, error, field):
    with pytest.raises(error) as caught:
        ModelSpec.from_config(config)
    assert caught.value.field == field
    assert field in caught.value.message
    return caught.value.message


def test_unknown_architectures_are_refused_with_the_list_of_known_ones():
    message = refused(LLAMA | {"architectures": ["MambaForCausalLM"]}, NotSupported, "architectures")
    assert [name for name in (*FAMILIES, *WITH_IMAGES) if name not in message] == []
    refused(without(LLAMA, "architectures") | {"model_type": "mamba"}, NotSupported, "model_type")
    refused(without(LLAMA, "architectures", "model_type"), InvalidRequest, "architectures")


@pytest.mark.parametrize(
    "field",
    [
        *("vocab_size", "hidden_size", "intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    ],
)
def test_sizes_must_be_there_and_be_sizes(field):
    for value in (None, "12", 0, -1, 1.5, True, [], 10**30):
        refused(LLAMA | {field: value}, InvalidRequest, field)
    refused(without(LLAMA, field), InvalidRequest, field)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"rms_norm_eps": "small"}, InvalidRequest, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, InvalidRequest, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, InvalidRequest, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, InvalidRequest, "rope_theta"),
        ({"hidden_size": float("inf")}, InvalidRequest, "hidden_size"),
        ({"time_step_limit": [0.0, float("inf")]}, NotSupported, "time_step_limit"),
        ({"hidden_act": "xielu"}, NotSupported, "hidden_act"),
        ({"hidden_act": 3}, InvalidRequest, "hidden_act"),
        ({"attention_bias": 1}, InvalidRequest, "attention_bias"),
        ({"tie_word_embeddings": "yes"}, InvalidRequest, "tie_word_embeddings"),
        ({"num_key_value_heads": 5}, InvalidRequest, "num_key_value_heads"),
        ({"head_dim": 7}, InvalidRequest, "head_dim"),
        ({"hidden_size": 4097}, InvalidRequest, "hidden_size"),
        ({"hidden_size": 96}, InvalidRequest, "hidden_size"),
        ({"num_hidden_layers": 10**6}, InvalidRequest, "num_hidden_layers"),
        ({"eos_token_id": "stop"}, InvalidRequest, "eos_token_id"),
        ({"eos_token_id": [1, -2]}, InvalidRequest, "eos_token_id"),
        ({"architectures": "LlamaForCausalLM"}, InvalidRequest, "architectures"),
        ({"rope_theta": 1.0}, InvalidRequest, "rope_theta"),
        ({"rope_scaling": "llama3"}, InvalidRequest, "rope_scaling"),
        (scaled(rope_type="dynamic", factor=2.0), NotSupported, "rope_scaling.rope_type"),
        (scaled(type="longrope"), NotSupported, "rope_scaling.type"),
        (scaled(rope_type="linear"), InvalidRequest, "rope_scaling.factor"),
        (scaled(rope_type="linear", factor=-2), InvalidRequest, "rope_scaling.factor"),
        (scaled(rope_type="llama3", factor=2.0), InvalidRequest, "rope_scaling.low_freq_factor"),
        (scaled(rope_type="yarn", beta_fast=-1), InvalidRequest, "rope_scaling.beta_fast"),
        (scaled(rope_type="yarn", truncate=0), InvalidRequest, "rope_scaling.truncate"),
        ({"partial_rotary_factor": 0.5}, NotSupported, "partial_rotary_factor"),
        (scaled(rope_type="linear", type="yarn", factor=2), NotSupported, "rope_scaling.rope_type"),
        (scaled(rope_type="linear", factor=2, mscale=2), NotSupported, "rope_scaling.mscale"),
        (scaled(rope_theta=7.0), InvalidRequest, "rope_scaling.rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, InvalidRequest, "rope_scaling"),
        ({"original_max_position_embeddings": 4096}, InvalidRequest, "rope_scaling.original_max_position_embeddings"),
        ({"model_type": "qwen2"}, InvalidRequest, "model_type"),
        ({"model_type": "internlm3"}, NotSupported, "model_type"),  # another family that has the class's name
        ({"sliding_window": 7}, NotSupported, "sliding_window"),
        ({"attn_logit_softcapping": 50.0}, NotSupported, "attn_logit_softcapping"),
        ({"rope_interleaved": True}, NotSupported, "rope_interleaved"),
        ({"use_mrope": 0}, NotSupported, "use_mrope"),
        ({"use_mrope": True}, NotSupported, "use_mrope"),
        ({"is_encoder_decoder": True}, NotSupported, "is_encoder_decoder"),
        ({"query_pre_attn_scalar": 256}, NotSupported, "query_pre_attn_scalar"),
        ({"a key that nobody knows": []}, NotSupported, "a key that nobody knows"),
        (
            {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            NotSupported,
            "rope_parameters.full_attention",
        ),
    ],
)
def test_a_refusal_names_the_field(fields, error, field):
    refused(LLAMA | fields, error, field)


def test_layer_types_must_fit():
    for wrong in (["full_attention"], ["sliding_attention"] * 32, "full_attention"):
        refused(QWEN3 | {"layer_types": wrong}, InvalidRequest, "layer_types")
    refused(QWEN3 | {"layer_types": ["chunked_attention"] * 32}, NotSupported, "layer_types")


def test_a_family_without_a_feature_refuses_it():
    refused(MISTRAL | {"attention_bias": True}, NotSupported, "attention_bias")
    refused(QWEN3 | {"mlp_bias": True}, NotSupported, "mlp_bias")
    refused(MISTRAL | {"use_sliding_window": False}, InvalidRequest, "use_sliding_window")
    refused(MISTRAL | {"max_window_layers": 3}, NotSupported, "max_window_layers")
    refused(LLAMA | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, InvalidRequest, "layer_types")


def test_null_says_nothing():
    assert ModelSpec.from_config(LLAMA | {"a key that nobody knows": None}) == ModelSpec.from_config(LLAMA)
    ModelSpec.from_config(PUBLISHED["Gemma 3"] | {"rope_parameters": {}})


PUBLISHED = {
    "Llama 3.2": LLAMA
    | {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "head_dim": 128, "pretraining_tp": 1}
    | {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "tie_word_embeddings": True}
    | {"transformers_version": "4.45.0.dev0"},
    "SmolLM2": without(LLAMA, "rope_scaling")
    | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    "phi-4 as Llama": without(LLAMA, "rope_scaling")
    | {"original_max_position_embeddings": 16384, "unsloth_fixed": True, "rope_scaling": None},
    "Llama 2": without(LLAMA, "rope_scaling")
    | {"_name_or_path": "x", "max_length": 4096, "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6},
    "Qwen2.5": QWEN2
    | {"attention_dropout": 0.0, "max_window_layers": 70, "sliding_window": 131072, "use_sliding_window": False}
    | {"use_mrope": False, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen3": QWEN3
    | {"attention_bias": False, "head_dim": 128, "max_window_layers": 36, "rope_scaling": None, "sliding_window": None}
    | {"use_sliding_window": False, "layer_types": ["full_attention"] * 32},
    "Mistral 7B": MISTRAL | {"sliding_window": 4096, "use_cache": True},
    "Yarn Mistral": MISTRAL
    | {"auto_map": {"AutoModelForCausalLM": "modeling_mistral_yarn.MistralForCausalLM"}}
    | {"rope_scaling": {"factor": 16.0, "finetuned": True, "original_max_position_embeddings": 8192, "type": "yarn"}},
    "Mistral Small, saved by transformers 5": without(MISTRAL, "rope_theta", "rope_scaling", "torch_dtype")
    | {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e9, "rope_type": "default"}, "sliding_window": None}
    | {"unsloth_version": "2025.12.5", "pad_token_id": 11},
}


OTHERS = without(LLAMA, "architectures", "model_type", "rope_scaling", "rms_norm_eps", "rope_theta")
PUBLISHED |= {
    "Gemma": OTHERS
    | {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None, "head_dim": 256, "rms_norm_eps": 1e-06},
    "Gemma 2": OTHERS
    | {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 224}
    | {"cache_implementation": "hybrid", "sliding_window": 4096, "head_dim": 128},
    "Gemma 3": OTHERS
    | {"model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256}
    | {"rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    | {"sliding_window": 512, "sliding_window_pattern": 6}
    | {"query_pre_attn_scalar": 256, "cache_implementation": "hybrid"},
    "Gemma 3, saved by transformers 5": OTHERS
    | {"model_type": "gemma3_text", "layer_types": (["sliding_attention"] * 7 + ["full_attention"]) * 4}
    | {"_sliding_window_pattern": 6, "use_bidirectional_attention": False, "hidden_activation": "gelu_pytorch_tanh"}
    | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
    "Phi-3 mini": OTHERS
    | {"model_type": "phi3", "embd_pdrop": 0.0, "resid_pdrop": 0.0, "sliding_window": 2047, "rope_scaling": None}
    | {"original_max_position_embeddings": 4096, "attention_bias": False, "auto_map": {"AutoConfig": "c.Phi3Config"}},
    "Phi-3.5 mini, as it was called first": OTHERS
    | {"model_type": "phi3", "original_max_position_embeddings": 4096, "sliding_window": 262144}
    | scaled(type="su", short_factor=[1.0] * 64, long_factor=[4.0] * 64),
    "Phi-4 mini": OTHERS
    | {"model_type": "phi3", "partial_rotary_factor": 0.75, "full_attn_mod": 1, "interpolate_factor": 1}
    | {"lm_head_bias": False, "mlp_bias": False, "original_max_position_embeddings": 4096, "sliding_window": 262144}
    | longrope(short=[1.0] * 48, long=[4.0] * 48),
    "Granite 3": OTHERS
    | {"model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0}
    | {"attention_multiplier": 0.0078125, "mlp_bias": False, "attention_bias": False, "rope_scaling": None},
    "SmolLM3": OTHERS
    | {"model_type": "smollm3", "max_window_layers": 28}
    | {"no_rope_layers": [1, 1, 1, 0] * 8, "no_rope_layer_interval": 4}
    | {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 32, "rope_theta": 5e6},
    "OLMo 2": OTHERS | {"model_type": "olmo2", "rms_norm_eps": 1e-06, "rope_scaling": None, "attention_bias": False},
    "GLM-4": OTHERS
    | {"model_type": "glm4", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}
    | {"head_dim": 128, "attention_bias": True},
    "StarCoder 2": OTHERS
    | {"model_type": "starcoder2", "activation_function": "gelu", "hidden_act": "gelu_pytorch_tanh", "use_bias": True}
    | {"mlp_type": "default", "norm_type": "layer_norm", "norm_epsilon": 1e-05, "residual_dropout": 0.1}
    | {"embedding_dropout": 0.1, "sliding_window": 4096, "rope_theta": 999999.4420358813},
    "Command R7B": OTHERS
    | {"model_type": "cohere2", "layer_switch": 4, "logit_scale": 0.25}
    | {"order_of_interleaved_layers": "local_attn_first"}
    | {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4}
    | {"use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True}
    | {"use_parallel_embedding": True, "cache_implementation": "hybrid", "layer_norm_eps": 1e-05},
}


def test_what_the_later_families_differ_in():
    def spec(name, **fields):
        return ModelSpec.from_config(PUBLISHED[name] | fields)

    gemma, gemma2, gemma3 = spec("Gemma"), spec("Gemma 2"), spec("Gemma 3")
    assert gemma.layers[0].mlp.activation == "gelu_tanh" and gemma.norm.offset and gemma.tied_embeddings
    assert gemma2.attention_specs[0].softcap == 50.0 and gemma2.attention_specs[0].scale == 224**-0.5
    assert windows_of(gemma2) == (4096, None) * 16 and gemma2.scales.logits_cap == 30.0
    assert windows_of(gemma3)[:6] == (512,) * 5 + (None,) and ropes_of(gemma3)[:6] == (1,) * 5 + (0,)
    assert [(rope.theta, rope.factor) for rope in gemma3.ropes] == [(1e6, 8.0), (1e4, 1.0)]
    phi, phi4 = spec("Phi-3.5 mini, as it was called first"), spec("Phi-4 mini")
    assert phi.ropes[0].kind == "longrope" and phi.ropes[0].long and not phi.for_context(4096).ropes[0].long
    assert (phi4.layers[0].mixer.rotary_dim, phi4.layers[0].mixer.head_dim) == (96, 128)
    assert spec("Granite 3").scales.logits == 1 / 16 and ropes_of(spec("SmolLM3"))[:4] == (0, 0, 0, None)
    olmo, glm = spec("OLMo 2").layers[0], spec("GLM-4").layers[0].mixer
    assert olmo.mixer.qk_norm == "row" and olmo.norm_names.before_mlp is None
    assert glm.pairs and glm.rotary_dim == 64 and not glm.output_bias
    starcoder, cohere = spec("StarCoder 2"), spec("Command R7B")
    mlp = starcoder.layers[0].mlp
    assert not mlp.gated and starcoder.norm.bias and mlp.bias and windows_of(starcoder) == (4096,) * 32
    assert cohere.layers[0].parallel and ropes_of(cohere)[:4] == (0, 0, 0, None) and cohere.scales.logits == 0.25


@pytest.mark.parametrize(
    ("name", "fields", "error", "field"),
    [
        ("Gemma", {"use_bidirectional_attention": True}, NotSupported, "use_bidirectional_attention"),
        ("Gemma 2", {"sliding_window_pattern": 3}, NotSupported, "sliding_window_pattern"),
        ("Gemma 2", {"final_logit_softcapping": -1.0}, InvalidRequest, "final_logit_softcapping"),
        ("Gemma 2", {"query_pre_attn_scalar": 0}, InvalidRequest, "query_pre_attn_scalar"),
        ("Gemma 3", {"attn_logit_softcapping": 50.0}, NotSupported, "attn_logit_softcapping"),
        ("Gemma 3", {"rope_parameters": {"rope_theta": 7.0}}, NotSupported, "rope_parameters.rope_theta"),
        ("Gemma 3", {"architectures": ["Gemma3ForConditionalGeneration"]}, InvalidRequest, "model_type"),
        ("Phi-3 mini", {"layer_types": ["full_attention"] * 32}, NotSupported, "layer_types"),
        ("Phi-3 mini", scaled(rope_type="linear", factor=2.0), NotSupported, "rope_scaling.rope_type"),
        ("Phi-3 mini", {"partial_rotary_factor": 0.01}, InvalidRequest, "partial_rotary_factor"),
        ("Phi-3 mini", {"partial_rotary_factor": 1.5}, InvalidRequest, "partial_rotary_factor"),
        ("Phi-3 mini", longrope(short=64 * [1.0], long=63 * [1.0]), InvalidRequest, "rope_scaling.long_factor"),
        ("Phi-3 mini", longrope(short=64 * [0.0], long=64 * [1.0]), InvalidRequest, "rope_scaling.short_factor[0]"),
        ("Granite 3", {"residual_multiplier": "much"}, InvalidRequest, "residual_multiplier"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, InvalidRequest, "no_rope_layers"),
        ("SmolLM3", {"no_rope_layers": [1.5] * 32}, InvalidRequest, "no_rope_layers"),
        ("OLMo 2", {"clip_qkv": 8.0}, NotSupported, "clip_qkv"),
        ("StarCoder 2", {"rms_norm_eps": 1e-6}, NotSupported, "rms_norm_eps"),
        ("Command R7B", {"use_qk_norm": True}, NotSupported, "use_qk_norm"),
        ("Command R7B", {"sliding_window_pattern": 0}, InvalidRequest, "sliding_window_pattern"),
        ("Command R7B", {"logit_scale": 0.0}, InvalidRequest, "logit_scale"),
    ],
)
def test_what_the_later_families_refuse(name, fields, error, field):
    refused(PUBLISHED[name] | fields, error, field)


GEMMA3_TEXT = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
GEMMA3_TEXT |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
GEMMA3_WITH_IMAGES = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
GEMMA3_WITH_IMAGES |= {"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144}
GEMMA3_WITH_IMAGES |= {"eos_token_id": [1, 106], "initializer_range": 0.02, "mm_tokens_per_image": 256}
GEMMA3_WITH_IMAGES |= {"text_config": GEMMA3_TEXT, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0"}
VISION = {"hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": False}
GEMMA3_WITH_IMAGES |= {"vision_config": VISION}
"""Of 4B, as it is published."""


def test_the_text_part_of_a_model_with_images_is_a_decoder_with_its_defaults():
    spec = ModelSpec.from_config(GEMMA3_WITH_IMAGES)
    assert spec.architecture == "Gemma3ForConditionalGeneration" and spec.dtype == "bfloat16"
    assert (spec.vocab_size, spec.max_context, spec.eos_token_ids) == (262_208, 131_072, (1, 106))
    assert (len(spec.layers), *heads(spec)) == (34, 8, 4, 256)
    assert windows_of(spec)[:6] == (1024,) * 5 + (None,) and spec.tied_embeddings
    assert [(rope.theta, rope.factor) for rope in spec.ropes] == [(1e6, 8.0), (1e4, 1.0)]
    named = GEMMA3_TEXT | {"architectures": ["Gemma3ForCausalLM"]}
    assert ModelSpec.from_config(GEMMA3_WITH_IMAGES | {"text_config": named}) == spec
    assert ModelSpec.from_config(without(GEMMA3_WITH_IMAGES, "architectures")) == spec


def test_llava_leaves_out_what_llama_and_mistral_have():
    """As LLaVA 1.5 and Pixtral are published."""
    told = {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "vocab_size": 32064}
    llava = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "ignore_index": -100}
    llava |= {"image_token_index": 32000, "projector_hidden_act": "gelu", "tie_word_embeddings": False}
    llava |= {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vision_config": {}}
    spec = ModelSpec.from_config(llava | {"text_config": told | {"architectures": ["LlamaForCausalLM"]}})
    assert (spec.hidden_size, len(spec.layers), heads(spec)[1], spec.vocab_size) == (4096, 32, 32, 32064)
    told = {"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40}
    told |= {"num_key_value_heads": 8, "sliding_window": None, "is_composition": True, "vocab_size": 131072}
    spec = ModelSpec.from_config(llava | {"text_config": told})
    assert (*heads(spec), windows_of(spec)[0]) == (32, 8, 128, None)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"model_type": "gemma3_text"}, InvalidRequest, "model_type"),
        ({"text_config": None}, InvalidRequest, "text_config"),
        ({"text_config": "gemma3_text"}, InvalidRequest, "text_config"),
        ({"text_config": {"model_type": "gemma2"}}, NotSupported, "text_config.model_type"),
        ({"text_config": {"surprise": 1}}, NotSupported, "text_config.surprise"),
        ({"text_config": {"architectures": ["LlamaForCausalLM"]}}, InvalidRequest, "text_config.architectures"),
        ({"text_config": {"hidden_size": "much"}}, InvalidRequest, "text_config.hidden_size"),
        ({"surprise": 1}, NotSupported, "surprise"),
    ],
    ids=str,
)
def test_what_a_model_with_images_is_refused_for(fields, error, field):
    refused(GEMMA3_WITH_IMAGES | fields, error, field)


QWEN35_TEXT = {"attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256}
QWEN35_TEXT |= {"dtype": "bfloat16", "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408}
QWEN35_TEXT |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16, "num_hidden_layers": 64}
QWEN35_TEXT |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16}
QWEN35_TEXT |= {"linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32"}
QWEN35_TEXT |= {"max_position_embeddings": 262144, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
QWEN35_TEXT |= {"mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_key_value_heads": 4}
QWEN35_TEXT |= {"output_gate_type": "swish", "rms_norm_eps": 1e-06, "vocab_size": 248320, "eos_token_id": 248044}
SECTIONS = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
QWEN35_TEXT |= {"rope_parameters": SECTIONS | {"rope_theta": 10000000, "rope_type": "default"}}
QWEN35 = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": QWEN35_TEXT}
QWEN35 |= {"image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053}
QWEN35 |= {"vision_end_token_id": 248054, "vision_config": {}, "tie_word_embeddings": False}
"""As 27B of Qwen3.5 and later is published."""


def test_qwen_35_has_recurrent_layers_and_gated_attention():
    spec = ModelSpec.from_config(QWEN35)
    assert spec.recurrent_shapes == (RecurrentShape(16, 48, 128, 128, 4),) * 48
    assert [isinstance(layer.mixer, Recurrent) for layer in spec.layers] == ([True] * 3 + [False]) * 16
    assert len(spec.attention_specs) == 16 and (spec.attention.heads, spec.attention.kv_heads) == (24, 4)
    assert spec.attention.gated and spec.attention.qk_norm == "head" and spec.attention.rotary_dim == 64
    assert ropes_of(spec)[:4] == (None, None, None, 0) and spec.ropes[0].theta == 1e7 and spec.norm.offset
    alone = ModelSpec.from_config(QWEN35_TEXT | {"architectures": ["Qwen3_5ForCausalLM"]})
    assert replace(alone, architecture=spec.architecture) == spec
    assert ModelSpec.from_config(without(QWEN35_TEXT, "layer_types")) == alone
    every_third = ModelSpec.from_config(without(QWEN35_TEXT, "layer_types") | {"full_attention_interval": 3})
    assert [isinstance(layer.mixer, Recurrent) for layer in every_third.layers[:4]] == [True, True, False, True]
    few = without(QWEN35_TEXT, *(name for name in QWEN35_TEXT if name.startswith("linear_")))
    assert ModelSpec.from_config(few).recurrent_shapes[0] == RecurrentShape(16, 32, 128, 128, 4)


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"attn_output_gate": False}, NotSupported, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, NotSupported, "output_gate_type"),
        ({"mamba_ssm_dtype": "bfloat16"}, NotSupported, "mamba_ssm_dtype"),
        ({"mlp_only_layers": [1]}, NotSupported, "mlp_only_layers"),
        ({"num_experts": 8}, NotSupported, "num_experts"),
        ({"hidden_act": "gelu"}, NotSupported, "hidden_act"),
        ({"sliding_window": 128, "use_sliding_window": True}, NotSupported, "sliding_window"),
        ({"layer_types": ["full_attention"] * 64}, NotSupported, "layer_types"),
        ({"layer_types": ["linear_attention"] * 64}, NotSupported, "layer_types"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 32}, NotSupported, "layer_types"),
        ({"layer_types": ["linear_attention", "full_attention"]}, InvalidRequest, "layer_types"),
        ({"layer_types": None, "full_attention_interval": 0}, InvalidRequest, "full_attention_interval"),
        ({"linear_num_key_heads": 32}, InvalidRequest, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 1}, InvalidRequest, "linear_conv_kernel_dim"),
        ({"linear_conv_kernel_dim": 65}, InvalidRequest, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 0}, InvalidRequest, "linear_key_head_dim"),
        ({"linear_value_head_dim": 1 << 20}, InvalidRequest, "linear_value_head_dim"),
        ({"rope_parameters": {"rope_theta": 1e7, "sections": 3}}, NotSupported, "rope_parameters.sections"),
        ({"model_type": "qwen3_next"}, InvalidRequest, "model_type"),
    ],
    ids=str,
)
def test_what_qwen_35_is_refused_for(fields, error, field):
    refused(QWEN35_TEXT | {"architectures": ["Qwen3_5ForCausalLM"]} | fields, error, field)


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_they_are_published_are_read(name):
    assert len(ModelSpec.from_config(PUBLISHED[name]).layers) == 32


def test_errors_do_not_repeat_a_megabyte():
    for fields in (
        {"k" * 10**6: 1},
        {"unknown": "v" * 10**6},
        {"model_type": "m" * 10**6},
        {"architectures": ["x" * 10**6]},
        {"hidden_act": "y" * 10**6},
        {"vocab_size": "z" * 10**6},
    ):
        with pytest.raises(ExecutorError) as caught:
            ModelSpec.from_config(LLAMA | fields)
        assert len(caught.value.message) < 1000


def test_every_key_that_is_not_known_is_named_at_once() -> None:
    config = make_model("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"], "one": 1, "other": True}
    with pytest.raises(UnknownKey, match=r"one: 1 is not known.*1 more \(other\).*--model-backend hf") as refusal:
        ModelSpec.from_config(config)
    assert refusal.value.field == "one"
    with pytest.raises(UnknownKey, match=r"without from the configuration$"):  # weights are read here by any backend
        refuse_unread(Fields({"one": 1}, "quantization_config"), (), {})


@pytest.mark.parametrize(("size", "right"), [(32000, True), (32001, False)])
def test_a_size_of_the_vocabulary_beside_the_text_part_is_that_of_the_text_part(size: int, right: bool) -> None:
    """The first LLaVAs say it twice."""
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vocab_size": size}
    config |= {"text_config": {"model_type": "llama"}}
    if right:
        assert ModelSpec.from_config(config).vocab_size == size
    else:
        with pytest.raises(InvalidRequest, match="not that of text_config"):
            ModelSpec.from_config(config)
