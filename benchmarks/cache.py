"""What a cache in 8 bits gains and costs: decode steps over it beside those over a cache in bfloat16, and its answers.

Two runners in this process, the same weights and tokens. Rounds alternate, so that the ratio is of one run. How far
answers move is told as the Kullback-Leibler divergence of the next token's distribution from the exact cache's, row by
row behind the same tokens: for the shape that is timed, whose weights are random, and for the demo model, which learned
from texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks import tables
from benchmarks.cases import DECODE, PREFILL, QUICK_CELLS, Cell, Tokens
from benchmarks.engines.inprocess import Inside
from benchmarks.record import Contest, Record, finish, out_of, read_options
from clients.scheduler.prompts import DEMO_PROMPTS

KINDS: Final = {"bfloat16 cache": "auto", "int8 cache": "int8"}
EXACT, ROUNDED = KINDS
TARGET: Final = 1.25
"""Tokens a second with the int8 cache, of those with the other, at least."""

ROWS: Final = 64
"""Of which answers are compared, at the end of a context."""

DEMO: Final = "demo"
TEXT: Final = np.frombuffer(" ".join(DEMO_PROMPTS).encode(), dtype=np.uint8).astype(np.int32)
"""Tokens of the demo model: bytes."""


def divergence(exact: npt.NDArray[np.float32], rounded: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Of ``rounded`` logits from ``exact`` ones, both [rows, vocab], in nats; and the share of equal arg-max tokens."""
    p, q = (_log_softmax(each.astype(np.float64)) for each in (exact, rounded))
    found = (np.exp(p) * (p - q)).sum(axis=1)
    return {
        "rows": len(found),
        "kl_mean": float(f"{found.mean():.3g}"),
        "kl_largest": float(f"{found.max():.3g}"),
        "same_tokens": round(float((exact.argmax(axis=1) == rounded.argmax(axis=1)).mean()), 4),
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
    [cell] = options.cells
    here = Contest(options, "cache", "qwen3-0.6b")
    record, compared = here.record, []
    async with AsyncExitStack() as stack:
        sides = await opened(stack, DEMO, Cell(PREFILL, 1, len(TEXT)), options.threads)
        compared.append(await answers(DEMO, sides, TEXT))
    async with AsyncExitStack() as stack:
        sides = await opened(stack, here.folder, cell, options.threads)
        record.values["sides"] = {kind: side.facts for kind, side in sides.items()}
        context = cell.prompts(here.spec.vocab_size)[0]
        context = np.tile(context, -(-2 * ROWS // len(context)))  # of a quick run it is too short
        compared.append(await answers(record.values["model"]["name"], sides, context))
        record.save(answers=compared, target=TARGET)
        await here.play([cell], {ROUNDED: sides[ROUNDED], EXACT: sides[EXACT]}, ROUNDED)
    return record


def show(values: dict[str, Any]) -> None:
    """Both tables on the terminal."""
    tables.show(tables.cells(values["cells"]), "cells")
    print()
    tables.show(tables.answers(values["answers"]), "answers")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache", description="A cache in 8 bits: speed, answers."
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step (default: 32)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each (default: 2048)")
    options = read_options(parser, argv, rounds=5, round_s=4.0)
    options.cells = QUICK_CELLS[-1:] if options.quick else (Cell(DECODE, options.batch, options.context, most=16),)
    options.out = out_of(options, "cache")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    finish(run(parse(argv)), show)


if __name__ == "__main__":
    main()
