"""A Qwen3 checkpoint of ours as a GGUF file, in bfloat16 or a quantized type: the same numbers for llama.cpp.

llama.cpp's own converter wants a tokenizer and there is none: the file says so, and names the vocabulary's size.
Norms stay float32, as that converter has them; q and k are not permuted in this architecture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import numpy as np

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
    if config["model_type"] != "qwen3":
        raise ValueError(f"this writes Qwen3, not {config['model_type']}")
    matrix = getattr(gguf.GGMLQuantizationType, kind.upper())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, "qwen3")
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
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - no mapping
            values = weights.get_tensor(name).to(torch.float32).numpy()
            to = names.get_name(name, (".weight",))
            assert to is not None, name
            if values.ndim == 1:
                writer.add_tensor(to, values.astype(np.float32))
            else:
                writer.add_tensor(to, quantize(values, matrix), raw_dtype=matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":  # a folder, and types
    for each in sys.argv[2:]:
        converted(Path(sys.argv[1]), each)
