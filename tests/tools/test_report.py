"""docs/benchmarks.md is generated: every figure of the page comes from the JSON, and nothing is silently left out."""

import json
import re

import pytest

from benchmarks import report
from benchmarks.cases import CELLS
from benchmarks.machine import ROOT
from benchmarks.peers import PEERS
from benchmarks.record import LIMIT, cell_rows
from benchmarks.report import NOT_YET, document, newest
from benchmarks.table import markdown, rows_of, shown, table, target

AMX, PLAIN = ["avx2", "amx_bf16"], ["avx2", "avx512f"]


def a_point():
    ratio = {"median": 0.976, "low": 0.97, "high": 0.98}
    standing = target("gRPC against in process", 0.976, 0.97)
    return {"model": "qwen3-0.6b", "batch": 8, "ms": 82.4, "ratio": ratio, "target": standing}


def a_result(benchmark="protocol", flags=AMX, ended="2026-11-21T06:10", **more):
    tables = {"steps": table([a_point()], left=2, legend={"ratio": "of pairs"})}
    return {
        "schema": 2,
        "benchmark": benchmark,
        "variant": "",
        "command": f"python -m benchmarks {benchmark}",
        "began": "2026-11-21T06:00",
        "ended": ended,
        "commit": {"id": "0123456789abcdef0123", "dirty": True},
        "hardware": {"cpu": "Some CPU", "cores": 2, "memory_gib": 23.4, "flags": flags, "huge_pages": "madvise"},
        "versions": {"python": "3.12.3", "torch": "2.13.0"},
        "others_cpu": 0.012,
        "settings": {"seed": 1, "lead_in_steps": 2},
        "tables": tables,
        "targets": [a_point()["target"]],
        "notes": [],
    } | more


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("2 of 2", "2 of 2"),
        (12345, "12,345"),
        (1772.4, "1,772"),
        (29.62, "29.6"),
        (0.9756, "0.976"),
        (0.00123, "0.00123"),
        ({"median": 1.234, "low": 1.0, "high": 99.96}, "1.23 (1.00 to 100.0)"),
        ({"median": 300.2, "p10": 2.0, "p90": 400.0}, "300 (2.00 to 400)"),
    ],
)
def test_a_cell_is_written_with_three_digits(value, text):
    assert shown(value) == text


def test_a_line_in_a_cell_does_not_end_it():
    assert markdown(("a", "b"), [("x | y", 1)]).splitlines()[-1] == "| x \\| y | 1 |"


def test_the_page_has_what_the_file_has_and_what_made_it():
    page = document([("protocol-2cpu.json", a_result(notes=["Others disturbed nothing."]))])
    [line] = [line for line in page.splitlines() if line.startswith("| qwen3-0.6b | 8 | 2cpu-amx_bf16 |")]
    for cell in rows_of(a_result()["tables"]["steps"])[0].values():
        assert f" {shown(cell)} |" in line
    for text in (
        "| 2cpu-amx_bf16 | Some CPU | 2 | 23.4 | avx2, amx_bf16 | madvise |",
        "- **ratio**: of pairs",
        "- 2cpu-amx_bf16: Others disturbed nothing.",
        "`0123456789ab` with uncommitted changes",
        "torch 2.13.0",
        "1.2% of the cores' time",
        "| lead in steps | 2 |",
        "`python -m benchmarks protocol`",
        "benchmarks/results/protocol-2cpu.json",
        "| gRPC against in process | ≥ 0.97 |  | 0.976, yes |",
    ):
        assert text in page, text


def test_kinds_of_machines_stand_side_by_side_the_newest_of_each():
    rate = [{"step": "one", "ms": 1.0}, {"step": "two", "ms": 2.0}]
    results = [
        ("old.json", a_result(ended="2026-01", tables={"steps": table([{"step": "one", "ms": 9.0}])})),
        ("amx.json", a_result(ended="2026-02", tables={"steps": table(rate)})),
        ("plain.json", a_result(flags=PLAIN, ended="2026-03", tables={"steps": table([{"step": "two", "ms": 5.0}])})),
    ]
    page = document(results)
    lines = [line for line in page.splitlines() if line.startswith(("| one |", "| two |"))]
    assert lines == [
        "| two | 2cpu-avx512f | 5.00 |",
        "| two | 2cpu-amx_bf16 | 2.00 |",
        "| one | 2cpu-amx_bf16 | 1.00 |",
    ]
    assert page.count("## What does the protocol cost?") == 1
    assert "| file | `benchmarks/results/plain.json` | `benchmarks/results/amx.json` |" in page


