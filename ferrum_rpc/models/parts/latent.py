"""Latent attention (MLA) over a paged cache of latents, as in DeepSeek V2 and V3: the mixer of a layer.

The checkpoint has a head's rotated channels behind its others. Here they are first, as row operations rotate them.

Ranks share the heads. Each has the whole of what latents, and the rows of queries with a low rank, are made of, and so
the whole cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ferrum_rpc.core import AttentionSpec, LatentShape
from ferrum_rpc.models.matrices import Channels, Cut, Floats, Matrix, NormWeights
from ferrum_rpc.models.parts.attention import Attention


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """``scale`` is that of `AttentionSpec`. ``query_rank``: queries are made of a normed row of so many numbers; None:
    of the hidden row. ``pairs``: the checkpoint pairs neighbouring channels. ``eps``: of the norms of latents."""

    hidden: int
    heads: int
    shape: LatentShape
    scale: float
    query_rank: int | None = None
    pairs: bool = True
    eps: float = 1e-6

    def matrices(self) -> tuple[Matrix, ...]:
        """What is made of the hidden row: the queries, or what they are made of, and the row that is cached. Then the
        queries, if they are not; and the output back to hidden rows."""
        shape, hidden = self.shape, Channels(self.hidden)
        pairs = shape.rotated if self.pairs else 0
        query = Channels(self.heads, shape.key_dim, pairs, shape.plain)
        row = Channels(1, shape.width, pairs, shape.rank)
        attended, cached = Channels(self.heads, shape.value_dim), "self_attn.kv_a_proj_with_mqa"
        output = Matrix("output", (hidden,), attended, ("self_attn.o_proj",), cut=Cut.COLUMNS)
        if self.query_rank is None:  # of the row, which is one unit, each rank has all
            return Matrix("inputs", (query, row), hidden, ("self_attn.q_proj", cached), cut=Cut.ROWS), output
        first = Channels(self.query_rank)
        return (
            Matrix("inputs", (first, row), hidden, ("self_attn.q_a_proj", cached)),
            Matrix("query", (query,), first, ("self_attn.q_b_proj",), cut=Cut.ROWS),
            output,
        )

    def others(self) -> tuple[Matrix, ...]:
        """What makes keys and values of latents: of each head the plain channels of its key, then its value."""
        shape = self.shape
        heads, latent = Channels(self.heads, shape.plain + shape.value_dim), Channels(shape.rank)
        names = ("self_attn.kv_b_proj",)
        return (Matrix("lifts", (heads,), latent, names, cut=Cut.ROWS, adaptable=False, apart=True),)

    def norms(self) -> tuple[NormWeights, ...]:
        """Of latents, and of what queries are made of."""
        latent = NormWeights("latent_norm", (Channels(1, self.shape.rank),), ("self_attn.kv_a_layernorm.weight",))
        if self.query_rank is None:
            return (latent,)
        return latent, NormWeights("query_norm", (Channels(1, self.query_rank),), ("self_attn.q_a_layernorm.weight",))

    def floats(self) -> tuple[Floats, ...]:
        """None."""
        return ()

    def share(self, ranks: int) -> LatentAttention:
        """What each of so many ranks has."""
        return replace(self, heads=self.heads // ranks)

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty if they can."""
        return f"num_attention_heads {self.heads} must be a multiple of it" if self.heads % ranks else ""

    @property
    def spec(self) -> AttentionSpec:
        """What an attention backend must know."""
        return AttentionSpec(self.heads, 1, self.shape.width, self.scale, latent=self.shape)

    @property
    def head_dim(self) -> int:
        """Channels that the frequencies of rotations are computed for."""
        return self.shape.rotated

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return self.shape.rotated

    @property
    def queries(self) -> Attention:
        """Attention whose heads are the queries, without keys. Its rows are what they are made of."""
        return Attention(
            self.query_rank or self.hidden, self.heads, 0, self.shape.key_dim, self.scale, self.rotary_dim, ()
        )

    @property
    def row(self) -> Attention:
        """Attention whose head is the row that is cached, without keys."""
        return Attention(self.hidden, 1, 0, self.shape.width, self.scale, self.rotary_dim, ())
