"""`python -m benchmarks.trips --quick` runs, and no delay is the measure of the others."""

from __future__ import annotations

import json
from pathlib import Path

import benchmarks.trips
from benchmarks.sections import trips
from benchmarks.trips import BATCHES, BESIDE, DELAYS_MS, WAYS, beside, points
from tests.tools.conftest import QuickRun


def test_a_quick_run_takes_every_way_at_every_delay(tmp_path: Path, quick_run: QuickRun) -> None:
    out = tmp_path / "trips.json"
    quick_run(benchmarks.trips, "--model", "identity", "--out", str(out))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found["points"]) == len(WAYS) * len(DELAYS_MS) * len(BATCHES)
    assert all(each["tokens_per_s"] > 0 for each in found["points"])
    assert [each["beside"] for each in found["beside"]] == list(BESIDE)
    assert all(each["p99_ms"] >= each["p50_ms"] > 0 for each in found["beside"])
    page = trips("trips.json", found)
    assert "10 ms" in page and "p99 in single steps" in page


def test_ratios_are_of_the_same_round() -> None:
    taken = {(WAYS[1], 0.0, 1): [100.0, 200.0, 400.0], (WAYS[1], 1.0, 1): [50.0, 100.0, 200.0]}
    assert [(each["of_no_delay"], each["target"]) for each in points(taken)] == [(1.0, None), (0.5, 0.9)]


def test_percentiles_are_set_beside_those_of_the_same_round() -> None:
    taken = {"alone": [[1.0], [2.0], [4.0]], "single steps": [[3.0], [4.0], [8.0]], "runs": [[2.0], [6.0], [12.0]]}
    alone, steps, runs = beside(taken)
    assert (alone["of_alone"], steps["of_alone"], runs["of_alone"]) == (1.0, 2.0, 3.0)
    assert (runs["of_single_steps"], runs["target"], steps["target"]) == (1.5, 2.0, None)
