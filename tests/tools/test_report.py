"""docs/benchmarks.md is generated: every figure of the page comes from the JSON, and nothing is silently left out."""

import json

import pytest

from benchmarks import gpu_report, report, targets
from benchmarks.measure import Case, point
from benchmarks.record import Record, conditions
from benchmarks.sides import Round
from benchmarks.suite_tables import NOT_YET
from benchmarks.tables import COLUMNS, row
from ferrum_rpc.polling import polled


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


def test_a_record_says_how_sockets_were_read_and_one_that_does_not_is_read_too(tmp_path):
    record = Record("wire", {}, tmp_path / "wire.json")
    said = a_result([a_point()], sockets=record.values["sockets"])
    assert f"| gRPC's sockets | read {polled()} |" in conditions("wire.json", said, ())
    assert "sockets" not in conditions("wire.json", a_result([a_point()]), ())


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


def a_decode(batch, context, share, target):
    return {
        "name": f"decode, batch {batch} @ {context}",
        "passed": share >= target,
        "share_of_limit": share,
        "target": target,
        "tokens_per_s": 250.0 * share * batch,
        "limit_tokens_per_s": 250.0 * batch,
        "seconds": {"graphs": 0.004, "eager": 0.009, "torch_rows": 0.005},
        "eager_over_graphs": [2.1, 2.2, 2.4],
        "torch_rows_over_graphs": [1.2, 1.25, 1.3],
    }


def a_gpu_check(**changes):
    """As `tools.gpu_check` writes it (tests/kernels sees to it that it does), with figures that nobody measured."""
    beginning = {key: value for key, value in a_result([]).items() if key not in ("settings", "models", "points")}
    attention = {
        "name": "decode, 64 x 4k",
        "seconds": {"ours": 0.00031, "sdpa": 0.0006},
        "over_ours": {"sdpa": [1.9, 2.0, 2.1]},
        "absent": {"varlen_attn": "no such | thing"},
        "share_of_bandwidth": 0.83,
        "share_of_matrix_units": 0.05,
        "target": 0.8,
        "passed": True,
    }
    tiles = {size: {"rows": rows, "keys": 64} for size, rows in (("small", 16), ("large", 128))}
    return (
        beginning
        | {
            "benchmark": "gpu",
            "command": "python -m tools.gpu_check",
            "environment": {
                "device": "Some GPU",
                "python": "3.12.3",
                "versions": {"torch": "2.13.0", "transformers": None},
                "capability": [9, 0],
                "memory_bytes": 140 << 30,
                "cuda": "13.0",
            },
            "part_seconds": {"limits": 1.5, "decode": 30.2},
            "limits": {
                "bytes_per_s": 4.3e12,
                "copy_bytes_per_s": 4.3e12,
                "read_bytes_per_s": 4.1e12,
                "operations_per_s": 7.9e14,
            },
            "parity": [
                {
                    "layer": layer,
                    "dtype": "float32",
                    "step": "mix",
                    "error": error,
                    "torch_error": 5e-7,
                    "tolerance": 1e-5,
                    "passed": error <= 1e-5,
                }
                for layer, error in (("group 4", 4e-7), ("group 7", float("nan")))
            ],
            "decode": [a_decode(1, 1024, 0.88, 0.85), a_decode(64, 2048, 0.71, 0.8)],
            "prefill": [
                {
                    "name": "prefill of 8192",
                    "passed": True,
                    "share_of_limit": 0.625,
                    "target": 0.6,
                    "tokens_per_s": 30000.0,
                }
            ],
            "wire": [
                {
                    "name": "gRPC against in process, batch 64 @ 2047, greedy",
                    "passed": True,
                    "ratio": 0.98,
                    "target": 0.97,
                    "ratios": [0.975, 0.98, 0.985],
                }
            ],
            "peer": [
                {
                    "name": "decode, batch 1 @ 1024, against an engine",
                    "passed": True,
                    "times_as_fast": 2.6,
                    "target": 2.0,
                }
            ],
            "attention": {"loads": [attention]},
            "shapes": [
                {
                    "name": "decode, 64 x 4k",
                    "shapes": [tiles | {"result": "too many registers"}, tiles | {"result": 0.00029}],
                }
            ],
            "tests/kernels": {"passed": 120, "skipped": 2, "failed": 1, "status": 1, "tests": {}},
            "failed": ["decode: {'name': 'decode, batch 64 @ 2048'}", "staging: RuntimeError: lost"],
            "skipped": ["tests/gpu: needs structlog"],
        }
        | changes
    )


