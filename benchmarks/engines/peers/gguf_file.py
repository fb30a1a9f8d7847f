"""A checkpoint of ours (Qwen3, with experts too, Qwen3.5) as a GGUF file, in bfloat16 or a quantized type: the same
numbers for llama.cpp.

llama.cpp's own converter wants a tokenizer and there is none: the file says so, and names the vocabulary's size.
Norms, convolutions and routers stay float32, as that converter has them; q and k are not permuted in these
architectures. Value heads would be, if several shared a key head.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

ARCHITECTURES: Final = {"qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35"}
"""What llama.cpp calls a ``model_type``."""

Floats = npt.NDArray[np.float32]

PLAIN: Final = ("bf16", "q8_0")
"""What is written here. llama.cpp's own quantizer makes all other types."""


def converted(folder: Path, kind: str) -> Path:
    """The file of ``folder`` in ``kind`` (bf16, q8_0, q4_k_m, ..); written on first use, whole or not at all."""
    file = folder / f"model.{kind}.gguf"
    if not file.exists():
        partial = file.with_suffix(".partial")
        if kind in PLAIN:
            write(folder, partial, kind)
        else:
            quantize_all(converted(folder, "bf16"), partial, kind)
        partial.rename(file)
    return file


def quantize_all(source: Path, file: Path, kind: str) -> None:
    """By llama.cpp itself."""
    import ctypes

    import llama_cpp

    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(wanted)):
        raise RuntimeError(f"llama.cpp does not quantize {source.name}")


def write(folder: Path, file: Path, kind: str) -> None:
    """Convert. Its libraries are the peers' own."""
    import gguf
    import torch
    from gguf.quants import quantize
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(f"this writes {', '.join(ARCHITECTURES)}, not {config['model_type']}")
    name = ARCHITECTURES[config["model_type"]]
    matrix = getattr(gguf.GGMLQuantizationType, kind.upper())
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, name)
    writer.add_name("random weights")
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{kind.upper()}"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if name == "qwen35":
        add_recurrence(writer, config)
    if name == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for each, parts in stacked(weights.keys(), config.get("num_experts", 0)).items():
            read = [weights.get_tensor(part).to(torch.float32).numpy() for part in parts]
            values = np.stack(read) if len(read) > 1 else read[0]
            if name == "qwen35":
                values = of_qwen35(each, values)
            to = names.get_name(each.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))
            assert to is not None, each
            if values.ndim == 1 or "conv1d" in each or each.endswith("mlp.gate.weight"):
                writer.add_tensor(to, values.astype(np.float32))
            else:
                writer.add_tensor(to, quantize(values, matrix), raw_dtype=matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked(names: Iterable[str], experts: int) -> dict[str, list[str]]:
    """The tensors of a file, and those of the checkpoint that each is: one for all experts of a layer."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"(\.experts)\.\d+", r"\1", name), []).append(name)
    for parts in found.values():
        parts.sort(key=lambda part: [int(each) for each in re.findall(r"\d+", part)])
        if len(parts) not in {1, experts}:
            raise ValueError(f"{parts[0]}: {len(parts)} of {experts} experts")
    return found


def add_recurrence(writer: Any, config: Mapping[str, Any]) -> None:
    """What llama.cpp must know of the recurrent layers of Qwen3.5."""
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    if (heads, size) != (config["linear_num_key_heads"], config["linear_key_head_dim"]):
        raise ValueError("this writes models with as many key heads as value heads, of one size")
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(size)
    writer.add_ssm_group_count(heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * size)
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])


def of_qwen35(name: str, values: Floats) -> Floats:
    """A tensor of Qwen3.5 as llama.cpp has it: decays instead of their logarithms, norms with the one that is added."""
    if name.endswith(".A_log"):
        return -np.exp(values)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values + 1
    return values.squeeze(1) if "conv1d" in name else values


if __name__ == "__main__":  # a folder, and types
    for each in sys.argv[2:]:
        converted(Path(sys.argv[1]), each)
