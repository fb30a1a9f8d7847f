"""Latent attention and experts in a ``config.json``: those of DeepSeek V2 and V3."""

from __future__ import annotations

from ferrum_rpc.core import LatentShape
from ferrum_rpc.errors import InvalidRequest, NotSupported, counted
from ferrum_rpc.models.families import Latent
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.parts.dense import Dense
from ferrum_rpc.models.parts.experts import Experts, Routing
from ferrum_rpc.models.parts.latent import LatentAttention

MAX_EXPERTS = 4096
"""Of a layer: more is a broken file."""


def read_latent(config: Fields, family: Latent, hidden: int, score_scale: float) -> LatentAttention:
    """The attention of all layers. ``score_scale``: of `RopeSpec`."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if kv_heads != heads:
        raise NotSupported(
            f"num_key_value_heads {kv_heads} is not num_attention_heads {heads}: latent attention has no fewer",
            field="num_key_value_heads",
        )
    shape = LatentShape(
        rank=config.integer("kv_lora_rank", 512),
        rotated=config.integer("qk_rope_head_dim", 64, high=4096),
        plain=config.integer("qk_nope_head_dim", 128, high=4096),
        value_dim=config.integer("v_head_dim", 128, high=4096),
    )
    sizes = {"qk_rope_head_dim": shape.rotated, "kv_lora_rank": shape.rank, "qk_nope_head_dim": shape.plain}
    for name, size in sizes.items():
        if size % 2:  # rotations pair channels, and our products of bfloat16 elements
            raise InvalidRequest(f"{name} {size}: it must be even", field=name)
    if family.interleave and config.integer("head_dim", shape.rotated) != shape.rotated:
        raise NotSupported(f"head_dim is not qk_rope_head_dim {shape.rotated}", field="head_dim")
    query_rank = None
    if "q_lora_rank" not in config or config.value("q_lora_rank") is not None:  # null is not absent
        query_rank = config.integer("q_lora_rank", 1536)
    pairs = config.flag("rope_interleave", True) if family.interleave else True
    scale = shape.key_dim**-0.5 * score_scale
    return LatentAttention(hidden, heads, shape, scale, query_rank=query_rank, pairs=pairs)


def read_experts(config: Fields, family: Latent, layers: int, dense: Dense) -> tuple[Dense | Experts, ...]:
    """The MLP of each layer: the first ones are ``dense``."""
    count = config.integer("n_routed_experts", family.experts, high=MAX_EXPERTS)
    experts = Experts(
        dense.hidden,
        config.integer("moe_intermediate_size", family.inner),
        dense.activation,
        count,
        config.integer("n_shared_experts", family.shared),
        _routing(config, family, count),
    )
    first = config.integer("first_k_dense_replace", family.dense, low=0)
    return tuple(dense if layer < first else experts for layer in range(layers))


def _routing(config: Fields, family: Latent, count: int) -> Routing:
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


def _groups(config: Fields, family: Latent) -> tuple[int, int]:
    """How many groups experts are in, and how many of these a row may use."""
    if family.scores == "sigmoid":
        return config.integer("n_group", 8), config.integer("topk_group", 4)
    method = config.text("topk_method", "greedy")
    if method not in {"greedy", "group_limited_greedy"}:
        raise NotSupported(f"topk_method {method[:80]!r} is not supported", field="topk_method")
    greedy = method == "greedy"  # then no group is closed, whatever is said of them
    groups, open_groups = (config.integer(name, *([1] if greedy else [])) for name in ("n_group", "topk_group"))
    return (1, 1) if greedy else (groups, open_groups)
