"""What ranks of one machine pay for a sum in the middle of a step: shared memory, our groups over gloo, and gloo's own.

Two ranks in processes of their own with a thread each, on rows of a hidden size of 1024. A step sums twice in every
layer. Rounds alternate, and every call counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
from torch.distributed import AllreduceOptions, PrefixStore, TCPStore

from benchmarks import tables
from benchmarks.machine import ROOT
from benchmarks.record import Record, finish, out_of, read_options
from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.distributed.gloo import LOOPBACK, GlooGroup

RANKS: Final = 2
HIDDEN: Final = 1024
ROWS: Final = (1, 8, 32, 512)
DTYPES: Final = (torch.bfloat16, torch.float32)
SHARED, GLOO, PLAIN = "shared memory", "gloo", "gloo's own"
CALLS: Final = {SHARED: 500, GLOO: 60, PLAIN: 60}
"""Of a round."""

Sum = Callable[[torch.Tensor], object]


def sides(store: Any, rank: int) -> dict[str, Sum]:
    """How rows are summed. gloo's own adds bfloat16 in an order and precision of its own."""
    shared = shared_memory.join(PrefixStore(SHARED, store), rank, RANKS)
    gloo = GlooGroup(PrefixStore(GLOO, store), rank, RANKS)
    own = GlooGroup(PrefixStore(PLAIN, store), rank, RANKS)._open()
    return {
        SHARED: shared.all_reduce,
        GLOO: gloo.all_reduce,
        PLAIN: lambda rows: own.allreduce([rows], AllreduceOptions()).wait(),
    }


def measure(port: int, rank: int, rounds: int, share: float) -> list[dict[str, Any]]:
    """Microseconds of a call, by side, rows and dtype. ``share``: of the calls of a round."""
    torch.set_num_threads(1)
    store = TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(minutes=1))
    cases = [(rows, dtype) for rows in ROWS for dtype in DTYPES]
    ways = sides(store, rank)
    taken: dict[tuple[str, int, torch.dtype], list[float]] = {}
    for _ in range(rounds):
        for rows, dtype in cases:
            for side, reduce in ways.items():
                ours = taken.setdefault((side, rows, dtype), [])
                tensor = torch.zeros(rows, HIDDEN, dtype=dtype)
                reduce(tensor)
                for _ in range(max(2, int(CALLS[side] * share))):
                    began = time.perf_counter()
                    reduce(tensor)
                    ours.append(time.perf_counter() - began)
    return [
        {
            "rows": rows,
            "dtype": str(dtype).removeprefix("torch."),
            "side": side,
            "median_us": round(1e6 * float(np.median(found)), 1),
            "p90_us": round(1e6 * float(np.percentile(found, 90)), 1),
        }
        for (side, rows, dtype), found in taken.items()
    ]


async def run(options: argparse.Namespace) -> Record:
    """Both ranks, and a file of what the first one found."""
    record = Record("collectives", {"ranks": RANKS, "hidden": HIDDEN, "rounds": options.rounds, **CALLS}, options.out)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    asked = f"{options.rounds}, {0.01 if options.quick else 1.0}"
    programs = [
        f"from benchmarks.collectives import *; print(json.dumps(measure({store.port}, {rank}, {asked})))"
        for rank in range(RANKS)
    ]
    started = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        for program in programs
    ]
    (printed, _), *_ = await asyncio.gather(*(each.communicate() for each in started))
    if any(each.returncode for each in started):
        raise RuntimeError(f"ranks ended with statuses {[each.returncode for each in started]}")
    record.save(points=json.loads(printed))
    return record


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    description = "What a sum over ranks of one machine costs."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=description)
    options = read_options(parser, argv, rounds=5)
    options.out = out_of(options, "collectives")
    finish(run(options), lambda result: tables.show(tables.collectives(result["points"])))


if __name__ == "__main__":
    main()
