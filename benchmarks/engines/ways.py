"""The ways to take an empty step: our executor by unary calls and in a session, with bare stubs and with the client
package, and the echo that each is measured against. Every way takes the same steps: ``depth`` sequences with one step
each in flight, one caller per sequence where calls are unary, one stream for all of them where there is one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Final

import grpc

from benchmarks.compare import Round
from benchmarks.engines.echo import SERVICE
from benchmarks.engines.grpc import TIMEOUT_S, Calls, Frames
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.client import Sequence as ClientSequence
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import model_executor_pb2, session_pb2, types_pb2

CONTEXT: Final = 16
"""Tokens of a sequence when a round begins: its first step rolls it back to them."""

LEAD_IN: Final = 5
"""Steps of each sequence that are not timed: the roll-back, and some that find the caches as the timed ones do."""

PROMPT: Final = list(range(1, CONTEXT + 1))
TOKEN: Final = 7


async def in_calls(step: Callable[[int], Awaitable[Any]], depth: int, steps: int) -> Round:
    """A task for each sequence that awaits one step after the other. ``step``: of one sequence; gives its timing."""
    timed = Round()

    async def caller(sequence: int) -> None:
        for _ in range(steps):
            began = perf_counter()
            _note(timed, began, await step(sequence))

    began = perf_counter()
    await asyncio.gather(*(caller(sequence) for sequence in range(depth)))
    timed.wall_s = perf_counter() - began
    return timed


async def in_frames(
    send: Callable[[int], Awaitable[object]], receive: Callable[[], Awaitable[tuple[int, Any]]], depth: int, steps: int
) -> Round:
    """One task on one stream: the next step of a sequence is sent when its last one was answered. ``receive``: the
    sequence that was answered, and the step's timing."""
    timed = Round()
    left, sent = [steps] * depth, [0.0] * depth
    began = perf_counter()
    for sequence in range(depth):
        sent[sequence] = perf_counter()
        await send(sequence)
    for _ in range(depth * steps):
        sequence, timing = await receive()
        _note(timed, sent[sequence], timing)
        left[sequence] -= 1
        if left[sequence]:
            sent[sequence] = perf_counter()
            await send(sequence)
    timed.wall_s = perf_counter() - began
    return timed


def _note(timed: Round, began: float, timing: Any) -> None:
    if isinstance(timing, types_pb2.StepTiming):
        timed.done(timing.forward_micros / 1e6, timing.queue_micros / 1e6, began)
    elif timing is not None:
        timed.done(timing.forward_s, timing.queue_s, began)
    else:
        timed.done(began=began)


class Way(ABC):
    """Steps of sequences that are prefilled once. ``back``: where the next step rolls back to; ``exchange``: the bytes
    of a step's request and answer, where they are kept."""

    exchange = (b"", b"")
    back: int | None = None

    @abstractmethod
    async def prepare(self, sequences: int) -> None:
        """Make what the steps need, for a depth of ``sequences`` at most."""

    @abstractmethod
    async def take(self, depth: int, steps: int) -> Round:
        """``steps`` timed steps of each of ``depth`` sequences."""

    async def round(self, depth: int, steps: int) -> Round:
        """Roll back, then timed steps."""
        self.back = CONTEXT
        await self.take(depth, 1)
        self.back = None
        await self.take(depth, LEAD_IN - 1)
        return await self.take(depth, steps)


