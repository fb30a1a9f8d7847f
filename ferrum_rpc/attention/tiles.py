"""The split of a step into SDPA calls of the torch backend: from host integers to block ids and masks, once per step.

Nothing here touches K, V or queries. Layers differ in planning only by their `MaskPattern`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.attention.geometry import BatchGeometry

TILE_ROWS = 256
"""Query rows of one SDPA call with a mask: bounds masks and scores; large enough for the kernel's own blocking."""

GROUP_BYTES = 4 << 20
"""K (and V) bytes gathered for one SDPA call over several single-token spans: two of these fit a shared L3 cache.
Measured at 32 x 512, 8 heads of 128, bf16: 5.5 ms a layer against 6.5-8.9 one by one and 8.2-8.6 all at once."""


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """Which tokens a layer's queries attend to: the last ``window`` (None: all). ``square``: a span that starts at 0
    may be one causal square without a mask, however long (not with a soft cap, whose scores are materialized).
    ``dtype``: of queries and masks."""

    window: int | None
    square: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """Single-token spans that gather equally many blocks. ``rows`` int64 [G] of the step; ``blocks`` int64 [G * n];
    ``mask`` [G, 1, 1, n * block_size], 0 or -inf; ``tail`` int64: slots of the gathered blocks after the sequences'
    ends, which were never written."""

    rows: Tensor
    blocks: Tensor
    mask: Tensor
    tail: Tensor


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Query rows ``first .. last`` of a span against the gathered keys ``low .. high``; causal at the lower right."""

    first: int
    last: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, eq=False)
class LongSpan:
    """A span of several tokens at rows ``first .. last`` of the step, its blocks (int64) and its tiles."""

    first: int
    last: int
    blocks: Tensor
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PatternWork:
    """The work of the layers of one pattern in a step."""

    decode_groups: list[DecodeGroup] = field(default_factory=list)
    long_spans: list[LongSpan] = field(default_factory=list)


class Planner:
    """Makes the `PatternWork` of a pattern. ``block_bytes`` is the size of one block's keys in the largest layer."""

    def __init__(self, block_size: int, block_bytes: int, device: torch.device) -> None:
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._device = device

    def work(self, geometry: BatchGeometry, pattern: MaskPattern, spans: Iterable[int]) -> PatternWork:
        """Groups, tiles and block ids of the spans with these indices."""
        size, window, work = self._block_size, pattern.window, PatternWork()
        by_blocks: dict[int, list[int]] = {}
        rows, starts, lengths, tables = geometry.by_span.tolist()
        for span in spans:
            start, length = starts[span], lengths[span]
            lowest = 0 if window is None else max(0, start - window + 1)
            first, end = lowest // size, -(-length // size)
            if length - start == 1:
                by_blocks.setdefault(end - first, []).append(span)
                continue
            row, table = rows[span], tables[span]
            blocks = self._to_device(geometry.blocks[table + first : table + end])
            whole = pattern.square and start == 0 and (window is None or length <= window)
            tiles = (QueryTile(0, length, 0, length),) if whole else _tiles(start, length, first * size, window)
            work.long_spans.append(LongSpan(row, row + length - start, blocks, tiles))
        for count, alike in by_blocks.items():
            together = max(1, GROUP_BYTES // (count * self._block_bytes))
            for group in range(0, len(alike), together):
                work.decode_groups.append(self._group(geometry, alike[group : group + together], count, pattern))
        return work

    def _group(self, geometry: BatchGeometry, spans: list[int], count: int, pattern: MaskPattern) -> DecodeGroup:
        """Masked positions are only in a span's first block (window) and its last (end)."""
        size, window = self._block_size, pattern.window
        lengths = geometry.lengths[spans].astype(np.int64)
        ends = -(-lengths // size)
        unwritten = (ends - 1)[:, None] * size + np.arange(size) >= lengths[:, None]
        mask = torch.zeros((len(spans), count, size), dtype=pattern.dtype, device=self._device)
        mask[:, -1].masked_fill_(torch.from_numpy(unwritten).to(self._device), -math.inf)
        if window is not None:
            unseen = (ends - count)[:, None] * size + np.arange(size) < (lengths - window)[:, None]
            mask[:, 0].masked_fill_(torch.from_numpy(unseen).to(self._device), -math.inf)
        row, offset = np.nonzero(unwritten)
        last = geometry.table_start[spans] + ends
        blocks = geometry.blocks[last[:, None] + np.arange(-count, 0)]
        return DecodeGroup(
            rows=self._to_device(geometry.query_start[spans]),
            blocks=self._to_device(blocks.ravel()),
            mask=mask.view(len(spans), 1, 1, count * size),
            tail=self._to_device((row * count + count - 1) * size + offset),
        )

    def _to_device(self, indices: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(indices.astype(np.int64)).to(self._device, non_blocking=True)


def _tiles(start: int, length: int, offset: int, window: int | None) -> tuple[QueryTile, ...]:
    """Tiles of the queries ``start .. length``; key indices count from position ``offset``."""
    tokens = length - start
    tiles = []
    for first in range(0, tokens, TILE_ROWS):
        last = min(first + TILE_ROWS, tokens)
        low = offset if window is None else max(offset, start + first - window + 1)
        tiles.append(QueryTile(first, last, low - offset, start + last - offset))
    return tuple(tiles)


class BandMask:
    """Additive masks [rows, keys] of causal attention, aligned at the lower right, with an optional window.

    Whether row i sees key j depends on ``j - i`` only, so every mask is a view of one matrix. It grows geometrically.
    On a GPU a mask is a copy: SDPA reads 16 bytes at once wherever the rows of a view begin.
    """

    def __init__(self, pattern: MaskPattern, device: torch.device) -> None:
        self._window = pattern.window
        self._base = torch.empty((TILE_ROWS, 0), dtype=pattern.dtype, device=device)

    def view(self, rows: int, keys: int) -> Tensor:
        """The mask of the last ``rows`` (at most TILE_ROWS) of ``keys`` positions: 0 where visible, -inf elsewhere."""
        columns = TILE_ROWS + keys - rows
        if self._base.shape[1] < columns:
            self._grow(max(columns, 2 * self._base.shape[1]))
        first = self._base.shape[1] - columns
        mask = self._base[:rows, first : first + keys]
        return mask if mask.device.type == "cpu" else mask.contiguous()

    def _grow(self, columns: int) -> None:
        """In place: a matrix of booleans beside it would be the largest tensor of a long context's first step."""
        dtype, device = self._base.dtype, self._base.device
        self._base = torch.empty((TILE_ROWS, 0), dtype=dtype, device=device)  # the old one goes first
        after = columns - TILE_ROWS + 1  # the first position that row 0 does not see
        self._base = torch.full((TILE_ROWS, columns), -math.inf, dtype=dtype, device=device).triu_(after)
        if self._window is not None:
            for row in range(TILE_ROWS):
                self._base[row, : max(0, after + row - self._window)] = -math.inf
