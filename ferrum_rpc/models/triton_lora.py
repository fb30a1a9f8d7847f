"""Adapters on a CUDA device: all adapters of a step in two launches for each product, which a CUDA graph can record.

`shrink_kernel` computes x A, and `expand_kernel` adds (x A) B to y, as in Punica and S-LoRA: a program gathers the rows
of one adapter, so that a step may mix adapters of any rank with rows that have none. A tile of rows reads its A and B
once. What differs from step to step is in device memory: a list of tiles with the addresses of their adapters, and the
rows in the order of the tiles. Grids have a fixed size, and each program takes every n-th tile of the list. So a
recorded launch serves any adapters, also those that are loaded later; an empty list (zeros) changes nothing.

The columns of x are divided among SPLITS programs if there are few tiles. Their sums are kept apart in float32, and
`expand_kernel` adds them in order, rounds them to the model's dtype and multiplies: the rounding of `TorchLoras`.

This file imports triton: `lora_choice` determines whether it can be imported.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_rpc.models.base import StepAdapters
from ferrum_rpc.models.layout import TensorPlacement
from ferrum_rpc.models.lora import AdaptedProduct, AdapterMatrix, Int64Array, Loras, ProductChange, StagedAdapters
from ferrum_rpc.sampling.transfer import to_device

ALIGNMENT: Final = 16
"""Elements. Matrices and the rows of B begin at multiples of it, so that a thread loads 16 bytes at once."""

SMALL: Final = 16
"""Rows of a small tile, as many as a matrix instruction takes: decode steps have few rows of an adapter."""

LARGE_BYTES: Final = 128
"""Of a column of x in a large tile, for prompts: 64 rows in 16 bits."""

RANKS: Final = 16
"""Columns of A, or rows of B, of one matrix instruction."""

COLUMN_BYTES: Final = 256
"""Of a row of x or y that a program has in its registers."""

SPLITS: Final = 8
"""Programs among which a small tile's columns of x are divided, of at least `SPLIT_COLUMNS` each: one program would
read A at a hundredth of the bandwidth."""

SPLIT_COLUMNS: Final = 512

PROGRAMS: Final = 1024
"""Programs of a launch: about twice those that a large GPU runs at once."""

SHRINK_STAGES, EXPAND_STAGES = 4, 3
"""Tiles of A and of B that are loaded ahead."""

HEADER, PART = 3, 5
"""Integers of a product in an adapter's table: address of A, rank, number of parts; and of each part: address of B,
first row, rows, first column of A x, rank."""


class TritonAdapted(AdaptedProduct):
    """A of all parts [rank, in], and B of each part, transposed [rank, rows]: rows aligned, all in one ``buffer``."""

    def __init__(self, change: ProductChange, dtype: torch.dtype, device: torch.device) -> None:
        self.change = change
        sizes = _sizes(change)
        starts = [*accumulate(map(_align, sizes), initial=0)]
        self._buffer = torch.zeros(starts[-1], dtype=dtype, device=device)
        self.nbytes = self._buffer.nbytes
        a, *each_b = (self._buffer[start : start + size] for start, size in zip(starts, sizes, strict=False))
        self._a = a.view(change.rank, change.size_in)
        self._b = {part: b.view(part.rank, -1) for part, b in zip(change.parts, each_b, strict=True)}
        parts = [(b.data_ptr(), p.first, p.rows, p.start, p.rank) for p, b in zip(change.parts, each_b, strict=True)]
        self.entry = [a.data_ptr(), change.rank, len(parts), *(number for part in parts for number in part)]

    def put(self, part: AdapterMatrix, a: Tensor, b: Tensor) -> None:
        device, rank = self._buffer.device, part.change.rank
        self._a[part.start : part.start + rank].copy_(to_device(a, device))
        self._b[part][:rank, : part.rows].copy_(to_device(b, device).T)


class TritonLoras(Loras):
    """By the kernels below. Adapters have ranks of up to ``max_rank``."""

    name = "triton"
    rowwise = False

    def __init__(
        self,
        table: Mapping[str, TensorPlacement],
        dtype: torch.dtype,
        device: torch.device,
        here: Mapping[str, TensorPlacement] | None = None,
        *,
        max_rank: int,
    ) -> None:
        super().__init__(table, dtype, device, here)
        parts: dict[int, list[int]] = {}
        for each in self._here.values():
            parts.setdefault(each.slot, []).append(each.first)
        self._max_parts = max(map(len, parts.values()), default=1)
        self.aligned = {slot: math.gcd(ALIGNMENT, *firsts) for slot, firsts in parts.items()}
        """What divides the first row of every part of a product."""
        self.itemsize = dtype.itemsize
        self.fields = HEADER + PART * self._max_parts
        self._max_rank = self._max_parts * _even(max_rank)
        self._loaded: dict[int, _Loaded] = {}

    def nbytes(self, changes: Sequence[ProductChange]) -> int:
        matrices = sum(_align(size) for each in changes for size in _sizes(each)) * self._dtype.itemsize
        return matrices + self._table_bytes

    def add(self, number: int, changes: Sequence[ProductChange]) -> int:
        allocated = super().add(number, changes)
        entries = np.zeros((self._slots, self.fields), dtype=np.int64)
        for slot, each in enumerate(self._adapters[number]):
            if isinstance(each, TritonAdapted):
                entries[slot, : len(each.entry)] = each.entry
        table = to_device(torch.from_numpy(entries), self._device)
        rank = max([each.rank for each in changes], default=0)
        self._loaded[number] = _Loaded(table, table.data_ptr(), rank, frozenset(each.slot for each in changes))
        return allocated + self._table_bytes

    def drop(self, number: int) -> None:
        super().drop(number)
        self._loaded.pop(number, None)

    @property
    def _table_bytes(self) -> int:
        return self._slots * self.fields * 8

    def _adapted(self, changes: Sequence[ProductChange]) -> Sequence[AdaptedProduct]:
        return [TritonAdapted(each, self._dtype, self._device) for each in changes]

    def step(self, spans: Sequence[tuple[int, int, int]], tokens: int) -> StagedAdapters:
        rows: dict[int, list[int]] = {}
        for number, first, count in spans:
            rows.setdefault(number, []).extend(range(first, first + count))
        loaded = [self._loaded[number] for number in rows]
        slots = loaded[0].slots.union(*[each.slots for each in loaded[1:]])
        groups = [(each.address, own) for each, own in zip(loaded, rows.values(), strict=True)]
        return TritonStep(self, max([each.rank for each in loaded]), slots, groups)

    def reserve(self, tokens: int) -> StagedAdapters:
        return TritonStep(self, self._max_rank, frozenset(self.aligned), tokens=tokens)


class _Loaded(NamedTuple):
    """An adapter: its table int64 [slots, fields] on the device, and the address of that; its largest rank, and the
    products that it changes."""

    table: Tensor
    address: int
    rank: int
    slots: frozenset[int]


class TritonStep(StagedAdapters):
    """A step with adapters that change products by up to ``rank`` columns of A x. ``slots``: those of the products that
    any of them changes. ``groups``: of each adapter its table's address and its rows; or, for a step that is recorded
    before they are known, ``tokens``: the most rows."""

    def __init__(
        self,
        loras: TritonLoras,
        rank: int,
        slots: frozenset[int],
        groups: Sequence[tuple[int, list[int]]] = (),
        tokens: int = 0,
    ) -> None:
        self._loras, self._slots, self._groups = loras, slots, groups
        self._rank = triton.cdiv(rank, RANKS) * RANKS
        self._rows = tokens or sum([len(rows) for _, rows in groups])
        self._tile, self._tiles = SMALL, tokens
        self._bound: StepAdapters | None = None

    def arrays(self, *, recorded: bool) -> tuple[Int64Array, Int64Array]:
        """The rows in the order of the tiles. The number of tiles, and of each the address of its adapter's table, its
        first row in that order, and its rows. Computed in Python loops, as the plan of attention."""
        large = LARGE_BYTES // self._loras.itemsize
        if not self._groups:
            self._tile = large if self._rows >= large and not recorded else SMALL
            return np.zeros(self._rows, dtype=np.int64), np.zeros(1 + 3 * self._rows, dtype=np.int64)
        self._tile = tile = large if self._rows >= large * len(self._groups) and not recorded else SMALL
        order, items = list[int](), [0]
        for address, rows in self._groups:
            first, last = len(order), len(order) + len(rows)
            for begin in range(first, last, tile):
                items += address, begin, min(tile, last - begin)
            order += rows
        items[0] = self._tiles = len(items) // 3
        return np.array(order, dtype=np.int64), np.array(items, dtype=np.int64)

    def bind(self, sections: Sequence[Tensor]) -> StepAdapters:
        order, items = sections
        return BoundStep(self._loras, order, items, self._rows, self._tiles, self._tile, self._rank, self._slots)

    def add(self, slot: int, x: Tensor, y: Tensor) -> None:
        if self._bound is None:
            arrays = self.arrays(recorded=False)
            self._bound = self.bind([to_device(torch.from_numpy(each), x.device) for each in arrays])
        self._bound.add(slot, x, y)


class BoundStep:
    """The launches of a `TritonStep` of up to so many ``rows`` in up to so many ``tiles``, of ``tile`` rows each. Its
    partial sums are allocated by its first launch and serve all of them."""

    address = None

    def __init__(
        self,
        loras: TritonLoras,
        order: Tensor,
        items: Tensor,
        rows: int,
        tiles: int,
        tile: int,
        rank: int,
        slots: frozenset[int],
    ) -> None:
        self._loras, self._order, self._items, self._slots = loras, order, items, slots
        self._rows, self._tiles, self._tile, self._rank = rows, tiles, tile, rank
        self._sums: Tensor | None = None

    def add(self, slot: int, x: Tensor, y: Tensor) -> None:
        """``y`` is contiguous."""
        if slot not in self._slots:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        splits = SPLITS if self._tile == SMALL else 1
        if self._sums is None:
            self._sums = torch.empty((splits, self._rows, self._rank), dtype=torch.float32, device=x.device)
        splits = min(splits, triton.cdiv(x.shape[1], SPLIT_COLUMNS))
        ranks = min(4, self._rank // RANKS)
        columns = COLUMN_BYTES // x.dtype.itemsize
        constants = {
            "ROWS": self._tile,
            "RANKS": RANKS,
            "COLUMNS": columns,
            "SPLITS": splits,
            "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32",
        }
        shared = self._order, self._items, self._sums, slot * self._loras.fields
        strides = self._sums.stride(0), self._rank
        shrink_kernel[splits, ranks, self._programs(splits * ranks)](
            x, *shared, x.stride(0), x.shape[1], *strides, **constants, num_warps=4, num_stages=SHRINK_STAGES
        )
        blocks = triton.cdiv(y.shape[1], columns)
        expand_kernel[blocks, self._programs(blocks)](
            y,
            *shared,
            y.shape[1],
            *strides,
            **constants,
            ALIGNED=self._loras.aligned[slot],
            num_warps=4,
            num_stages=EXPAND_STAGES,
        )

    def _programs(self, others: int) -> int:
        """Programs among which the tiles are divided, if ``others`` share each tile."""
        return max(1, min(self._tiles, PROGRAMS // others))


@triton.jit(do_not_specialize=["at_slot"])
def shrink_kernel(
    x: tl.tensor,  # [T, width], dense in its last dimension
    order: tl.tensor,  # int64: rows of x, tile by tile
    items: tl.tensor,  # int64: how many tiles; of each: address of the adapter's table, first in `order`, rows
    sums: tl.tensor,  # float32 [SPLITS, rows in their order, sums_row]
    at_slot: tl.tensor,  # place of the product in an adapter's table
    x_row: tl.tensor,
    width: tl.tensor,
    sums_split: tl.tensor,
    sums_row: tl.tensor,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program for a share of x's columns, every n-th RANKS columns of A x, and every m-th tile."""
    split = tl.program_id(0)
    share = tl.cdiv(tl.cdiv(width, COLUMNS), SPLITS) * COLUMNS
    low = split * share
    high = tl.minimum(low + share, width)
    column = tl.arange(0, COLUMNS)
    in_tile = tl.arange(0, ROWS)
    in_rank = tl.arange(0, RANKS)
    count = tl.load(items).to(tl.int32)
    for item in range(tl.program_id(2), count, tl.num_programs(2)):
        entry = items + 1 + 3 * item
        change = tl.load(entry).to(tl.pointer_type(tl.int64)) + at_slot
        a = tl.multiple_of(tl.load(change).to(tl.pointer_type(x.dtype.element_ty)), 16)
        rank = tl.load(change + 1).to(tl.int32)
        place = tl.load(entry + 1) + in_tile
        held = in_tile < tl.load(entry + 2)
        row = tl.load(order + place, mask=held, other=0) * x_row
        for first in range(tl.program_id(1) * RANKS, rank, tl.num_programs(1) * RANKS):
            total = tl.zeros([ROWS, RANKS], dtype=tl.float32)
            in_a = (first + in_rank).to(tl.int64) * width
            a_held = first + in_rank < rank
            for start in range(low, high, COLUMNS):
                k = start + column
                k_held = k < width
                left = tl.load(x + row[:, None] + k[None, :], mask=held[:, None] & k_held[None, :], other=0.0)
                right = tl.load(a + in_a[None, :] + k[:, None], mask=a_held[None, :] & k_held[:, None], other=0.0)
                total = tl.dot(left, right, total, input_precision=PRECISION)
            at = sums + split * sums_split + place[:, None] * sums_row + (first + in_rank)[None, :]
            tl.store(at, total, mask=held[:, None])


