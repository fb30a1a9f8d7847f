"""The ways to take an empty step: our executor by unary calls and in a session, with bare stubs and with the client
package, and the echo that each is measured against. Every way takes the same steps: ``depth`` sequences with one step
each in flight, one caller per sequence where calls are unary, one stream for all of them where there is one.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final, Protocol

import grpc

from benchmarks.echo import SERVICE
from benchmarks.pace import in_calls, in_frames
from benchmarks.sides import Round
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.client import Sequence as ClientSequence
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, model_executor_pb2_grpc, session_pb2, types_pb2

CONTEXT: Final = 16
"""Tokens of a sequence when a round begins: its first step rolls it back to them."""

LEAD_IN: Final = 5
"""Steps of each sequence that are not timed: the roll-back, and some that find the caches as the timed ones do."""

TIMEOUT_S: Final = 120.0
PROMPT: Final = list(range(1, CONTEXT + 1))
TOKEN: Final = 7


class Way(Protocol):
    """A way to take steps."""

    async def prepare(self, sequences: int) -> None:
        """Make what the steps need, for a depth of ``sequences`` at most."""

    async def round(self, depth: int, steps: int) -> Round:
        """Roll back, then ``steps`` timed steps of each of ``depth`` sequences."""


class _Raw:
    """A scheduler without our client package: it keeps handles and builds messages, request ids included. A step ends
    when the next handle is at hand. ``exchange``: the bytes of the last step's request and answer."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = model_executor_pb2_grpc.ModelExecutorStub(channel)
        self.handles: list[types_pb2.KvHandle] = []
        self.roll_back = False
        self.exchange = (b"", b"")

    def item(self, sequence: int) -> forward_pb2.ForwardItem:
        """The next decode of a sequence."""
        return forward_pb2.ForwardItem(
            handle=self.handles[sequence],
            token_ids=[TOKEN],
            truncate_to=CONTEXT if self.roll_back else None,
            request_id=uuid.uuid4().hex,
        )


class Unary(_Raw):
    """Decode by the generated stub."""

    async def prepare(self, sequences: int) -> None:
        """Prefill them."""
        for _ in range(sequences):
            item = forward_pb2.ForwardItem(token_ids=PROMPT)
            answer = await self.stub.Prefill(model_executor_pb2.PrefillRequest(item=item), timeout=TIMEOUT_S)
            self.handles.append(answer.output.handle)

    async def round(self, depth: int, steps: int) -> Round:
        """Roll back, then timed steps."""
        self.roll_back = True
        await in_calls(self._step, depth, 1)
        self.roll_back = False
        await in_calls(self._step, depth, LEAD_IN - 1)
        timed = await in_calls(self._step, depth, steps)
        request = model_executor_pb2.DecodeRequest(item=self.item(0))
        answer = await self.stub.Decode(request, timeout=TIMEOUT_S)
        self.handles[0] = answer.output.handle
        self.exchange = (request.SerializeToString(), answer.SerializeToString())
        return timed

    async def _step(self, sequence: int) -> types_pb2.StepTiming:
        request = model_executor_pb2.DecodeRequest(item=self.item(sequence))
        answer = await self.stub.Decode(request, timeout=TIMEOUT_S)
        self.handles[sequence] = answer.output.handle
        timing: types_pb2.StepTiming = answer.timing
        return timing


class Frames(_Raw):
    """Forward frames of one session."""

    async def prepare(self, sequences: int) -> None:
        """Open the session and prefill them."""
        self._call: Any = self.stub.Session()
        self._frame = 1
        self._owner: dict[int, int] = {}
        # Twice as many as are sent: an answer may be read before the executor knows that it has written it.
        hello = session_pb2.SessionHello(steps_in_flight=2 * sequences, client_name="benchmark")
        await self._call.write(session_pb2.SessionRequest(step_id=self._frame, hello=hello))
        granted = (await self._call.read()).welcome.steps_in_flight
        if granted < sequences:
            raise RuntimeError(f"the session grants {granted} steps in flight of {sequences}")
        items = [forward_pb2.ForwardItem(token_ids=PROMPT) for _ in range(sequences)]
        await self._write(session_pb2.SessionForward(items=items))
        answer = await self._call.read()
        self.handles = [result.output.handle for result in answer.forward.results]

    async def round(self, depth: int, steps: int) -> Round:
        """Roll back, then timed steps."""
        self.roll_back = True
        await in_frames(self._send, self._receive, depth, 1)
        self.roll_back = False
        await in_frames(self._send, self._receive, depth, LEAD_IN - 1)
        timed = await in_frames(self._send, self._receive, depth, steps)
        request = await self._send(0)
        await self._receive()
        self.exchange = (request.SerializeToString(), self._last.SerializeToString())
        return timed

    async def _write(self, forward: session_pb2.SessionForward) -> session_pb2.SessionRequest:
        self._frame += 1
        request = session_pb2.SessionRequest(step_id=self._frame, forward=forward)
        await self._call.write(request)
        return request

    async def _send(self, sequence: int) -> Any:
        self._owner[self._frame + 1] = sequence
        return await self._write(session_pb2.SessionForward(items=[self.item(sequence)]))

    async def _receive(self) -> tuple[int, types_pb2.StepTiming]:
        answer = self._last = await self._call.read()
        if answer.HasField("error"):
            raise RuntimeError(f"a frame was refused: {answer.error.message}")
        result = answer.forward.results[0]
        if result.HasField("error"):
            raise RuntimeError(f"a step was refused: {result.error.message}")
        sequence = self._owner.pop(answer.step_id)
        self.handles[sequence] = result.output.handle
        return sequence, answer.forward.timing


