"""What a layer with latent attention computes besides attention: its query, the row that it caches, and what makes keys
and values of such rows.

The matrix that lifts latents is held head by head: attention needs its products with latents, and those with queries
and answers. Each head's part for keys is held twice, for its columns are read in one and its rows in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_rpc.models.fused_ops import FusedOps
from ferrum_rpc.models.linear import Linear, LinearFactory
from ferrum_rpc.models.native_linear import NativeHeads, NativeLinear, PairFactory, PanelFactory
from ferrum_rpc.models.parts.latent import LatentAttention


class LatentLifts:
    """The products of ``weight`` [heads * (plain + value_dim), rank], held by ``factory``."""

    def __init__(self, mixer: LatentAttention, weight: Tensor, factory: LinearFactory) -> None:
        self._shape = shape = mixer.shape
        heads = weight.view(mixer.heads, shape.plain + shape.value_dim, shape.rank)
        parts = [each.split_with_sizes((shape.plain, shape.value_dim)) for each in heads]
        self._keys = [factory(key, None) for key, _ in parts]
        self._values = [factory(value, None) for _, value in parts]
        self._queries = [factory(key.t().contiguous(), None) for key, _ in parts]
        self._absorb, self._answer = _by_head(self._queries), _by_head(self._values)

    @staticmethod
    def nbytes(mixer: LatentAttention, factory: LinearFactory, dtype: torch.dtype) -> int:
        """Bytes of its products."""
        rank, plain, value = mixer.shape.rank, mixer.shape.plain, mixer.shape.value_dim
        return mixer.heads * sum(factory.nbytes(*each, dtype) for each in ((plain, rank), (value, rank), (rank, plain)))

    @property
    def native(self) -> bool:
        """Whether they are our kernel's."""
        return all(isinstance(each, NativeLinear) for each in self._keys)

    def absorbed(self, query: Tensor) -> Tensor:
        """[T, heads, width]: what a row is multiplied with instead of its key, for ``query`` [T, heads, key_dim]."""
        rotated = self._shape.rotated
        made = query.new_empty((*query.shape[:2], self._shape.width))
        made[..., :rotated] = query[..., :rotated]
        self._absorb(query[..., rotated:], made[..., rotated:])
        return made

    def answers(self, found: Tensor) -> Tensor:
        """[T, heads, value_dim] of sums of latents ``found`` [T, heads, rank]."""
        made = found.new_empty((*found.shape[:2], self._shape.value_dim))
        self._answer(found, made)
        return made

    def expand(self, rows: Tensor, first: int, keys: Tensor, values: Tensor) -> None:
        """Of ``rows`` [n, width] the ``keys`` [h, n, key_dim] and ``values`` [h, n, value_dim] of the heads from
        ``first`` on."""
        rotated = self._shape.rotated
        latents = rows[:, rotated:]
        keys[..., :rotated] = rows[:, :rotated]
        for head, (key, value) in enumerate(zip(keys, values, strict=True), first):
            key[:, rotated:] = self._keys[head](latents)
            value.copy_(self._values[head](latents))


class LatentWeights(NamedTuple):
    """What a layer with latent attention has besides products. ``queries`` and ``row`` rotate (`LayerSpec.rotated`).
    ``latent_norm`` and ``query_norm`` are as `FusedOps.add_norm` wants them."""

    lifts: LatentLifts
    queries: FusedOps
    row: FusedOps
    latent_norm: Tensor
    query_norm: Tensor | None = None


def normed_query(inputs: Tensor, weights: LatentWeights) -> Tensor:
    """What queries are made of, [T, query_rank], of ``inputs`` that begin with it."""
    norm = weights.query_norm
    assert norm is not None  # noqa: S101 - the caller knows
    return weights.queries.add_norm(inputs[:, : norm.shape[1]].contiguous(), None, norm)


def cached_row(inputs: Tensor, mixer: LatentAttention, weights: LatentWeights, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, 1, width], of ``inputs`` that end with it: its first channels are rotated, the latent behind is normed."""
    width, rotated = mixer.shape.width, mixer.shape.rotated
    row = inputs[:, -width:].contiguous()
    latent = weights.row.add_norm(row[:, rotated:].contiguous(), None, weights.latent_norm)
    row = weights.row.heads(row, None, cos, sin)[0]
    row[:, 0, rotated:] = latent
    return row


def _by_head(products: Sequence[Linear]) -> Callable[[Tensor, Tensor], None]:
    """Writes to [T, heads, n] the products of [T, heads, k], of each head its own."""
    native = [each for each in products if isinstance(each, NativeLinear)]
    if len(native) == len(products):
        return NativeHeads(native)

    def one_by_one(x: Tensor, out: Tensor) -> None:
        for head, product in enumerate(products):
            out[:, head] = product(x[:, head])

    return one_by_one


def of_own(factory: LinearFactory) -> LinearFactory:
    """How matrices are held that must not be quantized, beside those of ``factory``."""
    return PairFactory(factory.space) if isinstance(factory, PanelFactory) else factory
