"""`make profile`: where a step's microseconds go, stage by stage, from the first byte built to the rows in hand.

    python -m benchmarks.profile [--models identity demo qwen3-0.6b] [--batches 1 8 32] [--steps 100]

One table: a row for each stage, a column for each model and batch size. The identity model computes next to nothing, so
its columns are the wire and the bookkeeping; the others show what is left of that beside a forward pass.

Both ends note when each stage begins (`benchmarks.profile_server`); a stage lasts until the next mark of either. With
one call in flight the marks of a step are one line in time, so the stages add up to the whole.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import numpy as np

from benchmarks import machine, tables
from benchmarks.cases import CONTEXT, DECODE, IDENTITY, IDENTITY_CONTEXT, OUTPUTS, Cell, model_path, settings
from benchmarks.engines.echo import EchoCalls, echo_channel
from benchmarks.engines.grpc import TIMEOUT_S, Calls, executor
from benchmarks.profile_server import METHOD
from ferrum_rpc.executor.v1 import model_executor_pb2, model_executor_pb2_grpc
from ferrum_rpc.wire.output import output_to_proto

PATH: Final = f"/ferrum_rpc.executor.v1.ModelExecutor/{METHOD}"
WARM: Final = 50
END: Final = "end"

COMPUTE: Final = ("model thread: forward", "model thread: select")
"""The stages that compute; every other one of the server is bookkeeping or the way to it."""

BOOKKEEPERS: Final = ("server", "model thread")
"""Whose stages are bookkeeping, but for `COMPUTE`; the hand-overs between the threads are not."""

Mark = tuple[str, int]
Timeline = dict[str, float]
"""Microseconds by stage, in the order of the stages."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Of many steps: median microseconds by stage, in their order; of what the compute stages spend on what was summed
    up; of the whole step. ``exchange``: the bytes of the last one."""

    stages: Timeline
    inside: Timeline
    whole_us: float
    exchange: tuple[bytes, bytes]

    @property
    def bookkeeping(self) -> Timeline:
        """The stages of what the server does for a step besides computing and waking threads."""
        return {
            name: value
            for name, value in self.stages.items()
            if name.partition(":")[0] in BOOKKEEPERS and name not in COMPUTE
        }


async def profile(model: str, live: Cell, batches: Sequence[int], steps: int, threads: int) -> list[Profile]:
    """Steps of the first sequences of ``live``, of as many as each of ``batches`` says; the others live and wait.
    ``live`` has room for `steps_of` as many steps."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        program = ("-m", "benchmarks.profile_server", str(file))
        async with executor(model, settings([live], threads), program=program) as found:
            client = MarkedClient(found.channel, live)
            await client.side.prefill(live.prompts(found.vocab_size).tolist())
            runs = [await client.run(WARM + steps, batch) for batch in batches]
        noted = json.loads(file.read_text(encoding="utf-8"))
    return [_profile(run[WARM:], exchange, noted) for run, exchange in runs]


def steps_of(batches: Sequence[int], steps: int) -> int:
    """Steps that `profile` takes, and tokens that its sequences grow by at most."""
    return (WARM + steps) * len(batches)


def _profile(measured: Sequence[Sequence[Mark]], exchange: tuple[bytes, bytes], noted: Any) -> Profile:
    lines = timelines(measured, [(stage, time) for stage, time in noted["marks"]])
    first, last = measured[0][0][1], measured[-1][-1][1]
    within = [spent for time, spent in noted["inside"] if first <= time <= last]
    whole = float(np.median([sum(each.values()) for each in lines]))
    return Profile(medians(lines), medians(within), whole, exchange)


def medians(found: Sequence[Timeline]) -> Timeline:
    """Of every stage, in the order of the timeline that has the most; a stage that a step did not have took nothing."""
    longest = max(found, key=len, default={})
    return {stage: float(np.median([each.get(stage, 0.0) for each in found])) for stage in longest}


class MarkedClient:
    """A scheduler that notes its own stages."""

    def __init__(self, channel: Any, live: Cell) -> None:
        stub = model_executor_pb2_grpc.ModelExecutorStub(channel)
        stub.BatchDecode = channel.unary_unary(PATH, request_serializer=self._write, response_deserializer=self._read)
        self.side = Calls(channel, stub=stub)
        self._spec = output_to_proto(live.spec)
        self._marks: list[Mark] = []

    async def run(self, steps: int, batch: int) -> tuple[list[list[Mark]], tuple[bytes, bytes]]:
        """Decode; the sequences grow by a token a step. The marks of each step, and the bytes of the last one."""
        side, fed, taken = self.side, [1] * batch, []
        gc.collect()
        for _ in range(steps):
            self._marks = []
            self._mark("client: build the request")
            request = model_executor_pb2.BatchDecodeRequest(items=side.items(fed, self._spec))
            self._mark("client: grpc.aio starts the call")
            response = await side.stub.BatchDecode(request, timeout=TIMEOUT_S)
            self._mark("client: rows and handles")
            side.accept(response)
            self._mark(END)
            taken.append(self._marks)
        return taken, (request.SerializeToString(), response.SerializeToString())

    def _mark(self, stage: str) -> None:
        self._marks.append((stage, perf_counter_ns()))

    def _write(self, request: model_executor_pb2.BatchDecodeRequest) -> bytes:
        self._mark("client: serialize the request")
        data = request.SerializeToString()
        self._mark("wire: request")
        return data

    def _read(self, data: bytes) -> model_executor_pb2.BatchDecodeResponse:
        self._mark("client: parse the answer")
        response = model_executor_pb2.BatchDecodeResponse.FromString(data)
        self._mark("client: grpc.aio wakes the caller")
        return response


