"""Logits and what is drawn from them, with everything that samplers must agree on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.sampling.draw import PARAMS_DTYPE, SamplingParams

PLAIN = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}


def draws(count: int, **how: Any) -> SamplingParams:
    made = np.zeros(count, PARAMS_DTYPE)
    for name, value in (PLAIN | {"seed": 1, "position": np.arange(count)} | how).items():
        made[name] = value
    return made


def any_draws(count: int, vocabulary: int, seed: int = 0) -> SamplingParams:
    """With all filters, and positions and seeds of all sizes."""
    rng = np.random.default_rng(seed)
    return draws(
        count,
        seed=rng.integers(0, 2**64, count, dtype=np.uint64),
        position=np.arange(count, dtype=np.uint64) + np.uint64(2**33 + 5) * (np.arange(count) % 2).astype(np.uint64),
        temperature=rng.choice([0, 1e-30, 0.3, 1, 1, 5], count),
        top_p=rng.choice([1, 1, 0.95, 0.5, 1e-6, 0], count),
        min_p=rng.choice([0, 0, 0.1, 1], count),
        top_k=rng.choice([0, 0, 1, 3, 50, 200, vocabulary - 1, vocabulary, 10**9], count),
    )


def logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def spoiled(rows: Tensor) -> Tensor:
    """With ties, forbidden tokens, and rows that are not drawn from."""
    vocabulary = rows.shape[-1]
    rows[::3] = rows[::3].bfloat16().float()
    rows[1::6] = rows[1::6].round()
    rows[2::7] *= 20
    rows[3::11, ::2] = -torch.inf
    rows[4::23, vocabulary // 2 :] = -torch.inf
    rows[5::23, : vocabulary - 1] = -torch.inf
    rows[6::29] = 1.0
    rows[7::97, vocabulary - 2] = torch.nan
    rows[8::97, vocabulary // 3] = torch.inf
    rows[9::97] = -torch.inf
    return rows
