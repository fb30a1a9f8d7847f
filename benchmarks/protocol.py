"""What the protocol costs: an empty step through our executor and a bare grpc.aio echo of the same bytes, in one run.

The identity model with one layer and one head computes next to nothing, so a step is the wire, the protocol and the
hand-over to the model thread. Every server has a process of its own, TCP and unix sockets alike; rounds of all ways
alternate, and only one works at a time.

    python -m benchmarks protocol --against ../before --transports tcp

is what a change costs: executors of this checkout and of another one, by the callers of this one, round by round in
turn. The rows of the other checkout are a transport of their own, and every way has a ratio.
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

from benchmarks.cases import CACHE, DECODE, Cell
from benchmarks.compare import Round, alternate, median, percentile, ratio
from benchmarks.engines.echo import ANY_PORT, EchoCalls, EchoFrames, echo_channel
from benchmarks.engines.grpc import Calls, Client, Frames, executor
from benchmarks.engines.ways import CONTEXT, LEAD_IN, Way
from benchmarks.machine import ROOT
from benchmarks.record import Benchmark, Option, Record
from benchmarks.table import target
from ferrum_rpc.client import ExecutorClient

SETTLE_S: Final = 0.01  # between rounds: what a server does after its last answer is not the next way's
TRANSPORTS: Final = ("tcp", "unix")
AGAINST: Final = " of the other checkout"
MODEL: Final = "identity"
ONE_HEAD: Final = {"identity-layers": 1, "identity-heads": 1, "identity-kv-heads": 1, "threads": 1}
SERVED: Final[dict[str, Any]] = ONE_HEAD | {"device": "cpu", "kv-blocks": 8192}
"""The cheapest step there is; and blocks for every sequence at its longest."""

LEASE_TTL_S: Final = 600.0  # a session's sequences outlive the rounds of the other ways
WARM_STEPS: Final = 4
DEPTHS: Final = (1, 2, 4)  # steps in flight
MANY: Final = 64  # callers at a time, of unary calls only: a session is one scheduler's
ALL_DEPTHS: Final[tuple[int, ...]] = (*DEPTHS, MANY)
ECHO_OF: Final = {
    "unary": "echo, unary",
    "client, unary": "echo, unary",
    "session": "echo, stream",
    "client, session": "echo, stream",
}
"""What each way is measured against."""

ECHO_TARGET: Final = 2.0  # an empty step in bare echoes of the same bytes, at most
RATE_TARGET: Final = 3000.0  # steps a second, at least, in a session with four in flight and of `MANY` unary callers
Key = tuple[str, str, int]  # transport, way and depth


@dataclass(frozen=True, slots=True)
class Side:
    """A way over a transport, and the depths that it is taken at."""

    transport: str
    name: str
    way: Way
    depths: tuple[int, ...]


def variant(options: argparse.Namespace) -> str:
    """Unlike the usual run: the engine. A comparison with another checkout is of a change and no result."""
    if options.against is not None and options.out is None:
        options.out = CACHE / "protocol-against.json"
    return "process" if options.engine == "process" else ""


def steps_of(depth: int, steps: int) -> int:
    """Timed steps of each of ``depth`` sequences: about as many in all, but enough for each to find its stride."""
    return max(steps // depth, steps // 16, 1)


@asynccontextmanager
async def sides(transport: str, options: argparse.Namespace, root: Path = ROOT) -> AsyncIterator[list[Side]]:
    """All ways over one transport to the executor of a checkout, up and prepared."""
    with tempfile.TemporaryDirectory() as folder:
        flags, unix = SERVED | {"engine": options.engine, "lease-ttl-s": LEASE_TTL_S}, transport == "unix"
        flags |= {"host": f"unix:{folder}/executor"} if unix else {}
        name = transport if root == ROOT else transport + AGAINST
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            ours = await enter(executor(MODEL, flags, root=root))
            bare = await enter(echo_channel(f"unix:{folder}/echo" if unix else ANY_PORT))
            clients = [await enter(ExecutorClient(ours.target, session=session)) for session in (False, True)]
            vocab_size = ours.vocab_size
            unary, session = (kind(ours.channel, vocab_size) for kind in (Calls, Frames))
            found = [
                Side(name, "unary", unary, (*DEPTHS, MANY)),
                Side(name, "client, unary", Client(clients[0], None, vocab_size), (*DEPTHS, MANY)),
                Side(name, "echo, unary", EchoCalls(bare, unary), (*DEPTHS, MANY)),
                Side(name, "session", session, DEPTHS),
                Side(name, "client, session", Client(clients[1], None, vocab_size), DEPTHS),
                Side(name, "echo, stream", EchoFrames(bare, session), DEPTHS),
            ]
            for side in found:
                depth = max(side.depths)
                await side.way.prepare(Cell(DECODE, depth, CONTEXT, callers=depth))
            yield found


async def measure(found: Sequence[Side], rounds: int, steps: int) -> tuple[dict[Key, list[Round]], int]:
    """Rounds of every way at every depth, in turn; and how many turns were disturbed and kept."""
    taken: dict[Key, list[Round]] = {}
    kept = 0
    for warm in (True, False):
        for depth in ALL_DEPTHS:
            each = WARM_STEPS if warm else steps_of(depth, steps)
            takes = {
                (side.transport, side.name, depth): partial(_take, side.way, depth, each)
                for side in found
                if depth in side.depths
            }
            turns, disturbed = await alternate(takes, 1 if warm else rounds, settle_s=SETTLE_S)
            kept += 0 if warm else disturbed[1]
            taken |= turns  # in place of those that warm up
    return taken, kept


async def _take(way: Way, depth: int, steps: int, _: int) -> Round:
    return await way.turn(depth, steps)


def points(taken: Mapping[Key, Sequence[Round]]) -> list[dict[str, Any]]:
    """A row for each way over each transport: a step with one in flight, and the rates at every depth. ``around``: the
    step less its forward less the echo, which is what the protocol, its handlers and the hand-overs cost."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (transport, way, depth), rounds in taken.items():
        row = rows.setdefault((transport, way), {"transport": transport, "way": way})
        echoes = taken.get((transport, ECHO_OF.get(way, ""), depth))
        if depth == 1:
            row |= alone(rounds, echoes)
        row[f"steps/s at {depth}"] = median((len(each.step_s) / each.wall_s for each in rounds), 1)
        if other := taken.get((transport + AGAINST, way, depth)):
            row[f"of the other checkout's step at {depth}"] = ratio(rounds, other)
    return list(rows.values())


