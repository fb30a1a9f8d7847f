"""A Qwen3 checkpoint of ours as a GGUF file, bfloat16 or Q8_0: the same numbers for llama.cpp.

llama.cpp's own converter wants a tokenizer and there is none: the file says so, and names the vocabulary's size.
Norms stay float32, as that converter has them; q and k are not permuted in this architecture.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

OUTSIDE: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INSIDE: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensor_name(name: str) -> str:
    """llama.cpp's name of a checkpoint's tensor."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{INSIDE[rest.removesuffix('.weight')]}.weight"


def converted(folder: Path, kind: str) -> Path:
    """The file of ``folder`` in ``kind`` (bf16, q8_0); written on first use, whole or not at all."""
    file = folder / f"model.{kind}.gguf"
    if not file.exists():
        partial = file.with_suffix(".partial")
        write(folder, partial, kind)
        partial.rename(file)
    return file


def write(folder: Path, file: Path, kind: str) -> None:
    """Convert. Its libraries are the peers' own."""
    import gguf
    import torch
    from gguf.quants import quantize
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen3":
        raise ValueError(f"this writes Qwen3, not {config['model_type']}")
    types = gguf.GGMLQuantizationType, gguf.LlamaFileType
    matrix, file_type = getattr(types[0], kind.upper()), getattr(types[1], f"MOSTLY_{kind.upper()}")
    writer = gguf.GGUFWriter(file, "qwen3")
    _describe(writer, config, file_type)
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - no mapping
            values = weights.get_tensor(name).to(torch.float32).numpy()
            if values.ndim == 1:
                writer.add_tensor(tensor_name(name), values.astype(np.float32))
            else:
                writer.add_tensor(tensor_name(name), quantize(values, matrix), raw_dtype=matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any], file_type: int) -> None:
    writer.add_name("random weights")
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
