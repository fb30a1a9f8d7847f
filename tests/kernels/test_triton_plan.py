"""How steps are cut: every row meets every key that it sees exactly once, whatever the lengths, in bounded buffers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.triton_plan import (
    Launch,
    LayerKind,
    Multiprocessor,
    SplitLimits,
    TileShape,
    cut,
    padded_dim,
    tile_shapes,
)

BLOCK = 4
TILE = TileShape(rows=16, keys=16, warps=4, stages=3, part=16)

spans_strategy = st.lists(
    st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 3000)), st.one_of(st.just(1), st.integers(1, 90))),
    min_size=1,
    max_size=8,
)


def geometry_of(spans: list[tuple[int, int]], spare: int = 0) -> BatchGeometry:
    sizes = [-(-(start + count) // BLOCK) + spare for start, count in spans]
    tables = np.split(np.arange(1, sum(sizes) + 1, dtype=np.int32), np.cumsum(sizes)[:-1])
    return BatchGeometry.build(BLOCK, [start for start, _ in spans], [count for _, count in spans], tables)


def pairs(launch: Launch, kind: LayerKind, tokens: int) -> np.ndarray:
    """How often each (packed row, head of the group) is met by an item, per part, and by how many keys in all."""
    keys = np.zeros((tokens, kind.group), dtype=np.int64)
    for token, first, rows, start, low, high, _, _ in launch.items.tolist():
        for row in range(first, first + rows):
            position = start + row // kind.group
            lowest = 0 if kind.window is None else max(0, position - kind.window + 1)
            keys[token + row // kind.group, row % kind.group] += max(0, min(high, position + 1) - max(low, lowest))
    return keys


@given(spans_strategy, st.integers(1, 9), st.sampled_from([None, 1, 7, 64]), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_every_row_meets_every_key_that_it_sees_once(spans, group, window, wanted):
    geometry, kind, limits = geometry_of(spans), LayerKind(group, window), SplitLimits(wanted)
    launch = cut(geometry, range(len(spans)), kind, TILE, limits)
    seen = geometry.positions + 1 if window is None else np.minimum(geometry.positions + 1, window)
    assert (pairs(launch, kind, geometry.tokens) == seen[:, None]).all()

    items, merges = launch.items, launch.merges
    assert (items[:, 4] < items[:, 5]).all() and (np.diff(items[:, 5] - items[:, 4]) <= 0).all()
    parts = items[items[:, 7] >= 0]
    assert len(merges) <= limits.merges and len(parts) <= limits.parts
    assert sorted(parts[:, 7]) == list(range(len(parts))), "parts are numbered densely, each once"
    for token, first, rows, part, count, *_ in merges.tolist():
        mine = parts[(parts[:, 7] >= part) & (parts[:, 7] < part + count)]
        assert count > 1 and len(mine) == count and (mine[:, :3] == [token, first, rows]).all()
        mine = mine[np.argsort(mine[:, 7])]
        assert (mine[1:, 4] == mine[:-1, 5]).all(), "in the keys' order, without a gap"


@given(spans_strategy, st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_items_find_their_spans_blocks_without_what_is_reserved_for_later(spans, spare):
    geometry = geometry_of(spans, spare)
    launch = cut(geometry, range(len(spans)), LayerKind(2, None), TILE, SplitLimits(4))
    first = np.cumsum([0, *(-(-(start + count) // BLOCK) + spare for start, count in spans)])
    for token, _, _, _, low, high, table, _ in launch.items.tolist():
        span = int(np.searchsorted(geometry.query_start, token, side="right")) - 1
        used = np.arange(low // BLOCK, -(-high // BLOCK))
        assert (geometry.blocks[table + used] == 1 + first[span] + used).all()
    assert len(geometry.blocks) == sum(-(-length // BLOCK) for length in geometry.lengths.tolist())


def test_one_long_sequence_fills_the_device_and_many_are_left_whole():
    limits = SplitLimits(wanted=32)
    tile = TileShape(rows=16, keys=64, warps=4, stages=3, part=128)
    one = cut(geometry_of([(32767, 1)]), range(1), LayerKind(4, None), tile, limits)
    assert len(one.items) == 32 and len(one.merges) == 1
    many = cut(geometry_of([(4095, 1)] * 64), range(64), LayerKind(4, None), tile, limits)
    assert len(many.items) == 64 and len(many.merges) == 0
    short = cut(geometry_of([(99, 1)]), range(1), LayerKind(4, None), tile, limits)
    assert len(short.items) == 1, "no part is shorter than what is worth a program"


def test_the_longest_of_unequal_sequences_is_split_and_starts_first():
    spans = [(50, 1)] * 20 + [(9999, 1)]
    launch = cut(geometry_of(spans), range(21), LayerKind(4, None), TILE, SplitLimits(wanted=16))
    assert set(launch.merges[:, 0].tolist()) == {20}
    assert launch.items[0, 0] == 20 and launch.items[-1, 0] != 20


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [
        (128, 72_192, 4, 3),  # shared memory decides
        (168, 10_000, 4, 3),  # 5,376 registers for a warp: 12 warps
        (169, 10_000, 4, 2),  # 5,632: 11, of which a quarter of the multiprocessor takes whole ones
        (212, 98_560, 8, 1),
        (32, 0, 4, 16),  # threads
        (255, 300_000, 8, 1),  # at least one
    ],
)
def test_the_programs_that_run_at_once(registers, shared, warps, programs):
    assert Multiprocessor(228 << 10, 2048).programs(registers, shared, warps) == programs


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("shared_kib", [48, 99, 163, 227])
def test_a_tile_shape_fits_the_device(head_dim, itemsize, shared_kib):
    for tile in tile_shapes(head_dim, itemsize, shared_kib << 10):
        queries = tile.rows * padded_dim(head_dim) * itemsize
        under_way = 2 * (tile.stages - 1) // 2 * tile.keys * padded_dim(head_dim) * itemsize
        assert queries + under_way <= shared_kib << 10 or tile.keys == 16
        assert tile.keys >= 16 and tile.rows >= 16
