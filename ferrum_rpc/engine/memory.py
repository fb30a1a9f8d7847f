"""How much memory this process may still take: the machine's, or its container's where that is less.

The kernel's figure for the machine ignores control groups; a cache that was sized by it inside a container with a
limit would be killed at its first full load.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

import torch

PAGE: Final = resource.getpagesize()
MEMINFO: Final = Path("/proc/meminfo")
STATM: Final = Path("/proc/self/statm")
CGROUP: Final = Path("/sys/fs/cgroup")

_LIMIT_AND_USE: Final = (
    ("memory.max", "memory.current"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)


def total_memory(meminfo: Path = MEMINFO) -> int:
    """Bytes of memory that the machine has, or 0 where that is not known."""
    return _meminfo(meminfo).get("MemTotal", 0)


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that can be taken without swapping or breaking the container's limit, or 0 where that is not known."""
    available = _meminfo(meminfo).get("MemAvailable", 0)
    for limit_name, use_name in _LIMIT_AND_USE:
        limit, use = _number(cgroup / limit_name), _number(cgroup / use_name)
        if limit is not None and use is not None:
            available = min(available, max(0, limit - use))
    return available


def free_memory(device: torch.device) -> int:
    """As `available_memory`, of the device. On a GPU torch's allocator first releases what it keeps for later tensors,
    as after loading: not for use between steps."""
    if device.type != "cuda":
        return available_memory()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def used_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that this process has resident, 0 where that is not known; and that it has reserved on a GPU."""
    try:
        resident = int(STATM.read_text().split()[1]) * PAGE
    except OSError:
        resident = 0
    return resident, torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _meminfo(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) >= 2 and words[1].isdecimal()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # version 2 says "max" for no limit
