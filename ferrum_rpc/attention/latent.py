"""Attention over a cache of latents: a row of each token is its key and its value for all heads (DeepSeek V2 and V3).

A row has few numbers, and keys and values of heads are products of it. A short span, as in decode and verification, is
bound by memory: there the matrices of these products are applied to queries and to answers ("absorbed"), and heads
attend to the rows themselves, which are read in place. That is attention with one KV head, so any backend computes it
over keys and values that are the same tensor. The scores then take three times the arithmetic, so for a longer span
keys and values are computed from the rows, some heads at a time.

The length of a span alone decides, so a row's bits depend on its sequence alone where the backend promises that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.attention.geometry import BatchGeometry, Int64Array
from ferrum_rpc.attention.sinks import Sinks
from ferrum_rpc.attention.tiles import TILE_ROWS, BandMask, LongSpan, MaskPattern, Planner
from ferrum_rpc.attention.torch_paged import flash_bytes
from ferrum_rpc.core import AttentionSpec, LatentShape

SHORT: Final = 32
"""Tokens of the longest span whose matrices are absorbed."""

EXPANDED_BYTES: Final = 32 << 20
"""Of keys and values that are computed at once, if one head has no more."""


class Lifts(Protocol):
    """The products that make keys and values of heads of a layer's latents, and their use the other way round."""

    def absorbed(self, query: Tensor) -> Tensor:
        """[T, heads, width]: what a row is multiplied with instead of its key, for ``query`` [T, heads, key_dim]."""

    def answers(self, found: Tensor) -> Tensor:
        """[T, heads, value_dim] of sums of latents ``found`` [T, heads, rank]."""

    def expand(self, rows: Tensor, first: int, keys: Tensor, values: Tensor) -> None:
        """Of ``rows`` [n, width] the ``keys`` [h, n, key_dim] and ``values`` [h, n, value_dim] of the heads from
        ``first`` on."""


class RowBackend(Protocol):
    """What is used of an `AttentionBackend`."""

    name: str
    exact_span_tokens: int

    def plan(self, geometry: BatchGeometry) -> Any: ...

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None: ...

    def attend(self, layer: int, query: Tensor, plan: Any) -> Tensor: ...


class RowFactory(Protocol):
    """Constructs it."""

    def __call__(self, specs: Sequence[AttentionSpec], keys: list[Tensor], values: list[Tensor], /) -> RowBackend: ...


class LatentPlan(NamedTuple):
    """``short``: the row backend's plan of the short spans, None if there are none; ``rows``: those of the step that
    they own (int64), None if they own all. ``long``: the other spans."""

    short: Any
    rows: Tensor | None
    long: Sequence[LongSpan]


