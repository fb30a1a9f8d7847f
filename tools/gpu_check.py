"""`make gpu-check`: everything that waits for a CUDA device, in one command, with its results as data.

Three parts, each of which goes on where another fails: the attention kernels against float64, how fast they are, and
`tests/gpu` and `tests/kernels`. The first two need torch, triton and numpy; a test that needs packages that are not
there is left out, and the record says so. Writes what ran, on what, with which versions and outcomes, as JSON.
Exit status 1 if anything failed, or if there is no CUDA device (a check that cannot fail would be none).

``--interpret`` runs the first two on a CPU, tiny, through Triton's interpreter: it shows that the check itself runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).resolve().parent.parent
SUITES: Final = {"tests/kernels": ("pytest", "hypothesis"), "tests/gpu": ("pytest", "transformers", "structlog")}
"""Tests, and what they need that may not be there."""


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware and versions."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "transformers", "grpcio", "protobuf", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    found: dict[str, Any] = {"device": "interpreter", "python": platform.python_version(), "versions": versions}
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "memory_bytes": torch.cuda.mem_get_info(device)[1],
            "cuda": torch.version.cuda,
        }
    return found


def parity(device: torch.device, *, tiny: bool) -> list[dict[str, Any]]:
    """The kernels' largest error against float64 per layer, dtype and step, beside the torch path's own."""
    from ferrum_rpc.attention.torch_paged import TorchPagedAttention
    from ferrum_rpc.attention.triton_paged import TritonPagedAttention
    from tools.gpu_cases import LONG, MIX, SPECS, TOLERANCE, paged_step

    steps = {"mix": MIX[:4]} if tiny else {"mix": MIX, "long": LONG}
    names = ["group 7"] if tiny else list(SPECS)
    found = []
    for name in names:
        for dtype, tolerance in TOLERANCE.items():
            for step, spans in steps.items():
                world = paged_step(SPECS[name], spans, device=device, dtype=dtype)
                record: dict[str, Any] = {"layer": name, "dtype": str(dtype).removeprefix("torch."), "step": step}
                for side, backend in (("error", TritonPagedAttention), ("torch_error", TorchPagedAttention)):
                    attention: Any = backend([world.spec], [world.keys], [world.values])
                    record[side] = world.error(attention.attend(0, world.query, attention.plan(world.geometry)))
                found.append(record | {"tolerance": tolerance, "passed": record["error"] <= tolerance})
    return found


def run_tests() -> dict[str, Any]:
    """Each suite's tests with outcome and seconds, or what is missing for it."""
    found: dict[str, Any] = {}
    for suite, needs in SUITES.items():
        missing = [package for package in needs if find_spec(package) is None]
        found[suite] = {"missing": missing} if missing else _run_suite(ROOT / suite)
    return found


def _run_suite(folder: Path) -> dict[str, Any]:
    import pytest

    tests: dict[str, dict[str, Any]] = {}

    class Results:
        """Collects each test's outcome and seconds."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            """A pytest hook: called for set-up, call and tear-down of each test."""
            if report.when == "call" or report.outcome != "passed":
                name = report.nodeid.rpartition("/")[2]
                tests[name] = {"outcome": report.outcome, "seconds": round(report.duration, 3)}

    # what the whole suite shares (quiet logs) needs packages that these tests do not
    arguments = [str(folder), "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), f"--confcutdir={folder}"]
    status = int(pytest.main(arguments, plugins=[Results()]))
    passed = sum(test["outcome"] == "passed" for test in tests.values())
    failed = sum(test["outcome"] == "failed" for test in tests.values())
    return {"passed": passed, "failed": failed, "status": status, "tests": tests}


def main() -> None:
    """Check, write, exit."""
    parser = argparse.ArgumentParser(description="Run the CUDA checks and write their results.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu-check.json")
    parser.add_argument("--interpret", action="store_true", help="tiny, on a CPU, through Triton's interpreter")
    arguments = parser.parse_args()
    out: Path = arguments.out
    interpret: bool = arguments.interpret
    if interpret:
        from tools.gpu_interpreter import interpret as interpret_kernels

        interpret_kernels()
    elif not torch.cuda.is_available():
        sys.exit("gpu-check: torch finds no CUDA device; nothing was checked")
    device = torch.device("cpu" if interpret else "cuda")
    record: dict[str, Any] = {
        "command": "python -m tools.gpu_check" + " --interpret" * interpret,
        "environment": environment(device),
    }
    from tools.gpu_cases import reason

    failed = []
    try:
        record["parity"] = parity(device, tiny=interpret)
        failed += [f"parity: {each}" for each in record["parity"] if not each["passed"]]
    except Exception as error:
        traceback.print_exc()
        failed.append(f"parity: {reason(error)}")
    try:
        from tools.gpu_attention import LOADS, TINY, measure

        record["attention"] = measure(device, TINY if interpret else LOADS, rounds=1 if interpret else 9)
    except Exception as error:
        traceback.print_exc()
        failed.append(f"attention: {reason(error)}")
    if not interpret:
        record["tests"] = run_tests()
        failed += [f"{suite}: {each['failed']} failed" for suite, each in record["tests"].items() if each.get("status")]
    record["failed"] = failed
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for each in failed:
        print(f"gpu-check: FAILED {each}")
    print(f"gpu-check: {'failed' if failed else 'passed'}; wrote {out}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
