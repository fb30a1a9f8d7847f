"""Inverts llama.cpp's conversion of each architecture: names of tensors, and metadata as configuration.

Sources: llama.cpp's ``conversion``, and its ``src/models`` for what a file omits: there, scales of queries, patterns of
windows and layers without rotary embedding follow from the architecture, or from the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.fields import MAX_EXPERTS, Fields

WHOLE: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED: Final = {"ffn_up": "mlp.gate_up_proj"}
RECURRENT: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}

EACH: Final = "*"
"""In a name: the number of an expert. A file has the matrices of all experts of a layer in one tensor."""

ROUTED: Final = {f"ffn_{each}_exps": f"mlp.experts.{EACH}.{each}_proj" for each in ("gate", "up", "down")}
EXPERTS: Final = ROUTED | {"ffn_gate_inp": "mlp.gate"}
SHARED: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
}

RMS_EPS: Final = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
LAYER_EPS: Final = "attention.layer_norm_epsilon"

GEMMA2_27B: Final = 46
GEMMA3_27B: Final = 62
"""Layers of the models whose queries are not scaled by the size of a head."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a file when an architecture's own keys are read. ``rope``: the rotation so far."""

    fields: Fields
    hidden: int
    layers: int
    heads: int
    head_dim: int
    rope: dict[str, Any]


Read = Callable[[Facts], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """``name`` of Hugging Face's class. ``names``: of a layer's tensors, where they are not those of `LAYER`; an entry
    for a whole name wins. ``interleaved``: the channels that are rotated together became neighbours. ``shifted``: norms
    have the one that Hugging Face adds. ``eps``: of norms, the key here and there. ``partial``: heads may be rotated in
    part. ``drafts``: the last blocks may be layers that draft tokens, which are not read. ``biases``: keys of the
    configuration that say of a tensor whether it is there. ``read``: what else there is."""

    name: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    shifted: bool = False
    eps: tuple[str, str] = RMS_EPS
    partial: bool = False
    drafts: bool = False
    biases: Mapping[str, str] = field(default_factory=lambda: {"attention_bias": "blk.0.attn_q.bias"})
    read: Read | None = None


def _gemma2(facts: Facts) -> dict[str, Any]:
    made = _query_scalar(facts, GEMMA2_27B) | _windows(facts, declared="attention.sliding_window" in facts.fields)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name in facts.fields:
            made[name] = facts.fields.number(name)
    return made


def _gemma3(facts: Facts) -> dict[str, Any]:
    made = _query_scalar(facts, GEMMA3_27B) | _windows(facts, declared=True)
    local = facts.fields.number("rope.freq_base_swa", 10_000.0)
    made["rope_parameters"] = {"full_attention": facts.rope, "sliding_attention": {"rope_theta": local}}
    cap = facts.fields.optional_number("final_logit_softcapping", positive=False)
    return made | ({"final_logit_softcapping": cap} if cap else {})


def _phi3(facts: Facts) -> dict[str, Any]:
    made: dict[str, Any] = {}
    original = "rope.scaling.original_context_length"
    if original in facts.fields:
        made["original_max_position_embeddings"] = facts.fields.integer(original)
    factor = facts.fields.optional_number("rope.scaling.attn_factor")
    if facts.rope["rope_type"] == "longrope" and factor is not None:
        made["rope_parameters"] = facts.rope | {"attention_factor": factor}
    return made | {"sliding_window": facts.fields.integer("attention.sliding_window", 0, low=0) or None}


def _granite(facts: Facts) -> dict[str, Any]:
    finetuned = "rope.scaling.finetuned"  # here it says whether there is a rotation
    if not facts.fields.flag(finetuned, default=True):
        name = facts.fields.name(finetuned)
        raise NotSupported(f"{name}: false (a model without rotary embeddings) is not supported", field=name)
    given = {
        "attention_multiplier": ("attention.scale", facts.head_dim**-0.5),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
    }
    return {name: facts.fields.number(*each) for name, each in given.items()}


def _cohere2(facts: Facts) -> dict[str, Any]:
    return {"logit_scale": facts.fields.number("logit_scale"), **_windows(facts, declared=True)}


def _qwen3moe(facts: Facts) -> dict[str, Any]:
    """llama.cpp norms the weights of this architecture's experts, whatever the configuration said."""
    return {"norm_topk_prob": True, "moe_intermediate_size": _expert_inner(facts), **_expert_counts(facts)}


def _qwen35moe(facts: Facts) -> dict[str, Any]:
    shared = facts.fields.integer("expert_shared_feed_forward_length")
    return _qwen35(facts) | _qwen3moe(facts) | {"shared_expert_intermediate_size": shared}


def _gpt_oss(facts: Facts) -> dict[str, Any]:
    """A file does not say whether bounds of yarn's ramp are whole channels, which those of this model are not."""
    made = _windows(facts, declared=True) | {"intermediate_size": _expert_inner(facts), **_expert_counts(facts)}
    made["rope_parameters"] = facts.rope | ({"truncate": False} if facts.rope["rope_type"] == "yarn" else {})
    return made | {"gate_up_apart": True}


def _expert_counts(facts: Facts) -> dict[str, Any]:
    fields = facts.fields
    return {
        "num_experts": fields.integer("expert_count", high=MAX_EXPERTS),
        "num_experts_per_tok": fields.integer("expert_used_count"),
    }


def _expert_inner(facts: Facts) -> int:
    return facts.fields.integer("expert_feed_forward_length")


def _qwen35(facts: Facts) -> dict[str, Any]:
    fields, values = facts.fields, facts.fields.integer("ssm.time_step_rank")
    fields.integers("rope.dimension_sections")  # of images: the positions of a text are equal in all of them
    inner = fields.integer("ssm.inner_size")
    if inner % values:
        name = fields.name("ssm.inner_size")
        raise InvalidRequest(f"{name}: {inner} must be a multiple of the {values} value heads", field=name)
    every, listed = fields.integer("full_attention_interval", 4), fields.integers("attention.recurrent_layers")
    recurrent = listed or [(layer + 1) % every != 0 for layer in range(facts.layers)]
    if len(recurrent) < facts.layers:
        name = fields.name("attention.recurrent_layers")
        raise InvalidRequest(f"{name} has {len(recurrent)} entries for {facts.layers} layers", field=name)
    return {
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[: facts.layers]],
    }


