"""Where the microseconds of one step over gRPC go: the marks of both ends, put together.

Both ends note when each stage begins (`benchmarks.profile_server`); a stage lasts until the next mark of either. With
one call in flight the marks of a step are one line in time, so the stages add up to the whole.
"""

from __future__ import annotations

import gc
import json
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import numpy as np

from benchmarks.process import served
from benchmarks.profile_server import METHOD
from benchmarks.remote import TIMEOUT_S, Remote, serve_arguments, vocabulary
from benchmarks.workload import Workload, output_spec
from ferrum_rpc.client.channel import open_channel
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


async def profile(work: Workload, batches: Sequence[int], output: str, steps: int, threads: int) -> list[Profile]:
    """Steps of the first sequences of ``work``, of as many as each of ``batches`` says; the others live and wait.
    ``work`` has room for `steps_of` as many steps."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        module, name, *arguments = serve_arguments(work, threads, "benchmarks.profile_server")
        async with served(module, name, str(file), *arguments) as target, open_channel(target, None) as channel:
            client = MarkedClient(work, channel, await vocabulary(channel), output)
            await client.prefill()
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

    def __init__(self, work: Workload, channel: Any, vocab_size: int, output: str) -> None:
        stub = model_executor_pb2_grpc.ModelExecutorStub(channel)
        stub.BatchDecode = channel.unary_unary(PATH, request_serializer=self._write, response_deserializer=self._read)
        self._side = Remote(work, channel, vocab_size, stub)
        self._spec = output_to_proto(output_spec(output))
        self._marks: list[Mark] = []

    async def prefill(self) -> None:
        """Make the sequences."""
        await self._side.prefill()

    async def run(self, steps: int, batch: int) -> tuple[list[list[Mark]], tuple[bytes, bytes]]:
        """Decode; the sequences grow by a token a step. The marks of each step, and the bytes of the last one."""
        side, fed, taken = self._side, [1] * batch, []
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
