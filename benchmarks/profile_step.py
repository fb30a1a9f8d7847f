"""Where the microseconds of one step over gRPC go, stage by stage, from the first byte built to the rows in hand.

    python -m benchmarks.profile_step [--model identity] [--batch 1] [--output greedy] [--steps 500]

Both ends note when each stage begins (`benchmarks.profile_server`); a stage lasts until the next mark of either. With
one call in flight the marks of a step are one line in time, so the stages add up to the whole. For the forward pass the
identity model is the interesting one: it computes next to nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import numpy as np

from benchmarks import environment
from benchmarks.echo import Echo
from benchmarks.process import served
from benchmarks.profile_server import METHOD
from benchmarks.remote import TIMEOUT_S, Remote, serve_arguments, vocabulary
from benchmarks.workload import OUTPUTS, Workload, output_spec, workload
from ferrum_rpc.client.channel import open_channel
from ferrum_rpc.executor.v1 import model_executor_pb2, model_executor_pb2_grpc
from ferrum_rpc.wire.output import output_to_proto

PATH: Final = f"/ferrum_rpc.executor.v1.ModelExecutor/{METHOD}"
WARM: Final = 50
END: Final = "end"

Mark = tuple[str, int]
Timeline = dict[str, float]
"""Microseconds by stage, in the order of the stages."""


class MarkedClient:
    """A scheduler that notes its own stages; ``steps`` holds the marks of each step."""

    def __init__(self, work: Workload, channel: Any, vocab_size: int, output: str) -> None:
        self.steps: list[list[Mark]] = []
        stub = model_executor_pb2_grpc.ModelExecutorStub(channel)
        stub.BatchDecode = channel.unary_unary(PATH, request_serializer=self._write, response_deserializer=self._read)
        self._side = Remote(work, channel, vocab_size, stub)
        self._spec = output_to_proto(output_spec(output))
        self._marks: list[Mark] = []

    async def run(self, steps: int, batch: int) -> None:
        """Prefill, then decode; the sequences grow by a token a step."""
        side = self._side
        await side.prefill()
        fed = [1] * batch
        gc.collect()
        for _ in range(steps):
            self._marks = []
            self._mark("client: build the request")
            request = side.request(fed, self._spec, None)
            self._mark("client: grpc.aio starts the call")
            response = await side.stub.BatchDecode(request, timeout=TIMEOUT_S)
            self._mark("client: rows and handles")
            side.accept(response)
            self._mark(END)
            self.steps.append(self._marks)
            side.exchange = (request.SerializeToString(), response.SerializeToString())

    @property
    def exchange(self) -> tuple[bytes, bytes]:
        """The bytes of the last step."""
        return self._side.exchange

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


def show(found: Sequence[Timeline], echo_us: float) -> None:
    """Stages by median, and what they come to."""
    whole = float(np.median([sum(each.values()) for each in found]))
    longest: Timeline = max(found, key=len)
    stages = list(longest)
    print(f"{'stage':<42}{'median, µs':>12}{'p90, µs':>10}{'share':>8}")
    sums: dict[str, float] = {}
    for stage in stages:
        values = [each.get(stage, 0.0) for each in found]
        median, p90 = np.percentile(values, (50, 90))
        print(f"{stage:<42}{median:>12.1f}{p90:>10.1f}{median / whole:>8.1%}")
        owner = stage.partition(":")[0]
        sums[owner] = sums.get(owner, 0.0) + float(median)
    print()
    for owner, value in sums.items():
        print(f"{owner:<42}{value:>12.1f}{'':>10}{value / whole:>8.1%}")
    print(f"{'whole step':<42}{whole:>12.1f}")
    print(f"{'bare grpc.aio echo of the same bytes':<42}{echo_us:>12.1f}{'':>10}{whole / echo_us:>7.2f}×")


async def profile(options: argparse.Namespace) -> tuple[list[Timeline], float]:
    """Run the steps and the echo; the timelines, and the echo's median in microseconds."""
    work = workload(options.model, options.batch, WARM + options.steps)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        module, name, *arguments = serve_arguments(work, options.threads, "benchmarks.profile_server")
        async with served(module, name, str(file), *arguments) as target, open_channel(target, None) as channel:
            client = MarkedClient(work, channel, await vocabulary(channel), options.output)
            await client.run(WARM + options.steps, options.batch)
        server = [(stage, time) for stage, time in json.loads(file.read_text(encoding="utf-8"))]
    async with Echo.open() as echo:
        await echo.prepare(*client.exchange)
        await echo.round(WARM)
        timed = await echo.round(options.steps)
    return timelines(client.steps[WARM:], server), float(np.median(timed.step_s)) * 1e6


def main(argv: Sequence[str] | None = None) -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_step", description="A step, stage by stage.")
    parser.add_argument("--model", default="identity", help="identity, demo, qwen3-0.6b or a folder")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--output", choices=OUTPUTS, default="greedy")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=environment.hardware()["cores"])
    options = parser.parse_args(argv)
    print(f"{options.model}, batch {options.batch}, {options.output}, {options.steps} steps")
    show(*asyncio.run(profile(options)))


if __name__ == "__main__":
    main()