@triton.jit(do_not_specialize=["at_slot"])
def expand_kernel(
    y: tl.tensor,  # [T, width], dense
    order: tl.tensor,
    items: tl.tensor,
    sums: tl.tensor,
    at_slot: tl.tensor,
    width: tl.tensor,
    sums_split: tl.tensor,
    sums_row: tl.tensor,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,  # divides the first column of every part
) -> None:
    """One program for COLUMNS columns of y and every m-th tile."""
    low = tl.program_id(0) * COLUMNS
    column = low + tl.arange(0, COLUMNS)
    in_tile = tl.arange(0, ROWS)
    in_rank = tl.arange(0, RANKS)
    count = tl.load(items).to(tl.int32)
    for item in range(tl.program_id(1), count, tl.num_programs(1)):
        entry = items + 1 + 3 * item
        change = tl.load(entry).to(tl.pointer_type(tl.int64)) + at_slot
        parts = tl.load(change + 2).to(tl.int32)
        place = tl.load(entry + 1) + in_tile
        held = in_tile < tl.load(entry + 2)
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        changed = 0
        for part in range(parts):
            about = change + 3 + 5 * part
            first = tl.multiple_of(tl.load(about + 1).to(tl.int32), ALIGNED)
            rows = tl.load(about + 2).to(tl.int32)
            if (first < low + COLUMNS) & (first + rows > low):
                changed = 1
                b = tl.multiple_of(tl.load(about).to(tl.pointer_type(y.dtype.element_ty)), 16)
                of_sum = tl.multiple_of(tl.load(about + 3).to(tl.int32), 2)
                rank = tl.multiple_of(tl.load(about + 4).to(tl.int32), 2)
                b_row = tl.multiple_of((rows + 15) // 16 * 16, 16)
                in_part = (column >= first) & (column - first < b_row)  # behind the rows there are zeros
                for begin in range(0, rank, RANKS):
                    r = begin + in_rank
                    at = sums + place[:, None] * sums_row + (of_sum + r)[None, :]
                    sum_held = held[:, None] & (r < rank)[None, :]
                    left = tl.zeros([ROWS, RANKS], dtype=tl.float32)
                    for split in tl.static_range(SPLITS):
                        left += tl.load(at + split * sums_split, mask=sum_held, other=0.0)
                    at_b = b + r.to(tl.int64)[:, None] * b_row + (column - first)[None, :]
                    right = tl.load(at_b, mask=(r < rank)[:, None] & in_part[None, :], other=0.0)
                    total = tl.dot(left.to(right.dtype), right, total, input_precision=PRECISION)
        if changed:
            row = tl.load(order + place, mask=held, other=0) * width
            at_y = y + row[:, None] + column[None, :]
            y_held = held[:, None] & (column < width)[None, :]
            before = tl.load(at_y, mask=y_held, other=0.0).to(tl.float32)
            tl.store(at_y, (before + total).to(y.dtype.element_ty), mask=y_held)


def _align(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _even(rank: int) -> int:
    return rank + rank % 2


def _sizes(change: ProductChange) -> list[int]:
    """Elements of A, and of B of each part."""
    return [change.rank * change.size_in, *(part.rank * _align(part.rows) for part in change.parts)]
