"""`python -m benchmarks.structured --quick` runs every way, and counts what is valid."""

from __future__ import annotations

import json
from pathlib import Path

import benchmarks.structured
from benchmarks.sections import structured
from benchmarks.structured import DRAFTS, GRAMMAR, GRAMMAR_DRAFTS, MASKS, SCHEMA, WAYS, is_valid
from clients.structured.program import AT_ONCE
from tests.tools.conftest import QuickRun


def test_a_quick_run_takes_every_way(tmp_path: Path, quick_run: QuickRun) -> None:
    out = tmp_path / "structured.json"
    quick_run(benchmarks.structured, "--delays", "1", "--out", str(out))
    found = json.loads(out.read_text(encoding="utf-8"))
    cells = [(each["way"], each["temperature"], each["delay_ms"]) for each in found["points"]]
    assert cells == [(way, heat, 1.0) for way in WAYS for heat in (0.0, 0.8)]
    assert all(each["valid"] == each["texts"] == 2 < AT_ONCE for each in found["points"])
    trips = {each["way"]: each["tokens_per_trip"] for each in found["points"]}
    assert trips[MASKS] == 1.0 < trips[DRAFTS] < trips[GRAMMAR] and trips[GRAMMAR_DRAFTS] > 1.0
    by_way = {cell[:2]: each["tokens"] for cell, each in zip(cells, found["points"], strict=True)}
    assert len({by_way[way, 0.0] for way in WAYS}) == 1, "greedy texts are the same by every way"
    assert "2 of 2" in structured("structured.json", found)


def test_a_text_is_valid_only_if_it_is_json_of_the_schema() -> None:
    check = benchmarks.structured.jsonschema.Draft202012Validator(SCHEMA)
    person = {"name": "Ann", "age": 3, "married": False, "county": "Kent", "income": None, "sisters": []}
    assert is_valid(check, json.dumps(person))
    assert not is_valid(check, json.dumps(person)[:-1])
    assert not is_valid(check, json.dumps({**person, "age": 131}))
    assert not is_valid(check, json.dumps({**person, "more": 1}))
