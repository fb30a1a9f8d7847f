"""Tiny models with recurrent layers, with experts and with latent attention, and decoders that have their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.linear import LinearFactory
from ferrum_rpc.models.spec import ModelSpec
from tests.support.checkpoints import checkpoint_tensors
from tests.support.harness import CPU, Executor, made_or_skip, random_decoder, rounded_model

TOKENS = np.random.default_rng(5).integers(0, 300, size=84)
SPLITS = ([84], [1] * 7 + [40, 1, 3, 33], [32, 5, 1, 1, 13, 32])
"""`TOKENS` in one chunk, in chunks and steps, and in steps alone."""

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"num_hidden_layers": 4, "full_attention_interval": 2, "intermediate_size": 128},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_moe": {"num_hidden_layers": 4},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "qwen3_moe": {},
    "gpt_oss": {},
}
WITH_EXPERTS = {"head_dim": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
ROUND: dict[str, dict[str, Any]] = {
    "qwen3_5": {"head_dim": 64},
    "qwen3_next": WITH_EXPERTS,
    "qwen3_5_moe": WITH_EXPERTS,
    "deepseek_v3": {"q_lora_rank": 64, "v_head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 128},
    "qwen3_moe": WITH_EXPERTS,
    "gpt_oss": {"head_dim": 64, "intermediate_size": 64},
}
"""Sizes that can be quantized, and of which our kernels are."""

ATTENTION_FIRST = {
    "linear_num_key_heads": 1,
    "linear_value_head_dim": 8,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
    },
}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_slow": 2.0}
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen3.5": {},
    "Qwen3.5, tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
    "Qwen3.5, as many key heads": {
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 2,
        "rope_parameters": SECTIONS,
    },
    "Qwen3.5, one key head, attention first": ATTENTION_FIRST,
}
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "V2": ("deepseek_v2", {}),
    "V2, groups": (
        "deepseek_v2",
        {
            "q_lora_rank": 48,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.6},
        },
    ),
    "V3": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "V3, halves, no norm": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 1, "n_group": 1}
        | {"topk_group": 1, "rms_norm_eps": 1e-2},
    ),
    "V3, dense, wide values": (
        "deepseek_v3",
        {"first_k_dense_replace": 3, "v_head_dim": 56, "tie_word_embeddings": True},
    ),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3 MoE": ("qwen3_moe", {"norm_topk_prob": True}),
    "Qwen3 MoE, not normed, dense layers, windows, biases": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True}
        | {"use_sliding_window": True, "sliding_window": 7, "tie_word_embeddings": True, "num_experts": 5},
    ),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss, YaRN, listed layers, no biases of attention": (
        "gpt_oss",
        {"num_hidden_layers": 3, "attention_bias": False, "num_experts_per_tok": 1, "swiglu_alpha": 1.1}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "tie_word_embeddings": True}
        | {"rope_parameters": YARN | {"truncate": False}, "swiglu_limit": 7.0, "head_dim": 32},
    ),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("qwen3_5", options) for name, options in RECURRENT.items()},
    "Next": ("qwen3_next", {}),
    "Next, some layers dense": ("qwen3_next", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "Next, not normed, biases": ("qwen3_next", {"norm_topk_prob": False, "attention_bias": True, "num_experts": 5}),
    "Next, one key head, attention first": ("qwen3_next", ATTENTION_FIRST),
    "Next, as many key heads": ("qwen3_next", {"linear_num_key_heads": 4, "num_experts_per_tok": 1}),
    "Next, all dense": ("qwen3_next", {"num_experts": 0}),
    "3.5 MoE": ("qwen3_5_moe", {"tie_word_embeddings": True, "rope_parameters": SECTIONS}),
    "3.5 MoE, all experts, a wide part for every row": (
        "qwen3_5_moe",
        {"num_experts_per_tok": 8, "shared_expert_intermediate_size": 96, "linear_conv_kernel_dim": 2},
    ),
    **LATENT,
    **EXPERTS,
}
"""The family, and what differs from `SHAPES`."""


def model(dtype: torch.dtype = torch.float32, case: str = "Qwen3.5", **overrides: Any) -> Any:
    family, options = CASES[case]
    return rounded_model(family, dtype, **SHAPES[family] | options | overrides)


def native_of(reference: Any, factory: Any, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A decoder whose products are our kernels'."""
    linear: LinearFactory = made_or_skip(factory)
    spec = ModelSpec.from_config(reference.config.to_dict() | {"architectures": [type(reference).__name__]})
    decoder, state = Decoder(spec, dtype, CPU, linear), checkpoint_tensors(reference)
    for name in decoder.expected_tensors():
        decoder.load(name, state[name])
    return decoder


def exact(factory: Any, case: str = "Qwen3.5", **overrides: Any) -> Decoder:
    """A decoder whose row operations are our kernels' too."""
    family, options = CASES[case]
    sizes = SHAPES[family] | options | ROUND[family] | overrides
    decoder = random_decoder(family, torch.bfloat16, made_or_skip(factory), **sizes)
    if select_fused_ops(decoder.spec, torch.bfloat16, CPU)[1].name != "native":
        pytest.skip("no kernel of ours runs here")
    return decoder


def with_rejected_drafts(executor: Executor) -> torch.Tensor:
    """All logits of `TOKENS` in sequence 0, beside a sequence in chunks: of each step of five behind the first all or
    some of the tokens are others, which are cut off again; once twice, and once the whole step."""
    rows, at, others = [executor.step({0: TOKENS[:40], 1: TOKENS[20:60]})[0]], 40, TOKENS[::-1]
    for kept in (0, 2, 5, 1, 4, 3, 5, 0):
        drafts = [*TOKENS[at : at + kept], *others[kept:5]]
        step = {0: drafts, 1: TOKENS[at : at + 33]} if kept == 2 else {0: drafts}
        rows.append(executor.step(step)[0][:kept])
        if kept == 1:
            executor.truncate(0, at + 3)
        executor.truncate(0, at + kept)
        at += kept
    rows.append(executor.step({1: TOKENS[:2], 0: TOKENS[at:]})[0])
    return torch.cat(rows)


def with_images(folder: Path, text: Any, name: str = "Qwen3_5") -> None:
    """Write a model of text and images with this text part."""
    import transformers

    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    kind = getattr(transformers, f"{name}Config")
    config = kind(text_config=text.config.to_dict(), vision_config=vision | {"patch_size": 4})
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    whole.model.language_model, whole.lm_head = text.model, text.lm_head
    whole.save_pretrained(folder)
