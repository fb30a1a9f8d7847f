"""`benchmarks.speculation` takes every way, and single steps are the measure of the others."""

from __future__ import annotations

import pytest

from benchmarks.sections import speculation
from benchmarks.speculation import DRAFT, SINGLE, WAYS, points, texts
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.request import Request
from tests.serving import serve_identity
from tests.tools.conditions import conditions

SETTINGS = {"model": "demo", "draft": "demo-draft", "rounds": 2, "tokens": 8, "run_tokens": 16, "seed": 0}
CONDITIONS = {
    **conditions("speculation"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_gives_texts_of_one_length(way: str) -> None:
    async with serve_identity(kv_blocks=512) as served, ExecutorClient(served.target, session=True) as client:
        run = await texts(way, client, client, 2, 12)
        assert {len(each.generated) for each in run.requests} == {12}
        [point] = points({(way, 0.0, 2): [run], (SINGLE, 0.0, 2): [run]})[:1]
        assert point["of_single"] == 1 and point["tokens_per_s"] > 0
        assert point["per_trip"] == 1 if way == SINGLE else point["per_trip"] > 1
        assert (point["accepted"] is not None) == (run.drafted > 0)


def test_ratios_are_of_the_same_round() -> None:
    def taken(*seconds: float) -> list[RunCounts]:
        request = Request(0, (1,), 8, generated=[0] * 8)
        return [RunCounts([request], sequences=5, decode_tokens=8, wall_seconds=each) for each in seconds]

    found = points({(SINGLE, 10.0, 1): taken(8.0, 4.0, 2.0), (DRAFT, 10.0, 1): taken(2.0, 2.0, 0.5)})
    assert [(each["of_single"], each["target"], each["per_trip"]) for each in found] == [
        (1.0, None, 2.0),
        (4.0, 2.5, 2.0),
    ]
    page = speculation("speculation.json", {"points": found, "settings": SETTINGS, **CONDITIONS})
    assert "10 ms" in page and "≥ 2.5" in page
