"""Decode steps under a mixed load: one scheduler decodes a batch, another feeds long prompts in chunks beside it.

Nothing tells the two of each other: what a decode step waits for is what natural batching makes it wait for. The figure
is the ratio of its 99th percentile to its median: a chunk now and then must not double a step.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, TypedDict

import numpy as np

from benchmarks.cells import Cell
from benchmarks.ours import GREEDY, NOTHING, Session
from ferrum_rpc.client import ExecutorClient

TARGET: Final = 2.0
"""99th percentile over median of a decode step, at most."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Steps of ``cell``'s batch, beside prompts of ``prompt`` tokens in chunks of ``chunk``, one in flight.
    ``alone``: decode steps without the other scheduler, for comparison."""

    cell: Cell
    prompt: int
    chunk: int
    steps: int
    alone: int


MIX: Final = Mix(Cell("decode", 8, 256), prompt=512, chunk=64, steps=200, alone=40)
QUICK_MIX: Final = Mix(Cell("decode", 2, 8, most=4), prompt=16, chunk=4, steps=8, alone=4)


class Mixed(TypedDict):
    """Milliseconds of a decode step, beside the chunks and alone; ``chunks``: fed meanwhile."""

    batch: int
    context: int
    chunk: int
    steps: int
    chunks: int
    p50_ms: float
    p99_ms: float
    ratio: float
    target: float
    alone_p50_ms: float
    alone_p99_ms: float


async def mixed(session: Session, mix: Mix) -> Mixed:
    """Decode alone, then beside a second client of the same server."""
    cell = mix.cell
    await session.prepare(cell)
    await session.round(cell, 0, 2)  # warm up
    alone = await _decode(session, mix, mix.alone)
    async with ExecutorClient(session.client.target, session=True, timeout_s=600.0) as other:
        stop = asyncio.Event()
        feeding = asyncio.create_task(_feed(other, session.vocab_size, mix, stop))
        try:
            beside = await _decode(session, mix, mix.steps)
        finally:
            stop.set()
            chunks = await feeding
    p50, p99 = np.percentile(np.array(beside) * 1e3, (50, 99))
    quiet50, quiet99 = np.percentile(np.array(alone) * 1e3, (50, 99))
    return {
        "batch": cell.batch,
        "context": cell.context,
        "chunk": mix.chunk,
        "steps": len(beside),
        "chunks": chunks,
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "ratio": round(float(p99 / p50), 3),
        "target": TARGET,
        "alone_p50_ms": round(float(quiet50), 3),
        "alone_p99_ms": round(float(quiet99), 3),
    }


async def _decode(session: Session, mix: Mix, steps: int) -> list[float]:
    """Rounds of the cell until there are so many steps."""
    taken: list[float] = []
    while len(taken) < steps:
        timed = await session.round(mix.cell, 0, min(mix.cell.most, steps - len(taken)))
        taken += timed.step_s
    return taken


async def _feed(client: ExecutorClient, vocab_size: int, mix: Mix, stop: asyncio.Event) -> int:
    """New prompts, chunk by chunk, until told to stop; how many chunks."""
    chunks = number = 0
    while not stop.is_set():
        [prompt] = Cell("prefill", 1, mix.prompt).fresh(vocab_size, number, 0).tolist()
        number += 1
        async with client.sequence() as sequence:
            for start in range(0, mix.prompt, mix.chunk):
                last = start + mix.chunk >= mix.prompt
                await sequence.prefill(prompt[start : start + mix.chunk], GREEDY if last else NOTHING)
                chunks += 1
                if stop.is_set():
                    break
    return chunks
