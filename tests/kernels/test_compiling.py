"""What an interpreter cannot show: the kernels compile for real GPUs."""

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
        "import json, torch; from dataclasses import asdict;"
        "from tests.kernels.compiling import SHARED_BYTES, adapter_usage, row_usage, usage;"
        "found = usage(90, 128, torch.bfloat16, window=4096, cap=True, sinks=True);"
        "found += usage(90, 128, torch.bfloat16, rounded=True) + row_usage(90, torch.bfloat16);"
        "found += adapter_usage(90, torch.bfloat16);"
        "print(json.dumps([SHARED_BYTES[90], *map(asdict, found)]))"
    )
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=compiling, capture_output=True, text=True, check=True
    )
    shared, small, large, merge, small_fp8, large_fp8, *rows = json.loads(done.stdout)
    names = [each["kernel"].removesuffix("_kernel") for each in rows]
    assert names == ["heads", "heads", "add_norm", "gate", "shrink", "expand", "shrink", "expand"]
    for each in (small, large, merge, small_fp8, large_fp8, *rows):
        assert each["spilled"] == 0, each
    assert 3 * (small["shared"] + 1024) <= 228 << 10 and 3 * 128 * small["registers"] <= 65536  # three at once
    for each in (large, large_fp8):
        assert each["shared"] <= shared and "wgmma" in each["matrix"]
    assert "mma" in small["matrix"]
