"""GGUF files by hand: headers that no library would write, and models of transformers without llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {bool: (7, "?"), int: (5, "i"), float: (6, "f")}


def text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def value_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):  # as it is
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        kind, letter = TYPES[type(value[0])] if value else TYPES[int]
        return struct.pack("<IIQ", 9, kind, len(value)) + struct.pack(f"<{len(value)}{letter}", *value)
    kind, letter = TYPES[type(value)]
    return struct.pack("<I", kind) + struct.pack(f"<{letter}", value)


def read_gguf(file: Path) -> tuple[dict[str, Any], list[list[Any]], bytes]:
    """What `gguf_bytes` made a file of."""
    import gguf

    reader = gguf.GGUFReader(file)
    metadata = {key: each.contents() for key, each in reader.fields.items() if not key.startswith("GGUF.")}
    start = reader.data_offset
    tensors = [
        [each.name, [int(size) for size in each.shape], int(each.tensor_type), int(each.data_offset) - start]
        for each in reader.tensors
    ]
    return metadata, tensors, file.read_bytes()[start:]


def gguf_bytes(
    metadata: dict[str, Any], tensors: Sequence[Sequence[Any]], data: bytes = b"", alignment: int = 32
) -> bytes:
    """``tensors``: name, shape in ggml's order, type, offset."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [text(key) + value_bytes(value) for key, value in metadata.items()]
    for name, shape, kind, offset in tensors:
        parts += [text(name), struct.pack("<I", len(shape)), struct.pack(f"<{len(shape)}Q", *shape)]
        parts.append(struct.pack("<IQ", kind, offset))
    header = b"".join(parts)
    return header + bytes(-len(header) % alignment) + data


NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.q_proj.": ".attn_q.",
    ".self_attn.k_proj.": ".attn_k.",
    ".self_attn.v_proj.": ".attn_v.",
    ".self_attn.o_proj.": ".attn_output.",
    ".self_attn.q_norm.": ".attn_q_norm.",
    ".self_attn.k_norm.": ".attn_k_norm.",
    ".mlp.gate_proj.": ".ffn_gate.",
    ".mlp.up_proj.": ".ffn_up.",
    ".mlp.down_proj.": ".ffn_down.",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter lays out the rows of q and k of a Llama."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_model(file: Path, model: Any, kind: int, changes: dict[str, Any] | None = None) -> None:
    """A transformers model, its matrices of ggml's type ``kind``. ``changes``: of the metadata; None takes one out."""
    import gguf

    config, name = model.config, model.config.model_type
    metadata = {
        "general.architecture": name,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": model.model.layers[0].self_attn.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.eos_token_id": 2,
    } | (changes or {})
    tensors, data = [], b""
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = tensor.float().numpy()
        if name == "llama" and (".q_proj." in key or ".k_proj." in key):
            rows = interleaved(rows, config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads)
        for theirs, ours in NAMES.items():
            key = key.replace(theirs, ours)  # noqa: PLW2901
        of = gguf.GGMLQuantizationType(kind if rows.ndim == 2 else 0)
        content = gguf.quants.quantize(rows, of).tobytes()
        tensors.append((key, [*rows.shape[::-1]], int(of), len(data)))
        data += content + bytes(-len(content) % 32)
    kept = {key: value for key, value in metadata.items() if value is not None}
    file.write_bytes(gguf_bytes(kept, tensors, data))
