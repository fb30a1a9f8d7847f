"""One model on one rank and on two, on the same cores: what it costs that ranks share it, and what each of them has.

All sides are open at once and take turns, a step at a time. Then each is a server, whose callers send a step when
their last is answered.
"""

from __future__ import annotations

import argparse
import time
from contextlib import AsyncExitStack
from typing import Any, Final

from benchmarks.cases import CELLS, DECODE, QUICK_CELLS, Cell
from benchmarks.engines.grpc import Client
from benchmarks.engines.inprocess import Inside
from benchmarks.machine import memory_of
from benchmarks.record import Benchmark, Contest, Opening, Record
from ferrum_rpc.engine.ranks.compute import RankedCompute

SIDES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "1 rank, 2 threads": (2, {}),
    "1 rank, 1 thread": (1, {}),
    "tensor 2": (1, {"tensor_parallel": 2}),
    "tensor 2, gloo": (1, {"tensor_parallel": 2, "rank_transport": "gloo"}),
    "pipeline 2": (1, {"pipeline_parallel": 2}),
}
"""Threads of every rank, and settings. A step at a time: of two stages one waits for the other."""

NAMES: Final = ("prefill 512", "decode b1 @512", "decode b8 @256")

QUEUED: Final = ("1 rank, 2 threads", "1 rank, 1 thread", "tensor 2", "pipeline 2")
QUEUED_CELLS: Final = (Cell(DECODE, 16, 256), Cell(DECODE, 16, 256, callers=2))
QUICK_QUEUED_CELLS: Final = (Cell(DECODE, 4, 8, most=4), Cell(DECODE, 4, 8, most=4, callers=2))


async def run(options: argparse.Namespace) -> Record:
    """All sides, all cells."""
    cells = QUICK_CELLS if options.quick else [each for each in CELLS if each.name in NAMES]
    queued = QUICK_QUEUED_CELLS if options.quick else QUEUED_CELLS
    here = Contest(options)
    said: dict[str, Any] = here.record.values["settings"]
    async with AsyncExitStack() as stack:
        sides = {}
        for name, (threads, settings) in SIDES.items():
            began = time.monotonic()
            opening = Inside.open(here.folder, cells, threads, dtype="bfloat16", **settings)
            side = await here.open(stack, name, opening)
            if isinstance(side, Inside):
                sides[name] = side
                said[name] = f"loaded in {time.monotonic() - began:.1f} s"
        await here.play(cells, sides, next(iter(SIDES)))
        for name, side in sides.items():
            if isinstance(compute := side.runner.compute, RankedCompute):
                for pid in compute.others:
                    said[name] += f", {memory_of(pid, 'RssAnon') / 1e6:,.0f} MB on rank 1"
    async with AsyncExitStack() as stack:
        behind = dict[str, Opening]()
        for name in QUEUED:
            threads, settings = SIDES[name]
            behind[name] = Client.open(here.folder, queued, threads, name=name, dtype="bfloat16", **settings)
        await here.play(queued, await here.open_all(stack, behind), QUEUED[0])
    return here.record


BENCHMARK: Final = Benchmark("ranks", run, rounds=3, round_s=1.0)
