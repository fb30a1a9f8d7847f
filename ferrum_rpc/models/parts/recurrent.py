"""Gated DeltaNet, a recurrent layer: a state of fixed size in place of keys and values. The mixer of a layer.

The checkpoint's names are those of Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.models.matrices import Channels, Cut, Floats, Matrix, NormWeights


@dataclass(frozen=True, slots=True)
class Recurrent:
    """``shape``: its heads and its convolution, and so what a sequence keeps of it. ``by_heads``: the checkpoint has
    what is made of the hidden row by key heads, as Qwen3-Next does, not part by part."""

    hidden: int
    shape: RecurrentShape
    by_heads: bool = False

    def matrices(self) -> tuple[Matrix, Matrix]:
        """The inputs of the convolution, the gate of the output, and two numbers of each value head: how much of a
        token is written, and how much the state decays; the output back to hidden rows."""
        values = Channels(self.shape.value_heads, self.shape.value_dim)
        output = Matrix("output", (Channels(self.hidden),), values, ("linear_attn.out_proj",), cut=Cut.COLUMNS)
        return self._inputs(), output

    def _inputs(self) -> Matrix:
        shape, hidden = self.shape, Channels(self.hidden)
        prefix, by_parts = "linear_attn.in_proj_", ("qkv", "z", "b", "a")
        if not self.by_heads:
            heads, values = Channels(shape.value_heads), Channels(shape.value_heads, shape.value_dim)
            names = tuple(prefix + each for each in by_parts)
            return Matrix("inputs", (*convolved(shape), values, heads, heads), hidden, names, cut=Cut.ROWS)
        keys, sharing = Channels(shape.key_heads, shape.key_dim), shape.value_heads // shape.key_heads
        values, numbers = Channels(shape.key_heads, sharing * shape.value_dim), Channels(shape.key_heads, sharing)
        rows, names = (keys, keys, values, values, numbers, numbers), (f"{prefix}qkvz", f"{prefix}ba")
        return Matrix("inputs", rows, hidden, names, interleaved=(4, 2))

    def norms(self) -> tuple[NormWeights, ...]:
        """None: the one of its output has other weights than a model's norms (`floats`)."""
        return ()

    def floats(self) -> tuple[Floats, ...]:
        """The fields of `RecurrentWeights`."""
        shape, heads = self.shape, (self.shape.value_heads,)
        rows = (Channels(shape.value_heads),)
        return (
            Floats("taps", "linear_attn.conv1d.weight", (shape.channels, 1, shape.taps), convolved(shape)),
            Floats("decay", "linear_attn.A_log", heads, rows),
            Floats("shift", "linear_attn.dt_bias", heads, rows),
            Floats("out_norm", "linear_attn.norm.weight", (shape.value_dim,)),
        )

    def share(self, ranks: int) -> Recurrent:
        """What each of so many ranks has: value heads, and their key heads."""
        shape = self.shape
        keys, values = max(1, shape.key_heads // ranks), shape.value_heads // ranks
        return replace(self, shape=replace(shape, key_heads=keys, value_heads=values))

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty if they can."""
        shape = self.shape
        if self.by_heads and ranks > 1:
            return "its checkpoint has recurrent layers by key heads, which cannot be shared yet"
        if shape.value_heads % ranks:
            return f"linear_num_value_heads {shape.value_heads} must be a multiple of it"
        if shape.key_heads % ranks and ranks % shape.key_heads:
            return f"linear_num_key_heads {shape.key_heads} must be a multiple of it, or the other way round"
        return ""


def convolved(shape: RecurrentShape) -> tuple[Channels, Channels, Channels]:
    """The channels of the convolution: query, key and value."""
    keys = Channels(shape.key_heads, shape.key_dim)
    return keys, keys, Channels(shape.value_heads, shape.value_dim)