class Client:
    """`ferrum_rpc.client`, by unary calls or in a session, as the client was made."""

    def __init__(self, client: ExecutorClient) -> None:
        self._client = client
        self._sequences: list[ClientSequence] = []
        self._roll_back: int | None = None

    async def prepare(self, sequences: int) -> None:
        """Prefill them."""
        self._sequences = [self._client.sequence() for _ in range(sequences)]
        for sequence in self._sequences:
            await sequence.prefill(PROMPT)

    async def round(self, depth: int, steps: int) -> Round:
        """Roll back, then timed steps."""
        self._roll_back = CONTEXT
        await in_calls(self._step, depth, 1)
        self._roll_back = None
        await in_calls(self._step, depth, LEAD_IN - 1)
        return await in_calls(self._step, depth, steps)

    async def _step(self, sequence: int) -> Any:
        return (await self._sequences[sequence].decode(TOKEN, truncate_to=self._roll_back)).timing


class Batches(Client):
    """`ferrum_rpc.client` in lockstep: every step is one batch of all sequences, and the next waits for all of it."""

    async def round(self, depth: int, steps: int) -> Round:
        """Roll back, then timed steps."""
        await self._batch(depth, CONTEXT)
        for _ in range(LEAD_IN - 1):
            await self._batch(depth, None)
        timed = Round()
        began = perf_counter()
        for _ in range(steps):
            at = perf_counter()
            timing = await self._batch(depth, None)
            step_s = perf_counter() - at
            timed.step_s += [step_s] * depth
            timed.forward_s += [timing.forward_s] * depth
            timed.queue_s += [timing.queue_s] * depth
        timed.wall_s = perf_counter() - began
        return timed

    async def _batch(self, depth: int, truncate_to: int | None) -> Any:
        items = [each.item([TOKEN], truncate_to=truncate_to) for each in self._sequences[:depth]]
        timing = None
        for answer in await self._client.forward(items):
            if isinstance(answer, ExecutorError):
                raise answer
            timing = answer.timing
        return timing


class EchoCalls:
    """Unary calls of the echo server, of the bytes of ``like``'s steps."""

    def __init__(self, channel: grpc.aio.Channel, like: Unary) -> None:
        self._set: Any = channel.unary_unary(f"/{SERVICE}/Set")
        self._call: Any = channel.unary_unary(f"/{SERVICE}/Call")
        self._like = like

    async def prepare(self, sequences: int) -> None:
        """There is nothing to make."""

    async def round(self, depth: int, steps: int) -> Round:
        """Timed exchanges."""
        await self._set(self._like.exchange[1])
        await in_calls(self._step, depth, LEAD_IN)
        return await in_calls(self._step, depth, steps)

    async def _step(self, _: int) -> None:
        await self._call(self._like.exchange[0], timeout=TIMEOUT_S)


class EchoFrames:
    """A stream of the echo server, of the bytes of ``like``'s steps. Its answers come in order."""

    def __init__(self, channel: grpc.aio.Channel, like: Frames) -> None:
        self._set: Any = channel.unary_unary(f"/{SERVICE}/Set")
        self._open: Any = channel.stream_stream(f"/{SERVICE}/Stream")
        self._like = like
        self._in_flight: deque[int] = deque()

    async def prepare(self, sequences: int) -> None:
        """Open the stream."""
        self._call = self._open()

    async def round(self, depth: int, steps: int) -> Round:
        """Timed exchanges."""
        await self._set(self._like.exchange[1])
        await in_frames(self._send, self._receive, depth, LEAD_IN)
        return await in_frames(self._send, self._receive, depth, steps)

    async def _send(self, sequence: int) -> None:
        self._in_flight.append(sequence)
        await self._call.write(self._like.exchange[0])

    async def _receive(self) -> tuple[int, None]:
        await self._call.read()
        return self._in_flight.popleft(), None


def exchange_bytes(way: Way) -> Sequence[int]:
    """Bytes of a step's request and answer, where the way keeps them."""
    return [len(each) for each in way.exchange] if isinstance(way, _Raw) else []
