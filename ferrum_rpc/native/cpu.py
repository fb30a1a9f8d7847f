"""What this CPU can do, by the kernel's account. A cgroup or container does not hide it."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def flags() -> frozenset[str]:
    """The names of its instruction sets, as /proc/cpuinfo has them; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, ()))
