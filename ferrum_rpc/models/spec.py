"""The description of a decoder: a model family is data.

`ModelSpec.from_config` reads a Hugging Face ``config.json``, in the style of transformers 4 or 5, into the facts in
which the `families` differ. The defaults of absent fields and the meaning of a sliding window are those of
transformers, whose source is the oracle: with ``sliding_window`` W the query at position p sees the keys at p - W + 1
.. p. What is not supported is refused here, by the field's name, before any weight is read; `config_keys` lists what
need not be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ferrum_rpc.core import AttentionSpec, RecurrentShape
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import IRRELEVANT, NEUTRAL, OF_MODEL, refuse_unread
from ferrum_rpc.models.expert_config import read_experts
from ferrum_rpc.models.families import ACTIVATIONS, FAMILIES, Family, Latent
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.latent_config import read_latent
from ferrum_rpc.models.layer_kinds import read_kinds, read_kv_heads, read_recurrent
from ferrum_rpc.models.parts.attention import Attention
from ferrum_rpc.models.parts.dense import Dense
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.parts.latent import LatentAttention
from ferrum_rpc.models.parts.layer import LayerSpec, Norm
from ferrum_rpc.models.parts.recurrent import Recurrent
from ferrum_rpc.models.rope import RopeSpec, read_rope, read_ropes_of_windows
from ferrum_rpc.models.with_images import PLAIN, WITH_IMAGES, Roots, text_part

MAX_LAYERS = 4096
"""Maximum number of layers: more is a broken file."""

MAX_TAPS = 64
"""Of the convolution of a recurrent layer, likewise."""


@dataclass(frozen=True, slots=True)
class Scales:
    """The factors of embeddings (``rounded``: in the model's dtype) and of logits, and the soft cap of logits."""

    embedding: float = 1.0
    rounded: bool = False
    logits: float = 1.0
    logits_cap: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape and options of a decoder. ``layers`` may differ, except for what `__post_init__` checks. ``norm`` is
    that of the layers and the final one. ``ropes``: the rotations, of which layers name one. ``roots``: the prefixes of
    its tensors' names. ``dtype`` is the checkpoint's, as written there, or None."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_context: int
    norm: Norm
    ropes: tuple[RopeSpec, ...]
    tied_embeddings: bool
    roots: Roots = PLAIN
    scales: Scales = field(default_factory=Scales)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for layers that differ in what is computed once for all of them, or across two of them: a
        layer adds the output of the previous one with its own ``residual``."""
        attention, shapes, residual = self.attention, self.recurrent_shapes, self.layers[0].residual
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer
            facts: list[tuple[str, object, object]] = [
                ("norm", layer.norm, self.norm),
                ("residual", layer.residual, residual),
                ("mixer.hidden", mixer.hidden, self.hidden_size),
                ("mlp.hidden", layer.mlp.hidden, self.hidden_size),
            ]
            if isinstance(mixer, Recurrent):
                facts.append(("mixer.shape", mixer.shape, shapes[0]))
            else:
                facts.append(("mixer.head_dim", mixer.head_dim, attention.head_dim))
                facts.append(("mixer.rotary_dim", mixer.rotary_dim, attention.rotary_dim))
            for name, found, same in facts:
                if found != same:
                    raise ValueError(f"layer {index}: {name} must be the same in all layers, {same}, not {found}")

    @classmethod
    def from_config(cls, data: Mapping[str, object]) -> ModelSpec:
        """The spec of a parsed ``config.json``.

        Raises NotSupported for an architecture or feature that is not served, InvalidRequest for a field that is
        missing or wrong; both name the field.
        """
        architecture, family, config = _family(Fields(data))
        hidden = config.integer("hidden_size")
        max_context = config.integer("max_position_embeddings")
        norm = replace(family.norm, eps=config.number(*family.eps))
        layers, ropes = _layers(config, family, hidden, max_context, norm)
        bos = config.token_ids("bos_token_id")
        spec = cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden,
            layers=layers,
            max_context=max_context,
            norm=norm,
            ropes=ropes,
            tied_embeddings=config.flag("tie_word_embeddings", family.tied),
            scales=_scales(config, family, hidden),
            eos_token_ids=config.token_ids("eos_token_id"),
            bos_token_id=bos[0] if bos else None,
            dtype=config.text("dtype", config.text("torch_dtype", "")) or None,
        )
        refuse_unread(config, IRRELEVANT | family.irrelevant, {**NEUTRAL, **family.neutral}, OF_MODEL)
        return spec

    @property
    def attention(self) -> Attention | LatentAttention:
        """The first layer's that has attention; each model and each stage has such a layer."""
        return next(layer.mixer for layer in self.layers if not isinstance(layer.mixer, Recurrent))

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One per layer with attention."""
        return tuple(layer.mixer.spec for layer in self.layers if not isinstance(layer.mixer, Recurrent))

    @property
    def recurrent_shapes(self) -> tuple[RecurrentShape, ...]:
        """One per recurrent layer, all the same."""
        return tuple(layer.mixer.shape for layer in self.layers if isinstance(layer.mixer, Recurrent))

    def for_context(self, tokens: int | None) -> ModelSpec:
        """Of sequences of at most so many tokens (None: of as many as the model takes): scalings that depend on it are
        frozen for it."""
        served = min(tokens or self.max_context, self.max_context)
        return replace(self, ropes=tuple(replace(rope, context=served) for rope in self.ropes))


def _family(config: Fields) -> tuple[str, Family, Fields]:
    """Returns the class, how its decoder reads its configuration, and the decoder's configuration."""
    supported = ", ".join((*FAMILIES, *WITH_IMAGES))
    names, model_type = config.texts("architectures"), config.text("model_type", "")
    if names:
        if names[0] in WITH_IMAGES:
            return _of_text(names[0], config)
        if names[0] not in FAMILIES:
            raise NotSupported(
                f"architectures: {names[0][:80]!r} is not supported; supported: {supported}", field="architectures"
            )
        family = FAMILIES[names[0]]
        if model_type and model_type not in family.model_types:
            kind = InvalidRequest if any(model_type in each.model_types for each in FAMILIES.values()) else NotSupported
            raise kind(f"model_type {model_type[:80]!r} is not that of {names[0]}", field="model_type")
        return names[0], family, config
    for architecture, family in FAMILIES.items():
        if model_type in family.model_types:
            return architecture, family, config
    for architecture, whole in WITH_IMAGES.items():
        if model_type == whole.model_type:
            return _of_text(architecture, config)
    if model_type:
        raise NotSupported(
            f"model_type: {model_type[:80]!r} is not supported; supported: {supported}", field="model_type"
        )
    raise InvalidRequest("architectures is missing; it must name the model's class", field="architectures")


def _of_text(architecture: str, config: Fields) -> tuple[str, Family, Fields]:
    text, section = text_part(architecture, config)
    return architecture, FAMILIES[text], section


def _kv_heads(config: Fields, family: Family, heads: int) -> int:
    kv_heads = heads
    if "num_key_value_heads" not in config and family.kv_heads is not None:
        kv_heads = family.kv_heads
    kv_heads = config.integer("num_key_value_heads", kv_heads)
    if heads % kv_heads:
        raise InvalidRequest(
            f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}",
            field="num_key_value_heads",
        )
    return kv_heads


