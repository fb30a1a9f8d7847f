"""Attention sinks: a logit for every head, which the softmax counts as a score without a value.

A row can give weight to the sink if its keys matter little (Xiao et al. 2023, arXiv:2309.17453; learned, as in
gpt-oss). They are parameters of the model and never change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ferrum_rpc.core import AttentionSpec

Sinks = Sequence[Tensor | None]
"""For every layer its logits [heads], of any float type, or None; empty if no layer has any."""


def held(specs: Sequence[AttentionSpec], sinks: Sinks, device: torch.device) -> list[Tensor | None]:
    """Copies in float32 on ``device``. Raises ValueError if their shapes are not those of ``specs``."""
    found = list(sinks) or [None] * len(specs)
    for spec, each in zip(specs, found, strict=True):
        if (None if each is None else tuple(each.shape)) != ((spec.heads,) if spec.sinks else None):
            raise ValueError(f"sinks must be one tensor [{spec.heads}] for each layer that has them, else None")
    return [None if each is None else each.detach().to(device, torch.float32, copy=True) for each in found]


def random_sinks(specs: Sequence[AttentionSpec], generator: torch.Generator) -> list[Tensor | None]:
    """Random sinks, for a probe."""
    return [torch.randn(spec.heads, generator=generator) if spec.sinks else None for spec in specs]
