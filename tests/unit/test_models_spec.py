"""Configurations: what transformers means by them, and what is refused by name."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import UnknownKey, refuse_unread
from ferrum_rpc.models.families import FAMILIES
from ferrum_rpc.models.fields import Fields
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


def test_a_whole_number_may_be_written_as_a_float():
    floats = {name: float(value) for name, value in LLAMA.items() if type(value) is int and "token" not in name}
    assert ModelSpec.from_config(LLAMA | floats) == ModelSpec.from_config(LLAMA)
    with pytest.raises(InvalidRequest, match="hidden_size"):
        ModelSpec.from_config(LLAMA | {"hidden_size": 4096.5})


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


LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "ignore_index": -100}
LLAVA |= {"image_token_index": 32000, "projector_hidden_act": "gelu", "tie_word_embeddings": False}
LLAVA |= {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vision_config": {}}
OF_LLAMA = {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "vocab_size": 32064}
OF_MISTRAL = {"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40}
OF_MISTRAL |= {"num_key_value_heads": 8, "sliding_window": None, "is_composition": True, "vocab_size": 131072}

SIZES = {"vocab_size": 1000, "hidden_size": 4096, "intermediate_size": 1024, "max_position_embeddings": 8192}
SIZES |= {"num_hidden_layers": 12, "num_attention_heads": 32}
SHORT = {
    f"{name}, sizes alone": SIZES | {"model_type": family.model_types[0]}
    for name, family in FAMILIES.items()
    if not family.latent and name != "DeciLMForCausalLM"  # which transformers has not
}

SLIDING = {"use_sliding_window": True, "sliding_window": 100}
LISTED = {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"] * 16}
WINDOWS = {
    **{f"Mistral with a window of {size}": MISTRAL | {"sliding_window": size} for size in (None, 100)},
    "Mistral with listed windows": MISTRAL | LISTED,
    "Ministral": MISTRAL | LISTED | {"model_type": "ministral", "architectures": ["MinistralForCausalLM"]},
    "Qwen2 whose window is not used": QWEN2 | SLIDING | {"use_sliding_window": False},
    "Qwen2 with few windows": QWEN2 | SLIDING | {"max_window_layers": 30},
    "Qwen2 with its own window": QWEN2 | {"use_sliding_window": True, "max_window_layers": 0},
    "Qwen3 with listed windows": QWEN3 | LISTED | {"use_sliding_window": True},
    "Qwen3 without windows": QWEN3 | {"layer_types": None},
}

READ = without(PUBLISHED, "Phi-3.5 mini, as it was called first") | SHORT | WINDOWS
READ |= {"Gemma 3 with images": GEMMA3_WITH_IMAGES, "Qwen3.5": QWEN35, "the text part of Qwen3.5": QWEN35_TEXT}
READ |= {"Qwen3.5, every fourth": without(QWEN35_TEXT, "layer_types")}
READ |= {"LLaVA 1.5": LLAVA | {"text_config": OF_LLAMA}, "Pixtral": LLAVA | {"text_config": OF_MISTRAL}}


@pytest.mark.parametrize("name", READ)
def test_a_configuration_means_what_transformers_makes_of_it(name):
    """Which has a value for every field. What the values mean, logits show: tests/numerics/test_config_keys.py."""
    from transformers import CONFIG_MAPPING

    config = READ[name]
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    spec, whole = map(ModelSpec.from_config, (config, json.loads(theirs.to_json_string(use_diff=False))))
    told = ("architecture", "dtype", "eos_token_ids", "bos_token_id")  # by files alone
    assert spec == replace(whole, **{each: getattr(spec, each) for each in told})


def test_what_files_alone_tell():
    spec, images = ModelSpec.from_config(LLAMA), ModelSpec.from_config(GEMMA3_WITH_IMAGES)
    assert (spec.architecture, spec.dtype, spec.bos_token_id) == ("LlamaForCausalLM", "bfloat16", 128000)
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert (images.architecture, images.eos_token_ids) == ("Gemma3ForConditionalGeneration", (1, 106))
    bare = ModelSpec.from_config(without(LLAMA, "eos_token_id", "bos_token_id", "torch_dtype"))
    assert (bare.eos_token_ids, bare.bos_token_id, bare.dtype) == ((), None, None)
    for alone in (GEMMA3_WITH_IMAGES, QWEN3):
        assert ModelSpec.from_config(without(alone, "architectures")) == ModelSpec.from_config(alone)
    named = GEMMA3_TEXT | {"architectures": ["Gemma3ForCausalLM"]}
    assert ModelSpec.from_config(GEMMA3_WITH_IMAGES | {"text_config": named}) == images


def test_what_transformers_does_not_read_any_more():
    assert heads(ModelSpec.from_config(MISTRAL | {"num_key_value_heads": None}))[1] == 32
    first = PUBLISHED["Phi-3.5 mini, as it was called first"]
    named = first | longrope(short=[1.0] * 64, long=[4.0] * 64)
    assert ModelSpec.from_config(first) == ModelSpec.from_config(named)


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
