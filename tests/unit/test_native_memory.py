"""Where the C library gets no memory: a typed error, nothing lost, and the next call works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ferrum_rpc.native import library

HERE = Path(__file__).parent


def test_every_allocation_that_fails_is_a_memory_error_and_gives_back_what_there_was(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    try:
        library.load()
    except OSError as error:
        pytest.skip(str(error))
    allocator = tmp_path / "allocator.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", HERE / "failing_allocator.c", "-o", allocator], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.native_memory_program"],
        env={**os.environ, "LD_PRELOAD": str(allocator)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for name in ("attention", "attention in AVX2"):
        assert len(found[name]["errors"]) >= 5  # two kernels, and their buffers
    for name, each in found.items():
        assert set(each["errors"]) == {"MemoryError"}, (name, each)
        assert not any(each["leaks"]), (name, each)
        assert each["same"], name
