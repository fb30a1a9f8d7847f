"""The choice of who computes with adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ferrum_rpc.models.layout import TensorPlacement
from ferrum_rpc.models.lora import Loras, TorchLoras
from ferrum_rpc.models.native_lora import NativeLoras
from ferrum_rpc.models.shard import ShardedTensor
from ferrum_rpc.selection import BackendCandidate, select


def select_loras(
    table: Mapping[str, TensorPlacement],
    layers: int,
    dtype: torch.dtype,
    device: torch.device,
    parts: Mapping[str, ShardedTensor],
) -> tuple[str, Loras]:
    """``(reason, loras)`` of a decoder whose parameters are laid out as in ``table``, with so many ``layers`` and the
    ``parts`` of them here."""
    arguments = table, layers, dtype, device, parts
    _, reason, made = select(
        BackendCandidate("native", lambda: NativeLoras(*arguments), "all adapters of a step in one call a product"),
        BackendCandidate("torch", lambda: TorchLoras(*arguments)),
        what="adapters",
        field="adapter_dir",
    )
    return reason, made
