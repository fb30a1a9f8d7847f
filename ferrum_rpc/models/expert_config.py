"""Experts in a ``config.json``: those of DeepSeek V2 and V3, of Qwen3, Qwen3-Next and Qwen3.5, and of gpt-oss."""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_rpc.errors import InvalidRequest, NotSupported, counted
from ferrum_rpc.models.families import DeepSeekExperts, GptOssExperts, QwenExperts
from ferrum_rpc.models.fields import MAX_EXPERTS, Fields
from ferrum_rpc.models.parts.clamped import Clamped
from ferrum_rpc.models.parts.experts import Experts, Routing

COUNTS = "num_experts", "num_local_experts"
"""Names of how many there are: the classes of Qwen3 and gpt-oss in transformers read either, and write the second."""


def read_experts(
    config: Fields, family: DeepSeekExperts | QwenExperts | GptOssExperts, hidden: int, activation: str, layers: int
) -> tuple[Experts | None, ...]:
    """Those of each layer; None: it is dense."""
    if isinstance(family, DeepSeekExperts):
        return _deepseek(config, family, hidden, activation, layers)
    if isinstance(family, GptOssExperts):
        return (_gpt_oss(config, family, hidden, activation),) * layers
    return _qwen(config, family, hidden, activation, layers)


def _deepseek(
    config: Fields, family: DeepSeekExperts, hidden: int, activation: str, layers: int
) -> tuple[Experts | None, ...]:
    """All but the first layers have them."""
    count = config.integer("n_routed_experts", family.count, high=MAX_EXPERTS)
    inner = config.integer("moe_intermediate_size", family.inner)
    shared = inner * config.integer("n_shared_experts", family.shared)
    experts = Experts(hidden, inner, activation, count, shared, _routing(config, family, count))
    first = config.integer("first_k_dense_replace", family.dense, low=0)
    return tuple(None if layer < first else experts for layer in range(layers))


def _qwen(config: Fields, family: QwenExperts, hidden: int, activation: str, layers: int) -> tuple[Experts | None, ...]:
    """Every n-th layer has them, n being ``decoder_sparse_step``, but for those of ``mlp_only_layers``."""
    names = COUNTS[:1] if family.beside else COUNTS
    count = _count(config, names, family.count, low=int(family.fixed))
    chosen = config.integer("num_experts_per_tok", family.chosen)
    inner = config.integer("moe_intermediate_size", family.inner)
    shared = config.integer("shared_expert_intermediate_size", 512) if family.beside else 0
    normed = family.fixed or config.flag("norm_topk_prob", family.normed)
    step = 1 if family.fixed else config.integer("decoder_sparse_step", 1)
    dense = () if family.fixed else config.integers("mlp_only_layers") or ()
    if not count:
        return (None,) * layers
    _check_chosen(chosen, count)
    experts = Experts(
        hidden,
        inner,
        activation,
        count,
        shared,
        Routing("softmax", chosen, normed=normed),
        "mlp.shared_expert",
        "mlp.shared_expert_gate" if family.beside else None,
    )
    return tuple(None if (layer + 1) % step or layer in dense else experts for layer in range(layers))


def _gpt_oss(config: Fields, family: GptOssExperts, hidden: int, activation: str) -> Experts:
    if activation != "silu":  # transformers does not read it
        raise NotSupported(f"hidden_act must be silu, not {activation}", field="hidden_act")
    count = _count(config, COUNTS, family.count)
    chosen = config.integer("num_experts_per_tok", family.chosen)
    _check_chosen(chosen, count)
    apart = config.flag("gate_up_apart", False)  # of GGUF files, whose converter divides the module of both
    gate = Clamped(config.number("swiglu_limit", family.gate.limit), config.number("swiglu_alpha", family.gate.slope))
    return Experts(
        hidden,
        config.integer("intermediate_size", family.inner),
        gate,
        count,
        0,
        Routing("softmax", chosen, normed=True),
        router_name="mlp.router",
        names=("gate_proj", "up_proj") if apart else ("gate_up_proj",),
        bias=True,
    )


def _count(config: Fields, names: Sequence[str], default: int, low: int = 1) -> int:
    """How many experts there are, under any of these names."""
    found = {name: config.integer(name, low=low, high=MAX_EXPERTS) for name in names if config.value(name) is not None}
    if len({*found.values()}) > 1:
        said = " and ".join(f"{name} {count}" for name, count in found.items())
        raise InvalidRequest(f"{said} differ", field=names[0])
    return next(iter(found.values()), default)


def _check_chosen(chosen: int, count: int) -> None:
    if chosen > count:
        raise InvalidRequest(f"num_experts_per_tok {chosen} exceeds num_experts {count}", field="num_experts_per_tok")


def _routing(config: Fields, family: DeepSeekExperts, count: int) -> Routing:
    sigmoid = family.scores == "sigmoid"
    chosen = config.integer("num_experts_per_tok", *([] if family.chosen is None else [family.chosen]))
    groups, open_groups = _groups(config, family)
    if count % groups:
        raise InvalidRequest(f"n_routed_experts {count} must be a multiple of n_group {groups}", field="n_group")
    if open_groups > groups:
        raise InvalidRequest(f"topk_group {open_groups} exceeds n_group {groups}", field="topk_group")
    if chosen > count // groups * open_groups:
        raise InvalidRequest(
            f"num_experts_per_tok {chosen} exceeds the {count // groups * open_groups} experts of "
            f"{counted(open_groups, 'group')}",
            field="num_experts_per_tok",
        )
    if sigmoid and count // groups < 2:
        raise InvalidRequest(f"n_group {groups}: a group must have two experts at least", field="n_group")
    return Routing(
        family.scores,
        chosen,
        groups,
        open_groups,
        biased=sigmoid,
        normed=sigmoid and config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", family.scale),
    )


def _groups(config: Fields, family: DeepSeekExperts) -> tuple[int, int]:
    """How many groups experts are in, and how many of these a row may use."""
    if family.scores == "sigmoid":
        return config.integer("n_group", 8), config.integer("topk_group", 4)
    method = config.text("topk_method", "greedy")
    if method not in {"greedy", "group_limited_greedy"}:
        raise NotSupported(f"topk_method {method[:80]!r} is not supported", field="topk_method")
    greedy = method == "greedy"  # then no group is closed, whatever is said of them
    groups, open_groups = (config.integer(name, *([1] if greedy else [])) for name in ("n_group", "topk_group"))
    return (1, 1) if greedy else (groups, open_groups)
