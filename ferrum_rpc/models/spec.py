"""What makes a decoder: a model family is data.

`ModelSpec.from_config` reads a Hugging Face ``config.json``, in the style of transformers 4 or 5, into the few facts
in which Llama, Qwen2, Qwen3, Mistral and Ministral differ. The defaults of absent fields and the meaning of a sliding
window are those of transformers, whose source is the oracle: with ``sliding_window`` W the query at position p sees the
keys at p - W + 1 .. p. What a model cannot be served with is refused here, by the field's name, before any weight is
read; `config_keys` says what need not be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import IRRELEVANT, NEUTRAL, refuse_unread
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.rope import RopeSpec

MAX_LAYERS = 4096
"""More is a broken file: per-layer facts are kept as tuples."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""``hidden_act`` to the decoder's name of the function."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture reads its configuration. ``qkv_bias`` and ``output_bias`` None: ``attention_bias`` says.
    ``windows``: "none", "all" layers, or those from ``max_window_layers`` on where ``use_sliding_window`` says so
    ("some"); ``layer_types`` goes before."""

    model_types: tuple[str, ...]
    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool
    qk_norm: bool
    windows: str
    kv_heads: int | None = None
    head_dim: int | None = None


_MISTRAL = Family(("mistral", "ministral"), False, False, mlp_bias=False, qk_norm=False, windows="all", kv_heads=8)
FAMILIES = {
    "LlamaForCausalLM": Family(("llama",), None, None, mlp_bias=True, qk_norm=False, windows="none"),
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": Family(("qwen2",), True, False, mlp_bias=False, qk_norm=False, windows="some", kv_heads=32),
    "Qwen3ForCausalLM": Family(
        ("qwen3",), None, None, mlp_bias=False, qk_norm=True, windows="some", kv_heads=32, head_dim=128
    ),
}
"""By ``architectures[0]``. ``kv_heads`` and ``head_dim`` are what an absent field means there, ``mlp_bias`` whether the
field of that name is read."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape and options of a decoder. ``windows`` has one entry per layer: the tokens that a query sees,
    itself included, or None for all. ``dtype`` is the checkpoint's, as written there, or None."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    activation: str
    rope: RopeSpec
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None

    @classmethod
    def from_config(cls, data: Mapping[str, object]) -> ModelSpec:
        """The spec of a parsed ``config.json``.

        Raises NotSupported for an architecture or feature that is not served, InvalidRequest for a field that is
        missing or wrong; both name the field.
        """
        config = Fields(data)
        architecture, family = _family(config)
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        kv_heads = heads
        if "num_key_value_heads" not in config and family.kv_heads is not None:
            kv_heads = family.kv_heads
        kv_heads = config.integer("num_key_value_heads", kv_heads)
        if heads % kv_heads:
            raise InvalidRequest(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}",
                field="num_key_value_heads",
            )
        layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
        max_context = config.integer("max_position_embeddings")
        bos = config.token_ids("bos_token_id")
        spec = cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_head_dim(config, family, hidden, heads),
            max_context=max_context,
            norm_eps=config.number("rms_norm_eps", 1e-6),
            activation=_activation(config),
            rope=RopeSpec.from_config(config, max_context),
            qkv_bias=config.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias,
            output_bias=config.flag("attention_bias", False) if family.output_bias is None else family.output_bias,
            mlp_bias=family.mlp_bias and config.flag("mlp_bias", False),
            qk_norm=family.qk_norm,
            tied_embeddings=config.flag("tie_word_embeddings", False),
            windows=_windows(config, family, layers),
            eos_token_ids=config.token_ids("eos_token_id"),
            bos_token_id=bos[0] if bos else None,
            dtype=config.text("dtype", config.text("torch_dtype", "")) or None,
        )
        refuse_unread(config, IRRELEVANT, NEUTRAL)
        return spec

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One per layer."""
        scale = self.head_dim**-0.5
        return tuple(AttentionSpec(self.heads, self.kv_heads, self.head_dim, scale, window) for window in self.windows)


def _family(config: Fields) -> tuple[str, Family]:
    supported = ", ".join(FAMILIES)
    names, model_type = config.texts("architectures"), config.text("model_type", "")
    if names:
        if names[0] not in FAMILIES:
            raise NotSupported(
                f"architectures: {names[0][:80]!r} is not supported; supported: {supported}", field="architectures"
            )
        family = FAMILIES[names[0]]
        if model_type and model_type not in family.model_types:
            raise InvalidRequest(f"model_type {model_type[:80]!r} is not that of {names[0]}", field="model_type")
        return names[0], family
    for architecture, family in FAMILIES.items():
        if model_type in family.model_types:
            return architecture, family
    if model_type:
        raise NotSupported(
            f"model_type: {model_type[:80]!r} is not supported; supported: {supported}", field="model_type"
        )
    raise InvalidRequest("architectures is missing; it must name the model's class", field="architectures")


def _head_dim(config: Fields, family: Family, hidden: int, heads: int) -> int:
    if config.value("head_dim") is not None or family.head_dim is not None:
        head_dim = config.integer("head_dim", family.head_dim or 0, high=4096)
        field = "head_dim"
    else:
        head_dim, rest = divmod(hidden, heads)
        field = "hidden_size"
        if rest or not head_dim:
            raise InvalidRequest(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}", field=field)
    if head_dim % 2:
        raise InvalidRequest(f"{field}: rotary embeddings need an even head dimension, not {head_dim}", field=field)
    return head_dim


def _activation(config: Fields) -> str:
    name = config.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise NotSupported(
            f"hidden_act {name[:80]!r} is not supported; supported: {', '.join(ACTIVATIONS)}", field="hidden_act"
        )
    return ACTIVATIONS[name]


def _windows(config: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """Absent ``sliding_window`` means 4096 where the family has windows, null means none, as in transformers. A switch
    or a list that contradicts the family is refused."""
    window, first = None, 0
    if "sliding_window" not in config and family.windows != "none":
        window = 4096
    elif config.value("sliding_window") is not None:
        window = config.integer("sliding_window")
    used = config.flag("use_sliding_window", window is not None and family.windows != "some")
    if family.windows == "none" and used:
        raise NotSupported(f"sliding_window: {window} is not supported for this architecture", field="sliding_window")
    if family.windows == "all" and used != (window is not None):
        raise InvalidRequest(f"use_sliding_window {used} contradicts sliding_window", field="use_sliding_window")
    window = window if used else None
    if window is None or family.windows == "some":
        first = config.integer("max_window_layers", 28, low=0)
    if config.value("layer_types") is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    types = config.texts("layer_types")
    if len(types) != layers:
        raise InvalidRequest(f"layer_types has {len(types)} entries for {layers} layers", field="layer_types")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise NotSupported(f"layer_types: {kind[:80]!r} is not supported", field="layer_types")
        if kind == "sliding_attention" and window is None:
            raise InvalidRequest("layer_types has sliding layers, but there is no sliding_window", field="layer_types")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
