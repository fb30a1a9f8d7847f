"""`make gpu-check`: everything that waits for a CUDA device, in one command, with its results as data.

Runs `tests/gpu` and writes what ran, on what, with which versions and outcomes, as JSON. Exit status 1 if anything
failed, or if there is no CUDA device (a check that cannot fail would be none).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


class Results:
    """Collects each test's outcome and seconds."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A pytest hook: called for set-up, call and tear-down of each test."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("/")[2]
            self.tests[name] = {"outcome": report.outcome, "seconds": round(report.duration, 3)}


def environment() -> dict[str, Any]:
    """Hardware and versions."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "transformers", "grpcio", "protobuf", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "device": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "memory_bytes": torch.cuda.mem_get_info(0)[1],
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
    }


def main() -> None:
    """Check, write, exit."""
    parser = argparse.ArgumentParser(description="Run the CUDA checks and write their results.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu-check.json")
    out: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        sys.exit("gpu-check: torch finds no CUDA device; nothing was checked")
    results = Results()
    arguments = [str(ROOT / "tests/gpu"), "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    status = pytest.main(arguments, plugins=[results])
    passed = sum(test["outcome"] == "passed" for test in results.tests.values())
    record = {
        "command": "python tools/gpu_check.py",
        "environment": environment(),
        "passed": passed,
        "total": len(results.tests),
        "tests": results.tests,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"gpu-check: {passed} of {len(results.tests)} passed; wrote {out}")
    sys.exit(int(status) or int(passed != len(results.tests) or not passed))


if __name__ == "__main__":
    main()
