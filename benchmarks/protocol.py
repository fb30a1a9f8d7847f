"""What the protocol costs: an empty step through our executor and a bare grpc.aio echo of the same bytes, in one run.

The identity model with one layer and one head computes next to nothing, so a step is the wire, the protocol and the
hand-over to the model thread. Every server has a process of its own, TCP and unix sockets alike; rounds of all ways
alternate, and only one works at a time.

    python -m benchmarks.protocol --against ../before --transports tcp

is what a change costs: executors of this checkout and of another one, by the callers of this one, round by round in
turn. The rows of the other checkout are a transport of their own, and a ratio is told for every way.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import tables
from benchmarks.cases import CACHE
from benchmarks.compare import Round, alternate, ratio
from benchmarks.engines.echo import ANY_PORT, EchoCalls, EchoFrames, echo_channel
from benchmarks.engines.grpc import Batches, Calls, Client, Frames, executor
from benchmarks.engines.ways import CONTEXT, LEAD_IN, Way
from benchmarks.machine import ROOT
from benchmarks.record import Record, finish, out_of, read_options
from ferrum_rpc.client import ExecutorClient

SETTLE_S: Final = 0.01
"""Between rounds: what a server does after its last answer is not the next way's."""

TRANSPORTS: Final = ("tcp", "unix")
AGAINST: Final = " of the other checkout"
MODELS: Final[dict[str, dict[str, Any]]] = {
    "identity": {"identity-layers": 1, "identity-heads": 1, "identity-kv-heads": 1, "threads": 1},
    "demo": {},
}
SHARED: Final[dict[str, Any]] = {"device": "cpu", "kv-blocks": 8192}
"""The cheapest step there is, or the demo model's; and blocks for every sequence at its longest."""

LEASE_TTL_S: Final = 600.0
"""A session's sequences outlive the rounds of the other ways."""

WARM_STEPS: Final = 4
DEPTHS: Final = (1, 2, 4)
"""Steps in flight."""

MANY: Final = 64
"""Callers at a time, of unary calls only: a session is one scheduler's."""

CROWD: Final = tables.CROWD
"""Coroutines on one client, each with a sequence of its own, and the items of a batch in lockstep."""

ALL_DEPTHS: Final = (*DEPTHS, CROWD, MANY)
BATCHES: Final = "client, batches"
"""What a crowd of coroutines is measured against."""

ECHO_OF: Final = {
    "unary": "echo, unary",
    "client, unary": "echo, unary",
    "session": "echo, stream",
    "client, session": "echo, stream",
    BATCHES: "echo, stream",
}
"""What each way is measured against."""

TARGETS: Final = {1: 2.0, CROWD: 1.25}
"""By depth: an empty step in bare echoes of the same bytes, and one of the crowd in steps of a batch of as many (0.8 of
its rate), at most. They state where things are to be; nothing fails."""

RATE_TARGETS: Final = {("session", 4): 3000.0, ("unary", MANY): 3000.0}
"""Steps a second, at least, by way and depth."""

Key = tuple[str, str, int]
"""Transport, way and depth."""


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
    parser.add_argument("--steps", type=int, help="steps of a round with one in flight (default: 256)")
    parser.add_argument("--engine", choices=("thread", "process"), default="thread", help="of the executors")
    parser.add_argument("--model", choices=tuple(MODELS), default="identity", help="what the executors compute")
    parser.add_argument("--against", type=Path, help="another checkout, whose executors take turns with these")
    options = read_options(parser, argv, rounds=10)
    options.steps = options.steps or (16 if options.quick else 256)
    model = "" if options.model == "identity" else f"-{options.model}"
    options.name = f"protocol{model}" if options.engine == "thread" else f"protocol{model}-{options.engine}"
    if options.against is not None and options.out is None:  # of a change and not of the commit: no result
        options.out = CACHE / "protocol-against.json"
    options.out = out_of(options, options.name)
    return options


