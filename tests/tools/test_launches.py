"""The count of launches runs, and docs/kernels.md has its figure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks import launches
from benchmarks.machine import ROOT


def test_launches_per_layer_are_those_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of few layers: the count is that of each."""
    monkeypatch.setattr(launches, "WARM", 2)
    monkeypatch.setitem(launches.SHAPES, "qwen3-8b", launches.SHAPES["qwen3-8b"] | {"num_hidden_layers": 4})
    file = tmp_path / "found.json"
    sizes = ["--batches", "2", "--context", "24", "--steps", "2", "--rounds", "1", "--json", str(file)]
    launches.main(sizes)
    found = json.loads(file.read_text())
    per_layer = found["per_layer"]
    once = {"heads_kernel": 1, "attend_kernel": 1, "merge_kernel": 1, "gate_kernel": 1}
    assert per_layer == {"mm": 4, "add_norm_kernel": 2} | once
    ways = {name.partition(", ")[2] for name in found["host"]}
    each = {f"{way}{kind}" for way in ("eager", "replayed") for kind in ("", ", runs", ", runs that follow")}
    assert ways == each and all(times["begin_us"] > 0 for times in found["host"].values())
    docs = (ROOT / "docs" / "kernels.md").read_text()
    told = re.search(r"(\d+)\s+launches per layer", docs)
    assert told is not None and int(told[1]) == sum(per_layer.values())
