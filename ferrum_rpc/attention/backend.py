"""What an attention backend is, and how one is chosen.

A backend reads K and V where the store keeps them, by block tables, for whatever mix of spans a step has. The new
tokens' K and V are in the store before ``attend`` is called. A choice is made once, at start, by a probe that says why,
because an operator who finds the slow path in use wants to know the reason and not the absence of the fast one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.errors import InvalidRequest


class AttentionBackend(Protocol):
    """Paged attention over one store. Constructed with ``(specs, keys, values)``, one entry per layer; ``keys[l]`` and
    ``values[l]`` are [num_blocks, block_size, kv_heads, head_dim]."""

    name: str

    def plan(self, geometry: BatchGeometry) -> Any:
        """Everything that all layers of one step share: tile lists, block ids on the device. Once per step."""

    def attend(self, layer: int, query: Tensor, plan: Any) -> Tensor:
        """Causal attention of ``query`` [T, heads, head_dim] over each row's own sequence; the same shape and dtype.

        Row r of span s sees the positions ``0 .. starts[s] + r`` of that sequence, or the last ``window`` of them.
        """


Factory = Callable[[Sequence[AttentionSpec], list[Tensor], list[Tensor]], AttentionBackend]

AUTO = "auto"


def select_backend(
    device: torch.device, specs: Sequence[AttentionSpec], requested: str = AUTO
) -> tuple[str, str, Factory]:
    """``(name, reason, factory)`` of the backend for ``device`` and these layers.

    ``requested`` is ``auto`` or a backend's name. Raises InvalidRequest where that name does not exist.
    """
    if requested not in (AUTO, TorchPagedAttention.name):
        raise InvalidRequest(
            f"unknown attention backend {requested!r}; there are: {AUTO}, {TorchPagedAttention.name}",
            field="attention_backend",
        )
    if requested == TorchPagedAttention.name:
        reason = "requested"
    elif any(spec.softcap is not None for spec in specs):
        reason = f"the only backend on {device.type} with a logit soft cap"
    else:
        reason = f"exact block gather and SDPA: the portable path on {device.type}"
    return TorchPagedAttention.name, reason, TorchPagedAttention
