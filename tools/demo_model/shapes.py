"""The two shapes, and a model in and out of a Hugging Face folder. Knows nothing of training or text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from . import tokens

MAX_POSITIONS = 2048

SHAPES: dict[str, dict[str, int]] = {
    "target": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    # Two layers, not more: a draft step costs its depth before it costs its width.
    "draft": {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


def config_json(role: str) -> dict[str, Any]:
    """`config.json` in the spelling that Qwen3's own checkpoints use, so that old and new readers agree on it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokens.END_OF_TEXT,
        "eos_token_id": tokens.END_OF_TEXT,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": SHAPES[role]["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": tokens.VOCABULARY,
        **SHAPES[role],
    }


def build(role: str) -> Qwen3ForCausalLM:
    """A freshly initialised float32 model; the projections into the residual stream start smaller (GPT-2's rule)."""
    config = Qwen3Config(**(config_json(role) | {"torch_dtype": "float32"}))
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.div_((2 * SHAPES[role]["num_hidden_layers"]) ** 0.5)
    return model


def load(folder: Path) -> Qwen3ForCausalLM:
    """The model of a folder, in the bfloat16 it is stored in, ready to evaluate."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.train(False)
    return model


def save(model: Qwen3ForCausalLM, role: str, folder: Path) -> None:
    """Write the folder, without its model card. The weights are replaced whole, so an interruption leaves old ones."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens.write(folder, MAX_POSITIONS)
    generation: dict[str, Any] = {
        "bos_token_id": tokens.END_OF_TEXT,
        "eos_token_id": tokens.END_OF_TEXT,
        "pad_token_id": 257,
    }
    generation |= {"do_sample": True, "temperature": 0.7}
    (folder / "config.json").write_text(json.dumps(config_json(role), indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    state = model.state_dict()
    state.pop("lm_head.weight")  # tied to model.embed_tokens.weight
    scratch = folder / "model.safetensors.part"
    save_file({name: t.to(torch.bfloat16).contiguous() for name, t in state.items()}, scratch, {"format": "pt"})
    scratch.chmod(0o644)  # the library creates it for its owner alone
    scratch.replace(folder / "model.safetensors")


def parameters(model: torch.nn.Module) -> int:
    """Distinct parameters: the tied embedding counts once."""
    return sum(weight.numel() for weight in model.parameters())