class LatentPagedAttention:
    """An `AttentionBackend` of layers that all have a `LatentShape`. ``rows[l]``: [num_blocks, block_size, 1, width].
    ``of_rows`` makes the backend that attends to rows, whose ``name`` and ``exact_span_tokens`` this one has."""

    def __init__(
        self,
        of_rows: RowFactory,
        specs: Sequence[AttentionSpec],
        rows: list[Tensor],
        values: list[Tensor],
        *,
        sinks: Sinks = (),
    ) -> None:
        """``values`` are ``rows`` again, as a `KvStore` without pairs has them. Raises ValueError for sinks."""
        if any(sink is not None for sink in sinks):
            raise ValueError("latent attention has no sinks")
        self._of_rows = of_rows(specs, rows, values)
        self.name, self.exact_span_tokens = self._of_rows.name, min(SHORT, self._of_rows.exact_span_tokens)
        self._specs, self._rows = tuple(specs), rows
        self._pattern = MaskPattern(None, square=True, dtype=rows[0].dtype)
        self._planner = Planner(rows[0].shape[1], rows[0][0].nbytes, rows[0].device)
        self._mask = BandMask(self._pattern, rows[0].device)

    def plan(self, geometry: BatchGeometry) -> LatentPlan:
        """Which spans are short, and the plans of both."""
        short = geometry.lengths - geometry.starts <= SHORT
        if short.all():
            return LatentPlan(self._of_rows.plan(geometry), None, ())
        work = self._planner.work(geometry, self._pattern, np.flatnonzero(~short).tolist())
        if not short.any():
            return LatentPlan(None, None, work.long_spans)
        part, owned = _part(geometry, np.flatnonzero(short).tolist())
        rows = torch.from_numpy(owned).to(self._rows[0].device)
        return LatentPlan(self._of_rows.plan(part), rows, work.long_spans)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """``key`` [T, 1, width]; ``value`` is the same."""
        self._of_rows.write(layer, slots, key, value)

    def attend(self, layer: int, query: Tensor, plan: LatentPlan) -> Tensor:
        """Of absorbed queries [T, heads, width] of a step of short spans: sums of rows [T, heads, width]."""
        assert plan.rows is None and not plan.long  # noqa: S101 - see above
        return self._of_rows.attend(layer, query, plan.short)

    def attend_latent(self, layer: int, query: Tensor, lifts: Lifts, plan: LatentPlan) -> Tensor:
        """Causal attention of ``query`` [T, heads, key_dim], the rotated channels first, over each row's own sequence:
        [T, heads, value_dim]. The step's rows of the layer are written."""
        if not plan.long:
            return self._absorbed(layer, query, lifts, plan.short)
        shape = _shape(self._specs[layer])
        output = query.new_empty((*query.shape[:2], shape.value_dim))
        if plan.rows is not None:
            short = self._absorbed(layer, query.index_select(0, plan.rows), lifts, plan.short)
            output.index_copy_(0, plan.rows, short)
        for span in plan.long:
            self._expanded(layer, query[span.first : span.last], lifts, span, output[span.first : span.last])
        return output

    def _absorbed(self, layer: int, query: Tensor, lifts: Lifts, plan: Any) -> Tensor:
        found = self._of_rows.attend(layer, lifts.absorbed(query), plan)
        return lifts.answers(found[..., _shape(self._specs[layer]).rotated :])

    def _expanded(self, layer: int, query: Tensor, lifts: Lifts, span: LongSpan, output: Tensor) -> None:
        spec = self._specs[layer]
        shape, end = _shape(spec), span.tiles[-1].high
        rows = self._rows[layer].index_select(0, span.blocks).flatten(0, 2)[:end]
        together, padded = _heads_at_once(spec, end, query.dtype), max(shape.key_dim, shape.value_dim)
        keys = query.new_empty((together, end, shape.key_dim))
        values = query.new_zeros((together, end, padded))
        for first in range(0, spec.heads, together):
            heads = min(together, spec.heads - first)
            key, value = keys[:heads], values[:heads]
            lifts.expand(rows, first, key, value[..., : shape.value_dim])
            asked, found = (each[:, first : first + heads].transpose(0, 1) for each in (query, output))
            for tile in span.tiles:
                size, seen = tile.last - tile.first, tile.high
                answer = F.scaled_dot_product_attention(
                    asked[None, :, tile.first : tile.last],
                    key[None, :, :seen],
                    value[None, :, :seen],
                    None if size == seen else self._mask.view(size, seen),
                    is_causal=size == seen,
                    scale=spec.scale,
                )
                found[:, tile.first : tile.last] = answer[0, ..., : shape.value_dim]


def scratch_bytes(spec: AttentionSpec, dtype: torch.dtype, tokens: int, context: int) -> int:
    """Bytes that `LatentPagedAttention.attend_latent` takes for the last ``tokens`` tokens of a sequence of
    ``context``, in addition to queries and answers: absorbed queries and what they find; or masks, rows, keys and
    values, and what SDPA takes."""
    shape, size = _shape(spec), dtype.itemsize
    absorbed = 3 * min(tokens, SHORT) * spec.heads * shape.width * size
    if tokens <= SHORT:
        return absorbed
    mask = 0 if tokens == context else TILE_ROWS * (TILE_ROWS + context) * size
    together, padded = _heads_at_once(spec, context, dtype), max(shape.key_dim, shape.value_dim)
    lifted = together * context * (shape.key_dim + padded) + context * max(shape.plain, shape.value_dim)
    flash = torch.get_num_threads() * flash_bytes(padded, dtype)
    return absorbed + mask + (context * shape.width + lifted + together * tokens * padded) * size + flash


def _heads_at_once(spec: AttentionSpec, context: int, dtype: torch.dtype) -> int:
    shape = _shape(spec)
    of_a_head = context * (shape.key_dim + max(shape.key_dim, shape.value_dim)) * dtype.itemsize
    return max(1, min(spec.heads, EXPANDED_BYTES // of_a_head))


def _shape(spec: AttentionSpec) -> LatentShape:
    assert spec.latent is not None  # noqa: S101 - see the class
    return spec.latent


def _part(geometry: BatchGeometry, spans: Sequence[int]) -> tuple[BatchGeometry, Int64Array]:
    """The geometry of some spans alone, and which rows of the step they own."""
    rows, starts, lengths, tables = geometry.by_span.tolist()
    part = BatchGeometry.build(
        geometry.block_size,
        [starts[span] for span in spans],
        [lengths[span] - starts[span] for span in spans],
        [geometry.blocks[tables[span] : tables[span + 1]] for span in spans],
    )
    owned = [np.arange(rows[span], rows[span + 1], dtype=np.int64) for span in spans]
    return part, np.concatenate(owned)
