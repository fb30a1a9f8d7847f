"""`benchmarks.adapters` runs, its page shows it, and the standing knows its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import adapters
from benchmarks.sections import adapters as page
from benchmarks.targets import TARGETS
from tests.tools.conditions import conditions


async def test_a_quick_run_has_all_sides_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "adapters.json"
    monkeypatch.setattr(adapters, "CACHE", tmp_path)
    record = await adapters.run(adapters.parse(["--quick", "--rank", "4", "--threads", "1", "--out", str(out)]))
    adapters.show(record.values)
    assert "decode b3 @8" in capsys.readouterr().out
    result = json.loads(out.read_text())
    [cell] = result["cells"]
    assert cell["ratios"].keys() == {adapters.ONE, adapters.BASE}
    assert "3 of rank 4" in page("adapters.json", result | conditions("adapters"))
    [target] = [each for each in TARGETS if each.benchmark == "adapters"]
    cells = [{"cell": "decode b32 @256", "ratios": {adapters.BASE: {"median": 0.85}}}]
    assert target.row({"adapters": ("adapters.json", {"cells": cells})})[1:4] == ("0.850", "≥ 0.8", "yes")