def steps_of(depth: int, steps: int) -> int:
    """Timed steps of each of ``depth`` sequences: about as many in all, but enough for each to find its stride."""
    return max(steps // depth, steps // 16, 1)


@asynccontextmanager
async def sides(transport: str, options: argparse.Namespace, root: Path = ROOT) -> AsyncIterator[list[Side]]:
    """All ways over one transport to the executor of a checkout, up and prepared."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {**MODELS[options.model], **SHARED, "engine": options.engine, "lease-ttl-s": LEASE_TTL_S}
        unix = transport == "unix"
        flags |= {"host": f"unix:{folder}/executor"} if unix else {}
        name = transport if root == ROOT else transport + AGAINST
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            ours = await enter(executor(options.model, flags, root=root))
            bare = await enter(echo_channel(f"unix:{folder}/echo" if unix else ANY_PORT))
            clients = [await enter(ExecutorClient(ours.target, session=session)) for session in (False, True, True)]
            unary, session = Calls(ours.channel), Frames(ours.channel)
            found = [
                Side(name, "unary", unary, (*DEPTHS, MANY)),
                Side(name, "client, unary", Client(clients[0]), (*DEPTHS, MANY)),
                Side(name, "echo, unary", EchoCalls(bare, unary), (*DEPTHS, MANY)),
                Side(name, "session", session, DEPTHS),
                Side(name, "client, session", Client(clients[1]), (*DEPTHS, CROWD)),
                Side(name, BATCHES, Batches(clients[2]), (*DEPTHS, CROWD)),
                Side(name, "echo, stream", EchoFrames(bare, session), DEPTHS),
            ]
            for side in found:
                await side.way.make(max(side.depths))
            yield found


async def measure(found: Sequence[Side], rounds: int, steps: int) -> tuple[dict[Key, list[Round]], int]:
    """Rounds of every way at every depth, in turn; and how many turns were disturbed and kept."""
    taken: dict[Key, list[Round]] = {}
    kept = 0
    for depth, limit in [(depth, None) for depth in ALL_DEPTHS] + [(depth, steps) for depth in ALL_DEPTHS]:
        each = WARM_STEPS if limit is None else steps_of(depth, limit)
        takes = {
            (side.transport, side.name, depth): partial(_take, side.way, depth, each)
            for side in found
            if depth in side.depths
        }
        turns, disturbed = await alternate(takes, 1 if limit is None else rounds, settle_s=SETTLE_S)
        if limit is not None:
            kept += disturbed[1]
            taken |= {key: [turn[key] for turn in turns] for key in takes}
    return taken, kept


async def _take(way: Way, depth: int, steps: int, _: int) -> Round:
    return await way.turn(depth, steps)


def points(taken: Mapping[Key, Sequence[Round]]) -> list[dict[str, Any]]:
    """Every way at every depth, in the order of the rounds."""
    found = []
    for (transport, way, depth), rounds in taken.items():
        against = ECHO_OF.get(way, "") if depth != CROWD else BATCHES * (way != BATCHES)
        found.append(point((transport, way, depth), rounds, taken.get((transport, against, depth))))
        if other := taken.get((transport + AGAINST, way, depth)):
            found[-1]["against"] = ratio(rounds, other)
    return found


def point(key: Key, rounds: Sequence[Round], echoes: Sequence[Round] | None) -> dict[str, Any]:
    """The figures of rounds, and of the echo's rounds that they were paired with (None: it is an echo itself).
    Milliseconds of a step; ``steps_per_s``: median of the rounds. Of the server's own clock, where there is one:
    ``queue_ms``, ``forward_ms``, and ``around_ms``, the step less its forward less the echo: what the protocol, its
    handlers and the hand-overs cost."""
    transport, way, depth = key
    steps = np.array([second for each in rounds for second in each.step_s])
    queue = [second for each in rounds for second in each.queue_s]
    forward = np.array([second for each in rounds for second in each.forward_s])
    around = None
    if len(forward) and echoes is not None:
        around = _ms(np.median(steps - forward) - np.median([second for each in echoes for second in each.step_s]))
    return {
        "transport": transport,
        "way": way,
        "depth": depth,
        "samples": len(steps),
        "p50_ms": _ms(np.median(steps)),
        "p99_ms": _ms(np.percentile(steps, 99)),
        "steps_per_s": round(float(np.median([len(each.step_s) / each.wall_s for each in rounds])), 1),
        "rate_target": RATE_TARGETS.get((way, depth)),
        "ratio": None if echoes is None else ratio(rounds, echoes) | {"target": TARGETS.get(depth)},
        "queue_ms": _ms(np.median(queue)) if queue else None,
        "forward_ms": _ms(np.median(forward)) if len(forward) else None,
        "around_ms": around,
    }


def _ms(seconds: float | np.floating) -> float:
    return round(float(seconds) * 1e3, 4)


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    async with AsyncExitStack() as stack:
        found: list[Side] = []
        for transport in options.transports:
            for root in (ROOT, *([options.against.resolve()] if options.against else [])):
                found += await stack.enter_async_context(sides(transport, options, root))
        told = {**MODELS[options.model], **SHARED}
        settings = {
            "model": ", ".join([options.model, *(f"{name} {value}" for name, value in told.items())]),
            "engine": options.engine,
            "processes": "the callers in one, an executor and an echo server for each transport in one each",
            "request_ids": True,
            "context": CONTEXT,
            "lead_in_steps": LEAD_IN,
            "rounds": options.rounds,
            "steps": {str(depth): steps_of(depth, options.steps) for depth in ALL_DEPTHS},
        }
        record = Record(options.name, settings, options.out)
        taken, kept = await measure(found, options.rounds, options.steps)
        sizes = {f"{side.transport}, {side.name}": [len(each) for each in side.way.exchange] for side in found}
    settings = record.values["settings"]
    settings["disturbed_rounds_kept"] = kept
    settings["exchange_bytes"] = {name: size for name, size in sizes.items() if any(size)}
    record.save(points=points(taken))
    return record


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""

    def show(values: dict[str, Any]) -> None:
        tables.show(tables.protocol(values["points"]), "protocol")
        for each in values["points"]:
            if "against" in each:
                told = tables.low_to_high(each["against"], 3)
                print(f"{each['transport']}, {each['way']} at {each['depth']}: {told} of the other checkout's step")

    finish(run(parse(argv)), show)


if __name__ == "__main__":
    main()
