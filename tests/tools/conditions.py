"""Under what a result was measured, for tests of the pages that are made of results."""

from __future__ import annotations

from typing import Any


def conditions(benchmark: str) -> dict[str, Any]:
    """What `benchmarks.record` notes beside the figures."""
    return {
        "hardware": {"cpu": "Some CPU", "cores": 2, "memory_gib": 23.4, "flags": [], "huge_pages": "never"},
        "commit": {"id": "0123456789abcdef0123", "dirty": False},
        "versions": {},
        "others_cpu": 0.0,
        "began": "2026-11-21T06:00:00+00:00",
        "ended": "2026-11-21T06:10:00+00:00",
        "command": f"python -m benchmarks.{benchmark}",
    }
