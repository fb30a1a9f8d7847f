"""Real model shapes with random weights: what a benchmark needs of a model is its size, not its knowledge.

`write_checkpoint` writes a Hugging Face folder at disk speed: one block of random numbers is drawn and every tensor is
cut from it at another offset. Independent of ferrum_rpc and transformers, so that every peer can load the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_cache": True,
}
"""https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json"""

QWEN3_8B: dict[str, Any] = QWEN3_0_6B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "max_window_layers": 36,
}

TINY: dict[str, Any] = QWEN3_0_6B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "max_window_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The same architecture at a size that a test can afford."""

PERIOD = 4194301
"""Numbers drawn per checkpoint: a prime, so that no two rows of a matrix are equal (equal rows tie in the logits)."""

SHAPES: dict[str, dict[str, Any]] = {"qwen3-0.6b": QWEN3_0_6B, "qwen3-8b": QWEN3_8B, "tiny": TINY}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor of a Qwen3 configuration, by name."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (key, hidden),
            prefix + "self_attn.v_proj.weight": (key, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_checkpoint(
    path: str | Path, config: dict[str, Any] = QWEN3_0_6B, dtype: str = "bfloat16", seed: int = 0
) -> Path:
    """Write ``config`` with random weights of ``dtype`` (bfloat16, float16, float32) to folder ``path``; return it."""
    import torch
    from safetensors.torch import save_file

    block = torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype)).repeat(2)
    tensors: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(tensor_shapes(config).items()):
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=block.dtype)
            continue
        size = shape[0] * shape[1]
        offset = index * 7919 % PERIOD
        source = block[offset : offset + PERIOD] * (0.02 if "embed" in name else shape[1] ** -0.5)
        tensors[name] = source.repeat(-(-size // PERIOD))[:size].view(shape)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=1))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
