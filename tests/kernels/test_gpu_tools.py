"""What an interpreter cannot show: the kernels compile for real GPUs, and the check for one runs from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_compile_for_hopper_within_its_registers_and_shared_memory():
    program = (
        "import json, torch; from dataclasses import asdict; from tools.gpu_compile import SHARED_BYTES, usage;"
        "print(json.dumps([SHARED_BYTES[90], *map(asdict, usage(90, 128, torch.bfloat16, window=4096, cap=True))]))"
    )
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=compiling, capture_output=True, text=True, check=True
    )
    shared, small, large, merge = json.loads(done.stdout)
    for each in (small, large, merge):
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
    for load in record["attention"]["loads"]:
        assert load["seconds"].keys() >= {"ours", "sdpa"} and load["share_of_bandwidth"] > 0
        assert load["seconds"].keys() | load["absent"].keys() == {"ours", "sdpa", "varlen_attn"}
