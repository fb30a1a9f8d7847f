"""`benchmarks.streams` runs every way, and the faster lockstep of a round is the measure of its streams."""

from __future__ import annotations

import json
from pathlib import Path

import benchmarks.streams
from benchmarks.sections import streams
from benchmarks.streams import CANCEL_TARGET_MS, RANDOM, RUNS, STEPS, WAYS, Round, Steps, Work, points
from tests.tools.conftest import QuickRun


def test_a_quick_run_takes_every_way(tmp_path: Path, quick_run: QuickRun) -> None:
    out = tmp_path / "streams.json"
    quick_run(benchmarks.streams, "--model", "identity", "--streams", "3", "--prompt", "32", "--out", str(out))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [each["way"] for each in found["points"]] == list(WAYS)
    assert all(each["tokens_per_s"] > 0 for each in found["points"])
    assert [each["fed"] for each in found["points"][:2]] == [round((32 + 15) / 16, 3)] * 2  # none cached
    assert [each["rows"] for each in found["points"][:2]] == [3.0] * 2
    assert all(0 < each["busy"] <= 1 for each in found["points"])
    assert [each["first_p50_ms"] is None for each in found["points"]] == [True, True, False]
    assert 0 < found["share"] <= 1
    cancels = found["cancels"]
    assert 0 < cancels["gone_p50_ms"] <= cancels["gone_p99_ms"] <= cancels["gone_max_ms"] and cancels["cancels"] == 4
    assert 0 < cancels["step_ms"] < cancels["target"] == round(cancels["step_ms"] + CANCEL_TARGET_MS, 2)
    assert "of lockstep" in streams("streams.json", found)


def test_streams_are_compared_with_the_faster_lockstep_of_their_round() -> None:
    steps = Steps(16.0, 1.2, 0.9)
    taken = {
        (STEPS, 16): [Round(100.0, 100.0, steps), Round(300.0, 300.0, steps)],
        (RUNS, 16): [Round(200.0, 200.0, steps), Round(200.0, 200.0, steps)],
        (RANDOM, 16): [Round(100.0, 90.0, steps, [0.1, 0.3]), Round(240.0, 110.0, steps, [0.2])],
    }
    _, _, found = points(taken)
    assert found["of_lockstep"] == {"median": 0.65, "low": 0.5, "high": 0.8}
    assert (found["first_p50_ms"], found["target"]) == (200.0, 0.9)
    assert (found["whole_per_s"], found["rows"], found["fed"], found["busy"]) == (100.0, 16.0, 1.2, 0.9)


def test_no_two_prompts_begin_alike() -> None:
    work = Work(16, 64, 64, 256)
    numbers = [*range(64), *range(10**6, 10**6 + 256), *range(2 * 10**6, 2 * 10**6 + 256)]
    assert len({tuple(work.text(number)[:8]) for number in numbers}) == len(numbers)
