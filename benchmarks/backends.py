"""One model by the native decoder and by transformers' layers over our cache, beside transformers alone, in one run.

The sides alternate round by round; the runners of both backends are in this process, transformers is in another. How
much a family costs that only transformers serves, in the place of one that the native decoder does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from benchmarks import tables
from benchmarks.cases import CELLS, QUICK_CELLS
from benchmarks.engines.inprocess import Inside
from benchmarks.engines.process import PeerProcess
from benchmarks.record import Contest, Opening, Record, finish, out_of, read_options
from benchmarks.suite import EAGER

NATIVE: Final = "native"
HF: Final = "hf"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backends", description="Native beside transformers.")
    parser.add_argument("--cells", nargs="+", choices=[each.name for each in CELLS], help="(default: all)")
    options = read_options(parser, argv, rounds=3, round_s=2.0)
    options.cells = [each for each in CELLS if each.name in (options.cells or [each.name])]
    options.cells, options.out = QUICK_CELLS if options.quick else options.cells, out_of(options, "backends")
    return options


async def run(options: argparse.Namespace) -> Record:
    """All sides, all cells."""
    here = Contest(options, "backends", "qwen3-0.6b")
    cells, threads = options.cells, options.threads
    async with AsyncExitStack() as stack:
        sides: dict[str, Opening] = {
            name: Inside.open(here.folder, cells, threads, dtype="bfloat16", model_backend=name)
            for name in (NATIVE, HF)
        }
        sides[EAGER.name] = PeerProcess.open(EAGER, here.folder, threads, here.spec.vocab_size)
        found = {name: await here.open(stack, name, opening) for name, opening in sides.items()}
        await here.play(cells, {name: each for name, each in found.items() if each}, NATIVE)
    here.record.save(limits=here.machine.limits())
    return here.record


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    finish(run(parse(argv)), tables.show_suite)


if __name__ == "__main__":
    main()
