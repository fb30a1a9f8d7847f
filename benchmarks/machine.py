"""What a figure is worth nothing without: hardware, versions, the commit, and who else was on the machine.

Names no host: the results are published.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "grpcio", "protobuf", "numpy")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "hypervisor")
"""What decides which kernels run, and whether the cores are virtual."""

ISA_ORDER = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd")
QUIET: Final = 0.05  # share of the cores' time that others may have before figures are doubtful
TICKS_S: Final = 0.06  # the kernel counts time in ticks of 10 ms, per core and per process


WRITTEN: Final = (":!benchmarks/results", ":!docs")  # what a benchmark writes, as git leaves it out
Facts = dict[str, Any]


def hardware() -> Facts:
    """The machine that this runs on, without what `FERRUM_ISA` hides. ``huge_pages`` is the kernel's policy for
    transparent ones: it moves memory-bound steps by 10 %."""
    from ferrum_rpc.native import cpu  # here, because peers import this module without torch

    fields, flags = _cpu_fields(), cpu.flags()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "huge_pages": _huge_pages(),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of Python, the system and packages, by default those that the steps run through."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def commit() -> Facts:
    """What is measured, ``unknown`` outside of a working tree; ``dirty``: with changes that the commit does not have.
    Results and documents do not count: the benchmarks of one sitting write them one after the other."""
    head = _git("rev-parse", "HEAD")
    return {"id": head or "unknown", "dirty": bool(_git("status", "--porcelain", "--", ".", *WRITTEN))}


class Bystanders:
    """How much of the machine others used meanwhile: what they took, one of the sides did not get."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._others = _others_s()

    def share(self) -> float | None:
        """Of all cores' time since the start, about; None where the system does not tell."""
        used = self._used_s()
        return None if used is None else round(max(0.0, used) / self._available_s(), 3)

    def disturbed(self) -> bool:
        """Whether that was more than `QUIET`, and more than the kernel's ticks can tell."""
        used = self._used_s()
        return used is not None and used > max(QUIET * self._available_s(), TICKS_S)

    def _used_s(self) -> float | None:
        others = _others_s()
        return None if self._others is None or others is None else others - self._others

    def _available_s(self) -> float:
        return (time.monotonic() - self._began) * (os.cpu_count() or 1)


def label(machine: Facts) -> str:
    """Names a kind of machine, not a machine: ``2cpu-avx512_bf16``."""
    isa = next((flag for flag in ISA_ORDER if flag in machine["flags"]), platform.machine())
    return f"{machine['cores']}cpu-{isa}"


def processor_s(pid: int) -> float:
    """Seconds that the cores worked for a process, with all its threads. Raises OSError if it has ended."""
    user, system = _process_fields(Path(f"/proc/{pid}/stat"))[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _process_fields(file: Path) -> list[str]:
    """Of pid (name) state ppid ...: what is behind the name, which may hold anything; the first is no number."""
    return file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _others_s() -> float | None:
    """Seconds that the cores worked, or were taken by the hypervisor, for others than this process and its children."""
    if not (text := _text("/proc/stat")):
        return None
    fields = [int(each) for each in text.splitlines()[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4]) - _children_s()  # os.times counts the children that have ended


def _children_s() -> float:
    """Seconds of the children that live."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            fields = _process_fields(file)
            if int(fields[1]) == os.getpid():
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_fields() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty elsewhere than on Linux."""
    pairs = (line.partition(":") for line in _text("/proc/cpuinfo").split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _huge_pages() -> str:
    text = _text("/sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _text(path: str) -> str:
    """Of a file of the kernel; nothing where it is not."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    print(
        json.dumps({"machine": label(here := hardware()), "hardware": here, "versions": versions(), "commit": commit()})
    )
