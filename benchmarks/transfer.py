"""What it costs to move a sequence: megabytes a second out of one executor and into another, and what a decode step of
another client waits meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.compare import meanwhile, percentile
from benchmarks.engines.grpc import connected
from benchmarks.record import Benchmark, Record
from ferrum_rpc.client import CacheMode

SHAPES: Final = {
    "small": {"identity-layers": 2, "identity-kv-heads": 4, "identity-head-dim": 8},
    "0.6B": {"identity-layers": 28, "identity-heads": 16, "identity-kv-heads": 8, "identity-head-dim": 128},
}
ENGINES: Final = ("thread", "process")
TOKENS: Final = 512
BYPASS: Final = CacheMode.BYPASS


async def measure(shape: str, engine: str, tokens: int, rounds: int) -> dict[str, Any]:
    """One point."""
    flags = {"device": "cpu", "kv-blocks": 4 * (tokens // 16 + 2), "engine": engine, **SHAPES[shape]}
    moves, waits, alone = (list[float]() for _ in range(3))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        (_, one), (_, two) = [await enter(connected("identity", flags)) for _ in range(2)]
        size = tokens * (await one.info()).model.kv_bytes_per_token / 1e6
        other = await enter(one.sequence(cache_mode=BYPASS))
        await other.prefill([5] * 16)
        for _ in range(rounds):
            source, target = one.sequence(cache_mode=BYPASS), two.sequence(cache_mode=BYPASS)
            await source.prefill([number % 256 for number in range(tokens)])
            async with meanwhile(partial(other.decode, 5, truncate_to=16)) as decoding:
                await asyncio.sleep(0.2)
            alone += [1e3 * each for each in decoding]
            async with meanwhile(partial(other.decode, 5, truncate_to=16)) as decoding:
                began = time.perf_counter()
                await source.move_to(target)
                moves.append(time.perf_counter() - began)
            waits += [1e3 * each for each in decoding]
            await target.release()
    move = float(np.median(moves))
    return {
        "cache": shape,
        "engine": engine,
        "tokens": tokens,
        "MB": round(size, 1),
        "moved, MB/s": round(size / move),
        "moved in, ms": round(1e3 * move, 1),
        "decode p99, ms": percentile(alone, 99, 2),
        "during a move": percentile(waits, 99, 2),
    }


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    tokens, rounds = 64 if options.quick else TOKENS, options.rounds
    record = Record(options, tokens=tokens)
    record.put("moves", [await measure(shape, engine, tokens, rounds) for shape in SHAPES for engine in ENGINES])
    return record


BENCHMARK: Final = Benchmark("transfer", run)
