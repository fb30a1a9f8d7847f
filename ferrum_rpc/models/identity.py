"""The deterministic executor without weights, after Ferrum's ``PagedAttentionExecutor``.

It makes every protocol test run in milliseconds with numbers that anyone can recompute: token t has the embedding
``e_t[i] = sin(f32(t + 1) * f32(i + 1))``, i < kv_heads * head_dim, computed in float64 and rounded to float32, and
``K = V = e`` in every layer. Query head h is the embedding's head ``h // (heads / kv_heads)``. Only the last layer's
attention output o counts: ``logits[v]`` is the sum of ``o[i]`` over ``i = v (mod vocab)``.

The logits depend on the last token and on the multiset of cached ones, not on their order; ``positional`` adds
``sin(f32(p + 1) * f32(i + 1) / 1000)`` for position p to the embedding (in float64, before the one rounding), which
makes a token at a wrong position visible too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.core import AttentionSpec, ModelInfo
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.base import Attend, StepInputs

POSITION_PERIOD = 1000.0
"""Divides the argument of the positional term, so that neighbouring positions stay distinguishable."""


@dataclass(frozen=True, slots=True)
class IdentityConfig:
    """Shape of the identity model. Raises InvalidRequest for one that cannot be."""

    vocab_size: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    max_context: int = 32768
    positional: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "heads", "kv_heads", "head_dim", "max_context"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"identity model: {name} must be at least 1", field=name)
        if self.heads % self.kv_heads:
            raise InvalidRequest("identity model: heads must be a multiple of kv_heads", field="heads")


class IdentityModel:
    """See the module; a `Model`. float32 on any device."""

    native = waits = False
    rowwise = True
    sinks = ()

    def __init__(self, config: IdentityConfig, device: torch.device) -> None:
        self.config = config
        self.dtype = torch.float32
        self.device = device
        channels = np.arange(1, config.kv_heads * config.head_dim + 1, dtype=np.float32).astype(np.float64)
        tokens = np.arange(1, config.vocab_size + 1, dtype=np.float32).astype(np.float64)
        exact = torch.from_numpy(np.sin(tokens[:, None] * channels)).view(-1, config.kv_heads, config.head_dim)
        # Without a positional term the one rounding is of the table itself.
        self._embedding = (exact if config.positional else exact.to(torch.float32)).to(device)
        self._channels = torch.from_numpy(channels).view(config.kv_heads, config.head_dim).to(device)
        spec = AttentionSpec(config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5)
        self.attention_specs = (spec,) * config.layers

    def info(self, name: str) -> ModelInfo:
        config = self.config
        return ModelInfo(
            name=name,
            architecture="identity",
            vocab_size=config.vocab_size,
            max_context=config.max_context,
            layers=config.layers,
            hidden_size=config.heads * config.head_dim,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            parameters=0,
            weight_dtype="float32",
            kv_dtype="float32",
            eos_token_ids=config.eos_token_ids,
        )

    def forward(self, inputs: StepInputs, attend: Attend) -> Tensor:
        """The last layer's attention output, float32 [T, heads * head_dim]."""
        config = self.config
        key = self._embedding.index_select(0, inputs.token_ids)
        if config.positional:
            phase = (inputs.positions + 1).to(torch.float32).to(torch.float64)
            exact = key + torch.sin(phase[:, None, None] * self._channels / POSITION_PERIOD)
            key = exact.to(torch.float32)
        query = key
        if config.heads != config.kv_heads:
            query = key.repeat_interleave(config.heads // config.kv_heads, dim=1)
        output = query
        for layer in range(config.layers):
            output = attend(layer, query, key, key)
        return output.view(-1, config.heads * config.head_dim)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab]: the channels of each row summed modulo the vocabulary."""
        (rows, width), vocab = hidden.shape, self.config.vocab_size
        folds = -(-width // vocab)
        padded = torch.constant_pad_nd(hidden, (0, folds * vocab - width))
        return padded if folds == 1 else padded.view(rows, folds, vocab).sum(1)

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).argmax(dim=-1)
