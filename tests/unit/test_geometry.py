"""A step's geometry: what its arrays hold, and what cannot be a step."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.attention.geometry import BatchGeometry, Int32Array
from tests.support.harness import check_geometry

BLOCK_SIZE = 4
SHAPES = {
    "a lone decode": [(9, 1)],
    "a lone prompt": [(0, 7)],
    "decodes": [(5, 1), (0, 1), (11, 1)],
    "a mix": [(3, 2), (8, 1), (0, 5)],
    "many decodes": [(index, 1) for index in range(130)],
}


def tables_of(shape: list[tuple[int, int]]) -> list[Int32Array]:
    """A block longer than they must be."""
    sizes = [-(-(start + count) // BLOCK_SIZE) + 1 for start, count in shape]
    blocks = np.random.default_rng(0).permutation(sum(sizes)).astype(np.int32)
    return np.split(blocks, np.cumsum(sizes)[:-1])


def build(shape: list[tuple[int, int]]) -> BatchGeometry:
    """Spans (start, count) over `tables_of` them."""
    starts, counts = zip(*shape, strict=True)
    return BatchGeometry.build(BLOCK_SIZE, starts, counts, tables_of(shape))


@pytest.mark.parametrize("name", SHAPES)
def test_every_array_is_what_its_definition_says(name: str) -> None:
    shape, found = SHAPES[name], build(SHAPES[name])
    check_geometry(found)
    assert (found.spans, found.tokens) == (len(shape), sum(count for _, count in shape))
    assert found.starts.tolist() == [start for start, _ in shape]
    assert found.lengths.tolist() == [start + count for start, count in shape]
    needed = [-(-(start + count) // BLOCK_SIZE) for start, count in shape]
    assert np.diff(found.table_start).tolist() == needed
    expected = [table[:count] for table, count in zip(tables_of(shape), needed, strict=True)]
    assert found.blocks.tolist() == np.concatenate(expected).tolist()
    kinds = {each.dtype for each in (found.by_span, found.blocks)}, {found.slots.dtype, found.positions.dtype}
    assert kinds == ({np.dtype(np.int32)}, {np.dtype(np.int64)})
    assert found.by_span.flags.c_contiguous and found.slots.flags.c_contiguous


@pytest.mark.parametrize(
    ("starts", "counts", "blocks"),
    [
        ([0], [0], [1]),
        ([-1], [1], [1]),
        ([4], [1], [1]),
        ([0, 0], [1], [1, 1]),
        ([0], [1], [1, 1]),
        ([0, 1], [2, 0], [1, 1]),
    ],
    ids=["empty", "negative start", "short table", "more starts", "more tables", "one empty"],
)
def test_spans_that_cannot_be_are_refused(starts: list[int], counts: list[int], blocks: list[int]) -> None:
    with pytest.raises(ValueError, match=r"span|table|zip"):
        BatchGeometry.build(BLOCK_SIZE, starts, counts, [np.arange(1, each + 1, dtype=np.int32) for each in blocks])
