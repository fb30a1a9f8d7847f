"""The count of launches runs, and docs/kernels.md has its figure."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import ROOT

pytest.importorskip("triton")


def test_launches_per_layer_are_those_of_the_docs(tmp_path: Path) -> None:
    """In a process of its own: whether Triton interprets kernels is decided when a process imports it."""
    file = tmp_path / "found.json"
    sizes = ["--batches", "2", "--context", "24", "--steps", "2", "--rounds", "1", "--json", str(file)]
    subprocess.run([sys.executable, "-m", "benchmarks.launches", *sizes], check=True, cwd=ROOT, timeout=120)
    found = json.loads(file.read_text())
    per_layer = found["per_layer"]
    once = {"heads_kernel": 1, "attend_kernel": 1, "merge_kernel": 1, "gate_kernel": 1}
    assert per_layer == {"mm": 4, "add_norm_kernel": 2} | once
    assert all(times["begin_us"] > 0 for times in found["host"].values()) and len(found["host"]) == 2
    docs = (ROOT / "docs" / "kernels.md").read_text()
    told = re.search(r"(\d+)\s+launches per layer", docs)
    assert told is not None and int(told[1]) == sum(per_layer.values())