def of_the_gpu(results):
    return [line for line in targets.rows(targets.newest(results)) if line[0].startswith("CUDA")]


def test_what_waits_for_a_gpu_is_not_yet_measured_until_a_check_of_one_is_there():
    waiting = of_the_gpu([("wire.json", a_result([a_point()]))])
    assert [line[1] for line in waiting] == [NOT_YET] * 5
    found = of_the_gpu([("gpu-check.json", a_gpu_check())])
    assert [(line[1], line[3]) for line in found] == [
        ("0.880", "yes"),
        ("0.710", "no"),
        ("0.625", "yes"),
        ("0.830", "yes"),
        ("0.980", "yes"),
    ]
    assert {line[5] for line in found} == {"`gpu-check.json`"}
    some = a_gpu_check()
    del some["attention"]
    some["decode"] = [a_decode(1, 21, 0.9, 0.0)]  # of another size
    assert [line[1] for line in of_the_gpu([("gpu-check.json", some)])] == [NOT_YET] * 2 + ["0.625", NOT_YET, "0.980"]


def test_the_page_says_what_a_gpu_reached_what_it_missed_and_what_did_not_run():
    page = report.document([("gpu-check.json", a_gpu_check())])
    for text in (
        "| decode, batch 1 @ 1024 | 220 | 250 | 0.88 | ≥ 0.85 | yes |",
        "| decode, batch 64 @ 2048 | 11360 | 16000 | 0.71 | ≥ 0.8 | no |",
        "| prefill of 8192 | 30000 | 48000 | 0.62 | ≥ 0.6 | yes |",
        "| decode, batch 1 @ 1024: a step without graphs, in ours | 2.200 (2.100 to 2.400) |",
        "| gRPC against in process, batch 64 @ 2047, greedy | 0.980 (0.975 to 0.985) | ≥ 0.97 | yes |",
        "| decode, batch 1 @ 1024, against an engine | 2.60 × as fast | ≥ 2 | yes |",
        "| decode, 64 x 4k | 0.310 | 0.83 | 0.05 | 2.000 (1.900 to 2.100) × | none: no such \\| thing |",
        "| decode, 64 x 4k | 0.310 | 0.290 | 16 × 64, 128 × 64 |",
        "the worst of 2 cases | nan | 1.0e-05 | no: 1 of 2 |",
        "`tests/kernels`: 120 passed, 2 skipped, 1 failed",
        "`tests/gpu` was skipped: needs structlog",
        "`staging` failed: RuntimeError: lost",
        "`model`, `graph_parity`, `store`: not asked for",
        "copies 4.30 TB/s, reads 4.10 TB/s, bfloat16 products 790 TFLOP/s",
        "| GPU | Some GPU, capability 9.0, 140 GiB, CUDA 13.0 |",
        "python 3.12.3, torch 2.13.0, transformers absent",
    ):
        assert text in page, text


def test_a_check_that_ended_early_has_a_section_too():
    parts = dict.fromkeys(gpu_report.PARTS)
    some = {key: value for key, value in a_gpu_check().items() if key not in parts}
    page = report.document([("gpu-check.json", some)])
    assert "No limits were read" in page and "`limits`, `model`" in page


def test_a_rehearsal_without_a_gpu_is_no_result():
    with pytest.raises(ValueError, match=r"gpu-check\.json.*interpreted"):
        report.document([("gpu-check.json", a_gpu_check(benchmark="gpu, interpreted"))])
