"""docs/benchmarks.md is generated: every figure of the page comes from the JSON, and nothing is silently left out."""

import json

import pytest

from benchmarks import report
from benchmarks.measure import Case, point
from benchmarks.sides import Round
from benchmarks.tables import COLUMNS, row


def rounds(in_process_s, grpc_s, echo_s, forward_s, pairs=3):
    def one():
        return (
            Round(step_s=[in_process_s] * 4, digest=b"same"),
            Round(step_s=[grpc_s] * 4, forward_s=[forward_s] * 4, queue_s=[1e-5] * 4, digest=b"same"),
            Round(step_s=[echo_s] * 4),
        )

    return [one() for _ in range(pairs)]


def a_point(model="qwen3-0.6b", batch=8, output="greedy", **times):
    times = {"in_process_s": 0.080, "grpc_s": 0.082, "echo_s": 0.0005, "forward_s": 0.081} | times
    return point(Case(model, 256, batch, output), 4, (b"q" * 100, b"a" * 200), rounds(**times))


def a_result(points, **changes):
    return {
        "schema": 1,
        "benchmark": "wire",
        "command": "python -m benchmarks.wire --models qwen3-0.6b",
        "began": "2026-11-21T06:00:00+00:00",
        "ended": "2026-11-21T06:10:00+00:00",
        "commit": {"id": "0123456789abcdef0123", "dirty": True},
        "hardware": {
            "cpu": "Some CPU",
            "cores": 2,
            "memory_gib": 23.4,
            "flags": ["avx2", "avx512_bf16"],
            "huge_pages": "madvise",
        },
        "versions": {"python": "3.12.3", "torch": "2.13.0", "grpcio": "1.85.1"},
        "others_cpu": 0.012,
        "settings": {
            "threads_in_process": 2,
            "threads_server": 2,
            "processes": "three",
            "transport": "TCP loopback, insecure, unary",
            "request_ids": True,
            "block_size": 16,
            "seed": 1,
            "lead_in_steps": 2,
            "rounds": 3,
            "round_s": 1.5,
            "max_steps": 128,
        },
        "models": [
            {
                "name": name,
                "parameters": 596049920,
                "vocab_size": 151936,
                "weight_dtype": "bfloat16",
                "kv_dtype": "bfloat16",
                "context": 256,
                "settings": {},
                "choices": [["attention=torch", "the portable path"]],
            }
            for name in dict.fromkeys(each["model"] for each in points)
        ],
        "points": points,
    } | changes


def test_a_point_tells_wire_and_bookkeeping_apart():
    found = a_point()
    assert found["ratio"]["pairs"] == pytest.approx([80 / 82] * 3, abs=1e-3)
    assert found["overhead_ms"] == pytest.approx(2.0)
    assert found["bookkeeping_ms"] == pytest.approx(1.5)
    assert found["around_forward_ms"] == pytest.approx(0.5)
    assert found["grpc"]["tokens_per_s"] == pytest.approx(8 / 0.082, rel=1e-3)
    assert found["same_rows"] == [3, 3]
    json.dumps(found)


def test_targets_stand_beside_the_ratios_and_judge_nothing():
    assert a_point(output="greedy", batch=1)["ratio"]["target"] == 0.97
    assert a_point(output="full-bf16", batch=32)["ratio"]["target"] == 0.85
    assert a_point(output="full-bf16", batch=8)["ratio"]["target"] is None
    assert "≤ 2 echoes: 3.00" in row(a_point("identity", in_process_s=4e-4, grpc_s=1.5e-3, forward_s=4e-4))
    assert "≥ 0.97" in row(a_point())


def test_the_page_has_every_point_and_what_made_it():
    points = [a_point(batch=batch, output=output) for batch in (1, 8, 32) for output in ("greedy", "full-bf16")]
    page = report.document([("wire-2cpu-avx512_bf16.json", a_result([*points, a_point("identity")]))])
    for each in points:
        assert "| " + " | ".join(row(each)) + " |" in page
    for text in (
        "### qwen3-0.6b",
        "### identity",
        "596 million parameters",
        "`attention=torch`",
        "21 of 21 pairs",
        "`0123456789ab` with uncommitted changes",
        "2 × Some CPU, 23.4 GiB, avx2, avx512_bf16",
        "torch 2.13.0",
        "1.2% of the cores' time",
        "2 in process, 2 in the server",
        "python -m benchmarks.wire --models qwen3-0.6b",
        "benchmarks/results/wire-2cpu-avx512_bf16.json",
    ):
        assert text in page
    tables = [line for line in page.splitlines() if line.startswith("| model")]
    assert len(tables) == 2 and all(line.count("|") == len(COLUMNS) + 1 for line in tables)


def test_the_page_without_results_says_how_to_get_some():
    assert "make bench" in report.document([])


def test_a_file_of_another_kind_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"guesses\.json"):
        report.document([("guesses.json", a_result([a_point()], benchmark="guesses"))])


def test_the_program_writes_the_page_from_a_folder(tmp_path):
    (tmp_path / "wire-2cpu.json").write_text(json.dumps(a_result([a_point()])))
    page = tmp_path / "docs" / "benchmarks.md"
    report.main(["--results", str(tmp_path), "--out", str(page)])
    assert "0.976 (0.976 to 0.976)" in page.read_text(encoding="utf-8")
