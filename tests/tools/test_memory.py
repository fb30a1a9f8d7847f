"""`benchmarks.memory` sets a plan beside what is resident, part by part."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import SHAPES, write_checkpoint
from benchmarks.memory import measure
from benchmarks.tables import memory


def test_every_part_of_a_plan_is_measured(tmp_path: Path) -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this kernel does not tell what is resident")
    found = measure(write_checkpoint(tmp_path, SHAPES["tiny"]), "float32", 64, 2)
    assert [each["of"] for each in found] == ["weights", "cache", "largest step"]
    assert all(each["planned"] > 0 for each in found)
    assert len(memory(found).rows) == 3