def alone(rounds: Sequence[Round], echoes: Sequence[Round] | None) -> dict[str, Any]:
    """The figures of steps with one in flight, and of the echo's rounds that they were paired with (None: it is an echo
    itself). Queue and forward are by the server's own clock."""
    steps, forward, queue = (
        1e3 * np.array([second for each in rounds for second in getattr(each, name)])
        for name in ("step_s", "forward_s", "queue_s")
    )
    found: dict[str, Any] = {"p50, ms": median(steps, 4), "p99, ms": percentile(steps, 99, 4)}
    if echoes is None:
        return found
    found |= {"in echoes": ratio(rounds, echoes), "target": target("", None, ECHO_TARGET, least=False)}
    if len(forward):
        echo = 1e3 * np.median([second for each in echoes for second in each.step_s])
        found |= {"queue, ms": median(queue, 4), "forward, ms": median(forward, 4)}
        found["around, ms"] = round(float(np.median(steps - forward) - echo), 4)
    return found


def targets(rows: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Of the steps over TCP. ``name``: of a variant."""
    by_way = {row["way"]: row for row in rows if row["transport"] == "tcp"}
    of = ", engine in a process" if name else ""
    found = [
        target(f"an empty step, {way}, in bare echoes", by_way[way]["in echoes"]["median"], ECHO_TARGET, least=False)
        for way in ("unary", "session")
        if way in by_way and not name
    ]
    for what, way, depth in (
        ("empty steps in a session, 4 in flight", "session", 4),
        (f"empty steps of {MANY} unary callers", "unary", MANY),
    ):
        if way in by_way:
            found.append(target(what + of, by_way[way][f"steps/s at {depth}"], RATE_TARGET, unit="/s"))
    return found


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    async with AsyncExitStack() as stack:
        found: list[Side] = []
        for transport in options.transports:
            for root in (ROOT, *([options.against.resolve()] if options.against else [])):
                found += await stack.enter_async_context(sides(transport, options, root))
        record = Record(
            options,
            model=", ".join([MODEL, *(f"{name} {value}" for name, value in SERVED.items())]),
            engine=options.engine,
            processes="the callers in one, an executor and an echo server for each transport in one each",
            context=f"{CONTEXT} tokens when a round begins",
            lead_in_steps=LEAD_IN,
            steps=", ".join(f"{steps_of(depth, options.steps)} at {depth}" for depth in ALL_DEPTHS),
        )
        taken, kept = await measure(found, options.rounds, options.steps)
        sizes = {f"{side.transport}, {side.name}": [len(each) for each in side.way.exchange] for side in found}
    settings = record.values["settings"]
    settings["disturbed rounds"] = f"{kept} kept"
    settings["bytes"] = "; ".join(f"{name} {asked} and {got}" for name, (asked, got) in sizes.items() if asked and got)
    rows = points(taken)
    record.put("ways", rows, targets=targets(rows, options.variant))
    return record


BENCHMARK: Final = Benchmark(
    "protocol",
    run,
    (
        Option("--transports", list(TRANSPORTS), "of the executors", choices=TRANSPORTS),
        Option("--steps", 256, "of a round with one in flight", 16),
        Option("--engine", "thread", "of the executors", choices=("thread", "process")),
        Option("--against", None, "another checkout, whose executors take turns with these", kind=Path),
    ),
    rounds=10,
    variant=variant,
)
