"""Softmax attention over a paged cache, with grouped queries: the mixer of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.models.matrices import Channels, Cut, Floats, Matrix, NormWeights


@dataclass(frozen=True, slots=True)
class Attention:
    """``scale``, ``window`` and ``softcap`` are those of `AttentionSpec`. ``rotary_dim``: channels of a head that are
    rotated, from the first on; ``pairs``: the checkpoint pairs neighbouring ones. ``qk_norm``: query and key are normed
    head by head, or each as a whole row. ``names``: the checkpoint's modules of query, key and value, or of all.
    ``gated``: the query's module has for each head its query and then a gate, by whose sigmoid the head's output is
    multiplied. ``sinks``: the checkpoint's tensor of the heads' sinks (`AttentionSpec`); None: there are none."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rotary_dim: int
    names: tuple[str, ...]
    window: int | None = None
    softcap: float | None = None
    pairs: bool = False
    bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "row"] | None = None
    gated: bool = False
    sinks: str | None = None

    def matrices(self) -> tuple[Matrix, Matrix]:
        """The fused query, key and value; the output back to hidden rows."""
        query, key = self._rotated()
        if self.gated:
            query = Channels(self.heads, 2 * self.head_dim)
        value, hidden = Channels(self.kv_heads, self.head_dim), Channels(self.hidden)
        attended = Channels(self.heads, self.head_dim)
        return (
            Matrix("qkv", (query, key, value), hidden, self.names, self.bias, Cut.ROWS, fine=value.size),
            Matrix("output", (hidden,), attended, ("self_attn.o_proj",), self.output_bias, Cut.COLUMNS),
        )

    def norms(self) -> tuple[NormWeights, ...]:
        """One row of weights for each head of query and key."""
        if self.qk_norm is None:
            return ()
        names = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
        return (NormWeights("qk_norm", self._rotated(), names, spread=self.qk_norm == "head"),)

    def floats(self) -> tuple[Floats, ...]:
        """The sinks."""
        if self.sinks is None:
            return ()
        return (Floats("sinks", self.sinks, (self.heads,), (Channels(self.heads),)),)

    def share(self, ranks: int) -> Attention:
        """What each of so many ranks has."""
        return replace(self, heads=self.heads // ranks, kv_heads=max(1, self.kv_heads // ranks))

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty if they can."""
        if self.heads % ranks:
            return f"num_attention_heads {self.heads} must be a multiple of it"
        if self.kv_heads % ranks and ranks % self.kv_heads:
            return f"num_key_value_heads {self.kv_heads} must be a multiple of it, or the other way round"
        return ""

    @property
    def spec(self) -> AttentionSpec:
        """What an attention backend must know."""
        sinks = self.sinks is not None
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.scale, self.window, self.softcap, sinks)

    def _rotated(self) -> tuple[Channels, Channels]:
        """Query and key."""
        pairs = self.rotary_dim if self.pairs else 0
        return Channels(self.heads, self.head_dim, pairs), Channels(self.kv_heads, self.head_dim, pairs)
