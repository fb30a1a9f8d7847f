"""`python -m benchmarks.trips --quick` runs, and no delay is the measure of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.trips import BATCHES, DELAYS_MS, WAYS, points


def test_a_quick_run_takes_every_way_at_every_delay(tmp_path: Path) -> None:
    out = tmp_path / "trips.json"
    command = [sys.executable, "-m", "benchmarks.trips", "--quick", "--model", "identity", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))["points"]
    assert len(found) == len(WAYS) * len(DELAYS_MS) * len(BATCHES)
    assert all(each["tokens_per_s"] > 0 for each in found)


def test_ratios_are_of_the_same_round() -> None:
    taken = {(WAYS[1], 0.0, 1): [100.0, 200.0, 400.0], (WAYS[1], 1.0, 1): [50.0, 100.0, 200.0]}
    assert [(each["of_no_delay"], each["target"]) for each in points(taken)] == [(1.0, None), (0.5, 0.9)]
