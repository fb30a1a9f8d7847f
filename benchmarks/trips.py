"""What a slow link costs, and what runs and drafts save: texts of the reference scheduler through a proxy that delays
each way, by single steps, by runs, and by drafts that the executor verifies.

The proxy is in this process, and with no delay too; it keeps the order of the bytes and lets any number of them be
under way, as a long wire does. All rounds of a batch size alternate, so ratios are of one run. Texts are greedy, and
the same length for every way.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from benchmarks.compare import alternate, median, shares
from benchmarks.engines.grpc import executor
from benchmarks.record import Benchmark, Option, Record
from benchmarks.table import target
from clients.scheduler.prompts import DEMO_PROMPTS
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.queues import Observer
from ferrum_rpc.scheduler.request import Request
from ferrum_rpc.scheduler.speculation import Drafter, DraftModel, Lookup

DELAYS_MS: Final = (0.0, 1.0, 10.0)  # each way
SINGLE, RUNS, LOOKUP, DRAFT = "single steps", "runs", "look-up", "draft model"
WAYS: Final = (SINGLE, RUNS, LOOKUP, DRAFT, f"{LOOKUP} or runs", f"{DRAFT} or runs")
"""The last two: whatever gave tokens faster so far, as the scheduler chooses where it may."""

BATCHES: Final = (1, 8)
RUNS_TARGET: Final = 0.9  # tokens a second with runs, of those with no delay, at least
DRAFT_TARGETS: Final = {1: 2.5, 8: 1.5}
"""By batch: tokens a second with the draft model at the longest delay, of those by single steps, at least."""

SERVED: Final = {"device": "cpu", "kv-blocks": 8192, "lease-ttl-s": 600.0}
RUN_TOKENS: Final = 16


@asynccontextmanager
async def delayed(target: str, delay_s: float) -> AsyncIterator[str]:
    """Another target of the same server, ``delay_s`` farther away each way."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if delay_s:
                loop.call_later(delay_s, writer.write, data)  # timers of one length fire in their order
            else:
                writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = target.rpartition(":")
        with suppress(OSError, asyncio.CancelledError):
            back_reader, back = await asyncio.open_connection(host, int(port))
            ways = (pump(reader, back), pump(back_reader, writer))
            tasks.update(each := [asyncio.ensure_future(way) for way in ways])
            try:
                await asyncio.gather(*each)
            finally:
                back.close()
                writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the connections are closed in the next turn


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
    """Medians of the rounds; ratios are to the same round's with no delay, and by single steps."""
    found = []
    for (way, delay_ms, batch), runs in taken.items():
        rates, near, single = (
            [sum(len(each.generated) for each in run.requests) / run.wall_seconds for run in taken[key]]
            for key in ((way, delay_ms, batch), (way, DELAYS_MS[0], batch), (SINGLE, delay_ms, batch))
        )
        of_near, of_single, drafted = shares(rates, near), shares(rates, single), sum(run.drafted for run in runs)
        texts_, away, goal = f"{batch} text{'s' * (batch > 1)}", f"{delay_ms:g} ms each way", None
        if way == RUNS and delay_ms:
            goal = target(f"{texts_} by runs, {away}, of no delay", of_near["median"], RUNS_TARGET)
        elif (way, delay_ms) == (DRAFT, DELAYS_MS[-1]):
            what = f"{texts_} with the draft model, {away}, of single steps"
            goal = target(what, of_single["median"], DRAFT_TARGETS[batch])
        found.append(
            {
                "way": way,
                "texts": batch,
                "each way, ms": delay_ms,
                "tokens/s": median(rates, 1),
                "of no delay": of_near,
                "of single steps": of_single,
                "target": goal,
                "tokens a trip": median((run.decode_tokens / (run.sequences - batch) for run in runs), 2),
                "accepted": f"{sum(run.accepted for run in runs) / drafted:.0%}" if drafted else None,
            }
        )
    return found


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    pair = ("identity", "identity") if options.model == "identity" else ("demo", "demo-draft")
    tokens = f"{options.tokens} of a text; runs of {RUN_TOKENS}"
    record = Record(options, model=pair[0], draft=pair[1], **SERVED, tokens=tokens)
    taken: dict[tuple[str, float, int], list[RunCounts]] = {}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours, small = [await enter(executor(each, SERVED)) for each in pair]
        drafting = await enter(ExecutorClient(small.target, session=True))
        clients: dict[tuple[str, float], ExecutorClient] = {}
        for delay_ms in DELAYS_MS:
            farther = await enter(delayed(ours.target, delay_ms / 1e3))
            for way in WAYS:
                clients[way, delay_ms] = await enter(ExecutorClient(farther, session=True))
                await texts(way, clients[way, delay_ms], drafting, 1, 8)
        for batch in BATCHES:
            takes = {
                (*key, batch): partial(texts, key[0], client, drafting, batch, options.tokens)
                for key, client in clients.items()
            }
            taken |= (await alternate(takes, options.rounds))[0]
        record.put("texts", points(taken))
    return record


BENCHMARK: Final = Benchmark(
    "trips",
    run,
    (
        Option("--model", "demo", "of the executor", choices=("demo", "identity")),
        Option("--tokens", 256, "of a text", 16),
    ),
    rounds=3,
)
