"""Tiny random Hugging Face checkpoints, written by transformers itself so that their form is the real one.

Weights are scaled like trained ones (a layer's output is about as large as its input, norms differ from 1, biases from
0): with the library's own initialisation attention is nearly uniform and many a bug would not show.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

FAMILIES: dict[str, str] = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
}

TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""What every family starts from; overrides of `make_model` and `make_checkpoint` win."""

FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "ministral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
}


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model of the family, float32, eager attention, in evaluation mode."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    options = {**TINY, **FAMILY_DEFAULTS[family], **overrides}
    rope = options.pop("rope_parameters", None)
    if rope is not None:
        options["rope_parameters"] = {"rope_theta": options.pop("rope_theta"), **rope}
    else:
        options["rope_parameters"] = {"rope_theta": options.pop("rope_theta"), "rope_type": "default"}
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * (1.5 if "q_proj" in name or "k_proj" in name else 1.0) / weight.shape[1] ** 0.5)
    return model


def make_checkpoint(
    path: str | Path,
    family: str = "qwen3",
    *,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of ``family`` to ``path`` and return it.

    ``shards`` is about how many files the weights are spread over (the index file comes with more than one).
    ``overrides`` are fields of ``config.json``.
    """
    model = make_model(family, seed=seed, **overrides).to(dtype)
    model.config.dtype = dtype
    size = sum(weight.nbytes for weight in model.parameters())
    target = Path(path)
    model.save_pretrained(target, max_shard_size=size * 2 if shards == 1 else -(-size // shards))
    return target
