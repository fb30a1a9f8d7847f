"""`ferrum-rpc serve` in another process, and this process as its scheduler.

`Calls` and `Frames` are a scheduler without our client package: raw stubs over the channel that it opens. They build
every message, request ids included, and a step ends when the new handle is at hand. `Client` is `ferrum_rpc.client` as
anybody would use it; its steps end when the rows are arrays.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import torch
from crc32c import crc32c

from benchmarks.cases import LEAD_IN, NOTHING, PREFILL, Cell, settings
from benchmarks.compare import Round, Unsupported
from benchmarks.engines.process import REFERENCE, served
from benchmarks.engines.ways import TOKEN, Way, in_calls, in_frames
from benchmarks.machine import ROOT
from ferrum_rpc.client import Answer, ExecutorClient
from ferrum_rpc.client import Sequence as ClientSequence
from ferrum_rpc.client.channel import open_channel
from ferrum_rpc.core import ModelInfo, OutputSpec, RowKind, Rows
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, model_executor_pb2_grpc, session_pb2, types_pb2
from ferrum_rpc.models.linear import select_quantized
from ferrum_rpc.wire.output import output_to_proto

INT8: Final = "ours with int8 weights, gRPC session"
INT4: Final = "ours with int4 weights, gRPC session"
QUANTIZED: Final = {INT8: "int8", INT4: "int4"}
TIMEOUT_S: Final = 600.0
PREFILL_TOKENS: Final = 2048  # tokens of a prefill call
POLL_S: Final = 0.05
PROGRAM: Final = ("-m", "ferrum_rpc.cli")


@dataclass(frozen=True, slots=True)
class Executor:
    """A server that has loaded its model, the id of its process, and a channel to it."""

    target: str
    pid: int
    channel: grpc.aio.Channel
    vocab_size: int


@asynccontextmanager
async def executor(model: str, chosen: Mapping[str, Any], *, root: Path = ROOT) -> AsyncIterator[Executor]:
    """Start a server of the checkout ``root``, with settings as flags, on a free port unless one is chosen; wait until
    its model is loaded, `TIMEOUT_S` at most."""
    flags = {"grace-s": 0, "log-format": "json"} | ({} if "host" in chosen else {"port": 0}) | dict(chosen)
    written = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    starting = served(*PROGRAM, "serve", model, *written, "--no-warmup", root=root)
    async with starting as server, open_channel(server.target, None) as channel:
        stub = model_executor_pb2_grpc.ModelExecutorStub(channel)
        until = time.monotonic() + TIMEOUT_S
        while True:
            try:
                info = await stub.GetInfo(model_executor_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
                break
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                    raise
            await asyncio.sleep(POLL_S)
        yield Executor(server.target, server.process.pid, channel, int(info.model.vocab_size))


@asynccontextmanager
async def connected(model: str, chosen: Mapping[str, Any]) -> AsyncIterator[tuple[Executor, ExecutorClient]]:
    """A server as `executor` starts it, and a session with it."""
    async with (
        executor(model, chosen) as found,
        ExecutorClient(found.target, session=True, timeout_s=TIMEOUT_S) as client,
    ):
        yield found, client


def facts(name: str, device: Any, model: ModelInfo) -> dict[str, Any]:
    """What a side of ours is, by its ``device``, and what it keeps of a token of its ``model``."""
    choices = [choice for choice, _ in device.choices]
    cache = f"{model.kv_bytes_per_token:,} bytes of cache a token"
    return {"name": name, "threads": device.threads, "choices": choices, "cache": cache}


def last_rows(rows: Sequence[Rows]) -> list[int]:
    """Of a step's rows: tokens as they are, anything else as one checksum."""
    kind, checksum = rows[0].block.kind, 0
    columns = [each.block[kind.columns[0]][each.first : each.first + each.count] for each in rows]
    if kind is RowKind.TOKENS:
        return [token for column in columns for token in column.tolist()]
    for column in columns:
        checksum = crc32c(column.view(np.uint8).data, checksum)
    return [checksum]