def test_every_question_is_asked_once_and_an_open_one_says_so():
    page = document([("protocol.json", a_result())])
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert len(headings) == len({*headings}) == 2 + len(report.PAGE["question"])
    assert page.count("\nNot yet measured.\n") == len(report.PAGE["question"]) - 1


def test_all_engines_are_at_a_glance_with_those_that_were_not_measured():
    side = {"low": 1.0, "high": 2.0, "step_ms": {"median": 1.0, "p10": 1.0, "p90": 1.0}, "same_tokens": [1, 1]}
    sides = {"ours, gRPC session": side | {"tokens_per_s": 90.0}, "vLLM CPU bf16": side | {"tokens_per_s": 45.0}}
    cell = {
        "cell": CELLS[0].name,
        "roof": {"tokens_per_s": 100.0, "bound_by": "memory"},
        "sides": sides,
        "ratios": {"vLLM CPU bf16": {"median": 2.0, "low": 1.0, "high": 3.0}},
        "absent": {"llama.cpp bf16": "it cannot"},
    }
    rows = cell_rows([cell])
    assert [each["of the limit"] for each in rows if "of the limit" in each] == [0.9, 0.45]
    tables = {"cells": table(rows, **report.PAGE["tables"]["cells"])}
    found = newest([("peers.json", a_result("peers", tables=tables, left_out={PEERS[0].name: "no compiler"}))])
    page = report.glance(found)
    others = f" {NOT_YET} |" * (len(CELLS) - 1)
    assert f"| {LIMIT} | 100 |{others}" in page
    assert f"| ours, gRPC session | 90.0 |{others}" in page
    assert f"| vLLM CPU bf16 | 45.0 (2.00 ×) |{others}" in page
    assert f"| llama.cpp bf16 | – |{others}" in page
    assert f"| {PEERS[0].name} |" + " left out |" * len(CELLS) in page
    assert all(f"| {peer.name} |" in page for peer in PEERS)


def test_a_target_stands_on_every_kind_of_machine():
    def result(flags, value):
        return a_result(flags=flags, targets=[target("a step", value, 2.0, least=False, unit=" ms", goal=1.0)])

    page = report.standing(newest([("a.json", result(AMX, 1.5)), ("b.json", result(PLAIN, 3.0))]))
    assert "| a step | ≤ 2 ms | ≤ 1 ms | 1.50 ms, yes | 3.00 ms, no |" in page
    assert f"| a step | ≤ 2 ms | ≤ 1 ms | {NOT_YET} |" in report.standing(newest([("a.json", result(AMX, None))]))


def test_the_page_without_results_says_how_to_get_some():
    assert "make bench" in document([])


@pytest.mark.parametrize("change", [{"benchmark": "guesses"}, {"schema": 1}])
def test_a_file_of_another_kind_is_an_error_that_names_it(change):
    with pytest.raises(ValueError, match=r"guesses\.json"):
        document([("guesses.json", a_result() | change)])


def test_the_program_writes_the_page_from_a_folder(tmp_path):
    (tmp_path / "protocol-2cpu.json").write_text(json.dumps(a_result()))
    page = tmp_path / "docs" / "benchmarks.md"
    report.main(["--results", str(tmp_path), "--out", str(page)])
    assert "0.976 (0.970 to 0.980)" in page.read_text(encoding="utf-8")


def test_the_page_of_this_repository_is_that_of_its_results(tmp_path):
    page = tmp_path / "benchmarks.md"
    report.main(["--out", str(page)])
    assert page.read_text("utf-8") == (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
