"""One model on one rank and on two, on the same cores: what it costs that ranks share it, and what each of them has.

Where a model fits one process, threads are the better way to use the cores of one machine. The sides with two ranks
have a thread each, and stand beside one rank with one thread and with two: the difference to the latter is the price of
ranks, the one to the former what two of them gain. All sides are open at once and take turns.

So far a step at a time; then the engine's queue is between, and callers send steps whenever their last is answered. Two
callers' steps are in two stages at once; where there is one stage, the queue may make one step of both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks import tables
from benchmarks.cases import CELLS, DECODE, QUICK_CELLS, Cell
from benchmarks.compare import Player
from benchmarks.engines.inprocess import Inside
from benchmarks.engines.looped import Looped
from benchmarks.record import Contest, Record, finish, out_of, read_options
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


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description="Two ranks beside one.")
    options = read_options(parser, argv, rounds=3, round_s=1.0)
    options.alone = QUICK_CELLS if options.quick else [each for each in CELLS if each.name in NAMES]
    options.queued = QUICK_QUEUED_CELLS if options.quick else QUEUED_CELLS
    options.cells = [*options.alone, *options.queued]
    options.out = out_of(options, "ranks")
    return options


async def run(options: argparse.Namespace) -> Record:
    """All sides, all cells."""
    here, ranks = Contest(options, "ranks", "qwen3-0.6b"), dict[str, Any]()
    async with AsyncExitStack() as stack:
        sides = {}
        for name, (threads, settings) in SIDES.items():
            began = time.monotonic()
            opening = Inside.open(here.folder, options.alone, threads, dtype="bfloat16", **settings)
            side = await here.open(stack, name, opening)
            if isinstance(side, Inside):
                sides[name] = side
                ranks[name] = {"start_s": time.monotonic() - began}
        await here.play(options.alone, sides, next(iter(SIDES)))
        for name, side in sides.items():
            if isinstance(compute := side.runner.compute, RankedCompute):
                ranks[name]["own_bytes"] = [_rss(pid) for pid in compute.others]
    async with AsyncExitStack() as stack:
        behind: dict[str, Player] = {}
        for name in QUEUED:
            threads, settings = SIDES[name]
            queued = Looped.open(here.folder, options.queued, threads, dtype="bfloat16", **settings)
            if (player := await here.open(stack, name, queued)) is not None:
                behind[name] = player
        await here.play(options.queued, behind, QUEUED[0])
    here.record.save(limits=here.machine.limits(), ranks=ranks)
    return here.record


def _rss(pid: int) -> int:
    """Memory of another rank that no file backs: its part of the weights, and torch."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    finish(run(parse(argv)), tables.show_suite)


if __name__ == "__main__":
    main()
