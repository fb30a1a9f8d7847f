"""GGUF metadata as the keys of a ``config.json``, and its tensors by Hugging Face's names.

Every key below the architecture's name is honoured, known to change no number, or refused, as with a ``config.json``.
The executor does not need tokens and templates; of the tokenizer's keys only stops and the size of the vocabulary are
read. `architectures` has what is specific to an architecture. Source: llama.cpp's ``gguf/constants.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ferrum_rpc.errors import NotSupported
from ferrum_rpc.models.config_keys import refuse_unread
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.weights.gguf.architectures import ARCHITECTURES, LAYER, WHOLE, Architecture, Facts
from ferrum_rpc.weights.gguf.header import Header, Skipped

FREQUENCIES: Final = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS: Final = (FREQUENCIES, SHORT, LONG)
"""Names of the tensors with factors of the rotary periods."""

Factors = Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]
"""float32 [rotated channels / 2], by `FACTORS`."""

ROLES: Final = ("weight", "bias")
IN_LAYER: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_0-9]+)((?:\.weight|\.bias)?)")
DRAFTS: Final = "nextn_predict_layers"
INNER: Final = ("feed_forward_length", "expert_feed_forward_length")
"""The channels of dense layers; a model that has none may not say them."""

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


def hugging_face_name(name: str, known: Architecture, layers: int) -> str:
    """The tensor's name in Hugging Face's format; an unknown one as it is. Of ``layers`` layers: blocks behind them
    draft tokens, if the architecture has such."""
    whole, _, role = name.rpartition(".")
    if whole in WHOLE and role in ROLES:
        return f"{WHOLE[whole]}.{role}"
    block = name.split(".")[1] if name.startswith("blk.") else ""
    if known.drafts and block.isdecimal() and int(block) >= layers:
        return f"mtp.{name}"
    if match := IN_LAYER.fullmatch(name):
        layer, part, role = match.groups()
        if own := known.names.get(part + role):
            return f"model.layers.{layer}.{own}"
        if role and (own := known.names.get(part) or LAYER.get(part)):
            return f"model.layers.{layer}.{own}{role}"
    return name


def architecture(header: Header) -> Architecture:
    """Raises NotSupported for one that is not read, and for files that are no whole model."""
    general = Fields(_kept(header, "general."), "general")
    name, kind = general.text("architecture", ""), general.text("type", "model")
    if kind != "model":
        raise NotSupported(f"general.type: {kind[:80]!r} is not a model", field="model")
    if name not in ARCHITECTURES:
        raise NotSupported(
            f"general.architecture: {name[:80]!r} is not supported in GGUF; supported: {', '.join(ARCHITECTURES)}; "
            "serve the model in safetensors",
            field="architectures",
        )
    return ARCHITECTURES[name]


def config(header: Header, factors: Factors) -> dict[str, Any]:
    """The ``config.json`` of the model."""
    known, name = architecture(header), str(header.metadata["general.architecture"])
    fields, tokens = Fields(_kept(header, f"{name}."), name), Fields(_kept(header, "tokenizer.ggml."), "tokenizer.ggml")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads))
    layers = fields.integer("block_count")
    if known.drafts:
        layers -= fields.integer(DRAFTS, 0, low=0, high=layers - 1)
    _expect(fields, "attention.value_length", head_dim, f"heads of {head_dim} with {{}} values")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if not known.partial:
        _expect(fields, "rope.dimension_count", head_dim, f"heads of {head_dim} with {{}} rotated channels")
    theta = fields.number("rope.freq_base", 10_000.0)
    rope = {"rope_theta": theta, **_scaling(fields, theta, rotary_dim, factors)}
    if known.partial:
        rope["partial_rotary_factor"] = _part(rotary_dim, head_dim)
    eps, hugging_face_eps = known.eps
    made: dict[str, Any] = {
        "architectures": [known.name],
        "model_type": known.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.integer(next((each for each in INNER if each in fields), INNER[0])),
        "max_position_embeddings": fields.integer("context_length"),
        hugging_face_eps: fields.number(eps),
        "vocab_size": _vocabulary(fields, header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope,
        "eos_token_id": _stops(tokens),
        "bos_token_id": tokens.value("bos_token_id"),
        "pad_token_id": None,  # transformers' own may lie beyond the vocabulary
        **{key: tensor in header.tensors for key, tensor in known.biases.items()},
    }
    if known.read is not None:
        made |= known.read(Facts(fields, hidden, layers, heads, head_dim, rope))
    refuse_unread(fields, IRRELEVANT, OFF)
    return made


def _expect(fields: Fields, field: str, value: int, otherwise: str) -> None:
    found = fields.integer(field, value)
    if found != value:
        full = fields.name(field)
        raise NotSupported(f"{full}: {otherwise.format(found)} are not supported", field=full)


def _part(rotary_dim: int, head_dim: int) -> float:
    """The fraction of a head that gives so many channels."""
    part = rotary_dim / head_dim
    return part if int(head_dim * part) == rotary_dim else math.nextafter(part, 2.0)


def _kept(header: Header, prefix: str) -> dict[str, object]:
    """What is below ``prefix``, skipped values as their length."""
    return {
        key.removeprefix(prefix): {"length": value.length} if isinstance(value, Skipped) else value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }


def _vocabulary(fields: Fields, header: Header) -> int:
    """The declared size; else the rows of the embedding."""
    embedding = header.tensors.get("token_embd.weight")
    declared = fields.value("vocab_size")
    if declared is None and embedding is not None:
        return embedding.shape[0]
    return fields.integer("vocab_size")


def _stops(tokens: Fields) -> list[int]:
    ids = [*tokens.token_ids("eos_token_id"), *tokens.token_ids("eot_token_id")]
    return list(dict.fromkeys(ids))


def _scaling(fields: Fields, theta: float, rotary_dim: int, factors: Factors) -> dict[str, Any]:
    kind = fields.text("rope.scaling.type", "none")
    lists = {SHORT: "short_factor", LONG: "long_factor"}
    if not factors.keys().isdisjoint(lists) and kind in ("none", "longrope"):
        return {"rope_type": "longrope", **{lists[name]: factors[name].tolist() for name in lists if name in factors}}
    frequencies = factors.get(FREQUENCIES)
    if frequencies is not None and not bool((frequencies == 1).all()):
        if kind != "none":
            raise NotSupported(f"{FREQUENCIES} beside {fields.name('rope.scaling.type')} {kind[:80]!r}", field="model")
        return _llama3(frequencies, theta, rotary_dim)
    if kind == "none":
        return {"rope_type": "default"}
    made: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "linear":
        return made
    if kind != "yarn":
        raise NotSupported(
            f"{fields.name('rope.scaling.type')}: {kind[:80]!r} is not supported; supported: none, linear, yarn",
            field=fields.name("rope.scaling.type"),
        )
    made["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = fields.optional_number(f"rope.scaling.{theirs}")
        if value is not None:
            made[ours] = value
    return made


def _llama3(factors: np.ndarray[Any, np.dtype[np.float32]], theta: float, rotary_dim: int) -> dict[str, Any]:
    """The scaling that gives these factors. Llama 3.1 and 3.2 have a factor of 8 and 32, frequency factors of 1 and 4,
    and an original context that is a power of two; a file keeps only what comes out."""
    factor = float(factors.max())
    if factors.shape == (rotary_dim // 2,) and math.isfinite(factor) and factor > 1:
        waves = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
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
    raise NotSupported(f"{FREQUENCIES}: the factors are not those of a Llama 3 scaling", field="model")
