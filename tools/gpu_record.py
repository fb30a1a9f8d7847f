"""The record of a GPU check: which parts ran, failed or were skipped, with what, and how long they took.

A file of `benchmarks/results/` as the others: `benchmarks.report` makes a section of docs/benchmarks.md from it.
"""

from __future__ import annotations

import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Final

import torch

from benchmarks.environment import Bystanders, commit, hardware
from benchmarks.record import SCHEMA
from tools.gpu_cases import reason

RESULT: Final = "gpu"
REHEARSAL: Final = "gpu, interpreted"
"""What a run on a CPU calls itself: no benchmark's name, so that nobody takes its figures for a GPU's."""


def opening(device: torch.device, only: Sequence[str], *, tiny: bool) -> dict[str, Any]:
    """What a record begins with; it ends with `closing`."""
    arguments = ["--interpret"] * tiny + (["--only", *only] if only else [])
    return {
        "schema": SCHEMA,
        "benchmark": REHEARSAL if tiny else RESULT,
        "command": " ".join(["python", "-m", "tools.gpu_check", *arguments]),
        "began": _now(),
        "ended": "",
        "commit": commit(),
        "hardware": hardware(),
        "environment": environment(device),
        "part_seconds": {},
    }


def closing(check: Check) -> dict[str, Any]:
    """What it ends with."""
    ended = {"ended": _now(), "others_cpu": check.others_cpu}
    return ended | {"failed": check.failed, "skipped": check.skipped}


class Check:
    """The record, and what is left of the time. ``part`` runs a part unless too little time is left for it."""

    def __init__(self, record: dict[str, Any], budget_s: float, only: Collection[str] = ()) -> None:
        self.record, self.failed, self.skipped = record, [], []  # type: tuple[dict[str, Any], list[str], list[str]]
        self._only = only
        self._bystanders = Bystanders()
        self._ends = time.monotonic() + budget_s

    @property
    def others_cpu(self) -> float | None:
        """Share of the cores' time that other processes had so far; None where the system does not tell."""
        return self._bystanders.share()

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self._ends - time.monotonic()

    def part(self, name: str, run: Callable[[], Any], *, needs_s: float, packages: tuple[str, ...] = ()) -> Any:
        """What ``run`` returned, kept in the record as ``name``; None where it was skipped, failed or not asked for."""
        if self._only and name not in self._only:
            return None
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            self.skip(name, f"needs {', '.join(missing)}")
        elif self.left_s < needs_s:
            self.skip(name, f"needs about {needs_s:.0f} s, {max(0.0, self.left_s):.0f} s are left")
        else:
            began = time.monotonic()
            print(f"gpu-check: {name} ...", flush=True)
            try:
                self.record[name] = run()
                return self.record[name]
            except subprocess.TimeoutExpired as error:
                self.skip(name, f"did not end within {error.timeout:.0f} s")
            except Exception as error:
                traceback.print_exc()
                self.failed.append(f"{name}: {reason(error)}")
            finally:
                self.record["part_seconds"][name] = round(time.monotonic() - began, 1)
        return None

    def skip(self, name: str, why: str) -> None:
        """Say that a part did not run."""
        self.skipped.append(f"{name}: {why}")

    def cells(self, name: str, run: Callable[[], Any], **needs: Any) -> None:
        """A part of cells, each with its own outcome."""
        for cell in self.part(name, lambda: list(run()), **needs) or []:
            if not cell["passed"]:
                told = {key: value for key, value in cell.items() if isinstance(value, (int, float, str))}
                self.failed.append(f"{name}: {told}")


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
