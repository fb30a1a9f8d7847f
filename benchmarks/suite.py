"""`make bench`: how fast, beside the machine's limits and beside transformers, all in one run.

    ours, in process      the runner, driven as an in-process engine would
    ours, gRPC session    `ferrum-rpc serve` in another process, this one being its scheduler
    ours with int8 ...    the same of a server with ``--quantize int8``
    transformers eager    the same weights and the same tokens in a third, driven through its own forward

The sides alternate round by round. Around them: how decode steps fare beside prefill chunks, what a sequence costs in
bookkeeping, and how long a start takes. ``--only`` runs a part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks import environment
from benchmarks.bookkeeping import QUICK_SIZES, SIZES, slopes
from benchmarks.cells import CELLS, QUICK_CELLS, Cell
from benchmarks.contest import Plan, contest, under_roofs
from benchmarks.limits import Machine
from benchmarks.mixed import MIX, QUICK_MIX, mixed
from benchmarks.ours import INSIDE, INT8, REFERENCE, Inside, Player, Session, Unsupported, open_int8, settings
from benchmarks.peer_process import EAGER, PeerFailed, PeerProcess
from benchmarks.record import Record, model_facts
from benchmarks.starting import starting
from benchmarks.suite_tables import show
from benchmarks.wire import RESULTS
from benchmarks.workload import BLOCK_SIZE, CACHE, LEAD_IN, checkpoint
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.openmp import waits

PARTS: Final = ("cells", "mixed", "bookkeeping", "start")
SHAPE: Final = "qwen3-0.6b"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description="How fast, beside limits and a peer."
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    add_common(parser, "suite", rounds=5)
    return common(parser.parse_args(argv), "suite")


def add_common(parser: argparse.ArgumentParser, name: str, rounds: int) -> None:
    """What this and `benchmarks.peers` have in common."""
    parser.add_argument("--rounds", type=int, help=f"of every side (default: {rounds})")
    parser.add_argument("--round-seconds", type=float, help="of a round, about (default: 2)")
    parser.add_argument("--threads", type=int, help="compute threads of every side (default: one per core)")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, few steps: does it run at all?")
    parser.add_argument("--out", type=Path, help=f"JSON file (default: benchmarks/results/{name}-<machine>.json)")
    parser.set_defaults(default_rounds=rounds)


def common(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """Fill in what was not written."""
    machine = environment.hardware()
    options.rounds = options.rounds or (2 if options.quick else options.default_rounds)
    options.round_seconds = options.round_seconds or (0.01 if options.quick else 2.0)
    options.threads = options.threads or machine["cores"]
    options.cells = QUICK_CELLS if options.quick else CELLS
    if options.out is None:  # a quick run is no result
        label = environment.label(machine)
        options.out = CACHE / f"{name}-quick.json" if options.quick else RESULTS / f"{name}-{label}.json"
    return options


def model(quick: bool) -> tuple[Path, dict[str, Any]]:
    """The checkpoint and its configuration."""
    folder = checkpoint("tiny" if quick else SHAPE)
    return folder, json.loads((folder / "config.json").read_text(encoding="utf-8"))


def described(options: argparse.Namespace) -> dict[str, Any]:
    """What the file says of how the cells were run."""
    return {
        "threads": options.threads,
        "rounds": options.rounds,
        "round_s": options.round_seconds,
        "lead_in_steps": LEAD_IN,
        "block_size": BLOCK_SIZE,
        "openmp_waits": waits(),
        "output": "greedy: the arg-max of every row; the tokens fed were chosen beforehand, the same for all sides",
    }


async def run(options: argparse.Namespace) -> Record:
    """Measure the parts. Starts come first: no other process holds the weights in memory yet."""
    folder, config = model(options.quick)
    record = Record("suite", described(options), options.out)
    record.save(model=model_facts(folder.name, config))
    machine = Machine(options.threads, quick=options.quick)
    machine.read()
    if "start" in options.only:
        flags = settings(options.cells, options.threads)
        record.save(start=await starting(folder, flags, 1 if options.quick else 3))
    if "bookkeeping" in options.only:
        sizes = QUICK_SIZES if options.quick else SIZES
        record.save(bookkeeping=await slopes(sizes, 8 if options.quick else 200))
    if "cells" in options.only or "mixed" in options.only:
        await _sides(options, folder, config, machine, record)
    record.save(limits=machine.limits())
    return record


async def _sides(
    options: argparse.Namespace, folder: Path, config: dict[str, Any], machine: Machine, record: Record
) -> None:
    cells: Sequence[Cell] = options.cells
    mix = QUICK_MIX if options.quick else MIX
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(Session.open(str(folder), [*cells, mix.cell], options.threads))
        players: dict[str, Player] = {REFERENCE: session}
        if "cells" in options.only:
            enter = stack.enter_async_context
            players[INSIDE] = await enter(Inside.open(str(folder), cells, options.threads))
            left_out = {}
            try:
                players[INT8] = await enter(open_int8(str(folder), cells, options.threads))
            except Unsupported as error:
                left_out[INT8] = str(error)
            peer = PeerProcess.open(EAGER, str(folder), options.threads, config["vocab_size"])
            try:
                players[EAGER.name] = await enter(peer)
            except PeerFailed as error:
                left_out[EAGER.name] = str(error)
            record.save(left_out=left_out)
            record.save(sides={name: player.facts for name, player in players.items()})
            results = []
            for cell in cells:
                machine.read()
                results.append(await contest(cell, players, REFERENCE, Plan(options.rounds, options.round_seconds)))
                under_roofs(results, cells, config, machine)
                record.save(cells=results, limits=machine.limits())
                print(f"{cell.name}: done", flush=True)
        if "mixed" in options.only:
            record.save(mixed=await mixed(session, mix))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    options = parse(argv)
    configure_logging(level="warning")
    record = asyncio.run(run(options))
    show(record.values)
    record.tell()


if __name__ == "__main__":
    main()
