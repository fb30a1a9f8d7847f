"""One model by the native decoder and by transformers' layers over our cache, beside transformers alone, in one run.

How much a family costs that only transformers serves, in the place of one that the native decoder does.
"""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from typing import Final

from benchmarks.cases import CELLS, QUICK_CELLS
from benchmarks.engines.inprocess import Inside
from benchmarks.engines.process import PeerProcess
from benchmarks.record import Benchmark, Contest, Opening, Record
from benchmarks.suite import EAGER

NATIVE: Final = "native"
HF: Final = "hf"


async def run(options: argparse.Namespace) -> Record:
    """All sides, all cells."""
    here, cells, threads = Contest(options), QUICK_CELLS if options.quick else CELLS, options.threads
    async with AsyncExitStack() as stack:
        sides: dict[str, Opening] = {
            name: Inside.open(here.folder, cells, threads, dtype="bfloat16", model_backend=name)
            for name in (NATIVE, HF)
        }
        sides[EAGER.name] = PeerProcess.open(EAGER, here.folder, threads, here.spec.vocab_size)
        await here.play(cells, await here.open_all(stack, sides), NATIVE)
    return here.record


BENCHMARK: Final = Benchmark("backends", run, rounds=3, round_s=2.0)
