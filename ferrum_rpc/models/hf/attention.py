"""Attention functions that the layers of `transformers` call, registered under two names of our own.

A model that is built with ``attn_implementation="ferrum"`` calls `_attend` once in every layer, with queries, keys and
values as they go to the cache. `attending` sets the `Attend` of this context. No mask is made then, because no mask
function has that name. The second name is for one dry run without weights, which records what each layer requests: its
mask function returns a token for the rule of a mask, and a layer that passes the token on wants that rule.

A name must contain neither ``sdpa``, ``flash``, ``flex_attention`` nor ``paged|``: transformers looks for those in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ferrum_rpc.errors import NotSupported
from ferrum_rpc.models.base import Attend

NAME: Final = "ferrum"
DRY_NAME: Final = "ferrum_dry"
EAGER: Final = "eager"

MaskRule = Callable[[int, int, Tensor, Tensor], Tensor]
"""``rule(batch, head, query position, key position)``: whether the query sees the key."""

_attend_of: ContextVar[Attend] = ContextVar("attend")
_calls_of: ContextVar[list[DryRunCall]] = ContextVar("calls")


@dataclass(frozen=True, slots=True, eq=False)
class DryRunCall:
    """What a layer requested in the dry run. ``heads``: of queries, ``widths``: of a head's key and value. ``rule``:
    that of its mask; None: the mask was not ours. ``kept``: the key and the value."""

    layer: int | None
    heads: int
    kv_heads: int
    widths: tuple[int, int]
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    causal: bool
    rule: MaskRule | None
    kept: tuple[Tensor, Tensor]


class _Mask(Tensor):
    """A mask's rule in place of the mask. Gemma 4 slices the masks of layers that share K and V to the wanted rows:
    here all of them, so the rule still holds."""

    rule: MaskRule | None = None

    def __getitem__(self, index: Any) -> Tensor:
        part = super().__getitem__(index)
        sliced = isinstance(index, tuple) and all(isinstance(each, slice) for each in index)
        if isinstance(part, _Mask) and sliced and part.shape == self.shape:
            part.rule = self.rule
        return part


def register() -> None:
    """Register both names with transformers. A repeated call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionInterface.register(DRY_NAME, _record)
    AttentionMaskInterface.register(DRY_NAME, _rule_of_mask)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """A context in which layers store and attend by ``attend``."""
    token = _attend_of.set(attend)
    try:
        yield
    finally:
        _attend_of.reset(token)


@contextmanager
def plain(config: Any) -> Iterator[None]:
    """A context in which layers of a model with this ``config`` use the attention of transformers."""
    ours = config._attn_implementation
    config._attn_implementation = EAGER
    try:
        yield
    finally:
        config._attn_implementation = ours


@contextmanager
def recording() -> Iterator[list[DryRunCall]]:
    """A context that records what the layers request."""
    calls: list[DryRunCall] = []
    token = _calls_of.set(calls)
    try:
        yield calls
    finally:
        _calls_of.reset(token)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """transformers' interface: ``query`` [1, heads, T, width], ``key`` and ``value`` [1, kv_heads, T, width]; answers
    [1, T, heads, width of a value]."""
    if attention_mask is not None:
        raise NotSupported("a layer makes a mask of its own", field="architectures")
    rows = query[0].transpose(0, 1).contiguous()
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    narrower = key.shape[-1] - value.shape[-1]
    if narrower:
        values = torch.nn.functional.pad(values, (0, narrower))
    answer = _attend_of.get()(module.layer_idx, rows, keys.contiguous(), values.contiguous())
    return answer[None, ..., : value.shape[-1]], None


def _record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    causal, scaling = given.get("is_causal"), given.get("scaling")
    _calls_of.get().append(
        DryRunCall(
            layer=getattr(module, "layer_idx", None),
            heads=query.shape[1],
            kv_heads=key.shape[1],
            widths=(key.shape[-1], value.shape[-1]),
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=given.get("sliding_window"),
            softcap=given.get("softcap"),
            sinks=given.get("s_aux"),
            causal=getattr(module, "is_causal", True) is not False and causal is not False,
            rule=getattr(attention_mask, "rule", None),
            kept=(key, value),
        )
    )
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _rule_of_mask(*, mask_function: MaskRule, q_length: int, kv_length: int, **_: Any) -> Tensor:
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta").as_subclass(_Mask)
    mask.rule = mask_function
    return mask
