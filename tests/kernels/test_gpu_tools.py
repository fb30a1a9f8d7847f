"""What an interpreter cannot show: the kernels compile for real GPUs, and the check for one runs from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks import report, targets
from tools.gpu_attention import LOADS
from tools.gpu_attention import TINY as TINY_LOADS
from tools.gpu_check import run_suite
from tools.gpu_model import FULL, TINY
from tools.gpu_record import RESULT, Check

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_compile_for_hopper_within_its_registers_and_shared_memory():
    program = (
        "import json, torch; from dataclasses import asdict;"
        "from tools.gpu_compile import SHARED_BYTES, row_usage, usage;"
        "found = usage(90, 128, torch.bfloat16, window=4096, cap=True) + row_usage(90, torch.bfloat16);"
        "print(json.dumps([SHARED_BYTES[90], *map(asdict, found)]))"
    )
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=compiling, capture_output=True, text=True, check=True
    )
    shared, small, large, merge, *rows = json.loads(done.stdout)
    assert [each["kernel"] for each in rows] == ["store_kernel", "add_norm_kernel", "rotate_kernel", "gate_kernel"]
    for each in (small, large, merge, *rows):
        assert each["spilled"] == 0, each
    assert 3 * (small["shared"] + 1024) <= 228 << 10 and 3 * 128 * small["registers"] <= 65536  # three at once
    assert large["shared"] <= shared and "wgmma" in large["matrix"]
    assert "mma" in small["matrix"]


def test_the_check_for_a_gpu_runs_without_one(tmp_path):
    out = tmp_path / "gpu-check.json"
    done = subprocess.run(
        [sys.executable, "tools/gpu_check.py", "--interpret", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert record["failed"] == [] and record["environment"]["versions"]["triton"]
    assert record["parity"] and all(each["error"] <= each["tolerance"] for each in record["parity"])
    assert all(each["error"] <= each["tolerance"] for each in record["graph_parity"][:-1])
    assert record["graph_parity"][-1]["recorded"] and record["model"]["rows"] == "triton"
    for cell in record["decode"]:
        assert cell["seconds"].keys() == {"graphs", "eager", "torch_rows"} and 0 < cell["share_of_limit"] < 1
    assert record["prefill"][0]["share_of_limit"] > 0
    assert record["store"][0]["same"] and record["staging"][0]["same"]
    overlap = record.get("overlap")
    assert overlap is None or (overlap[0]["same_tokens"] and overlap[0]["seconds"].keys() == {"off", "on"})
    skipped = [each.partition(":")[0] for each in record["skipped"]]
    assert {"peer", "tests/kernels", "tests/gpu"} == {*skipped} - {"wire", "overlap"}
    assert ("wire" in skipped) != (record.get("wire", [{"ratio": 0}])[0]["ratio"] > 0), (
        "where the server's packages are"
    )
    for load in record["attention"]["loads"]:
        assert load["seconds"].keys() >= {"ours", "sdpa"} and load["share_of_bandwidth"] > 0
        assert load["seconds"].keys() | load["absent"].keys() == {"ours", "sdpa", "varlen_attn"}
    with pytest.raises(ValueError, match=record["benchmark"]):
        report.document([("gpu-check.json", record)])  # no result
    record = json.loads(full_size(out.read_text())) | {"benchmark": RESULT}
    page = report.document([("gpu-check.json", record)])
    for part in ("decode", "prefill", "store", "staging", "graph_parity"):
        assert all(cell["name"] in page for cell in record[part])
    [lone, many, prompt, attention, wire] = targets.rows(targets.newest([("gpu-check.json", record)]))[-5:]
    for line in (lone, many, prompt, attention, *([] if "wire" in skipped else [wire])):
        assert line[-1] == "`gpu-check.json`", line


def full_size(text):
    """The names that its cells have on a GPU."""
    for (batch, context, _), (large, long, _) in zip(TINY.decodes, FULL.decodes, strict=True):
        text = text.replace(f"batch {batch} @ {context + 1}", f"batch {large} @ {long + 1}")
        text = text.replace(f"batch {batch} @ {context},", f"batch {large} @ {long},")
    text = text.replace(f"prefill of {TINY.prefill[0]}", f"prefill of {FULL.prefill[0]}")
    return text.replace(TINY_LOADS[0].name, LOADS[0].name)


def test_a_part_that_cannot_run_is_skipped_aloud_and_one_that_fails_fails_the_check():
    check = Check({"part_seconds": {}}, budget_s=60)

    def fail():
        raise RuntimeError("no such instruction")

    assert check.part("late", lambda: 1, needs_s=100) is None
    assert check.part("lacking", lambda: 1, needs_s=0, packages=("json", "no_such_package")) is None
    assert check.part("failing", fail, needs_s=0) is None
    assert check.part("running", lambda: 1, needs_s=0) == check.record["running"] == 1
    assert (
        check.part("slow", lambda: run_suite(str(ROOT / "tests/kernels"), Check({}, budget_s=0.01)), needs_s=0) is None
    )
    check.cells("cells", lambda: [{"passed": True}, {"passed": False, "name": "slow", "ratio": 0.5}], needs_s=0)
    assert [each.partition(" ")[0] for each in check.skipped] == ["late:", "lacking:", "slow:"]
    assert "no_such_package" in check.skipped[1] and "json" not in check.skipped[1]
    some = Check({"part_seconds": {}}, budget_s=60, only=["one"])
    assert some.part("one", lambda: 1, needs_s=0) == 1 and some.part("other", fail, needs_s=0) is None
    assert some.failed == some.skipped == []
    assert check.failed == [
        "failing: RuntimeError: no such instruction",
        "cells: {'passed': False, 'name': 'slow', 'ratio': 0.5}",
    ]


def test_a_suite_says_what_became_of_each_test(tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    found = run_suite(str(tmp_path), Check({}, budget_s=60))
    outcomes = {name.rpartition("::")[2]: test["outcome"] for name, test in found["tests"].items()}
    assert outcomes == {"test_a": "passed", "test_b": "failure", "test_c": "skipped"}
    assert (found["passed"], found["skipped"], found["failed"], found["status"]) == (1, 1, 1, 1)
