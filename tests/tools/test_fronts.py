"""`benchmarks.fronts` takes every way, and its ratios are those of rounds with the library's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

for package in ("smg_grpc_proto", "smg"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import benchmarks.fronts  # noqa: E402 - behind the skip
from benchmarks.fronts import LIBRARY, ROUTER, WAYS, WORKER, Turn, points, tokenizer_of  # noqa: E402
from benchmarks.sections import fronts  # noqa: E402
from benchmarks.streams import Round, Steps  # noqa: E402
from ferrum_rpc.fronts.folder import FolderTokenizer  # noqa: E402
from tests.tools.conftest import QuickRun  # noqa: E402


def test_a_quick_run_takes_every_way_of_a_shape_without_a_tokenizer(tmp_path: Path, quick_run: QuickRun) -> None:
    out = tmp_path / "fronts.json"
    quick_run(benchmarks.fronts, "--model", "tiny", "--rounds", "1", "--out", str(out))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [each["way"] for each in found["points"]] == list(WAYS)
    for each in found["points"]:
        assert each["tokens_per_s"] > 0 and 0 < each["busy"] <= 1 and each["rows"] <= 2
        assert 0 < each["first_p50_ms"] <= each["first_p99_ms"]
        assert each["fed"] == pytest.approx((16 + 7) / 8, rel=0.2), "some text found its prompt in the prefix cache"
        assert set(each["token_us"]) == {"executor", "worker", "router", "caller"} and each["token_us"]["executor"] > 0
    assert [each["of_library"]["median"] == 1.0 for each in found["points"]] == [True, False, False]
    assert [each["way"] for each in found["leaves"]] == list(WAYS)
    assert all(0 < each["gone_p50_ms"] <= each["gone_max_ms"] and each["cancels"] == 2 for each in found["leaves"])
    assert "of the library" in fronts("fronts.json", found)


def test_ratios_are_of_a_round_and_times_of_a_token() -> None:
    steps = Steps(1.0, 1.5, 0.9)

    def turns(*rates: float, worker_s: float) -> list[Turn]:
        return [Turn(Round(rate, rate, steps, [0.1], 1000), {"worker": worker_s}) for rate in rates]

    taken = {
        (LIBRARY, 16): turns(100.0, 200.0, 400.0, worker_s=0.0),
        (WORKER, 16): turns(90.0, 160.0, 400.0, worker_s=0.25),
        (ROUTER, 16): turns(50.0, 180.0, 200.0, worker_s=0.5),
    }
    library, worker, router = points(taken)
    assert library["of_library"] == {"median": 1.0, "low": 1.0, "high": 1.0} and library["target"] is None
    assert worker["of_library"] == {"median": 0.9, "low": 0.8, "high": 1.0} and worker["token_us"] == {"worker": 250}
    assert router["of_library"] == {"median": 0.5, "low": 0.5, "high": 0.9} and router["target"] == 0.95


def test_the_made_tokenizer_has_a_text_for_every_token() -> None:
    tokenizer = FolderTokenizer(tokenizer_of("tiny", 512) / "tokenizer.json")
    assert tokenizer.encode("Some text.") == list(b"Some text.")
    assert all(tokenizer.decode([token]) for token in range(512))