class Unary(Way):
    """Decode by the generated stub. A step ends when the next handle is at hand."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._raw = Calls(channel)
        self._last: Any = None

    async def prepare(self, sequences: int) -> None:
        """Prefill them."""
        await self._raw.prefill([PROMPT] * sequences)

    async def take(self, depth: int, steps: int) -> Round:
        """By a caller each."""
        timed = await in_calls(self._step, depth, steps)
        self.exchange = (self._last[0].SerializeToString(), self._last[1].SerializeToString())
        return timed

    async def _step(self, sequence: int) -> Any:
        request = model_executor_pb2.DecodeRequest(item=self._raw.item(sequence, TOKEN, self.back))
        answer = await self._raw.stub.Decode(request, timeout=TIMEOUT_S)
        self._raw.handles[sequence] = answer.output.handle
        self._last = request, answer
        return answer.timing


class InSession(Way):
    """Forward frames of one session, by the generated stub."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._raw = Frames(channel)
        self._owner: dict[int, int] = {}
        self._sent: Any = None
        self._received: Any = None

    async def prepare(self, sequences: int) -> None:
        """Open the session and prefill them."""
        await self._raw.say_hello(sequences)
        await self._raw.prefill([PROMPT] * sequences)

    async def take(self, depth: int, steps: int) -> Round:
        """On one stream."""
        timed = await in_frames(self._send, self._receive, depth, steps)
        self.exchange = (self._sent.SerializeToString(), self._received.SerializeToString())
        return timed

    async def _send(self, sequence: int) -> None:
        self._owner[self._raw.frame + 1] = sequence
        item = self._raw.item(sequence, TOKEN, self.back)
        self._sent = await self._raw.send(forward=session_pb2.SessionForward(items=[item]))

    async def _receive(self) -> tuple[int, Any]:
        answer = self._received = await self._raw.receive()
        [result] = answer.forward.results
        if result.HasField("error"):
            raise RuntimeError(f"a step was refused: {result.error.message}")
        sequence = self._owner.pop(answer.step_id)
        self._raw.handles[sequence] = result.output.handle
        return sequence, answer.forward.timing


class Client(Way):
    """`ferrum_rpc.client`, by unary calls or in a session, as the client was made."""

    def __init__(self, client: ExecutorClient) -> None:
        self.client = client
        self.sequences: list[ClientSequence] = []

    async def prepare(self, sequences: int) -> None:
        """Prefill them."""
        self.sequences = [self.client.sequence() for _ in range(sequences)]
        for sequence in self.sequences:
            await sequence.prefill(PROMPT)

    async def take(self, depth: int, steps: int) -> Round:
        """By a caller each."""
        return await in_calls(self._step, depth, steps)

    async def _step(self, sequence: int) -> Any:
        return (await self.sequences[sequence].decode(TOKEN, truncate_to=self.back)).timing


class Batches(Client):
    """`ferrum_rpc.client` in lockstep: every step is one batch of all sequences, and the next waits for all of it."""

    async def take(self, depth: int, steps: int) -> Round:
        """A step of the batch is one of every sequence."""
        timed = await in_calls(lambda _: self._batch(depth), 1, steps)
        for values in (timed.step_s, timed.forward_s, timed.queue_s):
            values[:] = [value for value in values for _ in range(depth)]
        return timed

    async def _batch(self, depth: int) -> Any:
        items = [each.item([TOKEN], truncate_to=self.back) for each in self.sequences[:depth]]
        timing = None
        for answer in await self.client.forward(items):
            if isinstance(answer, ExecutorError):
                raise answer
            timing = answer.timing
        return timing


class EchoCalls(Way):
    """Unary calls of the echo server, of the bytes of ``like``'s steps."""

    def __init__(self, channel: grpc.aio.Channel, like: Any) -> None:
        self._set: Any = channel.unary_unary(f"/{SERVICE}/Set")
        self._call: Any = channel.unary_unary(f"/{SERVICE}/Call")
        self.like = like

    async def prepare(self, sequences: int) -> None:
        """There is nothing to make."""

    async def take(self, depth: int, steps: int) -> Round:
        """By a caller each."""
        return await in_calls(self._step, depth, steps)

    async def round(self, depth: int, steps: int) -> Round:
        """Timed exchanges of the bytes that the other way's last step had."""
        await self._set(self.like.exchange[1])
        return await super().round(depth, steps)

    async def _step(self, _: int) -> None:
        await self._call(self.like.exchange[0], timeout=TIMEOUT_S)


class EchoFrames(EchoCalls):
    """A stream of the echo server, of the bytes of ``like``'s steps. Its answers come in order."""

    def __init__(self, channel: grpc.aio.Channel, like: Way) -> None:
        super().__init__(channel, like)
        self._stream: Any = channel.stream_stream(f"/{SERVICE}/Stream")
        self._in_flight: deque[int] = deque()

    async def prepare(self, sequences: int) -> None:
        """Open the stream."""
        self._open = self._stream()

    async def take(self, depth: int, steps: int) -> Round:
        """On one stream."""
        return await in_frames(self._send, self._receive, depth, steps)

    async def _send(self, sequence: int) -> None:
        self._in_flight.append(sequence)
        await self._open.write(self.like.exchange[0])

    async def _receive(self) -> tuple[int, None]:
        await self._open.read()
        return self._in_flight.popleft(), None
