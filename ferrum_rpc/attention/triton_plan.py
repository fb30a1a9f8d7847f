"""The split of a step into work items of the CUDA kernels: integers on the host, without tensors and triton.

A span's query rows (``token * group + head``, per KV head) are divided into *tiles*. A tile's keys are one *part* if
enough programs run, else several parts, so that every multiprocessor has work for one long sequence or a small batch.
The number of parts follows from the lengths and the number of programs that the device runs at once. Spans of few rows
(decode) and of many (prefill) take different tile shapes, hence two lists of items, one launch each.

The split depends on the whole step, so a row's last bits may depend on the other rows. Its cost is bounded, whatever
the lengths: `SplitLimits` has the bounds, which also size the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ferrum_rpc.attention.geometry import BatchGeometry

Int32s = npt.NDArray[np.int32]

FIELDS = 8
"""Integers of a record, padded to 32 bytes: one memory transaction."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """A launch's shape: query ``rows`` and ``keys`` of a program, its ``warps`` and pipeline ``stages``, and ``part``,
    the minimum number of keys for which a program of its own is worth while. ``programs``: how many one multiprocessor
    holds at once."""

    rows: int
    keys: int
    warps: int
    stages: int
    part: int
    programs: int = 1


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What programs that run at once on a multiprocessor share: bytes of ``shared`` memory, ``threads``, and
    registers. Allocation rules are those of CUDA's occupancy calculator for compute capability 8.0 and later."""

    shared: int
    threads: int

    REGISTERS: ClassVar[int] = 65536

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """How many programs run at once of a kernel with ``registers`` per thread, ``shared`` bytes and ``warps``.
        At least 1."""
        of_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
        resident_warps = min(self.REGISTERS // of_warp // 4 * 4, self.threads // 32)  # in each of four quarters
        return max(1, min(resident_warps // warps, self.shared // (shared + 1024)))  # CUDA itself takes 1 kB


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What planning needs of a layer: query heads per KV head, and the last ``window`` tokens seen (None: all).
    ``shape``: its KV heads and their width, on which tiles and the number of programs depend."""

    group: int
    window: int | None
    shape: tuple[int, int] = (1, 16)


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """``wanted``: items that fill the device (programs that run at once, over the KV heads).

    Rounding gives a tile of x times the mean share floor(x + 1/2) parts; it is split from x = 3/2 on, and the x add up
    to ``wanted`` at most. So split tiles number at most 2/3 of it, and their parts 4/3."""

    wanted: int

    @property
    def parts(self) -> int:
        """The maximum number of parts of all split tiles of a launch."""
        return 4 * self.wanted // 3 + 1

    @property
    def merges(self) -> int:
        """The maximum number of split tiles of a launch."""
        return 2 * self.wanted // 3 + 1


class Tiling(NamedTuple):
    """The tiles of layers of one shape, with rising rows, and how each is split."""

    tiles: tuple[TileShape, ...]
    limits: tuple[SplitLimits, ...]

    def place(self, rows: int) -> int:
        """The index of the tile for spans of so many rows."""
        for index, tile in enumerate(self.tiles):
            if rows <= tile.rows:
                return index
        return len(self.tiles) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch's records, int32.

    items   [n, 8]: packed row of the span's first token; first row in the span; rows (0: nothing to do); tokens cached
            before the span; first key; key after the last; offset of the span's table; part, or -1 where the tile is
            not split. Longest first, so that the last programs to end are short ones.
    merges  [m, 8]: packed row of the span's first token; first row; rows; first part; parts; three unused
    """

    items: Int32s
    merges: Int32s


@dataclass(frozen=True, slots=True)
class LaunchCapacity:
    """How large a launch in tiles of ``tile`` is: numbers of ``items`` and ``merges``, and the maximum number of
    ``merged_rows`` of a split tile."""

    tile: TileShape
    items: int
    merges: int
    merged_rows: int

    @classmethod
    def of(cls, tile: TileShape, launch: Launch) -> LaunchCapacity:
        """What ``launch`` needs."""
        return cls(tile, len(launch.items), len(launch.merges), int(launch.merges[:, 2].max(initial=0)))

    def fits(self, other: LaunchCapacity) -> bool:
        """Whether a launch that needs ``other`` has all it needs here."""
        return self.items >= other.items and self.merges >= other.merges and self.merged_rows >= other.merged_rows


class PromptRun(NamedTuple):
    """Whole prompts whose rows follow each other: the ``first`` packed row, the ``ends`` of the prompts counted from
    there (0 first), and the tokens of the ``longest``."""

    first: int
    ends: tuple[int, ...]
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class PlanCapacity:
    """How large a plan is: each launch, by kind of layer, and how many ``blocks`` the tables have in all. ``prompts``:
    those of the step that other kernels compute."""

    launches: dict[LayerKind, list[LaunchCapacity]]
    blocks: int
    prompts: tuple[PromptRun, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """Integers (int32) of each section of the plan: items and merges of every launch, the ends of each run of
        prompts, then the tables."""
        counts = [
            count for launches in self.launches.values() for each in launches for count in (each.items, each.merges)
        ]
        return [*(count * FIELDS for count in counts), *(len(run.ends) for run in self.prompts), self.blocks]


def cut(geometry: BatchGeometry, spans: Iterable[int], kind: LayerKind, tile: TileShape, limits: SplitLimits) -> Launch:
    """The work of ``spans`` (indices) in tiles of ``tile``.

    It is computed in Python loops. Numpy takes 7 times as long for a single decode (143 us instead of 22), and half as
    long for 256 (300 us instead of 720), whose step is much longer.
    """
    group, window = kind.group, kind.window
    query_start, starts, lengths, table_start = geometry.by_span.tolist()
    tiles, keys = [], 0
    for span in spans:
        start = starts[span]
        span_rows = (lengths[span] - start) * group
        for first in range(0, span_rows, tile.rows):
            rows = min(tile.rows, span_rows - first)
            high = start + (first + rows - 1) // group + 1
            low = 0 if window is None else max(0, start + first // group - window + 1)
            tiles.append((query_start[span], first, rows, start, low, high, table_start[span]))
            keys += high - low
    share = max(float(tile.part), keys / limits.wanted)
    items: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    part = 0
    for token, first, rows, start, low, high, table in tiles:
        parts = max(1, int((high - low) / share + 0.5))
        length = -(-(high - low) // (parts * tile.keys)) * tile.keys  # whole tiles of keys, hence never more parts
        parts = -(-(high - low) // length)
        if parts == 1:
            items.append((token, first, rows, start, low, high, table, -1))
            continue
        merges.append((token, first, rows, part, parts, 0, 0, 0))
        for begin in range(low, high, length):
            items.append((token, first, rows, start, begin, min(high, begin + length), table, part))
            part += 1
    items.sort(key=lambda item: item[4] - item[5])
    return Launch(_records(items), _records(merges))


def _records(rows: Sequence[tuple[int, ...]]) -> Int32s:
    return np.array(rows, dtype=np.int32).reshape(-1, FIELDS)


def sections_of(launches: list[Launch], tables: Int32s, prompts: Sequence[PromptRun] = ()) -> list[Int32s]:
    """In the order of `PlanCapacity.sizes`."""
    ends = [np.array(run.ends, dtype=np.int32) for run in prompts]
    return [*(records for launch in launches for records in (launch.items, launch.merges)), *ends, tables]


def prompt_runs(geometry: BatchGeometry, tokens: int) -> tuple[tuple[PromptRun, ...], list[int]]:
    """The spans from position 0 of at least so many tokens, in runs of neighbours, and the other spans."""
    counts = geometry.lengths - geometry.starts
    whole = (geometry.starts == 0) & (counts >= tokens)
    runs = list[PromptRun]()
    for span in np.flatnonzero(whole).tolist():
        first, count = int(geometry.query_start[span]), int(counts[span])
        if runs and (last := runs[-1]).first + last.ends[-1] == first:
            runs[-1] = PromptRun(last.first, (*last.ends, last.ends[-1] + count), max(last.longest, count))
        else:
            runs.append(PromptRun(first, (0, count), count))
    return tuple(runs), np.flatnonzero(~whole).tolist()


def tile_shapes(head_dim: int, itemsize: int, shared_bytes: int) -> tuple[TileShape, ...]:
    """The shapes for spans of few rows and of more, rising, such that a program's shared memory is within
    ``shared_bytes``. A span gets the first shape that has all its rows, or the last.

    16 rows are the minimum of the matrix units, and enough for a decoded token's group. 64 rows are the minimum of
    Hopper's, for a verify (5 tokens of a group of 4 are 20 rows): two such programs share a multiprocessor, one of 128
    rows leaves no registers for another. 128 rows do 128 floating-point operations per byte of K and V in 16 bits,
    about the ratio of compute to memory bandwidth. For longer rows of K registers are the limit (see
    `tests/kernels/compiling.py`). Keys can be loaded only after their block ids, so Triton needs two stages for each
    tile of keys in flight. On an H200 (heads of 128, 32 over 8, us a layer) decode was fastest with three stages, which
    let four programs run at once: 125 for 64 sequences of 2,048 tokens, 155 with five stages, 42.8 and 44.4 for one of
    32,768; parts of 64 keys instead of 128 take 0.7 of 9.6 off one of 1,024. Prompts were fastest with five: 1,284 for
    8,192 tokens, 1,626 with three.

    ``programs`` are those of compute capability 9.0 and heads of 128, with windows, caps and sinks: compiled kernels
    know better.
    """
    row_bytes = padded_dim(head_dim) * itemsize
    shapes: tuple[TileShape, ...]
    if itemsize > 2:  # float32 takes three products in TensorFloat-32, and three times the registers
        keys = 32 if row_bytes <= 512 else 16
        shapes = (TileShape(16, keys, 4, 3, part=128, programs=2), TileShape(32, keys, 4, 3, part=512, programs=2))
    else:
        keys, warps = (64, 4) if row_bytes <= 256 else (32, 8)
        shapes = (
            TileShape(16, keys, 4, 3, part=64, programs=3),
            TileShape(64, keys, warps, 3, part=256, programs=2),
            TileShape(128, keys, 8, 5, part=512, programs=1),
        )
    return tuple(_fit(shape, row_bytes, shared_bytes) for shape in shapes)


def padded_dim(head_dim: int) -> int:
    """The width of a row in the kernels: a power of two, at least the minimum of a matrix unit."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _fit(tile: TileShape, row_bytes: int, shared_bytes: int) -> TileShape:
    """``tile``, with fewer stages or keys if queries, weights and the K and V in flight would not fit. One more tile of
    K and V is left free, for asynchronous matrix products and TensorFloat-32."""
    while True:
        under_way = 2 * ((tile.stages - 1) // 2 + 1) * tile.keys * row_bytes
        if tile.rows * (row_bytes + 4 * tile.keys) + under_way <= shared_bytes:
            return tile
        if tile.stages > 3:
            tile = replace(tile, stages=3)
        elif tile.keys > 16:
            tile = replace(tile, keys=tile.keys // 2)
        else:
            return tile
