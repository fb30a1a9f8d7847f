"""The choice of who computes with adapters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ferrum_rpc.models.layout import TensorPlacement
from ferrum_rpc.models.lora import Loras, TorchLoras
from ferrum_rpc.models.native_lora import NativeLoras
from ferrum_rpc.selection import BackendCandidate, select


def select_loras(
    table: Mapping[str, TensorPlacement], dtype: torch.dtype, device: torch.device, here: Mapping[str, TensorPlacement]
) -> tuple[str, Loras]:
    """``(reason, loras)`` of a decoder whose tensors are placed as in ``table``, and those of this rank as in
    ``here``."""
    arguments = table, dtype, device, here
    _, reason, made = select(
        BackendCandidate("native", lambda: NativeLoras(*arguments), "all adapters of a step in one call a product"),
        BackendCandidate("torch", lambda: TorchLoras(*arguments)),
        what="adapters",
        field="adapter_dir",
    )
    return reason, made
