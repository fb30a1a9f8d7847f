"""Tiny random Hugging Face checkpoints, written by transformers itself so that their form is the real one.

Weights are scaled like trained ones (a layer's output is about as large as its input, norms differ from 1, biases from
0): with the library's own initialisation attention is nearly uniform and many a bug would not show.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FAMILIES: dict[str, str] = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "glm4": "Glm4",
    "starcoder2": "Starcoder2",
    "cohere2": "Cohere2",
}

RECURRENT: dict[str, str] = {"qwen3_5": "Qwen3_5", "qwen3_next": "Qwen3Next", "qwen3_5_moe": "Qwen3_5Moe"}
"""Families with recurrent layers, all but the first with experts."""

EXPERTS_SHAPE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
"""Of layers with experts."""

RECURRENT_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""Of a model with recurrent layers: sizes that our kernels take, so that bits can be compared."""

RECURRENT_HEADS: dict[str, Any] = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Of a tiny model with recurrent layers."""

LATENT: dict[str, str] = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
"""Families with latent attention and experts."""

LATENT_SHAPE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
"""Of a model with latent attention: sizes that our kernels take, but for the row that is cached."""

EXPERTS: dict[str, str] = {"qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}
"""Families with experts and the usual attention, without a part that computes every row."""

CLASSES = FAMILIES | RECURRENT | LATENT | EXPERTS

WITHOUT_TRANSFORMERS: dict[str, str] = {"DeciLMForCausalLM": "tests/numerics/test_layers_that_differ.py"}
"""Families that transformers lacks: the class, and the test (below the root) of its definition written in torch."""

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
    "mistral": {"sliding_window": None},
    "ministral": {"sliding_window": None, "head_dim": 16},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20},
    "gemma3": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2},
    "granite": {
        "embedding_multiplier": 1.7,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.3,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "glm4": {"head_dim": 16},
    "cohere2": {"sliding_window": 9, "sliding_window_pattern": 2},
    "qwen3_5": RECURRENT_HEADS,
    "qwen3_next": RECURRENT_HEADS | EXPERTS_SHAPE,
    "qwen3_5_moe": RECURRENT_HEADS | EXPERTS_SHAPE,
    "deepseek_v2": LATENT_SHAPE | {"q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": LATENT_SHAPE | {"q_lora_rank": 48},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 9,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.7,
    },
}


def config_class(family: str) -> Any:
    """The configuration of the family in transformers."""
    import transformers

    name = CLASSES[family]
    with_images = family in {"gemma3", "qwen3_5", "qwen3_5_moe"}
    return getattr(transformers, f"{name}TextConfig" if with_images else f"{name}Config")


def drawn(family: str, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A random weight."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        offset = family.startswith("gemma") or (family in RECURRENT and "linear_attn" not in name)
        return (not offset) + 0.2 * noise
    if name.endswith(("A_log", "dt_bias", "sinks")) or "embed_tokens" in name:
        return noise
    if "conv1d" in name:
        return noise / shape[-1] ** 0.5
    if name.endswith("bias"):
        return 0.3 * noise
    return noise * (1.5 if re.search("(q|k|qkv)_proj", name) else 1.0) / shape[-1] ** 0.5


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model of the family, float32, eager attention, in evaluation mode."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    options = {**TINY, **FAMILY_DEFAULTS.get(family, {}), **overrides}
    theta, rope = options.pop("rope_theta"), options.pop("rope_parameters", None) or {"rope_type": "default"}
    if family == "gemma3":  # a rotation for layers of each type
        rope = rope if "full_attention" in rope else {"full_attention": {"rope_theta": 50 * theta, **rope}}
        options["rope_parameters"] = {"sliding_attention": {"rope_theta": theta, "rope_type": "default"}, **rope}
    else:
        options["rope_parameters"] = {"rope_theta": theta, **rope}
    config = config_class(family)(**options)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(drawn(family, name, weight.shape, generator))
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                values.copy_(0.3 * torch.randn(values.shape, generator=generator))
    return model


def checkpoint_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a transformers model by their names in checkpoints, where each expert has its own."""
    found, state = dict[str, torch.Tensor](), model.state_dict()
    for name, tensor in state.items():
        path, _, last = name.rpartition(".experts.")
        if not path:
            found[name] = tensor
            continue
        for index, each in enumerate(tensor):
            if last.endswith("_bias"):
                found[f"{path}.experts.{index}.{last.removesuffix('_bias')}.bias"] = each
                continue
            if f"{name}_bias" in state:  # multiplied from the right
                found[f"{path}.experts.{index}.{last}.weight"] = each.T
                continue
            parts = each.chunk(2) if last == "gate_up_proj" else (each,)
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for part, own in zip(names, parts, strict=True):
                found[f"{path}.experts.{index}.{part}.weight"] = own
    return found


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


def configure(folder: Path, **changes: Any) -> None:
    """Change fields of ``config.json``; take out those that are ``"gone"``."""
    config = json.loads((folder / "config.json").read_text()) | changes
    left = {key: value for key, value in config.items() if value != "gone"}
    (folder / "config.json").write_text(json.dumps(left))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


LOAD = """
import ctypes, gc, re, sys, torch
from pathlib import Path
from ferrum_rpc.engine.assembly.loading import load_model
from ferrum_rpc.models.linear import select_linear
cpu = torch.device("cpu")
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
for folder, name in zip(sys.argv[1::2], sys.argv[2::2]):
    dtype = getattr(torch, name)
    select_linear(cpu, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # it begins again at what is resident
    before = peak()
    model = load_model(folder, dtype, cpu)
    print(peak() - before)
    del model
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # else the next model may take what this one had
"""


def loading_peaks(*models: Path | str) -> list[int]:
    """Bytes by which the resident memory of a fresh process grows at most while it loads each of some models, which are
    given as the folder and the dtype. By VmHWM and not ru_maxrss: that one inherits the peak of the process that
    started this one."""
    command = [sys.executable, "-c", LOAD, *map(str, models)]
    return [int(each) for each in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def loading_peak(folder: Path, dtype: str = "float32") -> int:
    return loading_peaks(folder, dtype)[0]
