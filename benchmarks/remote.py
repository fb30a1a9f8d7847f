"""Side B: `ferrum-rpc serve` in another process, and this process as its scheduler: one BatchDecode per step over TCP,
or one frame of a session.

Raw stubs over the channel that the client package opens. Every step builds its messages, request ids included, and ends
when the rows are arrays and the new handles are at hand: what a scheduler needs before it can send the next one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from benchmarks.process import served
from benchmarks.sides import Round
from benchmarks.workload import LEAD_IN, Workload, digest, output_spec
from ferrum_rpc.client.channel import open_channel
from ferrum_rpc.core import OutputSpec, Positions, RowBlock
from ferrum_rpc.executor.v1 import (
    forward_pb2,
    model_executor_pb2,
    model_executor_pb2_grpc,
    output_pb2,
    session_pb2,
    types_pb2,
)
from ferrum_rpc.wire.output import output_to_proto
from ferrum_rpc.wire.rows import rows_from_proto

TIMEOUT_S = 120.0
PREFILL_TOKENS = 2048
"""Tokens of a prefill call."""

POLL_S = 0.05


class Remote:
    """A scheduler of one server."""

    def __init__(self, workload: Workload, channel: grpc.aio.Channel, vocab_size: int, stub: Any = None) -> None:
        self.exchange = (b"", b"")
        """The bytes of the last step's request and answer."""
        self._workload = workload
        self.stub = stub or model_executor_pb2_grpc.ModelExecutorStub(channel)
        self._vocab_size = vocab_size
        self._tokens = workload.tokens(vocab_size)
        self._handles: list[types_pb2.KvHandle] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, workload: Workload, threads: int, engine: str = "thread") -> AsyncIterator[Remote]:
        """Start the server, wait for the model and prefill every sequence."""
        arguments = [*serve_arguments(workload, threads), "--engine", engine]
        async with served(*arguments) as target, open_channel(target, None) as channel:
            side = cls(workload, channel, await vocabulary(channel))
            await side.prefill()
            yield side

    async def round(self, batch: int, output: str, steps: int) -> Round:
        """Roll back, then ``steps`` timed decode steps of the first ``batch`` sequences."""
        spec = output_to_proto(output_spec(output))
        timed = Round()
        blocks: list[RowBlock] = []
        for index in range(LEAD_IN + steps):
            fed = self._tokens[index, :batch].tolist()
            rollback = self._workload.context if index == 0 else None
            began = time.perf_counter()
            request = self.request(fed, spec, rollback)
            response = await self.step(request)
            blocks = self.accept(response)
            ended = time.perf_counter()
            if index >= LEAD_IN:
                timed.step_s.append(ended - began)
                timed.forward_s.append(response.timing.forward_micros / 1e6)
                timed.queue_s.append(response.timing.queue_micros / 1e6)
        self.exchange = (request.SerializeToString(), response.SerializeToString())
        timed.digest = digest(blocks[0])
        return timed

    async def step(self, request: model_executor_pb2.BatchDecodeRequest) -> Any:
        """Send it; the answer."""
        return await self.stub.BatchDecode(request, timeout=TIMEOUT_S)

    def request(
        self, fed: Sequence[int], spec: output_pb2.OutputSpec, rollback: int | None
    ) -> model_executor_pb2.BatchDecodeRequest:
        """A step that feeds ``fed[i]`` to sequence ``i``, rolled back to ``rollback`` tokens first if that is set."""
        return model_executor_pb2.BatchDecodeRequest(
            items=[
                forward_pb2.ForwardItem(
                    item_id=number,
                    handle=self._handles[number],
                    token_ids=[token],
                    truncate_to=rollback,
                    output=spec,
                    request_id=uuid.uuid4().hex,
                )
                for number, token in enumerate(fed)
            ]
        )

    def accept(self, response: Any) -> list[RowBlock]:
        """Note the new handles; the rows as arrays."""
        for number, result in enumerate(response.results):
            if not result.HasField("output"):
                raise RuntimeError(f"sequence {number} was refused: {result.error.message}")
            self._handles[number] = result.output.handle
        return rows_from_proto(response.row_blocks)

    async def prefill(self) -> None:
        """Make every sequence."""
        nothing = output_to_proto(OutputSpec(Positions.NONE))
        prompts = self._workload.prompts(self._vocab_size).tolist()
        at_once = max(1, PREFILL_TOKENS // self._workload.context)
        for first in range(0, len(prompts), at_once):
            items = [
                forward_pb2.ForwardItem(item_id=number, token_ids=prompts[number], output=nothing)
                for number in range(first, min(first + at_once, len(prompts)))
            ]
            request = model_executor_pb2.BatchPrefillRequest(items=items, all_or_nothing=True)
            response = await self.stub.BatchPrefill(request, timeout=TIMEOUT_S)
            self._handles += [result.output.handle for result in response.results]


class RemoteSession(Remote):
    """The same in one session. Greedy rows only: larger ones come in frames of their own."""

    async def prefill(self) -> None:
        """Make every sequence, and open the session."""
        await super().prefill()
        self._call: Any = self.stub.Session()
        self._frame = 1
        hello = session_pb2.SessionHello(client_name="benchmark")
        await self._call.write(session_pb2.SessionRequest(step_id=self._frame, hello=hello))
        await self._call.read()

    async def step(self, request: model_executor_pb2.BatchDecodeRequest) -> Any:
        """Send it as a frame; the answer's part that says what a unary one does."""
        self._frame += 1
        forward = session_pb2.SessionForward(items=request.items)
        await self._call.write(session_pb2.SessionRequest(step_id=self._frame, forward=forward))
        answer = await self._call.read()
        if not answer.HasField("forward"):
            raise RuntimeError(f"a frame was refused: {answer.error.message}")
        return answer.forward


def serve_arguments(workload: Workload, threads: int, module: str = "ferrum_rpc.cli") -> list[str]:
    """How the server is started: the workload's settings as flags, a free port, logs that a program reads."""
    return serve_flags(workload.path, {**workload.settings, "threads": threads}, module)


def serve_flags(model: str, settings: dict[str, Any], module: str = "ferrum_rpc.cli") -> list[str]:
    """The same of any model and settings."""
    flags = {**settings, "port": 0, "grace-s": 0, "log-format": "json"}
    written = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return ["-m", module, "serve", model, *written, "--no-warmup"]


async def vocabulary(channel: grpc.aio.Channel) -> int:
    """Wait until the model is loaded, `TIMEOUT_S` at most; returns its vocabulary size."""
    stub = model_executor_pb2_grpc.ModelExecutorStub(channel)
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            info = await stub.GetInfo(model_executor_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
            return int(info.model.vocab_size)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                raise
        await asyncio.sleep(POLL_S)
