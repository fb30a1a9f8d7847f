"""What stands around the cells of the suite: other outputs, mixed load, bookkeeping, and how long a start takes.

- Steps that ask for other outputs than greedy tokens, by the runner in this process; rounds of all outputs alternate.
- Decode steps of one scheduler beside another's long prompts in chunks. Nothing tells the two of each other: what a
  decode step waits for is what natural batching makes it wait for. A chunk now and then must not double a step.
- What a sequence costs in a step besides computing: the slope of the server's bookkeeping in the size of the batch, by
  the identity model and the stages of `benchmarks.profile`: requests to spans, admission, blocks, commit, answers to
  protobuf. It must be flat in how long the sequences are and in how many others live: each is varied alone.
- Seconds of `ferrum-rpc serve` until its model answers, beside a plain read of the weights' file. The file's pages are
  dropped from the kernel's cache before each, where the system offers that. What a start takes without weights (Python,
  torch, the server) is told apart.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.cases import DECODE, IDENTITY, IDENTITY_CONTEXT, NOTHING, PREFILL, Cell
from benchmarks.compare import Player, Round, contest
from benchmarks.engines.grpc import Client, executor
from benchmarks.profile import Profile, profile, steps_of
from ferrum_rpc.client import ExecutorClient

MIXED_TARGET: Final = 2.0
"""99th percentile over median of a decode step, at most."""

SLOPE_TARGET_US: Final = 30.0
"""Microseconds for a sequence and a step, at most."""

PIECE_BYTES: Final = 8 << 20


GREEDY: Final = "greedy"
DECODED: Final = (
    *("greedy-logprobs", "greedy-masked", "sample", "sample-penalties", "sample-masked"),
    *("top-tokens-20", "full-bf16", "hidden-states", "verify-4", "accept-4", "accept-4-sampled"),
)
PREFILLED: Final = ("next-token", "next-token-logprobs")
"""Names of `cases.OUTPUTS`."""


class Asking:
    """A side whose steps ask for ``output``, whatever the cell says."""

    def __init__(self, side: Player, output: str) -> None:
        self.facts = side.facts
        self._side, self._output = side, output

    async def prepare(self, cell: Cell) -> None:
        """As the side."""
        await self._side.prepare(cell)

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """As the side, for another output."""
        return await self._side.round(replace(cell, output=self._output), number, steps)


async def outputs(side: Player, cells: Sequence[Cell], rounds: int, round_s: float) -> list[dict[str, Any]]:
    """For each cell, milliseconds of a greedy step, and of each other output the ratio of its step to that."""
    found = []
    for cell in cells:
        asked = (GREEDY, *(PREFILLED if cell.kind == PREFILL else DECODED))
        result = await contest(cell, {name: Asking(side, name) for name in asked}, GREEDY, rounds, round_s)
        step_ms = result["sides"][GREEDY]["step_ms"]
        found.append({name: result[name] for name in ("cell", "steps", "ratios", "disturbed")} | {"step_ms": step_ms})
    return found


@dataclass(frozen=True, slots=True)
class Mix:
    """Steps of ``cell``'s batch, beside prompts of ``prompt`` tokens in chunks of ``chunk``, one in flight.
    ``alone``: decode steps without the other scheduler, for comparison."""

    cell: Cell
    prompt: int
    chunk: int
    steps: int
    alone: int


MIX: Final = Mix(Cell(DECODE, 8, 256), prompt=512, chunk=64, steps=200, alone=40)
QUICK_MIX: Final = Mix(Cell(DECODE, 2, 8, most=4), prompt=16, chunk=4, steps=8, alone=4)


async def mixed(session: Client, mix: Mix) -> dict[str, Any]:
    """Milliseconds of a decode step, alone and then beside a second client of the server; ``chunks``: fed meanwhile."""
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
    (p50, p99), (alone_p50, alone_p99) = (np.percentile(np.array(each) * 1e3, (50, 99)) for each in (beside, alone))
    return {
        "batch": cell.batch,
        "context": cell.context,
        "chunk": mix.chunk,
        "steps": len(beside),
        "chunks": chunks,
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "ratio": round(float(p99 / p50), 3),
        "target": MIXED_TARGET,
        "alone_p50_ms": round(float(alone_p50), 3),
        "alone_p99_ms": round(float(alone_p99), 3),
    }


async def _decode(session: Client, mix: Mix, steps: int) -> list[float]:
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
        [prompt] = Cell(PREFILL, 1, mix.prompt).fresh(vocab_size, number, 0).tolist()
        number += 1
        async with client.sequence() as sequence:
            for start in range(0, mix.prompt, mix.chunk):
                last = start + mix.chunk >= mix.prompt
                await sequence.prefill(prompt[start : start + mix.chunk], mix.cell.spec if last else NOTHING)
                chunks += 1
                if stop.is_set():
                    break
    return chunks


@dataclass(frozen=True, slots=True)
class Size:
    """``batch`` sequences of ``context`` tokens in a step, of ``live`` ones."""

    batch: int
    context: int
    live: int


SIZES: Final = (
    Size(64, IDENTITY_CONTEXT, 64),
    Size(64, 1024, 64),
    Size(64, IDENTITY_CONTEXT, 1000),
)
QUICK_SIZES: Final = (Size(4, 16, 12),)


async def slopes(sizes: Sequence[Size], steps: int) -> list[dict[str, Any]]:
    """A server for each size, and steps of one sequence and of the batch."""
    found = []
    for size in sizes:
        batches = (1, size.batch)
        live = Cell(DECODE, size.live, size.context, most=steps_of(batches, steps))
        one, many = await profile(IDENTITY, live, batches, steps, 1)
        found.append(slope(size, one, many))
    return found


def slope(size: Size, one: Profile, batch: Profile) -> dict[str, Any]:
    """From the two profiles. ``one_us`` and ``all_us``: bookkeeping of a step of one sequence, and of the whole batch;
    ``stages_us``: the slope of each stage, largest first."""
    more = size.batch - 1
    grown = {name: (value - one.bookkeeping.get(name, 0.0)) / more for name, value in batch.bookkeeping.items()}
    one_us, all_us = sum(one.bookkeeping.values()), sum(batch.bookkeeping.values())
    return {
        "batch": size.batch,
        "context": size.context,
        "live": size.live,
        "one_us": round(one_us, 1),
        "all_us": round(all_us, 1),
        "per_sequence_us": round((all_us - one_us) / more, 2),
        "target_us": SLOPE_TARGET_US,
        "stages_us": {name: round(value, 2) for name, value in sorted(grown.items(), key=lambda each: -each[1])},
    }


async def starting(model: Path, settings: dict[str, Any], times: int) -> dict[str, Any]:
    """Alternate: read the file, start with the model, start without one. Seconds, medians of the starts. ``loading_s``:
    beyond the start without weights. ``cold``: whether the pages were dropped; otherwise the file was in memory."""
    file = model / "model.safetensors"
    plain, ready, bare = [], [], []
    cold = True
    for _ in range(times):
        cold &= _drop(file)
        plain.append(_read(file))
        cold &= _drop(file)
        ready.append(await _start(str(model), settings))
        bare.append(await _start(IDENTITY, settings))
    ready_s, bare_s, plain_s = (float(np.median(each)) for each in (ready, bare, plain))
    return {
        "weight_bytes": file.stat().st_size,
        "cold": cold,
        "starts_s": [round(each, 3) for each in ready],
        "ready_s": round(ready_s, 3),
        "without_weights_s": round(bare_s, 3),
        "loading_s": round(ready_s - bare_s, 3),
        "plain_read_s": round(plain_s, 3),
    }


async def _start(model: str, settings: dict[str, Any]) -> float:
    began = time.perf_counter()
    async with executor(model, settings):
        return time.perf_counter() - began


def _drop(file: Path) -> bool:
    """Out of the page cache with it; False where the system has no such call."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # only clean pages can go
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _read(file: Path) -> float:
    """Seconds of reading it once into a small buffer."""
    buffer = bytearray(PIECE_BYTES)
    began = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass
    return time.perf_counter() - began
