"""docs/benchmarks.md is generated: every figure of the page comes from the JSON, and nothing is silently left out."""

import json

import pytest

from benchmarks import report
from benchmarks.cases import DECODE, Cell
from benchmarks.compare import Round, figures, ratio
from benchmarks.record import Record
from benchmarks.sections import conditions
from benchmarks.tables import WIRE_COLUMNS, wire
from ferrum_rpc.runtime import polled


def rounds(step_s, forward_s=None):
    forward = [] if forward_s is None else [forward_s] * 4
    return [Round(step_s=[step_s] * 4, forward_s=forward, queue_s=forward, last=["same"]) for _ in range(3)]


def a_point(model="qwen3-0.6b", batch=8, output="greedy", **times):
    times = {"in_process_s": 0.080, "grpc_s": 0.082, "echo_s": 0.0005, "forward_s": 0.081} | times
    inside, echo = rounds(times["in_process_s"]), rounds(times["echo_s"])
    grpc = rounds(times["grpc_s"], times["forward_s"])
    cell = Cell(DECODE, batch, 256, output=output)
    sides = {"in process": inside, "gRPC": grpc, "echo": echo}
    return {
        "model": model,
        "batch": batch,
        "output": output,
        "sides": {name: figures(cell, each, grpc) for name, each in sides.items()},
        "ratios": {"in process": ratio(inside, grpc)},
        "disturbed": [0, 0],
    }


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
        "cells": points,
    } | changes


def row(point):
    return wire([point]).rows[0]


def test_a_point_tells_wire_and_bookkeeping_apart():
    found = a_point()
    assert found["ratios"]["in process"]["pairs"] == pytest.approx([80 / 82] * 3, abs=1e-3)
    assert row(found)[-2:] == ("1.50", "0.500")
    assert found["sides"]["gRPC"]["tokens_per_s"] == pytest.approx(8 / 0.082, rel=1e-3)
    assert found["sides"]["in process"]["same_rounds"] == [3, 3]
    json.dumps(found)


def test_targets_stand_beside_the_ratios_and_judge_nothing():
    assert "≥ 0.97" in row(a_point(output="greedy", batch=1))
    assert "≥ 0.85" in row(a_point(output="full-bf16", batch=32))
    assert row(a_point(output="full-bf16", batch=8))[8] == ""
    assert "≤ 2 echoes: 3.00" in row(a_point("identity", in_process_s=4e-4, grpc_s=1.5e-3, forward_s=4e-4))


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
    assert len(tables) == 2 and all(line.count("|") == len(WIRE_COLUMNS) + 1 for line in tables)


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
