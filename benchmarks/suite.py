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
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks import machine, tables
from benchmarks.cases import BLOCK_SIZE, CELLS, LEAD_IN, QUICK_CELLS, Cell, checkpoint, settings
from benchmarks.compare import Player, Unsupported, contest
from benchmarks.engines.grpc import INT8, Session, open_int8
from benchmarks.engines.inprocess import INSIDE, Inside
from benchmarks.engines.process import REFERENCE, PeerKind, PeerProcess
from benchmarks.limits import Machine, roof
from benchmarks.parts import MIX, QUICK_MIX, QUICK_SIZES, SIZES, mixed, slopes, starting
from benchmarks.record import Record, add_common, model_facts, out_of
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.runtime import openmp_waits

PARTS: Final = ("cells", "mixed", "bookkeeping", "start")
EAGER: Final = PeerKind("transformers eager", "hf")
Opening = AbstractAsyncContextManager[Player]


class Contest:
    """The cells of a run, side by side: a result for each, with its limit, saved as it comes."""

    def __init__(self, options: argparse.Namespace, name: str, shape: str, device: str = "cpu") -> None:
        folder = checkpoint("tiny" if options.quick else shape)
        self.folder, self.options = str(folder), options
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        told = {
            "threads": options.threads,
            "rounds": options.rounds,
            "round_s": options.round_seconds,
            "lead_in_steps": LEAD_IN,
            "block_size": BLOCK_SIZE,
            "openmp_waits": openmp_waits(),
            "output": "greedy: the arg-max of every row; the tokens fed were chosen beforehand, the same for all sides",
        }
        self.record = Record(name, told, options.out)
        self.record.save(model=model_facts(folder.name, self.config), cells=[], sides={}, left_out={})
        self.machine = Machine(options.threads, device, quick=options.quick)
        self.machine.read()

    async def open(self, stack: AsyncExitStack, name: str, opening: Opening) -> Player | None:
        """A side, or None: then it is left out, and the file says why."""
        values = self.record.values
        try:
            player = await stack.enter_async_context(opening)
        except (Unsupported, OSError) as error:
            values["left_out"][name] = str(error)
            print(f"{name} is left out: {error}", flush=True)
            return None
        values["sides"][name] = player.facts
        return player

    async def play(self, cells: Sequence[Cell], players: Mapping[str, Player], reference: str = REFERENCE) -> None:
        """Every cell, by all sides in turn."""
        results: list[dict[str, Any]] = self.record.values["cells"]
        named = {cell.name: cell for cell in self.options.cells}
        for cell in cells:
            self.machine.read()
            options = self.options
            results.append(await contest(cell, players, reference, options.rounds, options.round_seconds))
            limits = self.machine.limits()  # the best readings of the whole run, for every cell
            for result in results:
                result["roof"] = roof(named[result["cell"]], self.config, limits)
            self.record.save(limits=limits)
            print(f"{', '.join(players)}: {cell.name}: done", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every contest of cells has."""
    parser.add_argument("--round-seconds", type=float, help="of a round, about (default: 2)")
    parser.add_argument("--threads", type=int, help="compute threads of every side (default: one per core)")
    add_common(parser)


def fill(options: argparse.Namespace, name: str, rounds: int, cells: Sequence[Cell] = CELLS) -> argparse.Namespace:
    """What was not written."""
    options.rounds = options.rounds or (2 if options.quick else rounds)
    options.round_seconds = options.round_seconds or (0.01 if options.quick else 2.0)
    options.threads = options.threads or machine.hardware()["cores"]
    options.cells = QUICK_CELLS if options.quick else cells
    options.out = out_of(options, name)
    return options


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description="How fast, beside limits and a peer."
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    add_options(parser)
    return fill(parser.parse_args(argv), "suite", rounds=5)


async def run(options: argparse.Namespace) -> Record:
    """Measure the parts. Starts come first: no other process holds the weights in memory yet."""
    here = Contest(options, "suite", "qwen3-0.6b")
    record, folder, cells, quick = here.record, here.folder, options.cells, options.quick
    if "start" in options.only:
        record.save(start=await starting(Path(folder), settings(cells, options.threads), 1 if quick else 3))
    if "bookkeeping" in options.only:
        record.save(bookkeeping=await slopes(QUICK_SIZES if quick else SIZES, 8 if quick else 200))
    mix = QUICK_MIX if quick else MIX
    record.save(limits=here.machine.limits())
    if not {"cells", "mixed"} & set(options.only):
        return record
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(Session.open(folder, [*cells, mix.cell], options.threads))
        if "cells" in options.only:
            sides: dict[str, Opening] = {
                INSIDE: Inside.open(folder, cells, options.threads),
                INT8: open_int8(folder, cells, options.threads),
                EAGER.name: PeerProcess.open(EAGER, folder, options.threads, here.config["vocab_size"]),
            }
            record.values["sides"][REFERENCE] = session.facts
            found = {name: await here.open(stack, name, opening) for name, opening in sides.items()}
            await here.play(cells, {REFERENCE: session, **{name: each for name, each in found.items() if each}})
        if "mixed" in options.only:
            record.save(mixed=await mixed(session, mix))
    return record


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    options = parse(argv)
    configure_logging(level="warning")
    record = asyncio.run(run(options))
    tables.show_suite(record.values)
    record.tell()


if __name__ == "__main__":
    main()
