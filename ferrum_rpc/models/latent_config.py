"""Latent attention in a ``config.json``: that of DeepSeek V2 and V3."""

from __future__ import annotations

from ferrum_rpc.core import LatentShape
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.families import Latent
from ferrum_rpc.models.fields import Fields
from ferrum_rpc.models.parts.latent import LatentAttention


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
