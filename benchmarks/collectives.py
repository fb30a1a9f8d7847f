"""What ranks of one machine pay for a sum in the middle of a step: shared memory, our groups over gloo, and gloo's own.

Two ranks in processes of their own with a thread each. Rounds alternate, and every call counts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import AllreduceOptions, PrefixStore, TCPStore

from benchmarks.compare import spread
from benchmarks.engines.process import apart
from benchmarks.record import Benchmark, Record
from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.distributed.gloo import LOOPBACK, GlooGroup

RANKS: Final = 2
HIDDEN: Final = 1024
ROWS: Final = (1, 8, 32, 512)
DTYPES: Final = (torch.bfloat16, torch.float32)
SHARED, GLOO, PLAIN = "shared memory", "gloo", "gloo's own"
CALLS: Final = {SHARED: 500, GLOO: 60, PLAIN: 60}  # of a round
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
    """Microseconds of a call, by dtype and rows, of each side. ``share``: of the calls of a round."""
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
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for (side, rows, dtype), seconds in taken.items():
        kind = str(dtype).removeprefix("torch.")
        row = found.setdefault((kind, rows), {"dtype": kind, "rows": rows})
        row[f"{side}, µs"] = spread(seconds, 1e6, 1)
    return list(found.values())


async def run(options: argparse.Namespace) -> Record:
    """Both ranks, and a file of what the first one found."""
    record = Record(
        options, ranks=RANKS, hidden=HIDDEN, calls=", ".join(f"{count} of {side}" for side, count in CALLS.items())
    )
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    share = 0.01 if options.quick else 1.0
    ranks = (apart(measure, store.port, rank, options.rounds, share) for rank in range(RANKS))
    found, *_ = await asyncio.gather(*ranks)
    record.put("sums", found)
    return record


BENCHMARK: Final = Benchmark("collectives", run)
