"""What a long way costs: texts by single steps, and by runs with followers, through a proxy that delays each way.

`Sequence.generate` of the client in one session, one text at a time and several at once, against an executor in a
process of its own. The proxy stands in this one, and with no delay too; it keeps the order of the bytes and lets any
number of them be under way, as a long wire does. All rounds of a batch size alternate, so ratios to no delay are of one
run.
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
from ferrum_rpc.client import Capability, ExecutorClient, Sample

DELAYS_MS: Final = (0.0, 1.0, 10.0)
"""Each way."""

TARGETS: Final = {1.0: 0.9, 10.0: 0.6}
"""By delay: tokens a second with runs, of those with no delay, at least."""

WAYS: Final = ("single steps", "runs")
BATCHES: Final = (1, 8)
SERVED: Final = {"device": "cpu", "kv-blocks": 8192, "lease-ttl-s": 600.0}
PROMPT: Final = b"In the beginning"
SAMPLE: Final = Sample(temperature=0.8, seed=1)


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
            await asyncio.gather(*each)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()


async def texts(client: ExecutorClient, batch: int, tokens: int) -> float:
    """Tokens a second of ``batch`` texts at once, their prompts included in the time."""

    async def text(number: int) -> int:
        async with client.sequence() as sequence:
            stream = sequence.generate(
                PROMPT, max_tokens=tokens, output=replace(SAMPLE, seed=number), stop=(), timeout_s=60
            )
            return len([token async for token in stream])

    began = time.perf_counter()
    total = sum(await asyncio.gather(*map(text, range(batch))))
    return total / (time.perf_counter() - began)


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


def table(found: Sequence[dict[str, Any]]) -> tables.Table:
    """A row for each point."""
    rows = [
        (
            each["way"],
            f"{each['batch']}",
            f"{each['delay_ms']:g} ms",
            f"{each['tokens_per_s']:,.0f}",
            f"{each['of_no_delay']:.2f}" + (f" ({each['target']})" if each["target"] else ""),
        )
        for each in found
    ]
    return tables.Table(("way", "texts", "each way", "tokens/s", "of no delay (target)"), rows)


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    record = Record("trips", {"model": options.model, **SERVED, "tokens": options.tokens}, options.out)
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
    finish(run(parse(argv)), lambda values: tables.show(table(values["points"])))


if __name__ == "__main__":
    main()