def _head_dim(config: Fields, family: Family, hidden: int, heads: int) -> int:
    if config.value("head_dim") is not None or family.head_dim is not None:
        head_dim = config.integer("head_dim", family.head_dim or 0, high=4096)
        field = "head_dim"
    else:
        head_dim, rest = divmod(hidden, heads)
        field = "hidden_size"
        if rest or not head_dim:
            raise InvalidRequest(f"hidden_size {hidden} must be a multiple of num_attention_heads {heads}", field=field)
    if head_dim % 2:
        raise InvalidRequest(f"{field}: rotary embeddings need an even head dimension, not {head_dim}", field=field)
    return head_dim


def _activation(config: Fields, family: Family) -> str:
    field, default = family.activation
    name = config.text(field, default)
    if name not in ACTIVATIONS:
        raise NotSupported(f"{field} {name[:80]!r} is not supported; supported: {', '.join(ACTIVATIONS)}", field=field)
    return ACTIVATIONS["gelu_pytorch_tanh" if name == "gelu" and family.gelu_is_tanh else name]


def _layers(
    config: Fields, family: Family, hidden: int, max_context: int, norm: Norm
) -> tuple[tuple[LayerSpec, ...], tuple[RopeSpec, ...]]:
    """All layers, and the rotations that they name."""
    count = config.integer("num_hidden_layers", high=MAX_LAYERS)
    if family.latent is not None:
        return _latent_layers(config, family, family.latent, count, hidden, max_context, norm)
    heads = config.integer("num_attention_heads")
    kv_heads = _kv_heads(config, family, heads)
    head_dim = _head_dim(config, family, hidden, heads)
    windows, no_rope = read_kinds(config, family, count)
    listed = read_kv_heads(config, family, count, heads) or (kv_heads,) * count
    ropes = _ropes(config, family, max_context, head_dim)
    biased = config.flag(family.bias, family.biased) if None in {family.qkv_bias, family.output_bias} else False
    scale = head_dim**-0.5
    if family.query_scalar is not None:
        scale = config.number("query_pre_attn_scalar", family.query_scalar) ** -0.5
    mixer = Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=config.number("attention_multiplier", 1.0) if family.multipliers else scale,
        rotary_dim=ropes[0].rotary_dim(head_dim),
        names=family.names.qkv,
        softcap=_softcap(config, family, "attn_logit_softcapping"),
        pairs=family.rotation.pairs,
        bias=biased if family.qkv_bias is None else family.qkv_bias,
        output_bias=biased if family.output_bias is None else family.output_bias,
        qk_norm=family.qk_norm,
        gated=family.recurrent is not None,
        sinks=family.sinks,
    )
    mlps = _mlps(config, family, hidden, count)
    layer = LayerSpec(
        mixer,
        mlps[0],
        norm,
        family.norms,
        parallel=family.parallel,
        residual=config.number("residual_multiplier", 1.0) if family.multipliers else 1.0,
    )
    made = [
        replace(
            layer,
            mixer=replace(mixer, window=window, kv_heads=own),
            mlp=mlp,
            rope=None if unrotated else int(len(ropes) > 1 and window is not None),
        )
        for mlp, window, own, unrotated in zip(mlps, windows, listed, no_rope, strict=True)
    ]
    if family.recurrent is not None:
        recurrent = Recurrent(hidden, _recurrent_shape(config), by_heads=family.recurrent == "heads")
        if (activation := mlps[0].activation) != "silu":  # its convolution has the same
            raise NotSupported(f"hidden_act must be silu, not {activation}", field="hidden_act")
        kinds = read_recurrent(config, count)
        made = [
            replace(each, mixer=recurrent, rope=None) if kind else each for each, kind in zip(made, kinds, strict=True)
        ]
    if family.vary is not None:
        made = [family.vary(config, index, each) for index, each in enumerate(made)]
    return tuple(made), ropes


