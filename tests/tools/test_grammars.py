"""`python -m benchmarks.grammars --quick` runs, and its ratios are of the same round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.grammars
from benchmarks.grammars import GRAMMAR, MASK, points
from benchmarks.sections import grammars
from tests.tools.conftest import QuickRun


@pytest.mark.parametrize("model", ["demo", "tiny"])
def test_a_quick_run_takes_every_batch(tmp_path: Path, quick_run: QuickRun, model: str) -> None:
    out = tmp_path / "grammars.json"
    quick_run(benchmarks.grammars, "--model", model, "--batches", "1", "3", "--out", str(out))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [each["batch"] for each in found["points"]] == [1, 3]
    assert all(each["mask_ms"] > 0 and each["grammar_ms"] > 0 for each in found["points"])
    assert "by a grammar" in grammars("grammars.json", found)


def test_ratios_are_of_the_same_round() -> None:
    [found] = points({8: [{MASK: 1.0, GRAMMAR: 1.5}, {MASK: 4.0, GRAMMAR: 4.0}, {MASK: 2.0, GRAMMAR: 4.0}]})
    assert found["ratio"] == {"median": 1.5, "low": 1.0, "high": 2.0} and found["grammar_ms"] == 4.0
