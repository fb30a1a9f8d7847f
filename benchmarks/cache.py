"""What a cache in 8 bits gains and costs: decode steps over it beside those over a cache in bfloat16, and its answers.

Two runners in this process, the same weights and tokens, in alternating rounds. Answers are compared for the shape that
is timed, whose weights are random, and for the demo model, which learned from texts.
"""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.cases import DECODE, PREFILL, QUICK_CELLS, Cell, Tokens
from benchmarks.engines.inprocess import Inside
from benchmarks.record import Benchmark, Contest, Record, median_of
from benchmarks.table import target
from clients.scheduler.prompts import DEMO_PROMPTS

KINDS: Final = {"bfloat16 cache": "auto", "int8 cache": "int8"}
EXACT, ROUNDED = KINDS
CELL: Final = Cell(DECODE, 32, 2048, most=16)
TARGET: Final = 1.25  # tokens a second with the int8 cache, of those with the other, at least
ROWS: Final = 64  # of which answers are compared, at the end of a context
DEMO: Final = "demo"
TEXT: Final = np.frombuffer(" ".join(DEMO_PROMPTS).encode(), dtype=np.uint8).astype(np.int32)
"""Tokens of the demo model: bytes."""


def divergence(exact: npt.NDArray[np.float32], rounded: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Of ``rounded`` logits from ``exact`` ones, both [rows, vocab], in nats; and the share of equal arg-max tokens."""
    p, q = (_log_softmax(each.astype(np.float64)) for each in (exact, rounded))
    found = (np.exp(p) * (p - q)).sum(axis=1)
    return {
        "rows": len(found),
        "KL, mean": float(f"{found.mean():.3g}"),
        "largest": float(f"{found.max():.3g}"),
        "same tokens": f"{(exact.argmax(axis=1) == rounded.argmax(axis=1)).mean():.1%}",
    }


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


async def answers(name: str, sides: dict[str, Inside], tokens: Tokens) -> dict[str, Any]:
    """How far the int8 cache moves the rows behind the last of ``tokens``."""
    exact, rounded = [await sides[kind].logits(tokens, ROWS) for kind in KINDS]
    return {"model": name, "context": len(tokens), **divergence(exact, rounded)}


async def opened(stack: AsyncExitStack, model: str, cell: Cell, threads: int) -> dict[str, Inside]:
    """A side for each kind of cache."""
    enter = stack.enter_async_context
    return {kind: await enter(Inside.open(model, [cell], threads, kv_dtype=kv)) for kind, kv in KINDS.items()}


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    cell = QUICK_CELLS[-1] if options.quick else CELL
    here = Contest(options)
    record, compared = here.record, []
    async with AsyncExitStack() as stack:
        sides = await opened(stack, DEMO, Cell(PREFILL, 1, len(TEXT)), options.threads)
        compared.append(await answers(DEMO, sides, TEXT))
    async with AsyncExitStack() as stack:
        sides = await opened(stack, here.folder, cell, options.threads)
        context = cell.prompts(here.spec.vocab_size)[0]
        context = np.tile(context, -(-2 * ROWS // len(context)))  # of a quick run it is too short
        compared.append(await answers(here.model, sides, context))
        await here.play([cell], {ROUNDED: sides[ROUNDED], EXACT: sides[EXACT]}, ROUNDED)
    gained = median_of(record.values["cells"], cell.name, EXACT)
    targets = [target(f"{cell.name} over an int8 cache, in process, of bfloat16", gained, TARGET)]
    record.put("answers", compared, targets=targets)
    return record


BENCHMARK: Final = Benchmark("cache", run, round_s=4.0)