def timelines(client: Sequence[Sequence[Mark]], server: Sequence[Mark]) -> list[Timeline]:
    """Each step's stages. A stage that begins several times in a step (one per span) counts from its first time."""
    times = [time for _, time in server]
    found = []
    for marks in client:
        low, high = bisect_left(times, marks[0][1]), bisect_left(times, marks[-1][1])
        begun: dict[str, int] = {}
        for stage, time in sorted([*marks, *server[low:high]], key=lambda each: each[1]):
            begun.setdefault(stage, time)
        order = list(begun.items())
        found.append({name: (after - time) / 1e3 for (name, time), (_, after) in pairwise(order)})
    return found


@dataclass(frozen=True, slots=True)
class Column:
    """A case of the table. ``echo_us``: a bare grpc.aio exchange of the same bytes."""

    name: str
    found: Profile
    echo_us: float


def table(columns: Sequence[Column]) -> tables.Table:
    """Stages with their share of the step, what they come to, and the echo. Microseconds."""
    rows = _rows([column.found.stages for column in columns], columns)
    rows.append(("",) * (len(columns) + 1))
    rows += _rows([_owners(column.found.stages) for column in columns], columns, "all of ")
    rows += _rows([column.found.inside for column in columns], columns, "  of these: ")
    totals: dict[str, Callable[[Column], str]] = {
        "whole step": lambda each: tables.number(each.found.whole_us),
        "server's bookkeeping": lambda each: tables.number(sum(each.found.bookkeeping.values())),
        "bare grpc.aio echo of the same bytes": lambda each: tables.number(each.echo_us),
        "whole step, in echoes": lambda each: f"{each.found.whole_us / each.echo_us:.2f}",
    }
    rows += [(name, *map(figure, columns)) for name, figure in totals.items()]
    return tables.Table(("stage, µs (share of the step)", *(column.name for column in columns)), rows)


def _rows(found: Sequence[Timeline], columns: Sequence[Column], prefix: str = "") -> list[tuple[str, ...]]:
    """Every name that one of them has, in the order of the longest."""
    names = dict.fromkeys(name for each in sorted(found, key=len, reverse=True) for name in each)

    def share(value: float | None, column: Column) -> str:
        return "" if value is None else f"{tables.number(value)} ({value / column.found.whole_us:.1%})"

    return [
        (prefix + name, *(share(each.get(name), column) for each, column in zip(found, columns, strict=True)))
        for name in names
    ]


def _owners(stages: Timeline) -> Timeline:
    sums: Timeline = {}
    for stage, value in stages.items():
        owner = stage.partition(":")[0]
        sums[owner] = sums.get(owner, 0.0) + value
    return sums


async def measure(options: argparse.Namespace) -> list[Column]:
    """Every case; a server for each model."""
    columns = []
    most = steps_of(options.batches, options.steps)
    async with echo_channel() as channel:
        for model in options.models:
            context = IDENTITY_CONTEXT if model == IDENTITY else CONTEXT
            live = Cell(DECODE, max(options.batches), context, most=most, output=options.output)
            path = model_path(model)
            profiles = await profile(path, live, options.batches, options.steps, options.threads)
            for batch, found in zip(options.batches, profiles, strict=True):
                timed = await EchoCalls(channel, found).turn(1, WARM + options.steps)
                echo_us = float(np.median(timed.step_s[WARM:])) * 1e6
                columns.append(Column(f"{Path(path).name} b{batch}", found, echo_us))
    return columns


def main(argv: Sequence[str] | None = None) -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description="A step, stage by stage.")
    parser.add_argument("--models", nargs="+", default=["identity", "qwen3-0.6b"], help="names or folders")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="sequences of a step")
    parser.add_argument("--output", choices=OUTPUTS, default="greedy")
    parser.add_argument("--steps", type=int, default=100, help="of each case")
    parser.add_argument("--threads", type=int, default=machine.hardware()["cores"])
    parser.add_argument("--out", type=Path, help="JSON file of the medians (default: none)")
    options = parser.parse_args(argv)
    columns = asyncio.run(measure(options))
    print()
    tables.show(table(columns))
    if options.out is not None:
        cases = {each.name: {"stages": each.found.stages, "inside": each.found.inside} for each in columns}
        facts = {"commit": machine.commit(), "hardware": machine.hardware(), "microseconds": cases}
        options.out.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
