"""`benchmarks.collectives` measures every side at every size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import collectives
from benchmarks.tables import collectives as table
from ferrum_rpc.distributed import shared_memory


def test_every_side_is_measured_at_every_size(tmp_path: Path) -> None:
    if reason := shared_memory.available():
        pytest.skip(f"no shared memory: {reason}")
    out = tmp_path / "found.json"
    collectives.main(["--quick", "--rounds", "1", "--out", str(out)])
    points = json.loads(out.read_text())["points"]
    assert len(points) == 3 * len(collectives.ROWS) * len(collectives.DTYPES)
    assert all(each["median_us"] > 0 for each in points)
    assert len(table(points).rows) == len(points) // 3
