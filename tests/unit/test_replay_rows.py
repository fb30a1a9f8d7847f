"""What a recorded answer keeps: its own rows, and nothing of the step that weighs anything."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from ferrum_rpc.core import HandleRef, ItemAnswer, Rows
from ferrum_rpc.service.replay import ROWS_BYTES, SHARED_BYTES, ReplayLog
from tests.rows import logit_rows, token_rows

KEY = ("owner", b"handle")
STEP = 32


def record(log: ReplayLog, rows: Rows) -> Rows:
    """Record an answer; the rows that a retry would get."""
    scope = log.scope(KEY)
    log.finish(log.begin(scope, "id", 0), ItemAnswer(HandleRef(b"handle", 1, 1), rows))
    entry = scope["id"]
    assert isinstance(entry.answer, ItemAnswer) and entry.answer.rows is not None
    return entry.answer.rows


@pytest.mark.parametrize("of_the_step", [1, STEP])
def test_a_recorded_row_of_logits_does_not_keep_the_steps_rows_alive(of_the_step: int) -> None:
    step = np.arange(STEP * 512, dtype=np.float32).reshape(STEP, 512)
    alive, expected = weakref.ref(step), step[0].tobytes()
    log = ReplayLog(1 << 30)
    kept = record(log, Rows(logit_rows(step[:of_the_step]), 0, 1))
    del step
    gc.collect()
    assert alive() is None
    assert kept.block["logits"].tobytes() == expected
    assert log.rows == ROWS_BYTES + len(expected)


@pytest.mark.parametrize("sequences", [1, 2, SHARED_BYTES // 4, SHARED_BYTES])
def test_a_recorded_token_is_the_sequences_own_and_counts_for_itself_alone(sequences: int) -> None:
    step = token_rows(np.arange(sequences, dtype=np.uint32))
    log = ReplayLog(1 << 30)
    kept = record(log, Rows(step, sequences - 1, 1))
    assert kept.block["token_ids"][kept.first : kept.first + kept.count].tolist() == [sequences - 1]
    assert log.rows == ROWS_BYTES + 4
    assert kept.block.nbytes <= SHARED_BYTES
