"""Tiny random models of the families that transformers runs for us: their configurations in one table.

Weights are scaled like trained ones, as in `tests.support.checkpoints`. Sizes are what each family takes for granted
otherwise: what is not said here is the family's default, which may be large.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

HEADS = {"head_dim": 8}
WINDOWED = {"sliding_window": 7}
BOTH = WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}
ALTERNATING = HEADS | BOTH
FULL = {"layer_types": ["full_attention"] * 2}
SHARED = ALTERNATING | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": 2 * BOTH["layer_types"]}
OF_A_LAYER = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": HEADS,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": MOE | HEADS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": HEADS | WINDOWED,
    "ministral": ALTERNATING,
    "gemma": HEADS,
    "gemma2": ALTERNATING | {"query_pre_attn_scalar": 16},
    "gemma3_text": ALTERNATING | {"query_pre_attn_scalar": 16},
    "gemma3n_text": SHARED | OF_A_LAYER | {"laurel_rank": 8},
    "gemma4_text": ALTERNATING | OF_A_LAYER | {"global_head_dim": 16},
    "gemma4_text (fewer and wider heads)": ALTERNATING
    | OF_A_LAYER
    | {"global_head_dim": 24, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_unified_text": ALTERNATING | {"global_head_dim": 16},
    "gemma4_text (shared K and V)": SHARED | OF_A_LAYER | {"global_head_dim": 16},
    "olmo": {},
    "olmo2": {},
    "olmo3": BOTH,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "cohere": {"logit_scale": 0.25},
    "cohere2": ALTERNATING,
    "exaone4": ALTERNATING,
    "gpt_oss": ALTERNATING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT | {"topk_method": "greedy", "q_lora_rank": None},
    "deepseek_v3": LATENT,
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": HEADS
    | {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "granitemoe": {"attention_multiplier": 0.2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "starcoder2": WINDOWED,
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi": {},
    "phi3": WINDOWED,
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "bitnet": {},
    "ernie4_5": HEADS,
    "hunyuan_v1_dense": HEADS,
    "seed_oss": HEADS,
    "apertus": {},
    "helium": HEADS,
    "arcee": {},
    "persimmon": {},
    "nemotron": {},
    "gemma3": {
        "text_config": TINY | ALTERNATING | {"model_type": "gemma3_text", "query_pre_attn_scalar": 16},
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "phimoe": WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": MOE | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    "granitemoehybrid": FULL
    | {"num_local_experts": 0, "shared_intermediate_size": 48, "mamba_n_heads": 4, "position_embedding_type": "rope"},
    "mimo_v2_flash": BOTH
    | {"head_dim": 16, "v_head_dim": 8, "swa_num_key_value_heads": 4}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "minimax_m2": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "gpt_bigcode": {"n_inner": 48},
    "internlm3": {},
    "ministral3": HEADS | WINDOWED,
    "minicpm3": LATENT,
    "modernbert-decoder": {"local_attention": 8, "global_attn_every_n_layers": 2},
}
"""Those that are served: ``model_type`` to what is said beside `TINY`. A word in brackets tells two of a type apart."""

ATTENTION_ALONE: dict[str, dict[str, Any]] = {
    "qwen3_next": HEADS | FULL | MOE | {"shared_expert_intermediate_size": 24},
    "qwen3_5_text": FULL | {"head_dim": 16},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0, "num_experts": 4},
    "bamba": {"attn_layer_indices": [0, 1], "mamba_n_heads": 4},
    "nemotron_h": HEADS | {"layers_block_type": ["attention"] * 2},
    "recurrent_gemma": {"block_types": ["attention"], "attention_window_size": 7},
    "kimi_linear": LATENT | FULL,
    "bailing_hybrid": LATENT | FULL,
}
"""Hybrid families, of models that have none of the layers with a state."""

RECURRENT = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": RECURRENT | MOE | {"shared_expert_intermediate_size": 24},
    "qwen3_5_text": RECURRENT,
    "qwen3_5_moe_text": RECURRENT | MOE | {"shared_expert_intermediate_size": 24},
}
"""Those with recurrent layers, which only the native decoder serves."""

NATIVE: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": TINY | HEADS | {"model_type": "mistral", "sliding_window": None},
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        "tie_word_embeddings": False,
    },
    "llava": {
        "text_config": TINY | {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48}
        | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    },
}
"""Those of text and images that are no decoders to transformers: the native decoder serves their text part alone."""

UNSAFE: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": ({}, "its attention cannot be replaced"),
    "bloom": ({}, "its attention cannot be replaced"),
    "mpt": ({}, "its attention cannot be replaced"),
    "gptj": ({}, "its attention cannot be replaced"),
    "stablelm": ({}, "its attention cannot be replaced"),
    "qwen3_next": ({}, "keeps a state in addition to keys and values"),
    "mamba": ({}, "keeps a state in addition to keys and values"),
    "jamba": ({}, "keeps a state in addition to keys and values"),
    "granitemoehybrid (mixed)": (
        {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4},
        "keeps a state in addition to keys and values .*'linear_attention'",
    ),
    "falcon_h1": ({"mamba_n_heads": 4, "mamba_d_ssm": 64}, "keeps a state in addition to keys and values .*'hybrid'"),
    "zamba": ({"layers_block_type": FULL["layer_types"]}, "Cannot get conv state"),
    "minimax": ({}, "'linear_attention' is not full or sliding attention"),
    "llama4_text": ({}, "'chunked_attention' is not full or sliding attention"),
    "doge": ({}, "layer 0 makes its own mask"),
    "bert": ({}, "layer 0 is not causal"),
}
"""Those that would give wrong answers without a word, and why they are refused. Zamba's configuration lists attention
alone, and its layers are others."""


def model_type(family: str) -> str:
    """Of a name in a table."""
    return family.partition(" ")[0]


def make_family(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model of the family, float32, eager attention, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    logging.getLogger("transformers").setLevel(logging.ERROR)
    options = {**(FAMILIES | ATTENTION_ALONE | NATIVE).get(family, {}), **overrides}
    if "text_config" not in options:
        options = TINY | options
    config = AutoConfig.for_model(model_type(family), **options)
    kind = AutoModelForImageTextToText if family in NATIVE else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                scale = 1.0 if "embed" in name or "wte" in name else (1.5 / weight.shape[-1] ** 0.5)
                weight.copy_(noise * scale)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            else:
                weight.add_(0.2 * noise)
    return model


def make_family_checkpoint(path: Path, family: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a random checkpoint of ``family`` to ``path`` and return it."""
    model = make_family(family, **overrides).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(path)
    return path
