"""What drafts spare on a long way: the reference scheduler's texts by single steps, by runs, and by drafts.

The executor that verifies drafts is behind the proxy of `benchmarks.trips`. All rounds of a batch size alternate, so
ratios to single steps are of one run. Texts are greedy, and the same length for every way.
"""

from __future__ import annotations

import argparse
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

from benchmarks.compare import alternate, median, shares
from benchmarks.engines.grpc import executor
from benchmarks.record import Benchmark, Option, Record
from benchmarks.table import target
from benchmarks.trips import SERVED, delayed
from clients.scheduler.prompts import DEMO_PROMPTS
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.queues import Observer
from ferrum_rpc.scheduler.request import Request
from ferrum_rpc.scheduler.speculation import Drafter, DraftModel, Lookup

DELAYS_MS: Final = (0.0, 10.0)  # each way
SINGLE, RUNS, LOOKUP, DRAFT = "single steps", "runs", "look-up", "draft model"
WAYS: Final = (SINGLE, RUNS, LOOKUP, DRAFT, f"{LOOKUP} or runs", f"{DRAFT} or runs")
"""The last two: whatever gave tokens faster so far, as the scheduler chooses where it may."""

BATCHES: Final = (1, 8)
TARGETS: Final = {1: 2.5, 8: 1.5}
"""By batch: tokens a second with the draft model at the longest delay, of those by single steps, at least."""

RUN_TOKENS: Final = 16


async def texts(
    way: str, client: ExecutorClient, small: ExecutorClient, batch: int, tokens: int, _: int = 0
) -> RunCounts:
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
    """Medians of the rounds; ratios are to the same round's by single steps."""
    found = []
    for (way, delay_ms, batch), runs in taken.items():
        rates, single = ([_rate(run) for run in taken[each, delay_ms, batch]] for each in (way, SINGLE))
        drafted, ratio = sum(run.drafted for run in runs), shares(rates, single)
        what = f"{batch} text{'s' * (batch > 1)} with the draft model, {delay_ms:g} ms each way, of single steps"
        goal = target(what, ratio["median"], TARGETS[batch]) if (way, delay_ms) == (DRAFT, DELAYS_MS[-1]) else None
        found.append(
            {
                "way": way,
                "texts": batch,
                "each way, ms": delay_ms,
                "tokens/s": median(rates, 1),
                "of single steps": ratio,
                "target": goal,
                "tokens a trip": median((run.decode_tokens / (run.sequences - batch) for run in runs), 2),
                "accepted": f"{sum(run.accepted for run in runs) / drafted:.0%}" if drafted else None,
            }
        )
    return found


def _rate(run: RunCounts) -> float:
    return sum(len(each.generated) for each in run.requests) / run.wall_seconds


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    pair = ("identity", "identity") if options.model == "identity" else ("demo", "demo-draft")
    tokens = f"{options.tokens} of a text; runs of {RUN_TOKENS}"
    record = Record(options, model=pair[0], draft=pair[1], **SERVED, tokens=tokens)
    taken: dict[tuple[str, float, int], list[RunCounts]] = {}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours, small = [await enter(executor(each, SERVED)) for each in pair]
        beside = await enter(ExecutorClient(small.target, session=True))
        clients: dict[tuple[str, float], ExecutorClient] = {}
        for delay_ms in DELAYS_MS:
            farther = await enter(delayed(ours.target, delay_ms / 1e3))
            for way in WAYS:
                clients[way, delay_ms] = await enter(ExecutorClient(farther, session=True))
                await texts(way, clients[way, delay_ms], beside, 1, 8)
        for batch in BATCHES:
            takes = {
                (*key, batch): partial(texts, key[0], client, beside, batch, options.tokens)
                for key, client in clients.items()
            }
            taken |= (await alternate(takes, options.rounds))[0]
    record.put("texts", points(taken))
    return record


BENCHMARK: Final = Benchmark(
    "speculation",
    run,
    (
        Option("--model", "demo", "of the executor", choices=("demo", "identity")),
        Option("--tokens", 128, "of a text", 16),
    ),
    rounds=3,
)
