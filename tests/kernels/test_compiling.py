"""What an interpreter cannot show: the kernels compile for real GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ferrum_rpc.attention.triton_plan import Multiprocessor, tile_shapes

triton = pytest.importorskip("triton")

SPILLED = {"prepare_kernel": 1792, "chunk_kernel": 848}
"""Bytes that a thread keeps in local memory, at most: these kernels were timed so (docs/kernels.md)."""

ROOT = Path(__file__).resolve().parents[2]


def compiled(program: str) -> Any:
    """What ``program`` prints as JSON, in a process that compiles kernels."""
    program = f"import json, torch; from dataclasses import asdict; from tests.kernels.compiling import *; {program}"
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=compiling, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(triton.__version__ < "3.7", reason="the registers are those of Triton 3.7, of the supported torch")
def test_kernels_compile_for_hopper_within_its_registers_and_shared_memory():
    shared, *found = compiled(
        "found = usage(90, 128, torch.bfloat16, window=4096, cap=True, sinks=True);"
        "found += usage(90, 128, torch.bfloat16, rounded=True) + row_usage(90, torch.bfloat16);"
        "found += [*adapter_usage(90, torch.bfloat16), *recurrent_usage(90, torch.bfloat16), sample_usage(90)];"
        "print(json.dumps([SHARED_BYTES[90], *map(asdict, found)]))"
    )
    small, middle, large, merge, small_fp8, middle_fp8, large_fp8, *rows = found
    names = [each["kernel"].removesuffix("_kernel") for each in rows]
    between = ["heads", "heads", "add_norm", "gate", "shrink", "expand", "shrink", "expand"]
    recurrent = ["step", "journal", "prepare", "chunk", "decays", "gate_heads", "gate_heads"]
    assert names == [*between, *recurrent, "sample"]
    for each in (small, middle, large, merge, small_fp8, middle_fp8, large_fp8, *rows):
        assert each["spilled"] <= SPILLED.get(each["kernel"], 0) and each["shared"] <= shared, each
    for each in (middle, large, middle_fp8, large_fp8):
        assert each["shared"] <= shared and "wgmma" in each["matrix"]
    assert "mma" in small["matrix"]
    hopper = Multiprocessor(228 << 10, 2048)
    for each, tile in zip((small, middle, large), tile_shapes(128, 2, shared), strict=True):
        assert hopper.programs(each["registers"], each["shared"], tile.warps) == tile.programs
