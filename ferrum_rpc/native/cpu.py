"""The CPU: its instruction sets according to the operating system, and requirements of code for it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

import torch

from ferrum_rpc.usage import masked_isa

BFLOAT16: Final = ("amx_bf16", "avx512_bf16", "bf16")
"""Instruction sets that multiply bfloat16, best first."""

HIDDEN: Final = {
    "portable": ("amx", "avx", "fma"),
    "avx2": ("amx", "avx512"),
    "avx512_vnni": ("amx", "avx512_bf16", "avx512_fp16"),
    "avx512": ("amx",),
    "amx": (),
}
"""What the names of those sets begin with that a value of `FERRUM_ISA` hides."""


def flags() -> frozenset[str]:
    """The names of its instruction sets, as in /proc/cpuinfo, without those that `FERRUM_ISA` hides; empty if there is
    no such file. Raises `ConfigError` for an unknown value."""
    isa = masked_isa()
    return _flags() if isa is None else frozenset(each for each in _flags() if not each.startswith(HIDDEN[isa]))


@functools.cache
def _flags() -> frozenset[str]:
    """All of them: a cgroup or container does not hide any."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, ()))


def bfloat16() -> str | None:
    """Which of `BFLOAT16` it has, or None."""
    return next((name for name in BFLOAT16 if name in flags()), None)


def require(device: torch.device, dtype: torch.dtype, *taken: torch.dtype) -> None:
    """Raise OSError if ``device`` is not a CPU or ``dtype`` is not one of ``taken``."""
    if device.type != "cpu":
        raise OSError(f"it runs on a CPU, not on {device.type}")
    if dtype not in taken:
        names = [str(each).removeprefix("torch.") for each in (*taken, dtype)]
        raise OSError(f"it computes in {' and '.join(names[:-1])}, not {names[-1]}")
