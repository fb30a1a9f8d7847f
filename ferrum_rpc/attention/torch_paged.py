"""Paged attention in plain torch: the path that runs everywhere, and the oracle of every faster backend.

Torch has no kernel that reads blocks in place, so the blocks that a row sees are gathered into a scratch buffer that is
allocated once (a fresh tensor per call costs page faults: 26 against 9 ms a layer at 32 x 512) and small enough to stay
in the cache, and SDPA reads them there. Three facts shape the code:

- A single-token span needs no causal mask once the GQA group is folded into the query axis. Several such spans with
  equally many blocks share one SDPA call; what lies behind each length in its last block is masked, and zeroed first,
  because a NaN in a masked slot would leak through 0 * NaN.
- SDPA's ``is_causal`` aligns at the top left: right only where a span starts at position 0. Elsewhere the mask of a
  tile of query rows is a view of one matrix that depends on nothing but ``key - query``: no step builds a mask.
- A logit soft cap has no fused kernel: it takes the explicit path, in float32.

Blocks are gathered exactly: nothing beyond ``ceil(length / block_size)`` is ever read. This file knows integers and
tensors; it must not know sequences, handles or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.core import AttentionSpec

TILE_ROWS = 256
"""Query rows of one SDPA call with a mask: bounds masks and scores; large enough for the kernel's own blocking."""

GROUP_BYTES = 4 << 20
"""K (and V) bytes gathered for one SDPA call over several single-token spans: two of these fit a shared L3 cache.
Measured at 32 x 512, 8 heads of 128, bf16: 5.5 ms a layer against 6.5-8.9 one by one and 8.2-8.6 all at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Singles:
    """Single-token spans that gather equally many blocks. ``rows`` int64 [G] of the step; ``blocks`` int64 [G * n];
    ``mask`` [G, 1, 1, n * block_size], 0 or -inf; ``tail`` int64: slots of the gathered blocks that are not visible
    because they were never written."""

    rows: Tensor
    blocks: Tensor
    mask: Tensor
    tail: Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows ``first .. last`` of a span against the gathered keys ``low .. high``; causal at the lower right."""

    first: int
    last: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A span of several tokens at rows ``first .. last`` of the step, its blocks (int64) and its tiles."""

    first: int
    last: int
    blocks: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What the layers of one sight do in a step."""

    singles: list[Singles] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


Sight = tuple[int | None, bool]
"""What tells layers apart in planning: the window, and whether a whole square may skip the mask (no soft cap)."""

Plan = dict[Sight, Work]


