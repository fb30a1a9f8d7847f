"""`make profile`: where a step's microseconds go, stage by stage, from the first byte built to the rows in hand.

Both ends note when each stage begins (`benchmarks.profile_server`); a stage lasts until the next mark of either. With
one call in flight the marks of a step are one line in time, so the stages add up to the whole.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import machine
from benchmarks.cases import CONTEXT, DECODE, IDENTITY, IDENTITY_CONTEXT, Cell, model_path, settings
from benchmarks.compare import median
from benchmarks.engines.echo import EchoCalls, echo_channel
from benchmarks.engines.grpc import TIMEOUT_S, Calls, executor
from benchmarks.engines.ways import TOKEN
from benchmarks.profile_server import METHOD, mark, marked, marks
from benchmarks.record import Benchmark, Option, Record
from benchmarks.table import Row, number
from ferrum_rpc.executor.v1 import model_executor_pb2
from ferrum_rpc.wire.output import output_to_proto
from ferrum_rpc.wire.rows import rows_from_proto

PATH: Final = f"/ferrum_rpc.executor.v1.ModelExecutor/{METHOD}"
WARM: Final = 50
END: Final = "end"
STAGE: Final = "stage, µs (share of the step)"

COMPUTE: Final = ("model thread: forward", "model thread: select")
"""The stages that compute; every other one of the server is bookkeeping or the way to it."""

BOOKKEEPERS: Final = ("server", "model thread")
"""Whose stages are bookkeeping, but for `COMPUTE`; the hand-overs between the threads are not."""

Mark = tuple[str, int]
Timeline = dict[str, float]  # microseconds by stage, in the order of the stages


@dataclass(frozen=True, slots=True)
class Profile:
    """Of many steps: median microseconds by stage, in their order, and of the whole. ``exchange``: the bytes of the
    last one."""

    stages: Timeline
    whole_us: float
    exchange: tuple[bytes, bytes]

    @property
    def bookkeeping(self) -> Timeline:
        ours = [name for name in self.stages if name.partition(":")[0] in BOOKKEEPERS and name not in COMPUTE]
        return {name: self.stages[name] for name in ours}


async def profile(model: str, live: Cell, batches: Sequence[int], steps: int, threads: int) -> list[Profile]:
    """Steps of the first sequences of ``live``, of as many as each of ``batches`` says; the others live and wait.
    ``live`` has room for `steps_of` as many steps."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        program = ("-m", "benchmarks.profile_server", str(file))
        async with executor(model, settings([live], threads), program=program) as found:
            client = MarkedClient(found.channel, found.vocab_size, live)
            await client.side.prepare(live)
            runs = [await client.run(WARM + steps, batch) for batch in batches]
        noted = json.loads(file.read_text(encoding="utf-8"))
    return [_profile(run[WARM:], exchange, noted) for run, exchange in runs]


def steps_of(batches: Sequence[int], steps: int) -> int:
    """Steps that `profile` takes, and tokens that its sequences grow by at most."""
    return (WARM + steps) * len(batches)


def _profile(measured: Sequence[Sequence[Mark]], exchange: tuple[bytes, bytes], noted: Any) -> Profile:
    lines = timelines(measured, [(stage, time) for stage, time in noted])
    return Profile(medians(lines), median(sum(each.values()) for each in lines), exchange)


def medians(found: Sequence[Timeline]) -> Timeline:
    """Of every stage, in the order of the timeline that has the most; a stage that a step did not have took nothing."""
    longest = max(found, key=len, default={})
    return {stage: median(each.get(stage, 0.0) for each in found) for stage in longest}


