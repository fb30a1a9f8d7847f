"""A client's requests as frames of one session stream: the hot path. Same messages, answers and errors as unary calls.

The stream opens with the first request and again after it broke, with the same lease; requests of unknown fate go out
again under their request ids, and the executor replays them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import grpc

from ferrum_rpc.client.asks import Answered, Ask, Frame, FrameCapacity, Result, other_answer
from ferrum_rpc.client.calls import Metadata
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.info import seconds
from ferrum_rpc.client.lease import Lease, Leases
from ferrum_rpc.client.policy import LEASE_GONE, Deadline
from ferrum_rpc.client.retry import SingleFlight, retry_while_starting
from ferrum_rpc.client.state import Item
from ferrum_rpc.client.stream import SessionStream
from ferrum_rpc.client.transport import FeedRpc, Forwarded, Operated, Operation, UnaryTransport
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.executor.v1 import model_executor_pb2, session_pb2
from ferrum_rpc.wire.info import SCHEMA_REVISION
from ferrum_rpc.wire.items import handle_from_proto
from ferrum_rpc.wire.status import error_from_status

STEPS_IN_FLIGHT: Final = 8
OPENINGS: Final = 4
"""Attempts to open a stream without an answer, as gRPC makes for a unary call (`channel.service_config`)."""
FIRST_BACKOFF_S: Final = 0.05


class SessionTransport:
    """Sends through a session of ``steps_in_flight`` steps at most, or what the executor grants of them."""

    def __init__(
        self,
        context: Context,
        leases: Leases,
        channel: grpc.aio.Channel,
        unary: UnaryTransport,
        steps_in_flight: int,
    ) -> None:
        self._context = context
        self._leases = leases
        self._unary = unary
        self._calls = context.calls
        self._channel = channel
        self._steps_in_flight = steps_in_flight
        self._stream: SessionStream | None = None
        self._opening = SingleFlight("opening the session")
        self.lease_id = ""

    @property
    def is_open(self) -> bool:
        """Whether a stream is open."""
        return self._stream is not None and self._stream.over is None

    # --- what a transport does ----------------------------------------------------------------------------------

    def forward(
        self, feed: FeedRpc, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool
    ) -> Awaitable[Forwarded]:
        """A batch in a frame of its own, or a single item in a frame with those that are ready at the same time."""
        frame = None
        if not feed.single:
            frame = Frame()
            frame.forward.items.extend([item.proto for item in items])
            frame.forward.all_or_nothing = all_or_nothing
        ask: Ask[Forwarded] = Ask(frame=frame, items=items)
        return self._calls.call(self._ask, ask, deadline)

    async def operate(self, operations: Sequence[Operation], deadline: Deadline) -> Operated:
        """One frame for all of them."""
        frame = _frame_of(operations)
        if frame is None:
            return await self._unary.operate(operations, deadline)
        ask: Ask[Answered] = Ask(frame=frame)
        if len(operations) == 1:
            answer = (await self._calls.call(self._ask_about_one, ask, deadline))[0].handles
            return Operated([[handle_from_proto(each.handle) for each in answer.results]], answer.pressure)
        answer = (await self._calls.call(self._ask, ask, deadline))[0].handles
        if len(answer.results) != len(operations):
            raise other_answer(f"{len(answer.results)} results for {len(operations)} handles")
        outcomes = [
            error_from_status(each.error) if each.HasField("error") else [handle_from_proto(each.handle)]
            for each in answer.results
        ]
        return Operated(outcomes, answer.pressure)

    def renewal(self, lease_id: str, deadline: Deadline) -> Awaitable[float] | None:
        """A renewal of the session's own lease, for how many seconds; None where it is another lease, or no
        stream is open."""
        stream = self._stream
        if stream is None or stream.over is not None or lease_id != self.lease_id:
            return None
        return self._renew(stream, deadline)

    async def _renew(self, stream: SessionStream, deadline: Deadline) -> float:
        answer = (await stream.say(Frame(keep_alive=session_pb2.SessionKeepAlive()), deadline)).keep_alive
        self._context.note_pressure(answer.pressure)
        return seconds(answer.ttl)

    async def close(self, deadline: Deadline) -> bool:
        """End the session and release its sequences; whether the executor said that it did. Does not raise."""
        stream, self._stream = self._stream, None
        if stream is None or not stream.alive:
            return False
        try:
            await stream.close(deadline, release_sequences=True)
        except ExecutorError:
            return False
        return True

    # --- frames ---------------------------------------------------------------------------------------------------

    async def _ask(
        self,
        ask: Ask[Result],
        *,
        timeout: float | None,  # noqa: ASYNC109 - called as a stub's method is
        metadata: Metadata,
    ) -> Result:
        """One attempt."""
        deadline = Deadline(None if timeout is None else time.monotonic() + timeout)
        while True:
            stream = self._open_stream() or await self._open(deadline)
            if (answered := await stream.ask(ask, deadline)) is not None:
                return answered

    async def _ask_about_one(self, ask: Ask[Answered], **attempt: Any) -> Answered:
        """One attempt of an operation on one handle, whose refusal is the call's."""
        answered = await self._ask(ask, **attempt)
        results = answered[0].handles.results
        if not results:
            raise other_answer("no results for an operation")
        for result in results:
            if result.HasField("error"):
                raise error_from_status(result.error)
        return answered

    # --- opening ----------------------------------------------------------------------------------------------------

    def _open_stream(self) -> SessionStream | None:
        """The open stream, or None. One whose lease is no longer the client's is ended."""
        stream = self._stream
        if stream is None:
            return None
        if stream.over is not None:
            self._calls.note_error(stream.over)
            return None
        if self.lease_id != self._leases.keeper.lease_id:
            stream.end(TransportError("the session's lease is gone", metadata={"grpc_code": "UNAVAILABLE"}))
            return None
        return stream

    async def _open(self, deadline: Deadline) -> SessionStream:
        """The open stream, or a new one. Where this raises nothing was sent, so no fate is unknown."""
        return await self._opening.get(
            self._open_stream, lambda: retry_while_starting(lambda: self._opened(deadline), deadline), deadline
        )

    async def _opened(self, deadline: Deadline) -> SessionStream:
        for attempt in range(OPENINGS):
            try:
                return await self._hello(deadline)
            except TransportError as error:
                if error.metadata.get("grpc_code") != "UNAVAILABLE":
                    raise
                if attempt == OPENINGS - 1 or deadline.passed:
                    raise
            except LEASE_GONE as error:
                if not self.lease_id:
                    raise
                self._leases.keeper.lost(self.lease_id, error)
                self._context.note_error(error)
                continue
            await asyncio.sleep(FIRST_BACKOFF_S * 2.0**attempt * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
        raise TransportError("the executor knows none of the leases that it grants", metadata={"grpc_code": "INTERNAL"})

    async def _hello(self, deadline: Deadline) -> SessionStream:
        keeper = self._leases.keeper
        self.lease_id = await self._leases.current(deadline) or keeper.lease_id
        asked = time.monotonic()
        hello = Frame(
            hello=session_pb2.SessionHello(
                client_revision=SCHEMA_REVISION,
                lease_id=self.lease_id,
                steps_in_flight=self._steps_in_flight,
                client_name=keeper.client_name,
            )
        )
        stream = SessionStream(self._channel, self._calls.metadata)
        try:
            welcome = await stream.open(hello, deadline)
            self._context.note_instance(welcome.instance_id)
            info = await self._context.info(deadline)
        except BaseException:
            stream.end(TransportError("the session could not be opened"))
            raise
        limits = info.limits
        stream.capacity = FrameCapacity(
            items=limits.max_batch_items,
            tokens=limits.max_batch_tokens,
            row_bytes=welcome.inline_bytes,
            request_bytes=limits.max_request_bytes // 2,
            vocab_size=info.model.vocab_size,
        )
        self._stream, self.lease_id = stream, welcome.lease_id
        if welcome.lease_id and not keeper.lease_id:
            keeper.adopt(Lease(welcome.lease_id, seconds(welcome.lease_ttl), seconds(welcome.renew_every)), asked)
        return stream


def _frame_of(operations: Sequence[Operation]) -> Frame | None:
    """The frame of operations of one kind; None where they can only be called."""
    frame = Frame()
    for each in operations:
        if isinstance(each, model_executor_pb2.TruncateKvRequest):
            frame.truncate.handles.append(each.handle)
            frame.truncate.lengths.append(each.length)
            frame.truncate.request_id = each.request_id
        elif isinstance(each, model_executor_pb2.ReleaseRequest):
            frame.release.handles.append(each.handle)
            frame.release.any_version = True  # what was freed before counts as freed: it needs no request id
        elif each.lease_id:
            return None  # in a session children live with its lease
        else:
            frame.fork.handle.CopyFrom(each.handle)
            frame.fork.count, frame.fork.request_id = each.count, each.request_id
            if each.HasField("at_length"):
                frame.fork.at_length = each.at_length
    return frame
