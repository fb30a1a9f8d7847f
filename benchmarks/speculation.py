"""What drafts spare on a long way: the reference scheduler's texts by single steps, by runs, and by drafts.

Drafts come from prompt look-up, and from the smaller demo model on an executor beside the scheduler; the executor that
verifies them is behind a proxy that delays each way (`benchmarks.trips`). All rounds of a batch size alternate, so
ratios to single steps are of one run. Texts are greedy, and the same length for every way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import numpy as np

from benchmarks import tables
from benchmarks.engines.grpc import executor
from benchmarks.record import Record, finish, out_of, read_options
from benchmarks.trips import SERVED, delayed
from clients.scheduler.prompts import DEMO_PROMPTS
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.queues import Observer
from ferrum_rpc.scheduler.request import Request
from ferrum_rpc.scheduler.speculation import Drafter, DraftModel, Lookup

DELAYS_MS: Final = (0.0, 10.0)
"""Each way."""

SINGLE, RUNS, LOOKUP, DRAFT = "single steps", "runs", "look-up", "draft model"
WAYS: Final = (SINGLE, RUNS, LOOKUP, DRAFT, f"{LOOKUP} or runs", f"{DRAFT} or runs")
"""The last two: whatever gave tokens faster so far, as the scheduler chooses where it may."""

BATCHES: Final = (1, 8)
TARGETS: Final = {1: 2.5, 8: 1.5}
"""By batch: tokens a second with the draft model at the longest delay, of those by single steps, at least."""

RUN_TOKENS: Final = 16


async def texts(way: str, client: ExecutorClient, small: ExecutorClient, batch: int, tokens: int) -> RunCounts:
    """The first ``batch`` demo prompts at once, ``tokens`` each."""
    drafter: Drafter | None = None
    if way.startswith(LOOKUP):
        drafter = Lookup()
    elif way.startswith(DRAFT):
        drafter = DraftModel(small, await small.info())
    await client.info()
    driver = Driver(
        client,
        client.executors[0],
        budget=Budget(tokens=1024, items=64, running=batch),
        observer=Observer(),
        drafter=drafter,
        run_tokens=RUN_TOKENS if way.endswith(RUNS) else 0,
        chains=True,
    )
    work = [Request(at, tuple(text.encode()), tokens) for at, text in enumerate(DEMO_PROMPTS[:batch])]
    run = await driver.run(work)
    if any(len(each.generated) != tokens for each in work):
        raise RuntimeError(f"{way}: a text ended early: {[each.error or each.ending for each in work]}")
    return run


def points(taken: dict[tuple[str, float, int], list[RunCounts]]) -> list[dict[str, Any]]:
    """Medians of the rounds; ``of_single``: of the ratios to the same round's by single steps. ``per_trip``: tokens of
    a sequence with one trip, behind its prompt; ``accepted``: the share of drafted tokens."""
    found = []
    for (way, delay_ms, batch), runs in taken.items():
        rates, single = ([_rate(run) for run in taken[each, delay_ms, batch]] for each in (way, SINGLE))
        drafted = sum(run.drafted for run in runs)
        found.append(
            {
                "way": way,
                "delay_ms": delay_ms,
                "batch": batch,
                "tokens_per_s": round(float(np.median(rates)), 1),
                "of_single": round(float(np.median(np.divide(rates, single))), 3),
                "target": TARGETS[batch] if way == DRAFT and delay_ms == DELAYS_MS[-1] else None,
                "per_trip": round(float(np.median([_per_trip(run, batch) for run in runs])), 2),
                "accepted": round(sum(run.accepted for run in runs) / drafted, 3) if drafted else None,
            }
        )
    return found


def _rate(run: RunCounts) -> float:
    return sum(len(each.generated) for each in run.requests) / run.wall_seconds


def _per_trip(run: RunCounts, prompts: int) -> float:
    return run.decode_tokens / (run.sequences - prompts)


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    pair = ("identity", "identity") if options.model == "identity" else ("demo", "demo-draft")
    settings = {"model": pair[0], "draft": pair[1], **SERVED, "tokens": options.tokens, "run_tokens": RUN_TOKENS}
    record = Record("speculation", settings | {"rounds": options.rounds}, options.out)
    taken: dict[tuple[str, float, int], list[RunCounts]] = {}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours, small = [await enter(executor(each, SERVED)) for each in pair]
        beside = await enter(ExecutorClient(small.target, session=True))
        clients: dict[tuple[str, float], ExecutorClient] = {}
        for delay_ms in DELAYS_MS:
            target = await enter(delayed(ours.target, delay_ms / 1e3))
            for way in WAYS:
                clients[way, delay_ms] = await enter(ExecutorClient(target, session=True))
                await texts(way, clients[way, delay_ms], beside, 1, 8)
        for batch in BATCHES:
            for _ in range(options.rounds):
                for (way, delay_ms), client in clients.items():
                    run = await texts(way, client, beside, batch, options.tokens)
                    taken.setdefault((way, delay_ms, batch), []).append(run)
    record.save(points=points(taken))
    return record


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description="What drafts spare.")
    parser.add_argument("--model", choices=("demo", "identity"), default="demo")
    parser.add_argument("--tokens", type=int, help="of a text (default: 128)")
    options = read_options(parser, argv, rounds=3)
    options.tokens = options.tokens or (16 if options.quick else 128)
    options.out = out_of(options, "speculation")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    finish(run(parse(argv)), lambda values: tables.show(tables.speculation(values["points"]), "speculation"))


if __name__ == "__main__":
    main()
