"""GGUF metadata as the keys of a ``config.json``, and its tensors by Hugging Face's names.

Every key below the architecture's name is honoured, known to change no number, or refused: as with a ``config.json``.
Tokens and templates are a scheduler's business; of the tokenizer's keys only stops and the size of the vocabulary are
read. Sources: llama.cpp's ``convert_hf_to_gguf.py`` and ``gguf/constants.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ferrum_rpc.errors import NotSupported
from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.weights.gguf.header import Header, Skipped


@dataclass(frozen=True, slots=True)
class Architecture:
    """``name`` of Hugging Face's class. ``interleaved``: the channels that are rotated together are neighbours."""

    name: str
    model_type: str
    interleaved: bool = False


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True),  # Mistral too
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
}
"""By ``general.architecture``."""

ROPE_FACTORS: Final = "rope_freqs.weight"
WHOLE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
IN_LAYER: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")

IRRELEVANT: Final = ("rope.scaling.finetuned", "tensor_data_layout")
OFF: Final[Mapping[str, tuple[object, ...]]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "logit_scale": (1.0,),
    "use_parallel_residual": (True,),
}


def hugging_face_name(name: str) -> str:
    """The tensor's name in Hugging Face's format; an unknown one as it is."""
    if name in WHOLE:
        return WHOLE[name]
    match = IN_LAYER.fullmatch(name)
    if match is None or match[2] not in LAYER:
        return name
    return f"model.layers.{match[1]}.{LAYER[match[2]]}.{match[3]}"


def architecture(header: Header) -> Architecture:
    """Raises NotSupported for one that is not read, and for files that are no whole model."""
    general = Fields(_kept(header, "general."), "general")
    name, kind = general.text("architecture", ""), general.text("type", "model")
    if kind != "model":
        raise NotSupported(f"general.type: {kind[:80]!r} is no model", field="model")
    split = header.metadata.get("split.count", 0)
    if split not in (0, 1):
        raise NotSupported(
            f"split.count: a GGUF file in {str(split)[:40]} parts is not read; llama-gguf-split --merge joins them",
            field="model",
        )
    if name not in ARCHITECTURES:
        raise NotSupported(
            f"general.architecture: GGUF files of {name[:80]!r} are not read, those of {', '.join(ARCHITECTURES)} are; "
            "take the model in safetensors",
            field="architectures",
        )
    return ARCHITECTURES[name]


def config(header: Header, factors: np.ndarray[Any, np.dtype[np.float32]] | None) -> dict[str, Any]:
    """What a ``config.json`` of the model says. ``factors``: float32 [head_dim / 2], what the periods of rotation are
    multiplied with (of `ROPE_FACTORS`)."""
    known, name = architecture(header), str(header.metadata["general.architecture"])
    fields, tokens = Fields(_kept(header, f"{name}."), name), Fields(_kept(header, "tokenizer.ggml."), "tokenizer.ggml")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads))
    for other, meaning in (("attention.value_length", "values"), ("rope.dimension_count", "rotated channels")):
        if fields.integer(other, head_dim) != head_dim:
            raise NotSupported(
                f"{fields.name(other)}: heads of {head_dim} with {fields.integer(other)} {meaning} are not read",
                field=fields.name(other),
            )
    theta = fields.number("rope.freq_base", 10_000.0)
    made: dict[str, Any] = {
        "architectures": [known.name],
        "model_type": known.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("feed_forward_length"),
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocabulary(fields, header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": {"rope_theta": theta, **_scaling(fields, theta, head_dim, factors)},
        "eos_token_id": _stops(tokens),
        "bos_token_id": tokens.value("bos_token_id"),
    }
    if known.model_type != "qwen2":
        made["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if known.model_type == "llama":
        made["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    refuse_unread(fields, IRRELEVANT, OFF)
    return made


def _kept(header: Header, prefix: str) -> dict[str, object]:
    """What is below ``prefix``, skipped values as their length."""
    return {
        key.removeprefix(prefix): {"length": value.length} if isinstance(value, Skipped) else value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }


def _vocabulary(fields: Fields, header: Header) -> int:
    """As told; else the rows of the embedding."""
    embedding = header.tensors.get("token_embd.weight")
    told = fields.value("vocab_size")
    if told is None and embedding is not None:
        return embedding.shape[0]
    return fields.integer("vocab_size")


def _stops(tokens: Fields) -> list[int]:
    ids = [*tokens.token_ids("eos_token_id"), *tokens.token_ids("eot_token_id")]
    return list(dict.fromkeys(ids))


def _scaling(
    fields: Fields, theta: float, head_dim: int, factors: np.ndarray[Any, np.dtype[np.float32]] | None
) -> dict[str, Any]:
    kind = fields.text("rope.scaling.type", "none")
    if factors is not None and not bool((factors == 1).all()):
        if kind != "none":
            raise NotSupported(f"{ROPE_FACTORS} beside {fields.name('rope.scaling.type')} {kind[:80]!r}", field="model")
        return _llama3(factors, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default"}
    made: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "linear":
        return made
    if kind != "yarn":
        raise NotSupported(
            f"{fields.name('rope.scaling.type')}: {kind[:80]!r} is not read; none, linear and yarn are",
            field=fields.name("rope.scaling.type"),
        )
    made["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = fields.optional_number(f"rope.scaling.{theirs}")
        if value is not None:
            made[ours] = value
    return made


def _llama3(factors: np.ndarray[Any, np.dtype[np.float32]], theta: float, head_dim: int) -> dict[str, Any]:
    """The scaling that gives these factors. Llama 3.1 and 3.2 have a factor of 8 and 32, frequency factors of 1 and 4,
    and an original context that is a power of two; a file keeps only what comes out."""
    factor = float(factors.max())
    if factors.shape == (head_dim // 2,) and math.isfinite(factor) and factor > 1:
        waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        for original in (1 << power for power in range(4, 24)):
            smooth = (original / waves - 1) / 3
            with np.errstate(divide="ignore", invalid="ignore"):
                blended = 1 / ((1 - smooth) / factor + smooth)
            expected = np.where(waves < original / 4, 1, np.where(waves > original, factor, blended))
            if np.allclose(factors, expected, rtol=1e-4, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise NotSupported(f"{ROPE_FACTORS}: these factors are none of Llama 3's", field="model")
