"""The identity model's formula in plain numpy and float64, written from the specification, sharing no code with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCE = 1e-5
"""Of the float32 model, absolute."""


@dataclass(frozen=True)
class OracleConfig:
    """Any object with these attributes will do, the model's own configuration included."""

    vocab_size: int = 256
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    positional: bool = False


def _embeddings(tokens: np.ndarray, config) -> np.ndarray:
    i = np.arange(config.kv_heads * config.head_dim)
    token_phase = np.float32(tokens + 1).astype(np.float64)[:, None] * np.float32(i + 1).astype(np.float64)[None]
    e = np.sin(token_phase)
    if config.positional:
        p = np.float32(np.arange(len(tokens)) + 1).astype(np.float64)
        e = e + np.sin(p[:, None] * np.float32(i + 1).astype(np.float64)[None] / 1000)
    return e.astype(np.float32).astype(np.float64).reshape(len(tokens), config.kv_heads, config.head_dim)


def identity_logits(tokens: Sequence[int], positions: Sequence[int] | None = None, config=None) -> np.ndarray:
    """float64 [len(positions), vocab]: the logits after ``tokens[: p + 1]`` for each p of ``positions`` (None: all).

    Against the float32 model compare with an absolute tolerance of 1e-5.
    """
    config = config or OracleConfig()
    e = _embeddings(np.asarray(tokens, dtype=np.int64), config)
    rows = range(len(tokens)) if positions is None else positions
    out = np.zeros((len(rows), config.vocab_size))
    for r, p in enumerate(rows):
        for head in range(config.heads):
            cached = e[: p + 1, head // (config.heads // config.kv_heads)]
            scores = cached @ cached[p] / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            o = weights / weights.sum() @ cached
            for d in range(config.head_dim):
                out[r, (head * config.head_dim + d) % config.vocab_size] += o[d]
    return out
