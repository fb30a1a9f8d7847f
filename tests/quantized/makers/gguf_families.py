"""llama.cpp's own converter writes GGUF files of the families in float16, from models whose weights are exact in it.

The oracle is transformers with the original model; llama.cpp itself, which rounds activations, is compared here.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.quantized.make import SAMPLES
from tests.quantized.makers.gguf import convert, logits, prepare_library
from tests.support.checkpoints import make_model
from tests.support.harness import error, reference_logits

FOLDER = SAMPLES.parent / "families"
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
HEADS = {"head_dim": 16}
RECURRENT = HEADS | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
}
EXPERTS = HEADS | {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
GEMMA = HEADS | {"tie_word_embeddings": True, "sliding_window": 4}
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.5, 2.0, 4.0, 8.0]}
FAMILIES: dict[str, tuple[str, dict]] = {
    "gemma": ("gemma", HEADS | {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", GEMMA | {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3",
        GEMMA
        | {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "sliding_window_pattern": 6}
        | {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
    ),
    "phi3": ("phi3", {"original_max_position_embeddings": 128}),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 0.5, **FACTORS},
        },
    ),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", HEADS),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True}),
    "qwen35": ("qwen3_5", RECURRENT),
    "qwen35-tiled": ("qwen3_5", RECURRENT | {"linear_num_value_heads": 6, "tie_word_embeddings": True}),
    "qwen3moe": ("qwen3_moe", EXPERTS | {"num_experts": 4}),
    "qwen35moe": ("qwen3_5_moe", RECURRENT | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32}),
    "gpt-oss": (
        "gpt_oss",
        HEADS
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "swiglu_limit": 7.0}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150_000.0, "truncate": False, **YARN}},
    ),
    "cohere2": (
        "cohere2",
        {"num_hidden_layers": 4, "sliding_window": 4, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    ),
}
TOKENS = np.random.default_rng(5).integers(0, 32, 40).tolist()


def prepare(folder: Path) -> None:
    """What the converters look for, and published folders have."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"rotary_pct": 1.0} | config))
    words = {"model": {"vocab": {str(each): each for each in range(SHAPE["vocab_size"])}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(words))


def make(llama_cpp_folder: str, *names: str) -> None:
    prepare_library(llama_cpp_folder)
    FOLDER.mkdir(exist_ok=True)
    for name in names or FAMILIES:
        family, shape = FAMILIES[name]
        model = make_model(family, **SHAPE | shape)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.half())
        file = FOLDER / f"{name}.gguf"
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            prepare(Path(scratch))
            file.unlink(missing_ok=True)
            convert(model, Path(scratch), file, "MOSTLY_F16")
        expected = reference_logits(model, TOKENS, torch.float64)
        save_file({"logits": expected.float().contiguous()}, file.with_suffix(".safetensors"))
        print(name, file.stat().st_size, "bytes; llama.cpp differs by", error(logits(file, TOKENS), expected))
