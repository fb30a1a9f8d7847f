"""What a long way costs: texts by single steps, and by runs with followers, through a proxy that delays each way; and
what other schedulers' runs cost a decode step.

`Sequence.generate` of the client in one session, one text at a time and several at once, against an executor in a
process of its own. The proxy stands in this one, and with no delay too; it keeps the order of the bytes and lets any
number of them be under way, as a long wire does. All rounds of a batch size alternate, so ratios to no delay are of one
run. So do the rounds of a sequence's decode steps alone, beside batches of single steps, and beside as many runs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np

from benchmarks import tables
from benchmarks.engines.grpc import executor
from benchmarks.record import Record, finish, out_of, read_options
from ferrum_rpc.client import Capability, ExecutorClient, Run, Sample
from ferrum_rpc.client import Sequence as ClientSequence

DELAYS_MS: Final = (0.0, 1.0, 10.0)
"""Each way."""

TARGETS: Final = {1.0: 0.9, 10.0: 0.9}
"""By delay: tokens a second with runs, of those with no delay, at least."""

WAYS: Final = ("single steps", "runs")
BATCHES: Final = (1, 8)
BESIDE: Final = ("alone", "single steps", "runs")
"""What goes on in the executor while one sequence decodes."""

OTHERS: Final = 32
OTHERS_TARGET: Final = 2.0
"""99th percentile of a decode step beside `OTHERS` runs, in that beside the same sequences in single steps, at most."""

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


async def texts(client: ExecutorClient, batch: int, tokens: int) -> float:
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


class Others:
    """`OTHERS` sequences of one client that decode in batches of single steps, or in runs, until they are stopped."""

    def __init__(self, client: ExecutorClient) -> None:
        self._client = client
        self._sequences: list[ClientSequence] = []

    async def prefill(self) -> None:
        """Make the sequences."""
        for number in range(OTHERS):
            self._sequences.append(self._client.sequence())
            await self._sequences[-1].prefill([1 + number] * CONTEXT)

    @asynccontextmanager
    async def decoding(self, way: str) -> AsyncIterator[None]:
        """Until the block ends; ``way`` as in `BESIDE`."""
        if way == "alone":
            yield
            return
        began, stop = asyncio.Event(), asyncio.Event()
        decoding = asyncio.create_task(self._decode(Run(RUN_TOKENS) if way == "runs" else None, began, stop))
        await began.wait()
        try:
            yield
        finally:
            stop.set()
            await decoding

    async def _decode(self, run: Run | None, began: asyncio.Event, stop: asyncio.Event) -> None:
        while not stop.is_set():
            items = [each.item([TOKEN], truncate_to=CONTEXT, run=run) for each in self._sequences]
            results = await self._client.forward(items)
            began.set()
            results.all_answers()


async def steps_ms(sequence: ClientSequence, steps: int) -> list[float]:
    """Milliseconds of each of ``steps`` decode steps from `CONTEXT` tokens on."""
    taken = []
    for index in range(steps):
        began = time.perf_counter()
        await sequence.decode(TOKEN, truncate_to=None if index else CONTEXT)
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


def beside(taken: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """Percentiles of all steps; ``of_alone`` and ``of_single_steps``: of the ratios of a round's 99th percentile to
    that of the same round's, the median."""
    p99 = {way: [float(np.percentile(each, 99)) for each in rounds] for way, rounds in taken.items()}
    ratios = {way: [round(float(np.median(np.divide(p99[way], p99[of]))), 3) for of in BESIDE[:2]] for way in taken}
    return [
        {
            "beside": way,
            "p50_ms": round(float(np.median(np.concatenate(rounds))), 3),
            "p99_ms": round(float(np.percentile(np.concatenate(rounds), 99)), 3),
            "of_alone": ratios[way][0],
            "of_single_steps": ratios[way][1],
            "target": OTHERS_TARGET if way == "runs" else None,
        }
        for way, rounds in taken.items()
    ]


def points(taken: dict[tuple[str, float, int], list[float]]) -> list[dict[str, Any]]:
    """Medians of the rounds; ``of_no_delay``: of the ratios to the same round's with no delay."""
    found = []
    for (way, delay_ms, batch), rates in taken.items():
        near = taken[way, DELAYS_MS[0], batch]
        found.append(
            {
                "way": way,
                "delay_ms": delay_ms,
                "batch": batch,
                "tokens_per_s": round(float(np.median(rates)), 1),
                "of_no_delay": round(float(np.median(np.divide(rates, near))), 3),
                "target": TARGETS.get(delay_ms) if way == WAYS[1] else None,
            }
        )
    return found


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    record = Record(
        "trips", {"model": options.model, **SERVED, "rounds": options.rounds, "tokens": options.tokens}, options.out
    )
    taken: dict[tuple[str, float, int], list[float]] = {}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours = await enter(executor(options.model, SERVED))
        clients: dict[tuple[str, float], ExecutorClient] = {}
        for delay_ms in DELAYS_MS:
            target = await enter(delayed(ours.target, delay_ms / 1e3))
            for way in WAYS:
                client = clients[way, delay_ms] = await enter(ExecutorClient(target, session=True))
                info = await client.info()
                if way == WAYS[0]:
                    client._context.known_info = replace(info, capabilities=info.capabilities - {Capability.RUN})
                await texts(client, 1, 8)
        for batch in BATCHES:
            for _ in range(options.rounds):
                for (way, delay_ms), client in clients.items():
                    rate = await texts(client, batch, options.tokens)
                    taken.setdefault((way, delay_ms, batch), []).append(rate)
        record.save(points=points(taken))
        crowd, alone = [await enter(ExecutorClient(ours.target, session=True)) for _ in range(2)]
        others, sequence = Others(crowd), await enter(alone.sequence())
        await others.prefill()
        await sequence.prefill([TOKEN] * CONTEXT)
        steps: dict[str, list[list[float]]] = {way: [] for way in BESIDE}
        for _ in range(options.rounds):
            for way, rounds in steps.items():
                async with others.decoding(way):
                    rounds.append(await steps_ms(sequence, options.tokens))
        record.save(beside=beside(steps))
    return record


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trips", description="What a long way costs.")
    parser.add_argument("--model", choices=("demo", "identity"), default="demo")
    parser.add_argument("--tokens", type=int, help="of a text (default: 256)")
    options = read_options(parser, argv, rounds=5)
    options.tokens = options.tokens or (16 if options.quick else 256)
    options.out = out_of(options, "trips")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    finish(run(parse(argv)), tables.show_trips)


if __name__ == "__main__":
    main()
