"""What a slow link costs: texts by single steps, and by runs with followers, through a proxy that delays each way; and
what other schedulers' runs cost a decode step.

The proxy stands in this process, and with no delay too; it keeps the order of the bytes and lets any number of them be
under way, as a long wire does. All rounds of a batch size alternate, so ratios to no delay are of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.compare import alternate, median, percentile, shares
from benchmarks.engines.grpc import executor
from benchmarks.record import Benchmark, Option, Record
from benchmarks.table import target
from ferrum_rpc.client import Capability, ExecutorClient, Run, Sample
from ferrum_rpc.client import Sequence as ClientSequence

DELAYS_MS: Final = (0.0, 1.0, 10.0)  # each way
TARGET: Final = 0.9  # tokens a second with runs, of those with no delay, at least
WAYS: Final = ("single steps", "runs")
BATCHES: Final = (1, 8)
BESIDE: Final = ("alone", "single steps", "runs")  # what goes on in the executor while one sequence decodes
OTHERS: Final = 32
OTHERS_WHAT: Final = "p99 of a decode step with 32 runs, in those with single steps"
OTHERS_TARGET: Final = 2.0  # at most
CONTEXT: Final = 32
SERVED: Final = {"device": "cpu", "kv-blocks": 8192, "lease-ttl-s": 600.0}
PROMPT: Final = b"In the beginning"
SAMPLE: Final = Sample(temperature=0.8, seed=1)
TOKEN: Final = 5
RUN_TOKENS: Final = 32


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


async def texts(client: ExecutorClient, batch: int, tokens: int, _: int = 0) -> float:
    """Tokens a second of ``batch`` texts at once, from their prompts to the last token that a reader gets. The release
    of their sequences, one more trip, is not part of it."""
    ended = began = time.perf_counter()

    async def text(number: int) -> int:
        nonlocal ended
        async with client.sequence() as sequence:
            stream = sequence.generate(
                PROMPT, max_tokens=tokens, output=replace(SAMPLE, seed=number), stop=(), timeout_s=60
            )
            count = len([token async for token in stream])
            ended = max(ended, time.perf_counter())
            return count

    total = sum(await asyncio.gather(*map(text, range(batch))))
    return total / (ended - began)


@asynccontextmanager
async def decoding(client: ExecutorClient, others: Sequence[ClientSequence], way: str) -> AsyncIterator[None]:
    """While the block runs ``others`` decode in batches, in a ``way`` of `BESIDE`."""
    began, stop = asyncio.Event(), asyncio.Event()

    async def decode() -> None:
        run = Run(RUN_TOKENS) if way == "runs" else None
        while not stop.is_set():
            results = await client.forward([each.item([TOKEN], truncate_to=CONTEXT, run=run) for each in others])
            began.set()
            results.all_answers()

    if way == "alone":
        yield
        return
    task = asyncio.create_task(decode())
    await began.wait()
    try:
        yield
    finally:
        stop.set()
        await task


async def steps_ms(sequence: ClientSequence, steps: int, context: int = CONTEXT) -> list[float]:
    """Milliseconds of each of ``steps`` decode steps from ``context`` tokens on."""
    taken = []
    for index in range(steps):
        began = time.perf_counter()
        await sequence.decode(TOKEN, truncate_to=None if index else context)
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


def beside(taken: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Percentiles of all steps; of the ratios of a round's 99th percentile to that of the same round's, the median."""
    p99 = {way: [percentile(each, 99) for each in rounds] for way, rounds in taken.items()}
    found = []
    for way, rounds in taken.items():
        every = np.concatenate(rounds)
        in_alone, in_steps = (median(np.divide(p99[way], p99[of])) for of in BESIDE[:2])
        goal = target(OTHERS_WHAT, in_steps, OTHERS_TARGET, least=False)
        found.append(
            {
                "with": way,
                "p50, ms": median(every),
                "p99, ms": percentile(every, 99),
                "p99 in alone": in_alone,
                "p99 in single steps": in_steps,
                "target": goal if way == "runs" else None,
            }
        )
    return found


def points(taken: dict[tuple[str, float, int], list[float]]) -> list[dict[str, Any]]:
    """Medians of the rounds; ratios are to the same round's with no delay."""
    found = []
    for (way, delay_ms, batch), rates in taken.items():
        of_near = shares(rates, taken[way, DELAYS_MS[0], batch])
        what = f"{batch} text{'s' * (batch > 1)} by runs, {delay_ms:g} ms each way, of no delay"
        goal = target(what, of_near["median"], TARGET) if way == WAYS[1] and delay_ms else None
        row = {"way": way, "texts": batch, "each way, ms": delay_ms, "tokens/s": median(rates, 1)}
        found.append(row | {"of no delay": of_near, "target": goal})
    return found


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    record = Record(options, model=options.model, **SERVED, tokens=f"{options.tokens} of a text, and as many steps")
    taken: dict[tuple[str, float, int], list[float]] = {}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours = await enter(executor(options.model, SERVED))
        clients: dict[tuple[str, float], ExecutorClient] = {}
        for delay_ms in DELAYS_MS:
            farther = await enter(delayed(ours.target, delay_ms / 1e3))
            for way in WAYS:
                client = clients[way, delay_ms] = await enter(ExecutorClient(farther, session=True))
                info = await client.info()
                if way == WAYS[0]:
                    client._context.known_info = replace(info, capabilities=info.capabilities - {Capability.RUN})
                await texts(client, 1, 8)
        for batch in BATCHES:
            takes = {(*key, batch): partial(texts, client, batch, options.tokens) for key, client in clients.items()}
            taken |= (await alternate(takes, options.rounds))[0]
        record.put("texts", points(taken))
        crowd, alone = [await enter(ExecutorClient(ours.target, session=True)) for _ in range(2)]
        others, sequence = [crowd.sequence() for _ in range(OTHERS)], await enter(alone.sequence())
        for number, each in enumerate([sequence, *others]):
            await each.prefill([1 + number] * CONTEXT)

        async def take(way: str, _: int) -> list[float]:
            async with decoding(crowd, others, way):
                return await steps_ms(sequence, options.tokens)

        steps, _ = await alternate({way: partial(take, way) for way in BESIDE}, options.rounds)
        record.put("others", beside(steps))
    return record


BENCHMARK: Final = Benchmark(
    "trips",
    run,
    (
        Option("--model", "demo", "of the executor", choices=("demo", "identity")),
        Option("--tokens", 256, "of a text", 16),
    ),
)
