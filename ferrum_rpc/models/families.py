"""The supported families, as data: what each reads in a ``config.json``, and the names of tensors in its checkpoints.

Every default and detail follows the source of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.parts.clamped import Clamped
from ferrum_rpc.models.parts.layer import LayerSpec, Norm, NormNames

ACTIVATIONS: Final = {
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
class Names:
    """A checkpoint's names of the matrices of a layer. ``qkv`` and ``gate_up`` are several tensors, or one for all; an
    MLP without a gate has one."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class Rotation:
    """How heads are rotated. ``theta``: the default of ``rope_theta``. ``partial``: the default of
    ``partial_rotary_factor``; None: whole heads are rotated. ``pairs``: neighbouring channels are a pair, not channels
    i and i + half. ``longrope``: that scaling (and no other) is supported, with ``original`` as the context before it.
    ``local``: the base of layers with a window, if they have their own rotation. ``dynamic``: that scaling is accepted,
    which changes nothing within the context of the model. ``section``: where a configuration has none.
    ``irrelevant``: keys of its section that change nothing."""

    theta: float = 10_000.0
    partial: float | None = None
    pairs: bool = False
    longrope: bool = False
    original: int | None = None
    local: float | None = None
    dynamic: bool = False
    section: Mapping[str, object] = field(default_factory=dict)
    irrelevant: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention. ``interleave``: there is the field ``rope_interleave``."""

    interleave: bool


@dataclass(frozen=True, slots=True)
class DeepSeekExperts:
    """Experts from some layer on. ``scores``: as `Routing`. The others are defaults: ``dense`` of
    ``first_k_dense_replace``, ``count``, ``shared`` and ``inner`` of ``n_routed_experts``, ``n_shared_experts`` and
    ``moe_intermediate_size``, ``chosen`` of ``num_experts_per_tok`` (None: there is none), ``scale`` of
    ``routed_scaling_factor``."""

    scores: Literal["softmax", "sigmoid"]
    dense: int
    count: int
    shared: int
    inner: int
    chosen: int | None
    scale: float


@dataclass(frozen=True, slots=True)
class QwenExperts:
    """Experts, which may be ``beside`` a part that computes every row, and whose answer has a gate. ``count``,
    ``chosen``, ``inner`` and ``normed``: the defaults of ``num_experts``, ``num_experts_per_tok``,
    ``moe_intermediate_size`` and ``norm_topk_prob``. ``fixed``: all layers have experts, whose weights are normed; else
    fields say so."""

    count: int
    chosen: int
    inner: int = 512
    normed: bool = True
    beside: bool = True
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class GptOssExperts:
    """Experts in all layers, with biases and a clamped gate. These are defaults: ``count`` of ``num_local_experts``,
    ``chosen`` of ``num_experts_per_tok``, ``inner`` of ``intermediate_size``, and those of ``gate`` of ``swiglu_limit``
    and ``swiglu_alpha``."""

    count: int
    chosen: int
    inner: int
    gate: Clamped


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture reads its configuration.

    - ``qkv_bias`` and ``output_bias``: None means the field ``bias``, or ``biased`` if that is absent. ``mlp_bias``:
      the name of that field for the MLP.
    - ``windows``: "none"; "all" layers; all but every ``pattern``-th ("pattern"; ``pattern_field`` may name another);
      with ``use_sliding_window``, all ("switched"), those from ``max_window_layers`` on ("some") or those without a
      rotation ("no_rope").
      ``listed``: ``layer_types`` takes precedence. ``window``: the default of ``sliding_window``.
    - ``kv_heads``, ``head_dim``, ``inner``, ``tied``: the defaults of these fields; ``inner`` of ``intermediate_size``.
      ``kv_heads_listed``: the field that has the KV heads of each layer.
    - ``sinks``: the tensor of a layer's attention sinks, if there are any.
    - ``norm``: without its ``eps``, which is the name of its field and the default. ``qk_norm``: of each head of query
      and key, or of the whole row.
    - ``activation``: as ``eps``; ``gelu_is_tanh``: its ``gelu`` means the tanh form. ``gated``: the MLP has a gate.
      ``parallel``: attention and MLP read the same row.
    - ``no_rope``: layers without a rotation: those of ``no_rope_layers``, or those without a window.
    - ``recurrent``: layers of ``layer_types`` "linear_attention" (without a list, all but every n-th) are Gated
      DeltaNet, and the output of attention has a gate. Their first matrices are stored by "parts" or by key "heads".
    - ``latent``: all layers have latent attention, which reads none of the fields above but the norms'.
    - ``experts``: which layers have experts. None: all are dense.
    - ``multipliers``: the four of Granite. ``scaled_embedding``: by the root of the hidden size. ``query_scalar``,
      ``logit_scale``: the defaults of ``query_pre_attn_scalar`` and ``logit_scale``; None: the family has no such
      field. ``softcaps``: the fields of soft caps with their defaults.
    - ``vary(configuration, index, layer)``: the layer in place of what the rest of this table gives, if layers differ
      in more than their windows and rotations. `ModelSpec` refuses layers that differ in their norm, residual scale,
      hidden size or head dimensions.
    - ``irrelevant``, ``neutral``: as in `config_keys`, of this family alone.
    """

    model_types: tuple[str, ...]
    norms: NormNames = field(default_factory=NormNames)
    names: Names = field(default_factory=Names)
    rotation: Rotation = field(default_factory=Rotation)
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    bias: str = "attention_bias"
    biased: bool = False
    mlp_bias: str | None = None
    windows: Literal["none", "all", "switched", "some", "pattern", "no_rope"] = "none"
    listed: bool = True
    window: int | None = None
    pattern: int = 1
    pattern_field: str | None = None
    kv_heads: int | None = None
    kv_heads_listed: str | None = None
    head_dim: int | None = None
    sinks: str | None = None
    inner: int | None = None
    tied: bool = False
    norm: Norm = field(default_factory=Norm)
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    qk_norm: Literal["head", "row"] | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    gelu_is_tanh: bool = False
    parallel: bool = False
    gated: bool = True
    no_rope: Literal["listed", "windowless"] | None = None
    recurrent: Literal["parts", "heads"] | None = None
    latent: Latent | None = None
    experts: DeepSeekExperts | QwenExperts | GptOssExperts | None = None
    multipliers: bool = False
    scaled_embedding: bool = False
    query_scalar: float | None = None
    logit_scale: float | None = None
    softcaps: Mapping[str, float | None] = field(default_factory=dict)
    vary: Callable[[Fields, int, LayerSpec], LayerSpec] | None = None
    irrelevant: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