class MarkedClient:
    """A scheduler that notes its own stages."""

    def __init__(self, channel: Any, vocab_size: int, live: Cell) -> None:
        self.side = Calls(channel, vocab_size)
        write = model_executor_pb2.BatchDecodeRequest.SerializeToString
        read = model_executor_pb2.BatchDecodeResponse.FromString
        self._step = channel.unary_unary(
            PATH,
            request_serializer=marked(write, "client: serialize the request", "wire: request"),
            response_deserializer=marked(read, "client: parse the answer", "client: grpc.aio wakes the caller"),
        )
        self._spec = output_to_proto(live.spec)

    async def run(self, steps: int, batch: int) -> tuple[list[list[Mark]], tuple[bytes, bytes]]:
        """Decode; the sequences grow by a token a step. The marks of each step, and the bytes of the last one."""
        side, taken = self.side, []
        gc.collect()
        for _ in range(steps):
            marks.clear()
            mark("client: build the request")
            items = [side.item(number, TOKEN, item_id=number, output=self._spec) for number in range(batch)]
            request = model_executor_pb2.BatchDecodeRequest(items=items)
            mark("client: grpc.aio starts the call")
            response = await self._step(request, timeout=TIMEOUT_S)
            mark("client: rows and handles")
            for at, result in enumerate(response.results):
                assert result.HasField("output"), result.error.message
                side.handles[at] = result.output.handle
            rows_from_proto(response.row_blocks)
            mark(END)
            taken.append([*marks])
        return taken, (request.SerializeToString(), response.SerializeToString())


def timelines(client: Sequence[Sequence[Mark]], server: Sequence[Mark]) -> list[Timeline]:
    """Each step's stages. A stage that begins several times in a step (one per span) counts from its first time."""
    times = [time for _, time in server]
    found = []
    for own in client:
        low, high = bisect_left(times, own[0][1]), bisect_left(times, own[-1][1])
        begun: dict[str, int] = {}
        for stage, time in sorted([*own, *server[low:high]], key=lambda each: each[1]):
            begun.setdefault(stage, time)
        order = list(begun.items())
        found.append({name: (after - time) / 1e3 for (name, time), (_, after) in pairwise(order)})
    return found


class Column(NamedTuple):
    """A case of the table. ``echo_us``: a bare grpc.aio exchange of the same bytes."""

    name: str
    found: Profile
    echo_us: float


def rows(columns: Sequence[Column]) -> list[Row]:
    """Stages with their share of the step, what they come to, and the echo. Microseconds."""
    found = _rows([column.found.stages for column in columns], columns)
    found += _rows([_owners(column.found.stages) for column in columns], columns, "all of ")
    totals: dict[str, Callable[[Column], float]] = {
        "whole step": lambda each: each.found.whole_us,
        "server's bookkeeping": lambda each: sum(each.found.bookkeeping.values()),
        "bare grpc.aio echo of the same bytes": lambda each: each.echo_us,
        "whole step, in echoes": lambda each: each.found.whole_us / each.echo_us,
    }
    return found + [{STAGE: name} | {each.name: figure(each) for each in columns} for name, figure in totals.items()]


def _rows(found: Sequence[Timeline], columns: Sequence[Column], prefix: str = "") -> list[Row]:
    """Every name that one of them has, in the order of the longest."""
    names = dict.fromkeys(name for each in sorted(found, key=len, reverse=True) for name in each)
    pairs = list(zip(columns, found, strict=True))
    return [
        {STAGE: prefix + name}
        | {
            column.name: f"{number(each[name])} ({each[name] / column.found.whole_us:.1%})"
            for column, each in pairs
            if name in each
        }
        for name in names
    ]


def _owners(stages: Timeline) -> Timeline:
    sums = defaultdict[str, float](float)
    for stage, value in stages.items():
        sums[stage.partition(":")[0]] += value
    return sums


async def run(options: argparse.Namespace) -> Record:
    """Every case, with a server for each model, and a file of it."""
    threads = machine.hardware()["cores"]
    record = Record(options, threads=threads, steps=f"{options.steps} of each case", output="greedy")
    columns, most = list[Column](), steps_of(options.batches, options.steps)
    async with echo_channel() as channel:
        for model in options.models:
            context, path = IDENTITY_CONTEXT if model == IDENTITY else CONTEXT, model_path(model)
            live = Cell(DECODE, max(options.batches), context, most=most)
            profiles = await profile(path, live, options.batches, options.steps, threads)
            for batch, found in zip(options.batches, profiles, strict=True):
                timed = await EchoCalls(channel, found).turn(1, WARM + options.steps)
                columns.append(Column(f"{Path(path).name} b{batch}", found, median(timed.step_s[WARM:], 9) * 1e6))
    record.put("stages", rows(columns))
    return record


BENCHMARK: Final = Benchmark(
    "profile",
    run,
    (
        Option("--models", ["identity", "qwen3-0.6b"], "names or folders", [IDENTITY]),
        Option("--batches", [1, 8, 32], "sequences of a step", [1, 2]),
        Option("--steps", 100, "of each case", 4),
    ),
    rounds=1,
)