class Calls(Way):
    """Unary calls of the generated stub. ``exchange``: the bytes of the last step's request and answer."""

    def __init__(self, channel: grpc.aio.Channel, vocab_size: int) -> None:
        self.stub: Any = model_executor_pb2_grpc.ModelExecutorStub(channel)
        self.handles: list[types_pb2.KvHandle] = []
        self._vocab_size = vocab_size
        self._last: tuple[Any, Any] = (None, None)

    def item(self, sequence: int, token: int, back: int | None = None) -> forward_pb2.ForwardItem:
        """The next decode of a sequence, rolled back to ``back`` tokens first if that is set."""
        return forward_pb2.ForwardItem(
            handle=self.handles[sequence], token_ids=[token], truncate_to=back, request_id=uuid.uuid4().hex
        )

    async def prepare(self, cell: Cell) -> None:
        """Make a sequence of every prompt that has none."""
        prompts = cell.prompts(self._vocab_size).tolist()
        at_once = max(1, PREFILL_TOKENS // len(prompts[0]))
        while missing := prompts[len(self.handles) :][:at_once]:
            items = [forward_pb2.ForwardItem(token_ids=each, output=output_to_proto(NOTHING)) for each in missing]
            for number, item in enumerate(items):
                item.item_id = number
            request = model_executor_pb2.BatchPrefillRequest(items=items, all_or_nothing=True)
            response = await self.stub.BatchPrefill(request, timeout=TIMEOUT_S)
            self.handles += [result.output.handle for result in response.results]

    async def take(self, depth: int, steps: int) -> Round:
        """By a caller each. A step ends when the next handle is at hand."""
        return self._exchanged(await in_calls(self._step, depth, steps))

    def _exchanged(self, timed: Round) -> Round:
        self.exchange = (self._last[0].SerializeToString(), self._last[1].SerializeToString())
        return timed

    async def _step(self, sequence: int) -> Any:
        request = model_executor_pb2.DecodeRequest(item=self.item(sequence, TOKEN, self.back))
        answer = await self.stub.Decode(request, timeout=TIMEOUT_S)
        self.handles[sequence] = answer.output.handle
        self._last = request, answer
        return answer.timing


class Frames(Calls):
    """Forward frames of one session."""

    frame = 0
    _owner: dict[int, int]

    async def say_hello(self, in_flight: int) -> None:
        """Open the session. Twice as many steps as are sent: an answer may be read before the executor knows that it
        has written it."""
        self._call: Any = self.stub.Session()
        await self.send(hello=session_pb2.SessionHello(steps_in_flight=2 * in_flight, client_name="benchmark"))
        granted = (await self.receive()).welcome.steps_in_flight
        if granted < in_flight:
            raise RuntimeError(f"the session grants {granted} steps in flight of {in_flight}")

    async def send(self, **part: Any) -> session_pb2.SessionRequest:
        self.frame += 1
        request = session_pb2.SessionRequest(step_id=self.frame, **part)
        await self._call.write(request)
        return request

    async def receive(self) -> Any:
        """The next frame that is no refusal."""
        answer = await self._call.read()
        if answer.HasField("error"):
            raise RuntimeError(f"a frame was refused: {answer.error.message}")
        return answer

    async def prepare(self, cell: Cell) -> None:
        if not self.frame:
            await self.say_hello(cell.callers)
        self._owner = {}
        await super().prepare(cell)

    async def take(self, depth: int, steps: int) -> Round:
        return self._exchanged(await in_frames(self._send, self._receive, depth, steps))

    async def _send(self, sequence: int) -> None:
        self._owner[self.frame + 1] = sequence
        sent = await self.send(forward=session_pb2.SessionForward(items=[self.item(sequence, TOKEN, self.back)]))
        self._last = sent, self._last[1]

    async def _receive(self) -> tuple[int, Any]:
        answer = await self.receive()
        [result] = answer.forward.results
        if result.HasField("error"):
            raise RuntimeError(f"a step was refused: {result.error.message}")
        sequence = self._owner.pop(answer.step_id)
        self.handles[sequence] = result.output.handle
        self._last = self._last[0], answer
        return sequence, answer.forward.timing


class Client(Way):
    """A scheduler with the client package: in a session or by unary calls, as the client was made. ``options``: of
    every sequence."""

    def __init__(
        self, client: ExecutorClient, facts: dict[str, Any] | None = None, vocab_size: int = 0, **options: Any
    ) -> None:
        self.client, self.facts, self.vocab_size, self._options = client, facts or {}, vocab_size, options
        self._sequences: list[ClientSequence] = []

    @classmethod
    @asynccontextmanager
    async def open(
        cls, model: str, cells: Sequence[Cell], threads: int, device: str = "cpu", *, name: str = REFERENCE, **more: Any
    ) -> AsyncIterator[Client]:
        """Start the server, told ``more`` than the settings of all sides, and wait for the model."""
        async with connected(model, settings(cells, threads, device) | more) as (found, client):
            about = await client.info()
            yield cls(client, facts(name, about.device, about.model), found.vocab_size)

    async def prepare(self, cell: Cell) -> None:
        for sequence in self._sequences:
            await sequence.release()
        self._sequences = []
        if cell.kind != PREFILL:
            for prompt in cell.prompts(self.vocab_size).tolist():
                self._sequences.append(self.client.sequence(**self._options))
                await self._sequences[-1].prefill(prompt, NOTHING)

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """A step is over when the rows of all are arrays. Decode steps are of forks: recurrent states cannot be rolled
        back by a round without feeding tokens again."""
        timed, output = Round(), cell.spec
        if cell.kind == PREFILL:
            for _, prompt in timed.steps(cell.fresh(self.vocab_size, number, steps).tolist(), 1):
                async with self.client.sequence(**self._options) as sequence:
                    _done(timed, [await sequence.prefill(prompt, output)])
            return timed
        async with AsyncExitStack() as stack:
            children = [(await each.fork(at=cell.context))[0] for each in self._sequences]
            sequences = [await stack.enter_async_context(each) for each in children]
            if cell.callers > 1:
                return await self._callers(cell, steps, sequences)
            for _, fed in timed.steps(cell.fed(self.vocab_size, steps).tolist(), LEAD_IN):
                _done(timed, await self._forward(sequences, fed, output))
        return timed

    async def _callers(self, cell: Cell, steps: int, sequences: Sequence[ClientSequence]) -> Round:
        """Each with a part of the sequences: a step has ended when the last of them is answered."""
        fed, size = cell.fed(self.vocab_size, steps).tolist(), cell.batch // cell.callers
        ended = np.zeros((cell.callers, len(fed)))

        async def call(caller: int) -> list[Any]:
            mine = slice(caller * size, (caller + 1) * size)
            for index, tokens in enumerate(fed):
                answers = await self._forward(sequences[mine], tokens[mine], cell.spec)
                ended[caller, index] = time.perf_counter()
            return [answer.token for answer in answers]

        last = await asyncio.gather(*map(call, range(cell.callers)))
        seconds = np.diff(ended.max(axis=0))[LEAD_IN - 1 :]
        return Round(step_s=seconds.tolist(), last=[token for each in last for token in each])

    async def _forward(
        self, sequences: Sequence[ClientSequence], fed: Sequence[int], output: OutputSpec
    ) -> list[Answer]:
        pairs = zip(sequences, fed, strict=True)
        items = [sequence.item([token], output) for sequence, token in pairs]
        return (await self.client.forward(items)).all_answers()

    async def runs(self, cell: Cell, steps: int) -> float:
        """Seconds of each of so many steps of greedy runs of a decode cell's sequences, which are prepared: from the
        moment when all of them have a token."""
        began = list[float]()

        async def run(sequence: ClientSequence, token: int) -> None:
            tokens = sequence.stream([token], max_tokens=1 + steps, stop=())
            await anext(tokens)
            began.append(time.perf_counter())
            async for _ in tokens:
                pass

        fed = cell.fed(self.vocab_size, 1)[0].tolist()
        await asyncio.gather(*map(run, self._sequences, fed))
        return (time.perf_counter() - max(began)) / steps

    async def take(self, depth: int, steps: int) -> Round:
        return await in_calls(self._step, depth, steps)

    async def _step(self, sequence: int) -> Any:
        return (await self._sequences[sequence].decode(TOKEN, truncate_to=self.back)).timing


def _done(timed: Round, answers: Sequence[Answer]) -> None:
    """A step has ended: its timing by the server, and its rows."""
    timing = answers[-1].timing
    assert timing is not None
    timed.done(timing.forward_s, timing.queue_s)
    timed.last = last_rows([answer.rows for answer in answers if answer.rows])


@asynccontextmanager
async def open_quantized(name: str, model: str, cells: Sequence[Cell], threads: int) -> AsyncIterator[Client]:
    """`Client.open` of a side of `QUANTIZED`. Raises `Unsupported` where the machine has no products of its weights."""
    try:
        select_quantized(torch.device("cpu"), torch.bfloat16, QUANTIZED[name])
    except InvalidRequest as error:
        raise Unsupported(str(error)) from None
    async with Client.open(model, cells, threads, name=name, quantize=QUANTIZED[name]) as session:
        yield session