def _query_scalar(facts: Facts, largest: int) -> dict[str, Any]:
    whole = facts.layers == largest
    return {"query_pre_attn_scalar": facts.hidden // facts.heads if whole else facts.head_dim}


def _windows(facts: Facts, *, declared: bool) -> dict[str, Any]:
    """``declared``: an absent window means that there is none, and not Hugging Face's own."""
    made: dict[str, Any] = {}
    if declared:
        made["sliding_window"] = facts.fields.integer("attention.sliding_window", 0, low=0) or None
    pattern = facts.fields.value("attention.sliding_window_pattern")
    if pattern is not None and made.get("sliding_window", 1):
        made["layer_types"] = _layer_types(facts, pattern)
    return made


def _layer_types(facts: Facts, pattern: object) -> list[str]:
    """Of a list with an entry for each layer, or of a period whose last layer has no window."""
    name = "attention.sliding_window_pattern"
    if isinstance(pattern, list):
        sliding = facts.fields.integers(name) or ()
    else:
        period = facts.fields.integer(name)
        sliding = tuple((layer + 1) % period != 0 for layer in range(facts.layers))
    if len(sliding) != facts.layers:
        full = facts.fields.name(name)
        raise InvalidRequest(f"{full} has {len(sliding)} entries for {facts.layers} layers", field=full)
    return ["sliding_attention" if each else "full_attention" for each in sliding]


_NO_BIASES: Final[Mapping[str, str]] = {}
_WITH_MLP: Final = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}

ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True, biases=_WITH_MLP),  # Mistral too
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", biases=_NO_BIASES),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", "qwen3_5_text", RECURRENT, shifted=True, partial=True, drafts=True, read=_qwen35
    ),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, read=_qwen3moe),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        RECURRENT | EXPERTS | SHARED,
        shifted=True,
        partial=True,
        drafts=True,
        read=_qwen35moe,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        ROUTED
        | {"post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks"}
        | {"ffn_gate_inp": "mlp.router"},
        read=_gpt_oss,
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", shifted=True, biases=_NO_BIASES),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", SANDWICH, shifted=True, biases=_NO_BIASES, read=_gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", SANDWICH, shifted=True, biases=_NO_BIASES, read=_gemma3),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        FUSED | {"attn_qkv": "self_attn.qkv_proj"},
        partial=True,
        biases=_NO_BIASES,
        read=_phi3,
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", interleaved=True, biases=_WITH_MLP, read=_granite),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", interleaved=True, biases=_WITH_MLP),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        FUSED | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        partial=True,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        eps=(LAYER_EPS, "norm_epsilon"),
        biases={"use_bias": "blk.0.attn_q.bias"},
    ),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", eps=(LAYER_EPS, "layer_norm_eps"), read=_cohere2),
}
"""By ``general.architecture``."""