class BandMask:
    """Additive masks [rows, keys] of causal attention, aligned at the lower right, with an optional window.

    Whether row i sees key j depends on ``j - i`` only, so every mask is a view of one matrix. It grows geometrically.
    """

    def __init__(self, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._window = window
        self._base = torch.empty((TILE_ROWS, 0), dtype=dtype, device=device)

    def view(self, rows: int, keys: int) -> Tensor:
        """The mask of the last ``rows`` (at most TILE_ROWS) of ``keys`` positions: 0 where visible, -inf elsewhere."""
        columns = TILE_ROWS + keys - rows
        if self._base.shape[1] < columns:
            self._grow(max(columns, 2 * self._base.shape[1]))
        first = self._base.shape[1] - columns
        return self._base[:rows, first : first + keys]

    def _grow(self, columns: int) -> None:
        base = self._base
        row = torch.arange(columns - TILE_ROWS, columns, device=base.device)[:, None]
        column = torch.arange(columns, device=base.device)[None, :]
        hidden = column > row
        if self._window is not None:
            hidden |= column <= row - self._window
        self._base = torch.zeros((TILE_ROWS, columns), dtype=base.dtype, device=base.device)
        self._base.masked_fill_(hidden, -math.inf)


class TorchPagedAttention:
    """See the module. ``keys[l]`` and ``values[l]``: [num_blocks, block_size, kv_heads, head_dim], one shape and dtype
    for all layers; queries have that dtype."""

    name = "torch"

    def __init__(self, specs: Sequence[AttentionSpec], keys: list[Tensor], values: list[Tensor]) -> None:
        if not len(specs) == len(keys) == len(values):
            raise ValueError("one spec, one key tensor and one value tensor per layer")
        self._specs = tuple(specs)
        self._keys, self._values = keys, values
        self._block_size = keys[0].shape[1]
        self._device = keys[0].device
        self._sights: list[Sight] = [(spec.window, spec.softcap is None) for spec in specs]
        self._masks = {spec.window: BandMask(spec.window, keys[0].dtype, self._device) for spec in specs}
        self._block_bytes = keys[0][0].nbytes
        self._scratch = (keys[0].new_empty((0, *keys[0].shape[1:])), values[0].new_empty((0, *values[0].shape[1:])))

    # --- planning: host integers, once per step ---------------------------------------------------------------------

    def plan(self, geometry: BatchGeometry) -> Plan:
        """Groups, tiles and block ids for every distinct sight of the layers."""
        return {sight: self._plan_sight(geometry, *sight) for sight in set(self._sights)}

    def _plan_sight(self, geometry: BatchGeometry, window: int | None, square: bool) -> Work:
        size, plan = self._block_size, Work()
        by_blocks: dict[int, list[int]] = {}
        for span in range(geometry.spans):
            start, length = int(geometry.starts[span]), int(geometry.lengths[span])
            lowest = 0 if window is None else max(0, start - window + 1)
            first, end = lowest // size, -(-length // size)
            if length - start == 1:
                by_blocks.setdefault(end - first, []).append(span)
                continue
            row = int(geometry.query_start[span])
            blocks = self._to_device(geometry.tables[span][first:end])
            whole = square and start == 0 and (window is None or length <= window)
            tiles = (Tile(0, length, 0, length),) if whole else self._tiles(start, length, first * size, window)
            plan.runs.append(Run(row, row + length - start, blocks, tiles))
        for count, spans in by_blocks.items():
            together = max(1, GROUP_BYTES // (count * self._block_bytes))
            for group in range(0, len(spans), together):
                plan.singles.append(self._singles(geometry, spans[group : group + together], count, window))
        return plan

    @staticmethod
    def _tiles(start: int, length: int, offset: int, window: int | None) -> tuple[Tile, ...]:
        """Tiles of the queries ``start .. length``; key indices count from position ``offset``."""
        tokens = length - start
        tiles = []
        for first in range(0, tokens, TILE_ROWS):
            last = min(first + TILE_ROWS, tokens)
            low = offset if window is None else max(offset, start + first - window + 1)
            tiles.append(Tile(first, last, low - offset, start + last - offset))
        return tuple(tiles)

    def _singles(self, geometry: BatchGeometry, spans: list[int], count: int, window: int | None) -> Singles:
        size = self._block_size
        lengths = geometry.lengths[spans].astype(np.int64)
        ends = -(-lengths // size)
        offset = (ends - count) * size
        position = offset[:, None] + np.arange(count * size)
        unwritten = position >= lengths[:, None]
        hidden = unwritten if window is None else unwritten | (position < lengths[:, None] - window)
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        blocks = [geometry.tables[span][end - count : end] for span, end in zip(spans, ends, strict=True)]
        return Singles(
            rows=self._to_device(geometry.query_start[spans]),
            blocks=self._to_device(np.concatenate(blocks)),
            mask=torch.from_numpy(mask)[:, None, None].to(self._device, self._keys[0].dtype),
            tail=self._to_device(np.flatnonzero(unwritten)),
        )

    def _to_device(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(indices.astype(np.int64)).to(self._device, non_blocking=True)

    # --- attending: device tensors, once per layer ------------------------------------------------------------------

    def attend(self, layer: int, query: Tensor, plan: Plan) -> Tensor:
        """Causal attention of ``query`` [T, heads, head_dim]; see `AttentionBackend`."""
        spec = self._specs[layer]
        output = torch.empty_like(query)
        work = plan[self._sights[layer]]
        for singles in work.singles:
            self._attend_singles(spec, layer, query, singles, output)
        for run in work.runs:
            self._attend_run(spec, layer, query[run.first : run.last], run, output[run.first : run.last])
        return output

    def _attend_singles(self, spec: AttentionSpec, layer: int, query: Tensor, work: Singles, output: Tensor) -> None:
        group = len(work.rows)
        key, value = self._gather(layer, work.blocks)  # [G * n * block_size, kv_heads, head_dim]
        key.index_fill_(0, work.tail, 0.0)
        value.index_fill_(0, work.tail, 0.0)
        folded = query.index_select(0, work.rows).view(group, spec.kv_heads, -1, spec.head_dim)
        key = key.view(group, -1, spec.kv_heads, spec.head_dim).transpose(1, 2)
        value = value.view(group, -1, spec.kv_heads, spec.head_dim).transpose(1, 2)
        result = _sdpa(spec, folded, key, value, work.mask)
        output.index_copy_(0, work.rows, result.reshape(group, spec.heads, spec.head_dim))

    def _attend_run(self, spec: AttentionSpec, layer: int, query: Tensor, work: Run, output: Tensor) -> None:
        key, value = self._gather(layer, work.blocks)
        # KV heads are the batch and the group is the head axis, over which K and V have stride 0: nothing is repeated.
        grouped = query.view(len(query), spec.kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
        out = output.view(len(query), spec.kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
        shape = (spec.kv_heads, grouped.shape[1], -1, spec.head_dim)
        for tile in work.tiles:
            rows, keys = tile.last - tile.first, tile.high - tile.low
            plain = rows == keys and spec.softcap is None and (spec.window is None or rows <= spec.window)
            mask = None if plain else self._masks[spec.window].view(rows, keys)
            result = _sdpa(
                spec,
                grouped[:, :, tile.first : tile.last],
                key[tile.low : tile.high].transpose(0, 1)[:, None].expand(shape),
                value[tile.low : tile.high].transpose(0, 1)[:, None].expand(shape),
                mask,
            )
            out[:, :, tile.first : tile.last] = result

    def _gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of ``blocks`` in the scratch buffers, as [slots, kv_heads, head_dim]; valid until the next gather."""
        count = len(blocks)
        if len(self._scratch[0]) < count:
            capacity = max(count, 2 * len(self._scratch[0]))
            key, value = self._scratch
            self._scratch = (key.new_empty((capacity, *key.shape[1:])), value.new_empty((capacity, *value.shape[1:])))
        key, value = self._scratch[0][:count], self._scratch[1][:count]
        torch.index_select(self._keys[layer], 0, blocks, out=key)
        torch.index_select(self._values[layer], 0, blocks, out=value)
        return key.flatten(0, 1), value.flatten(0, 1)


def _sdpa(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention over the last two axes; without a mask causal where there are several queries (as many as keys)."""
    if spec.softcap is None:
        causal = mask is None and query.shape[-2] > 1
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=spec.scale)
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(exact) @ key.to(exact).transpose(-1, -2)) * spec.scale
    scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1) @ value.to(exact)).to(query.dtype)
