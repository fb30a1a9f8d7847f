"""Rows on an answer: typed, sliced to the item, and a clear error for what was not asked."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.client import Answer, BatchResults, HandleRef, NoSuchRowsError, Pressure, QueueFull, RunEnd, StepFailed
from ferrum_rpc.client.answer import joined
from ferrum_rpc.core import RowBlock, RowKind, Rows
from tests.support.rows import logit_rows, selected_rows, token_rows, top_token_rows

PRESSURE = Pressure(1, 2, 3, 0, 0, 0)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


TOKENS = token_rows(np.array([5, 6, 7], np.uint32), f32(-1, -2, -3))
BESIDE = RowBlock(
    RowKind.TOKENS,
    {
        "token_ids": TOKENS["token_ids"],
        "top_token_ids": np.arange(6, dtype=np.uint32).reshape(3, 2),
        "top_logprobs": -np.arange(6, dtype=np.float32).reshape(3, 2),
        "selected_logprobs": f32(-7, -8, -9).reshape(3, 1),
    },
)
TOP = top_token_rows(np.arange(6, dtype=np.uint32).reshape(3, 2), np.ones((3, 2), np.float32), f32(1, 2, 3))
SELECTED = selected_rows(np.ones((3, 4), np.float32), f32(1, 2, 3))
LOGITS = logit_rows(np.arange(12, dtype=np.float32).reshape(3, 4))


def answer(block: RowBlock | None, first: int = 1, count: int = 1, *, replayed: bool = False) -> Answer:
    rows = None if block is None else Rows(block, first, count)
    return Answer(HandleRef(b"", 9, 1), rows, PRESSURE, replayed=replayed)


def test_each_kind_is_read_under_its_name_and_cut_to_the_items_rows() -> None:
    assert answer(TOKENS).token == 6
    assert answer(TOKENS, 1, 2).tokens.tolist() == [6, 7]
    assert answer(TOKENS, 1, 2).logprobs.tolist() == [-2, -3]
    assert answer(TOP).top_tokens.token_ids.tolist() == [[2, 3]]
    assert answer(TOP).top_tokens.logsumexp.tolist() == [2]
    assert answer(SELECTED, 0, 2).selected.logits.shape == (2, 4)
    assert answer(LOGITS).logits.tolist() == [[4, 5, 6, 7]]
    assert answer(None).length == 9
    both = answer(BESIDE, 1, 2)
    assert both.top_logprobs.token_ids.tolist() == [[2, 3], [4, 5]]
    assert both.top_logprobs.logprobs.tolist() == [[-2, -3], [-4, -5]]
    assert both.selected_logprobs.tolist() == [[-8], [-9]]
    assert both.tokens.tolist() == [6, 7]


def test_logits_are_float32_whatever_they_travelled_as() -> None:
    values = f32(1.5, -2.0, 0.25)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16).reshape(1, 3)
    bf16 = answer(logit_rows(raw), 0).logits
    f16 = answer(logit_rows(values.astype(np.float16).reshape(1, 3)), 0).logits
    for each in (bf16, f16):
        assert each.dtype == np.float32
        assert each.tolist() == [values.tolist()]


def test_an_answer_prints_in_a_line_what_it_holds() -> None:
    assert repr(answer(TOKENS)) == "<Answer length=9 tokens=[6]>"
    assert repr(answer(TOP, 0, 3)) == "<Answer length=9 3 x TopTokens>"
    assert repr(answer(None, replayed=True)) == "<Answer length=9 no rows replayed>"
    most = 2**32 - 1
    block = token_rows(np.full(1000, most, np.uint32))
    longest = Answer(
        HandleRef(b"", most, most),
        Rows(block, 0, 1000),
        PRESSURE,
        cached_tokens=most,
        replayed=True,
        run_end=RunEnd.CUT,
        run_cause=QueueFull("x" * 1000),
    )
    assert repr(longest).endswith(", ... 1000] cached_tokens=4294967295 replayed run_end=CUT run_cause=QueueFull>")
    assert len(repr(longest)) <= 160 and "\n" not in repr(longest)


def test_the_results_of_a_batch_come_apart() -> None:
    first, second, error = answer(TOKENS), answer(TOP), StepFailed("no")
    results = BatchResults([first, error, second])
    assert results == [first, error, second] and results[1] is error
    assert results.answers() == [first, second] and results.errors() == [error]
    assert results.split("abc") == ([("a", first), ("c", second)], [("b", error)])
    with pytest.raises(StepFailed):
        results.all_answers()
    assert BatchResults([first, second]).all_answers() == [first, second]
    assert BatchResults([first]).split([1]) == ([(1, first)], [])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        results.split("ab")


def test_rows_that_are_not_there_say_why() -> None:
    """Rows of another kind: `test_output_kinds`."""
    for name in ("token", "tokens", "logprobs", "top_tokens", "selected", "logits"):
        with pytest.raises(NoSuchRowsError, match="without rows"):
            getattr(answer(None), name)
        with pytest.raises(NoSuchRowsError, match="rows are gone"):
            getattr(answer(None, replayed=True), name)
    with pytest.raises(NoSuchRowsError, match="2 rows"):
        _ = answer(TOKENS, 0, 2).token


def test_log_probabilities_must_be_asked_for() -> None:
    tokens = answer(token_rows(TOKENS.columns["token_ids"]))
    for name, ask_with in (("logprobs", "logprob=True"), ("top_logprobs", "k"), ("selected_logprobs", "token_ids")):
        with pytest.raises(NoSuchRowsError, match=f"ask with .*{ask_with}"):
            getattr(tokens, name)


@pytest.mark.parametrize("block", [TOKENS, BESIDE, token_rows(TOKENS.columns["token_ids"]), TOP, SELECTED, LOGITS])
def test_chunks_joined_are_the_whole(block: RowBlock) -> None:
    parts = [answer(None), answer(block, 0, 1), answer(block, 1, 2)]
    whole = joined([each._replace(cached_tokens=at, recomputed_tokens=10 * at) for at, each in enumerate(parts)])
    assert (whole.cached_tokens, whole.recomputed_tokens) == (3, 30)
    rows = whole.rows
    assert rows is not None
    assert (rows.first, rows.count) == (0, 3)
    assert (rows.block.kind, list(rows.block.columns)) == (block.kind, list(block.columns))
    for name, column in block.columns.items():
        found = rows.block.columns[name]
        assert found.dtype == column.dtype
        assert (found == column).all()
