"""`make bench`: how fast, beside the machine's limits and beside transformers, all in one run.

    ours, in process      the runner, driven as an in-process engine would
    ours, gRPC session    `ferrum-rpc serve` in another process, this one being its scheduler
    ours with int8 ...    the same of a server with ``--quantize int8``
    transformers eager    the same weights and the same tokens in a third, driven through its own forward

The sides alternate round by round. Around them: what other outputs than greedy tokens cost, how decode steps fare
beside prefill chunks, what a sequence costs in bookkeeping, and how long a start takes. ``--only`` runs a part.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from benchmarks import tables
from benchmarks.cases import CELLS, QUICK_CELLS, settings
from benchmarks.engines.grpc import INT8, Client, open_int8
from benchmarks.engines.inprocess import INSIDE, Inside
from benchmarks.engines.process import REFERENCE, PeerKind, PeerProcess
from benchmarks.parts import MIX, QUICK_MIX, QUICK_SIZES, SIZES, mixed, outputs, slopes, starting
from benchmarks.record import Contest, Opening, Record, finish, out_of, read_options

PARTS: Final = ("cells", "outputs", "mixed", "bookkeeping", "start")
EAGER: Final = PeerKind("transformers eager", "hf")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description="How fast, beside limits and a peer."
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = read_options(parser, argv, rounds=5, round_s=2.0)
    options.cells, options.out = QUICK_CELLS if options.quick else CELLS, out_of(options, "suite")
    return options


async def run(options: argparse.Namespace) -> Record:
    """Measure the parts. Starts come first: no other process holds the weights in memory yet."""
    here = Contest(options, "suite", "qwen3-0.6b")
    record, folder, cells, quick = here.record, here.folder, options.cells, options.quick
    if "start" in options.only:
        record.save(start=await starting(Path(folder), settings(cells, options.threads), 1 if quick else 3))
    if "bookkeeping" in options.only:
        record.save(bookkeeping=await slopes(QUICK_SIZES if quick else SIZES, 8 if quick else 200))
    if "outputs" in options.only:
        async with Inside.open(folder, cells, options.threads) as inside:
            record.save(outputs=await outputs(inside, cells, options.rounds, options.round_seconds / 4))
    mix = QUICK_MIX if quick else MIX
    record.save(limits=here.machine.limits())
    if not {"cells", "mixed"} & set(options.only):
        return record
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(Client.open(folder, [*cells, mix.cell], options.threads))
        if "cells" in options.only:
            sides: dict[str, Opening] = {
                INSIDE: Inside.open(folder, cells, options.threads),
                INT8: open_int8(folder, cells, options.threads),
                EAGER.name: PeerProcess.open(EAGER, folder, options.threads, here.spec.vocab_size),
            }
            record.values["sides"][REFERENCE] = session.facts
            found = {name: await here.open(stack, name, opening) for name, opening in sides.items()}
            await here.play(cells, {REFERENCE: session, **{name: each for name, each in found.items() if each}})
        if "mixed" in options.only:
            record.save(mixed=await mixed(session, mix))
    return record


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    finish(run(parse(argv)), tables.show_suite)


if __name__ == "__main__":
    main()
