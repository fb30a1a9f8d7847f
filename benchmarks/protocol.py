"""What the protocol costs: an empty step through our executor and a bare grpc.aio echo of the same bytes, in one run.

The identity model with one layer and one head computes next to nothing, so a step is the wire, the protocol and the
hand-over to the model thread. Every server has a process of its own, TCP and unix sockets alike; rounds of all ways
alternate, and only one works at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks import environment
from benchmarks.echo import ANY_PORT, OPTIONS
from benchmarks.process import served
from benchmarks.protocol_points import BATCHES, CROWD, DEPTHS, MANY, Point, Rounds, points
from benchmarks.protocol_tables import show
from benchmarks.record import Record
from benchmarks.remote import vocabulary
from benchmarks.sides import Round
from benchmarks.ways import CONTEXT, LEAD_IN, Batches, Client, EchoCalls, EchoFrames, Frames, Unary, Way, exchange_bytes
from benchmarks.wire import RESULTS
from benchmarks.workload import CACHE
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.client.channel import open_channel
from ferrum_rpc.logs import configure_logging

SETTLE_S: Final = 0.01
"""Between rounds: what a server does after its last answer is not the next way's."""

TRANSPORTS: Final = ("tcp", "unix")
MODELS: Final[dict[str, dict[str, Any]]] = {
    "identity": {"identity-layers": 1, "identity-heads": 1, "identity-kv-heads": 1, "threads": 1},
    "demo": {},
}
SHARED: Final[dict[str, Any]] = {"device": "cpu", "kv-blocks": 8192}
"""The cheapest step there is, or the demo model's; and blocks for every sequence at its longest."""

ALL_DEPTHS: Final = (*DEPTHS, CROWD, MANY)

LEASE_TTL_S: Final = 600.0
"""A session's sequences outlive the rounds of the other ways."""


@dataclass(frozen=True, slots=True)
class Side:
    """A way over a transport, and the depths that it is taken at."""

    transport: str
    name: str
    way: Way
    depths: tuple[int, ...]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.protocol", description="What the protocol costs, in echoes of the same bytes."
    )
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--rounds", type=int, help="rounds of each way (default: 10)")
    parser.add_argument("--steps", type=int, help="steps of a round with one in flight (default: 256)")
    parser.add_argument("--engine", choices=("thread", "process"), default="thread", help="of the executors")
    parser.add_argument("--model", choices=tuple(MODELS), default="identity", help="what the executors compute")
    parser.add_argument("--quick", action="store_true", help="few steps: does it run at all?")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/protocol-<machine>.json)")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (2 if options.quick else 10)
    options.steps = options.steps or (16 if options.quick else 256)
    if options.out is None:  # a quick run is no result
        label = environment.label(environment.hardware())
        options.out = CACHE / "protocol-quick.json" if options.quick else RESULTS / f"{_name(options)}-{label}.json"
    return options


def steps_of(depth: int, steps: int) -> int:
    """Timed steps of each of ``depth`` sequences: about as many in all, but enough for each to find its stride."""
    return max(steps // depth, steps // 16, 1)


@asynccontextmanager
async def sides(transport: str, folder: Path, engine: str, model: str) -> AsyncIterator[list[Side]]:
    """All ways over one transport, up and prepared."""
    flags = {
        **MODELS[model],
        **SHARED,
        "engine": engine,
        "lease-ttl-s": LEASE_TTL_S,
        "grace-s": 0,
        "log-format": "json",
    }
    flags |= {"host": f"unix:{folder}/executor"} if transport == "unix" else {"port": 0}
    written = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        target = await enter(served("-m", "ferrum_rpc.cli", "serve", model, *written))
        echo = await enter(served("-m", "benchmarks.echo", f"unix:{folder}/echo" if transport == "unix" else ANY_PORT))
        channel = await enter(open_channel(target, None))
        bare = await enter(grpc.aio.insecure_channel(echo, options=OPTIONS))
        await vocabulary(channel)
        in_session = partial(ExecutorClient, target, session=True)
        unary, frames = Unary(channel), Frames(channel)
        found = [
            Side(transport, "unary", unary, (*DEPTHS, MANY)),
            Side(transport, "client, unary", Client(await enter(ExecutorClient(target))), (*DEPTHS, MANY)),
            Side(transport, "echo, unary", EchoCalls(bare, unary), (*DEPTHS, MANY)),
            Side(transport, "session", frames, DEPTHS),
            Side(transport, "client, session", Client(await enter(in_session())), (*DEPTHS, CROWD)),
            Side(transport, BATCHES, Batches(await enter(in_session())), (*DEPTHS, CROWD)),
            Side(transport, "echo, stream", EchoFrames(bare, frames), DEPTHS),
        ]
        for side in found:
            await side.way.prepare(max(side.depths))
        yield found


async def measure(found: Sequence[Side], rounds: int, steps: int) -> tuple[Rounds, int]:
    """Rounds of every way at every depth, in turn; those during which others used the machine are repeated, ``rounds``
    times at most. Returns the rounds, and how many were disturbed and kept."""
    taken: Rounds = {}
    for depth in ALL_DEPTHS:  # warm up
        await _turn(found, depth, 4)
    repeated = kept = 0
    for depth in ALL_DEPTHS:
        done = 0
        while done < rounds:
            bystanders = environment.Bystanders()
            turn = await _turn(found, depth, steps_of(depth, steps))
            if bystanders.disturbed():
                if repeated < rounds:
                    repeated += 1
                    continue
                kept += 1
            done += 1
            for side, timed in turn:
                taken.setdefault((side.transport, side.name, depth), []).append(timed)
    return taken, kept


async def _turn(found: Sequence[Side], depth: int, steps: int) -> list[tuple[Side, Round]]:
    turn = []
    for side in found:
        if depth in side.depths:
            await asyncio.sleep(SETTLE_S)
            turn.append((side, await side.way.round(depth, steps)))
    return turn


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    async with AsyncExitStack() as stack:
        found: list[Side] = []
        for transport in options.transports:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            found += await stack.enter_async_context(sides(transport, folder, options.engine, options.model))
        record = Record(_name(options), _settings(options), options.out, module="protocol")
        taken, kept = await measure(found, options.rounds, options.steps)
        sizes = {f"{side.transport}, {side.name}": exchange_bytes(side.way) for side in found}
    settings = record.values["settings"]
    settings["disturbed_rounds_kept"] = kept
    settings["exchange_bytes"] = {name: size for name, size in sizes.items() if size}
    record.save(points=points(taken))
    return record


def _name(options: argparse.Namespace) -> str:
    model = "" if options.model == "identity" else f"-{options.model}"
    return f"protocol{model}" if options.engine == "thread" else f"protocol{model}-{options.engine}"


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": ", ".join(
            [options.model, *(f"{name} {value}" for name, value in {**MODELS[options.model], **SHARED}.items())]
        ),
        "engine": options.engine,
        "processes": "the callers in one, an executor and an echo server for each transport in one each",
        "request_ids": True,
        "context": CONTEXT,
        "lead_in_steps": LEAD_IN,
        "rounds": options.rounds,
        "steps": {str(depth): steps_of(depth, options.steps) for depth in ALL_DEPTHS},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    options = parse(argv)
    configure_logging(level="warning")
    record = asyncio.run(run(options))
    measured: list[Point] = record.values["points"]
    show(measured)
    record.tell()


if __name__ == "__main__":
    main()