_SANDWICH: Final = NormNames(
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_MISTRAL: Final = Family(
    ("mistral", "ministral"), qkv_bias=False, output_bias=False, windows="all", window=4096, kv_heads=8
)
_OF_EXPERTS: Final = frozenset(
    (
        *("aux_loss_alpha", "ep_size", "output_router_logits", "qk_head_dim", "router_aux_loss_coef", "seq_aux"),
        "intermediate_size",
    )
)
"""Of training; what follows from other fields; and the size of dense layers, which is read if there are any."""

_QWEN_NEXT: Final = Family(
    ("qwen3_next",),
    rotation=Rotation(partial=0.25),
    kv_heads=2,
    head_dim=256,
    inner=5632,
    norm=Norm(offset=True),
    qk_norm="head",
    recurrent="heads",
    experts=QwenExperts(count=512, chosen=10),
    irrelevant=_OF_EXPERTS | {"full_attention_interval"},
)
_QWEN_35: Final = replace(
    _QWEN_NEXT,
    model_types=("qwen3_5_text",),
    rotation=Rotation(partial=0.25, irrelevant=frozenset(("mrope_section", "mrope_interleaved"))),
    kv_heads=4,
    inner=None,
    recurrent="parts",
    experts=None,
    irrelevant=frozenset(("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")),
    neutral={
        "attn_output_gate": (True,),
        "output_gate_type": ("swish",),
        "mamba_ssm_dtype": ("float32",),
        "mlp_only_layers": ([],),
    },
)

_GELU_TANH: Final = "gelu_pytorch_tanh"

FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(("llama",), mlp_bias="mlp_bias"),
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": Family(("qwen2",), qkv_bias=True, output_bias=False, windows="some", window=4096, kv_heads=32),
    "Qwen3ForCausalLM": Family(("qwen3",), qk_norm="head", windows="some", window=4096, kv_heads=32, head_dim=128),
    "GemmaForCausalLM": Family(
        ("gemma",),
        kv_heads=16,
        head_dim=256,
        tied=True,
        norm=Norm(offset=True),
        activation=("hidden_act", _GELU_TANH),
        gelu_is_tanh=True,
        scaled_embedding=True,
        irrelevant=frozenset(("hidden_activation",)),
    ),
    "Gemma2ForCausalLM": Family(
        ("gemma2",),
        _SANDWICH,
        windows="pattern",
        window=4096,
        pattern=2,
        kv_heads=4,
        head_dim=256,
        tied=True,
        norm=Norm(offset=True),
        activation=("hidden_activation", _GELU_TANH),
        scaled_embedding=True,
        query_scalar=256.0,
        softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        irrelevant=frozenset(("hidden_act", "cache_implementation")),
    ),
    "Gemma3ForCausalLM": Family(
        ("gemma3_text",),
        _SANDWICH,
        rotation=Rotation(theta=1_000_000.0, local=10_000.0),
        windows="pattern",
        window=4096,
        pattern=6,
        pattern_field="sliding_window_pattern",
        kv_heads=4,
        head_dim=256,
        tied=True,
        norm=Norm(offset=True),
        qk_norm="head",
        activation=("hidden_activation", _GELU_TANH),
        scaled_embedding=True,
        query_scalar=256.0,
        softcaps={"final_logit_softcapping": None},
        irrelevant=frozenset(("hidden_act", "cache_implementation", "_sliding_window_pattern")),
    ),
    "Phi3ForCausalLM": Family(
        ("phi3",),
        names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        rotation=Rotation(partial=1.0, longrope=True, original=4096),
        qkv_bias=False,
        output_bias=False,
        windows="all",
        listed=False,
        eps=("rms_norm_eps", 1e-5),
        neutral={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
    ),
    "GraniteForCausalLM": Family(("granite",), mlp_bias="mlp_bias", multipliers=True),
    "SmolLM3ForCausalLM": Family(
        ("smollm3",),
        rotation=Rotation(theta=2_000_000.0),
        mlp_bias="mlp_bias",
        windows="no_rope",
        kv_heads=4,
        tied=True,
        no_rope="listed",
        irrelevant=frozenset(("max_window_layers",)),
    ),
    "Olmo2ForCausalLM": Family(
        ("olmo2",),
        NormNames(
            before_mixer=None,
            after_mixer="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
        eps=("rms_norm_eps", 1e-5),
        qk_norm="row",
    ),
    "Glm4ForCausalLM": Family(
        ("glm4",),
        NormNames(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
        Names(gate_up=("mlp.gate_up_proj",)),
        Rotation(partial=0.5, pairs=True),
        output_bias=False,
        biased=True,
        kv_heads=2,
        head_dim=128,
        eps=("rms_norm_eps", 0.00000015625),
    ),
    "Starcoder2ForCausalLM": Family(
        ("starcoder2",),
        names=Names(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        bias="use_bias",
        biased=True,
        mlp_bias="use_bias",
        windows="all",
        listed=False,
        kv_heads=2,
        tied=True,
        norm=Norm("layer", bias=True),
        gated=False,
        eps=("norm_epsilon", 1e-5),
        activation=("hidden_act", _GELU_TANH),
        irrelevant=frozenset(("activation_function", "mlp_type", "norm_type", "residual_dropout", "embedding_dropout")),
    ),
    "Cohere2ForCausalLM": Family(
        ("cohere2",),
        NormNames(before_mlp=None),
        rotation=Rotation(pairs=True),
        windows="pattern",
        window=4096,
        pattern=4,
        pattern_field="sliding_window_pattern",
        tied=True,
        norm=Norm("layer"),
        eps=("layer_norm_eps", 1e-5),
        parallel=True,
        no_rope="windowless",
        logit_scale=0.0625,
        irrelevant=frozenset(
            (
                *("cache_implementation", "layer_switch", "order_of_interleaved_layers", "position_embedding_type"),
                *("use_embedding_sharing", "use_parallel_embedding"),
            )
        ),
        neutral={
            "rotary_pct": (1.0,),
            "use_gated_activation": (True,),
            "use_parallel_block": (True,),
            "use_qk_norm": (False,),
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        ("qwen3_moe",),
        qk_norm="head",
        windows="switched",
        listed=False,
        window=4096,
        kv_heads=4,
        inner=6144,
        experts=QwenExperts(count=128, chosen=8, inner=768, normed=False, beside=False),
        irrelevant=_OF_EXPERTS | {"max_window_layers"},
    ),
    "GptOssForCausalLM": Family(
        ("gpt_oss",),
        rotation=Rotation(
            theta=150_000.0,
            section={
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        biased=True,
        windows="pattern",
        window=128,
        pattern=2,
        kv_heads=8,
        head_dim=64,
        sinks="self_attn.sinks",
        eps=("rms_norm_eps", 1e-5),
        experts=GptOssExperts(count=128, chosen=4, inner=2880, gate=Clamped(limit=7.0, slope=1.702)),
        irrelevant=_OF_EXPERTS | {"experts_per_token", "initial_context_length"},
    ),
    "Qwen3NextForCausalLM": _QWEN_NEXT,
    "Qwen3_5ForCausalLM": _QWEN_35,
    "Qwen3_5MoeForCausalLM": replace(
        _QWEN_35,
        model_types=("qwen3_5_moe_text",),
        kv_heads=2,
        experts=QwenExperts(count=256, chosen=8, fixed=True),
        irrelevant=_QWEN_35.irrelevant | _OF_EXPERTS,
        neutral={**_QWEN_35.neutral, "decoder_sparse_step": (1,), "norm_topk_prob": (True,)},
    ),
    "DeciLMForCausalLM": Family(
        ("deci",),
        rotation=Rotation(dynamic=True),
        mlp_bias="mlp_bias",
        kv_heads_listed="num_key_value_heads_per_layer",
        irrelevant=frozenset(
            ("naive_attention_decode_batched", "naive_attention_decode_single", "naive_attention_prefill")
        ),
    ),
    "DeepseekV2ForCausalLM": Family(
        ("deepseek_v2",),
        latent=Latent(interleave=False),
        experts=DeepSeekExperts("softmax", dense=0, count=64, shared=2, inner=1407, chosen=None, scale=1.0),
        irrelevant=_OF_EXPERTS | {"head_dim"},
        neutral={"scoring_func": ("softmax",), "moe_layer_freq": (1,), "norm_topk_prob": (False,)},
    ),
    "DeepseekV3ForCausalLM": Family(
        ("deepseek_v3",),
        latent=Latent(interleave=True),
        experts=DeepSeekExperts("sigmoid", dense=3, count=256, shared=1, inner=2048, chosen=8, scale=2.5),
        irrelevant=_OF_EXPERTS | {"num_mtp_layers", "num_nextn_predict_layers"},
        neutral={"scoring_func": ("sigmoid",), "moe_layer_freq": (1,), "topk_method": ("noaux_tc",)},
    ),
}
"""By ``architectures[0]``."""
