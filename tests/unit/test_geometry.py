"""A step's geometry: the same whether it was planned token by token or by numpy, and where C looks for it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from ferrum_rpc.attention import geometry
from ferrum_rpc.attention.geometry import FEW_TOKENS, BatchGeometry, Int32Array

BLOCK_SIZE = 4
SHAPES = {
    "a lone decode": [(9, 1)],
    "a lone prompt": [(0, 7)],
    "decodes": [(5, 1), (0, 1), (11, 1)],
    "a mix": [(3, 2), (8, 1), (0, 5)],
    "as many tokens as are few": [(index, 1) for index in range(FEW_TOKENS)],
}


def build(shape: list[tuple[int, int]]) -> BatchGeometry:
    """Spans (start, count) over tables that are a block longer than they must be."""
    sizes = [-(-(start + count) // BLOCK_SIZE) + 1 for start, count in shape]
    blocks = np.random.default_rng(0).permutation(sum(sizes)).astype(np.int32)
    tables: list[Int32Array] = np.split(blocks, np.cumsum(sizes)[:-1])
    return BatchGeometry.build(BLOCK_SIZE, [start for start, _ in shape], [count for _, count in shape], tables)


@pytest.mark.parametrize("name", SHAPES)
def test_few_tokens_are_planned_as_many_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = build(SHAPES[name])
    monkeypatch.setattr(geometry, "FEW_TOKENS", 0)
    many = build(SHAPES[name])
    assert (few.by_span is None, many.by_span is None) == (False, True)
    for each in (few, many):
        each.check()
    for field in ("query_start", "starts", "lengths", "entries", "table_start", "slots", "positions"):
        mine, its = getattr(few, field), getattr(many, field)
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(mine, its, err_msg=field)
    assert (few.spans, few.tokens) == (many.spans, many.tokens)


@pytest.mark.parametrize("few_tokens", [FEW_TOKENS, 0])
def test_addresses_are_where_the_arrays_lie(few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "FEW_TOKENS", few_tokens)
    found = build(SHAPES["a mix"])
    arrays = (found.query_start, found.starts, found.lengths, found.table_start, found.entries)
    for address, array in zip(found.addresses, arrays, strict=True):
        assert list((ctypes.c_int32 * len(array)).from_address(address)) == array.tolist()


@pytest.mark.parametrize("few_tokens", [FEW_TOKENS, 0])
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
def test_spans_that_cannot_be_are_refused(
    starts: list[int], counts: list[int], blocks: list[int], few_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "FEW_TOKENS", few_tokens)
    with pytest.raises(ValueError, match=r"span|table"):
        BatchGeometry.build(BLOCK_SIZE, starts, counts, [np.arange(1, each + 1, dtype=np.int32) for each in blocks])