def _mlps(config: Fields, family: Family, hidden: int, layers: int) -> tuple[Dense | Experts, ...]:
    """Of each layer."""
    activation = _activation(config, family)
    experts: tuple[Experts | None, ...] = (None,) * layers
    if family.experts is not None:
        experts = read_experts(config, family.experts, hidden, activation, layers)
    if None not in experts:
        return tuple(each for each in experts if each is not None)
    dense = Dense(
        hidden=hidden,
        inner=config.integer("intermediate_size", *([] if family.inner is None else [family.inner])),
        activation=activation,
        names=family.names.gate_up,
        down=family.names.down,
        gated=family.gated,
        bias=family.mlp_bias is not None and config.flag(family.mlp_bias, family.biased),
    )
    return tuple(dense if each is None else each for each in experts)


def _latent_layers(  # noqa: PLR0917
    config: Fields, family: Family, latent: Latent, count: int, hidden: int, max_context: int, norm: Norm
) -> tuple[tuple[LayerSpec, ...], tuple[RopeSpec, ...]]:
    rope = read_rope(config, family.rotation, max_context, config.integer("qk_rope_head_dim", 64))
    mixer = read_latent(config, latent, hidden, rope.score_scale)
    mlps = _mlps(config, family, hidden, count)
    return tuple(LayerSpec(mixer, mlp, norm, family.norms) for mlp in mlps), (rope,)


def _scales(config: Fields, family: Family, hidden: int) -> Scales:
    scales = Scales(logits_cap=_softcap(config, family, "final_logit_softcapping"))
    if family.scaled_embedding:
        scales = replace(scales, embedding=hidden**0.5, rounded=True)
    if family.multipliers:
        embedding = config.number("embedding_multiplier", 1.0)
        scales = replace(scales, embedding=embedding, logits=1.0 / config.number("logits_scaling", 1.0))
    if family.logit_scale is not None:
        scales = replace(scales, logits=config.number("logit_scale", family.logit_scale))
    return scales


def _recurrent_shape(config: Fields) -> RecurrentShape:
    key_heads, value_heads = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise InvalidRequest(
            f"linear_num_value_heads {value_heads} must be a multiple of linear_num_key_heads {key_heads}",
            field="linear_num_value_heads",
        )
    return RecurrentShape(
        key_heads,
        value_heads,
        config.integer("linear_key_head_dim", 128, high=4096),
        config.integer("linear_value_head_dim", 128, high=4096),
        config.integer("linear_conv_kernel_dim", 4, low=2, high=MAX_TAPS),
    )


def _softcap(config: Fields, family: Family, name: str) -> float | None:
    return config.optional_number(name, family.softcaps[name]) if name in family.softcaps else None


def _ropes(config: Fields, family: Family, max_context: int, head_dim: int) -> tuple[RopeSpec, ...]:
    """Of all layers; or those of layers without a window, and with one."""
    if family.rotation.local is not None:
        return read_ropes_of_windows(config, family.rotation, max_context)
    return (read_rope(config, family.rotation, max_context, head_dim),)
