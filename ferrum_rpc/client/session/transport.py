"""A client's requests as frames of one session stream: the hot path. Same messages, answers and errors as unary calls.

The stream opens with the first request and again after a failure, with the same lease; requests of unknown outcome are
sent again under their request ids, and the executor replays them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from ferrum_rpc.client.context import Context, Metadata, Method
from ferrum_rpc.client.info import Capability
from ferrum_rpc.client.lease import Lease, Leases
from ferrum_rpc.client.retry import LEASE_GONE, Deadline, SingleFlight, retry_while_starting
from ferrum_rpc.client.session.frames import Frame, FrameCapacity, Result, StreamRequest
from ferrum_rpc.client.session.stream import SessionStream
from ferrum_rpc.client.state import Item
from ferrum_rpc.client.transport import Feed, Forwarded, Operated, Operation, Transport
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.executor.v1 import model_executor_pb2, session_pb2
from ferrum_rpc.wire.info import SCHEMA_REVISION, seconds
from ferrum_rpc.wire.items import handle_from_proto
from ferrum_rpc.wire.status import error_from_status

STEPS_IN_FLIGHT: Final = 8
OPENINGS: Final = 4
"""Attempts to open a stream without an answer, as gRPC makes for a unary call (`channel.service_config`)."""
FIRST_BACKOFF_S: Final = 0.05

log = logging.getLogger("ferrum_rpc.client")


class SessionTransport(Transport):
    """Sends through a session of at most ``steps_in_flight`` steps, or fewer if the executor grants fewer; by unary
    calls if it offers no sessions, and after `close`. ``tokens_ahead``: asks for the tokens of runs as they are
    chosen."""

    def __init__(self, context: Context, leases: Leases, steps_in_flight: int, *, tokens_ahead: bool = False) -> None:
        super().__init__(context)
        self._leases = leases
        self._steps_in_flight = steps_in_flight
        self._tokens_ahead = tokens_ahead
        self._stream: SessionStream | None = None
        self._opening = SingleFlight("opening the session")
        self._used = True
        self._warned = False
        self._closed = False
        self.lease_id = ""
        leases.session_renewal = self._renewal

    @property
    def ready(self) -> bool:
        """Whether a stream is open, or none will be."""
        return self._closed or (self._stream is not None and self._stream.over is None)

    @property
    def chains(self) -> bool:
        """Whether an item may follow one in flight."""
        return self._used

    async def prepare(self, deadline: Deadline) -> None:
        """Find out whether sessions are offered."""
        if self.ready:
            return
        self._used = Capability.SESSION in (await self._context.info(deadline)).capabilities and not self._closed
        if not self._used and not self._closed and not self._warned:
            self._warned = True
            log.warning("the executor offers no sessions (capability SESSION): requests go as unary calls")

    def forward(
        self, feed: Feed, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool = False
    ) -> Coroutine[Any, Any, Forwarded]:
        """Send a batch in a frame of its own, or a single item in a frame with those that are ready at the same time:
        also a batch of one item that is a run or a follower."""
        if not self._used:
            return super().forward(feed, items, deadline, all_or_nothing=all_or_nothing)
        frame = None
        if not feed.single and (all_or_nothing or len(items) > 1 or not items[0].goes_on):
            frame = Frame()
            add = frame.forward.items.add
            for item in items:
                item.write(add())
            frame.forward.all_or_nothing = all_or_nothing
            if not all_or_nothing and any([item.goes_on for item in items]):  # noqa: C419 - half the time
                frame.forward.apart = all(item.parent is None for item in items)  # a call may make several children
        request: StreamRequest[Forwarded] = StreamRequest(frame=frame, items=items, batch=not feed.single)
        return self._context.call(self._submit, request, deadline)

    async def _operate(self, operations: Sequence[Operation], deadline: Deadline) -> Sequence[Operated]:
        frame = _frame_of(operations) if self._used else None
        if frame is None:
            return await super()._operate(operations, deadline)
        request: StreamRequest[session_pb2.SessionResponse] = StreamRequest(frame=frame)
        submit: Method[session_pb2.SessionResponse] = self._submit_single if len(operations) == 1 else self._submit
        answer = (await self._context.call(submit, request, deadline)).handles
        self._context.note_pressure(answer.pressure)
        if len(operations) == 1:
            return [[handle_from_proto(each.handle) for each in answer.results]]
        if len(answer.results) != len(operations):
            raise _other_answer(f"{len(answer.results)} results for {len(operations)} handles")
        return [
            self._context.note_error(error_from_status(each.error))
            if each.HasField("error")
            else [handle_from_proto(each.handle)]
            for each in answer.results
        ]

    async def _renewal(self, lease_id: str, deadline: Deadline) -> float | None:
        stream = self._stream
        if stream is None or stream.over is not None or lease_id != self.lease_id:
            return None
        answer = (await stream.control(Frame(keep_alive=session_pb2.SessionKeepAlive()), deadline)).keep_alive
        self._context.note_pressure(answer.pressure)
        return seconds(answer.ttl)

    async def close(self, deadline: Deadline) -> None:
        """End the session and release its sequences. Does not raise."""
        stream, self._stream, self._closed, self._used = self._stream, None, True, False
        if stream is not None and stream.over is None:
            with suppress(ExecutorError):
                await stream.close(deadline)

    # --- frames ---------------------------------------------------------------------------------------------------

    async def _submit(
        self,
        request: StreamRequest[Result],
        *,
        timeout: float | None,  # noqa: ASYNC109 - called as a stub's method is
        metadata: Metadata,
    ) -> Result:
        """One attempt."""
        deadline = Deadline(None if timeout is None else time.monotonic() + timeout)
        while True:
            stream = self._open_stream()
            if stream is None:  # if opening it raises, nothing was sent, so no outcome is unknown
                stream = await self._opening.get(
                    self._open_stream, lambda: retry_while_starting(lambda: self._open(deadline), deadline), deadline
                )
            if (result := await stream.submit(request, deadline)) is not None:
                return result

    async def _submit_single(
        self, request: StreamRequest[session_pb2.SessionResponse], **attempt: Any
    ) -> session_pb2.SessionResponse:
        """One attempt of an operation on one handle. Raises its refusal."""
        response = await self._submit(request, **attempt)
        if not response.handles.results:
            raise _other_answer("no results for an operation")
        for result in response.handles.results:
            if result.HasField("error"):
                raise error_from_status(result.error)
        return response

    # --- opening ----------------------------------------------------------------------------------------------------

    def _open_stream(self) -> SessionStream | None:
        """The open stream, or None. A stream whose lease is no longer the client's is ended."""
        stream = self._stream
        if stream is None:
            return None
        if stream.over is not None:
            self._context.note_error(stream.over)
            return None
        if self.lease_id != self._leases.lease_id:
            stream.end(TransportError("the session's lease is gone", metadata={"grpc_code": "UNAVAILABLE"}))
            return None
        return stream

    async def _open(self, deadline: Deadline) -> SessionStream:
        for attempt in range(OPENINGS):
            try:
                return await self._hello(deadline)
            except TransportError as error:
                if error.metadata.get("grpc_code") != "UNAVAILABLE" or attempt == OPENINGS - 1 or deadline.passed:
                    raise
            except LEASE_GONE as error:
                if not self.lease_id:
                    raise
                self._leases.lost(self.lease_id, error)
                self._context.note_error(error)
                continue
            await asyncio.sleep(FIRST_BACKOFF_S * 2.0**attempt * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
        raise TransportError("the executor does not find the leases that it grants", metadata={"grpc_code": "INTERNAL"})

    async def _hello(self, deadline: Deadline) -> SessionStream:
        leases = self._leases
        self.lease_id = await leases.current(deadline) or leases.lease_id
        sent_at = time.monotonic()
        hello = session_pb2.SessionHello(
            client_revision=SCHEMA_REVISION,
            lease_id=self.lease_id,
            steps_in_flight=self._steps_in_flight,
            client_name=leases.client_name,
            tokens=self._tokens_ahead,
        )
        stream = SessionStream(self._context.channel, self._context.metadata)
        try:
            welcome = await stream.open(Frame(hello=hello), deadline)
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
            hidden_size=info.model.hidden_size,
        )
        self._stream, self.lease_id = stream, welcome.lease_id
        if welcome.lease_id and not leases.lease_id:
            leases.adopt(Lease(welcome.lease_id, seconds(welcome.lease_ttl), seconds(welcome.renew_every)), sent_at)
        return stream


def _frame_of(operations: Sequence[Operation]) -> Frame | None:
    """The frame of operations of one kind; None if they need unary calls."""
    frame = Frame()
    for each in operations:
        if isinstance(each, model_executor_pb2.TruncateKvRequest):
            frame.truncate.handles.append(each.handle)
            frame.truncate.lengths.append(each.length)
            frame.truncate.request_id = each.request_id
        elif isinstance(each, model_executor_pb2.ReleaseRequest):
            frame.release.handles.append(each.handle)
            frame.release.any_version = True  # a sequence that is gone counts as freed, so no request id is needed
        elif each.lease_id:
            return None  # in a session children have its lease
        else:
            frame.fork.handle.CopyFrom(each.handle)
            frame.fork.count, frame.fork.request_id = each.count, each.request_id
            if each.HasField("at_length"):
                frame.fork.at_length = each.at_length
    return frame


def _other_answer(what: str) -> TransportError:
    return TransportError(f"the executor's answer is not to what was asked: {what}", metadata={"grpc_code": "INTERNAL"})
