"""What it costs to move a sequence: megabytes a second out of one executor and into another, beside a bare gRPC stream
of the same bytes, and what a decode step beside an export waits. All rounds alternate.
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
from benchmarks.engines.echo import SERVICE, echo_channel
from benchmarks.engines.grpc import executor
from benchmarks.record import Benchmark, Record
from ferrum_rpc.client import CacheMode, ExecutorClient
from ferrum_rpc.client import Sequence as ClientSequence
from ferrum_rpc.client.transfer import exported

SHAPES: Final = {
    "small": {"identity-layers": 2, "identity-kv-heads": 4, "identity-head-dim": 8},
    "0.6B": {"identity-layers": 28, "identity-heads": 16, "identity-kv-heads": 8, "identity-head-dim": 128},
}
ENGINES: Final = ("thread", "process")
TOKENS: Final = 512
PIECE: Final = 2 << 20
BYPASS: Final = CacheMode.BYPASS


async def export_s(client: ExecutorClient, sequence: ClientSequence) -> tuple[float, int]:
    """Seconds of an export of which only the bytes are counted, and those."""
    context, handle = client._context, sequence.handle
    assert handle is not None
    began = time.perf_counter()
    size = sum([len(frame) async for frame in exported(context, handle, 0, 0, context.deadline(None))])
    return time.perf_counter() - began, size


async def bare_s(channel: Any, size: int) -> float:
    """Seconds in which a server that does nothing else streams ``size`` bytes, in pieces as large as an export's."""
    await channel.unary_unary(f"/{SERVICE}/Set")(bytes(min(size, PIECE)))
    stream = channel.stream_stream(f"/{SERVICE}/Stream")()
    began = time.perf_counter()
    pieces = -(-size // PIECE)
    asking = asyncio.ensure_future(_ask(stream, pieces))
    for _ in range(pieces):
        await stream.read()
    await asking
    return time.perf_counter() - began


async def _ask(stream: Any, pieces: int) -> None:
    for _ in range(pieces):
        await stream.write(b"")
    await stream.done_writing()


async def measure(shape: str, engine: str, tokens: int, rounds: int) -> dict[str, Any]:
    """One point."""
    flags = {"device": "cpu", "kv-blocks": 4 * (tokens // 16 + 2), "engine": engine, **SHAPES[shape]}
    exports, moves, waits, alone, bare = (list[float]() for _ in range(5))
    size = 0
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        one, two = [await enter(ExecutorClient((await enter(executor("identity", flags))).target)) for _ in range(2)]
        channel = await enter(echo_channel())
        other = await enter(one.sequence(cache_mode=BYPASS))
        await other.prefill([5] * 16)
        for _ in range(rounds):
            source, target = one.sequence(cache_mode=BYPASS), two.sequence(cache_mode=BYPASS)
            await source.prefill([number % 256 for number in range(tokens)])
            for taken, beside in ((alone, asyncio.sleep(0.2)), (waits, export_s(one, source))):
                async with meanwhile(partial(other.decode, 5, truncate_to=16)) as decoding:
                    result = await beside
                taken.extend(1e3 * each for each in decoding)
                if result is not None:
                    seconds, size = result
                    exports.append(seconds)
            began = time.perf_counter()
            await source.move_to(target)
            moves.append(time.perf_counter() - began)
            await target.release()
            bare.append(await bare_s(channel, size))
    export, move, streamed = (float(np.median(each)) for each in (exports, moves, bare))
    return {
        "cache": shape,
        "engine": engine,
        "tokens": tokens,
        "MB": round(size / 1e6, 1),
        "export, MB/s": round(size / 1e6 / export),
        "bare stream, MB/s": round(size / 1e6 / streamed),
        "moved, MB/s": round(size / 1e6 / move),
        "moved in, ms": round(1e3 * move, 1),
        "decode p99, ms": percentile(alone, 99, 2),
        "during an export": percentile(waits, 99, 2) if waits else None,
    }


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    tokens, rounds = 64 if options.quick else TOKENS, options.rounds
    record = Record(options, tokens=tokens)
    record.put("moves", [await measure(shape, engine, tokens, rounds) for shape in SHAPES for engine in ENGINES])
    return record


BENCHMARK: Final = Benchmark("transfer", run)
