"""Rotations that do not depend on a row's neighbours.

With ``dynamic`` and ``longrope`` scaling transformers chooses the frequencies by the largest position of a forward
pass, and ours has many sequences. They are chosen once instead, for the longest sequence that is served: transformers'
own code gets that position, and the scaling is then marked as fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

FIXED: Final = "fixed"


def freeze(model: Any, context: int) -> list[str]:
    """Fix the frequencies of a loaded model; on the meta device there are none to fix. Returns the kinds of scaling
    that were found."""
    kinds = []
    for module in model.modules():
        for layer_type, kind in _kinds(module):
            if _moves(kind):
                kinds.append(kind)
                _freeze(module, layer_type, context)
    return kinds


def _kinds(module: Any) -> Iterator[tuple[str | None, str]]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, str):
        yield None, kind
    elif isinstance(kind, dict):
        yield from [*kind.items()]


def _moves(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _freeze(module: Any, layer_type: str | None, context: int) -> None:
    device = next(module.buffers()).device
    if device.type != "meta":
        last = torch.tensor([[context - 1]], device=device)
        module(torch.zeros(1, device=device), last, *([] if layer_type is None else [layer_type]))
    if layer_type is None:
        module.rope_type = FIXED
    else:
        module.rope_type[layer_type] = FIXED
