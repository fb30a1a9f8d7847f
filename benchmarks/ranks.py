"""One model on one rank and on two, on the same cores: what it costs that ranks share it. Every side is a server, whose
callers send a step when their last is answered. All are up at once and take turns.
"""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from typing import Any, Final

from benchmarks.cases import CELLS, DECODE, QUICK_CELLS, Cell
from benchmarks.engines.grpc import Client
from benchmarks.record import Benchmark, Contest, Opening, Record

SIDES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "1 rank, 2 threads": (2, {}),
    "1 rank, 1 thread": (1, {}),
    "tensor 2": (1, {"tensor_parallel": 2}),
    "tensor 2, gloo": (1, {"tensor_parallel": 2, "rank_transport": "gloo"}),
    "pipeline 2": (1, {"pipeline_parallel": 2}),
}
"""Threads of every rank, and settings. A step at a time: of two stages one waits for the other."""

NAMES: Final = ("prefill 512", "decode b1 @512", "decode b8 @256")
QUEUED: Final = (Cell(DECODE, 16, 256), Cell(DECODE, 16, 256, callers=2))
QUICK_QUEUED: Final = (Cell(DECODE, 4, 8, most=4), Cell(DECODE, 4, 8, most=4, callers=2))


async def run(options: argparse.Namespace) -> Record:
    """All sides, all cells."""
    cells = [*QUICK_CELLS, *QUICK_QUEUED] if options.quick else [*(c for c in CELLS if c.name in NAMES), *QUEUED]
    here, openings = Contest(options), dict[str, Opening]()
    for name, (threads, settings) in SIDES.items():
        openings[name] = Client.open(here.folder, cells, threads, name=name, dtype="bfloat16", **settings)
    async with AsyncExitStack() as stack:
        await here.play(cells, await here.open_all(stack, openings), next(iter(SIDES)))
    return here.record


BENCHMARK: Final = Benchmark("ranks", run, rounds=3, round_s=1.0)
