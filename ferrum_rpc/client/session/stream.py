"""One session stream: frames out in their order, answers back to their callers.

gRPC takes one write at a time, so one writer sends what is queued, and one reader distributes the answers. What waits
while the steps in flight are as many as may be shares a frame (`client.session.frames`). No task is made for a step.

A step counts as in flight until the executor answers it, even if its callers have given up. When the stream ends, the
outcome of every step is unknown, and its owner opens another stream.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Final

import grpc

from ferrum_rpc.client.context import Metadata, closed
from ferrum_rpc.client.pace import FramePace
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.client.session.frames import (
    UNSHARED,
    Frame,
    Kind,
    Result,
    SessionStep,
    StreamRequest,
    frame_of,
    group,
)
from ferrum_rpc.client.transport import Forwarded
from ferrum_rpc.core import OutputSpec
from ferrum_rpc.errors import DeadlineExceeded, DeviceLost, Draining, ExecutorError, QueueFull, TransportError
from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.wire.items import timing_from_proto
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_rpc, error_from_status

METHOD: Final = "/ferrum_rpc.executor.v1.ModelExecutor/Session"
_UNAVAILABLE: Final = {"grpc_code": "UNAVAILABLE"}
_INTERNAL: Final = {"grpc_code": "INTERNAL"}
_UNANSWERED: Final = "the executor did not answer all items"
_REQUEUE_S: Final = 0.001
_TURNS: Final = 5
"""Turns of the event loop in which a program, after an answer, can send its next request through a task or two."""


class SessionStream:
    """One stream, usable after `open`. ``capacity``: the limits of a shared frame."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._loop = asyncio.get_running_loop()
        method: grpc.aio.StreamStreamMultiCallable[bytes, session_pb2.SessionResponse] = channel.stream_stream(
            METHOD, response_deserializer=session_pb2.SessionResponse.FromString
        )
        self._call = method(metadata=tuple(metadata))
        self.capacity = UNSHARED
        self._output: OutputSpec | None = None  # of the last item, of which a row takes so many bytes
        self._row_bytes = 0
        self._step_id = 0
        self._number = 0
        self._steps: dict[int, SessionStep] = {}
        self._most = 1
        self._waiting: dict[Kind, OrderedDict[StreamRequest[Any], None]] = {kind: OrderedDict() for kind in Kind}
        self._in_flight = dict.fromkeys(Kind, 0)
        self._cancels: deque[session_pb2.SessionCancel] = deque()
        self._wake = asyncio.Event()
        self._pace = FramePace()
        self._linger = False
        self._expires = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.over: ExecutorError | None = None
        self._writer = self._loop.create_task(self._write(), name="ferrum_rpc session writer")
        self._reader = self._loop.create_task(self._read(), name="ferrum_rpc session reader")

    async def open(self, hello: Frame, deadline: Deadline) -> session_pb2.SessionWelcome:
        """Send ``hello`` and wait for the welcome. Raises the refusal, or the reason of the stream's end."""
        try:
            welcome = (await self.control(hello, deadline)).welcome
        except (TransportError, Draining):
            raise self.over or TransportError("the session could not be opened") from None
        self._most = max(1, welcome.steps_in_flight)
        return welcome

    async def submit(self, request: StreamRequest[Result], deadline: Deadline) -> Result | None:
        """Queue, send, and wait for the answer. None: the stream ended before it was sent. Raises the refusal, and
        `DeadlineExceeded`, of known outcome if nothing was sent. A caller that gives up cancels its step if that has
        not begun; the other items of the step are sent again."""
        if self.over is not None:
            return None
        expires = math.inf if deadline.at is None else deadline.at
        if request.frame is None:
            item = request.items[0]
            if item.output is not self._output:
                self._output = item.output
                self._row_bytes = item.output.row_bytes(self.capacity.vocab_size, self.capacity.hidden_size)
            request.row_bytes = item.output.row_count(len(item.tokens), item.start) * self._row_bytes
            if item.run is not None:
                request.row_bytes *= item.run.max_tokens
            large = request.row_bytes > self.capacity.row_bytes
            shared = Kind.APART if item.goes_on else Kind.SHARED
            request.kind = Kind.LARGE if large else Kind.FRAME if request.resent else shared
        self._number += 1
        request.number, request.expires, request.step = self._number, expires, None
        request.future = asyncio.Future(loop=self._loop)
        waiting = self._waiting[request.kind]
        if not waiting:
            self._wake.set()  # a request after others waits for them
        waiting[request] = None
        if request.kind is Kind.APART:  # what follows it may share its frame
            request.items[0].sent()
        if expires < self._expires:
            self._set_timer(expires)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._give_up(request)
            raise

    async def control(self, frame: Frame, deadline: Deadline) -> session_pb2.SessionResponse:
        """Send a frame that is not a step, without a limit, and wait for its answer."""
        request: StreamRequest[session_pb2.SessionResponse] = StreamRequest(frame=frame, kind=Kind.CONTROL)
        answer = await self.submit(request, deadline)
        if answer is None:
            raise self._ended()
        return answer

    async def close(self, deadline: Deadline) -> int:
        """End the session and release its sequences; returns their number. The session is over even if this raises."""
        frame = Frame(close=session_pb2.SessionClose(release_sequences=True))
        try:
            return (await self.control(frame, deadline)).goodbye.released_sequences
        finally:
            self.end(closed())

    def end(self, error: ExecutorError) -> None:
        """End it: every step in flight fails with an unknown outcome. Idempotent."""
        if self.over is not None:
            return
        self.over = error
        for step in self._steps.values():
            for request in step.requests:
                if not request.future.done():
                    request.future.set_exception(self._ended())
        self._steps.clear()
        for waiting in self._waiting.values():
            for request in waiting:
                if not request.future.done():
                    request.future.set_result(None)
            waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._call.cancel()
        current = asyncio.current_task()
        for task in (self._writer, self._reader):
            if task is not current:
                task.cancel()

    # --- frames -----------------------------------------------------------------------------------------------------

    def _next(self) -> Frame | None:
        """The next frame to send, if one may be sent."""
        if self._cancels:
            self._step_id += 1
            return Frame(step_id=self._step_id, cancel=self._cancels.popleft())
        first: StreamRequest[Any] | None = None
        for kind, waiting in self._waiting.items():
            if waiting and self._may_go(kind):
                head = next(iter(waiting))
                if first is None or head.number < first.number:
                    first = head
        if first is None:
            return None
        waiting = self._waiting[first.kind]
        now = time.monotonic()
        requests = group(waiting, self.capacity, now) if first.kind >= Kind.SHARED else [first]
        self._step_id = step_id = self._step_id + 1
        for request in requests:
            del waiting[request]
            request.step, request.resent = step_id, True
            for item in request.items:
                item.sent()
        frame = frame_of(requests, now)
        self._steps[step_id] = SessionStep(requests, now, frame.forward.apart)
        self._in_flight[first.kind] += 1
        frame.step_id = step_id
        return frame

    def _may_go(self, kind: Kind) -> bool:
        """Whether another frame of a kind may be in flight. Large answers leave one step to the others."""
        if kind is Kind.CONTROL:
            return True
        in_flight = self._in_flight
        if len(self._steps) - in_flight[Kind.CONTROL] >= self._most:
            return False
        if kind is Kind.SHARED:
            return in_flight[kind] < self._pace.most
        return kind not in {Kind.LARGE, Kind.APART} or in_flight[kind] < max(1, self._most - 1)

    def _receive(self, response: session_pb2.SessionResponse) -> None:
        if response.HasField("tokens"):
            for run in response.tokens.runs:
                if (step := self._steps.get(run.step_id or response.step_id)) is not None:
                    step.note_tokens(run)
            return
        step = self._steps.get(response.step_id)
        if step is None:
            return
        if response.HasField("rows"):
            if not step.given_up:
                step.rows.append(response.rows)
            return
        if response.HasField("forward") and step.requests[0].items:
            self._receive_forward(response.step_id, step, response.forward)
        elif response.HasField("error"):
            error = error_from_status(response.error)
            if isinstance(error, QueueFull) and "steps_in_flight" in error.metadata:
                # The executor counts a step until its answer is written, which may be after this client has read it.
                self._loop.call_later(_REQUEUE_S, self._requeue_step, response.step_id)
                return
            self._forget(response.step_id)
            if len(step.requests) > 1:
                self._requeue(step.requests, Kind.FRAME)  # alone it may be answered differently
            elif not step.given_up:
                step.requests[0].future.set_exception(error)
        else:
            self._forget(response.step_id)
            if not step.given_up:
                step.requests[0].future.set_result(response)
        self._wake.set()  # after the results, so that their callers' next requests share a frame

    def _receive_forward(self, step_id: int, step: SessionStep, answer: session_pb2.SessionForwardAnswer) -> None:
        """Distribute the results of a step: all that were still open, unless ``more`` parts come. A caller of several
        items gets them together."""
        failed: ExecutorError | None = None
        try:
            outcomes, blocks = step.outcomes_in(answer), rows_from_proto(answer.row_blocks, step.rows)
        except ExecutorError as error:
            outcomes, blocks, failed = {}, [], error
        step.rows, single, timing = [], list[StreamRequest[Any]](), timing_from_proto(answer)
        first = step.requests[0]
        if first.frame is not None:
            if step.apart:
                outcomes, blocks = step.kept(outcomes, blocks)
            if len(outcomes) == len(first.items) and not failed and not answer.more and not first.future.done():
                whole = list(map(outcomes.__getitem__, range(len(outcomes))))
                first.future.set_result(Forwarded(whole, blocks, answer.pressure, timing))
            outcomes = {}
        elif step.apart:
            self._linger = bool(outcomes)
        elif step.kind is Kind.SHARED and outcomes and not isinstance(outcomes[0], ExecutorError):
            self._pace.answered(time.monotonic() - step.sent, timing)
            self._linger = bool(self._waiting[Kind.SHARED])
        for place, outcome in outcomes.items():
            request = step.requests[place]
            if request.future.done():
                continue
            if isinstance(outcome, DeadlineExceeded) and len(step.requests) > 1:
                single.append(request)  # another's deadline
            elif isinstance(outcome, ExecutorError) and not request.batch:
                request.future.set_exception(outcome)
            else:
                request.future.set_result(Forwarded((outcome,), blocks, answer.pressure, timing))
        if not answer.more:
            self._forget(step_id)
        if single:
            self._requeue(single, Kind.FRAME)
        if failed or not answer.more:
            for request in step.requests:
                if request.step == step_id and not request.future.done():
                    request.future.set_exception(
                        failed or TransportError("the executor did not answer all items", metadata=_INTERNAL)
                    )

    def _forget(self, step_id: int) -> None:
        """Stop counting it as in flight."""
        self._in_flight[self._steps.pop(step_id).kind] -= 1

    def _requeue_step(self, step_id: int) -> None:
        """Queue the requests of a step again that was not begun."""
        if (step := self._steps.get(step_id)) is not None:
            self._forget(step_id)
            self._requeue(step.requests, step.kind)
            self._wake.set()

    def _requeue(self, requests: Sequence[StreamRequest[Any]], kind: Kind) -> None:
        """Queue them again, before all others."""
        for request in reversed(requests):
            if not request.future.done():
                request.step, request.kind = None, kind
                self._waiting[kind][request] = None
                self._waiting[kind].move_to_end(request, last=False)

    # --- giving up --------------------------------------------------------------------------------------------------

    def _set_timer(self, at: float) -> None:
        """Set the one timer that looks for requests whose deadline has passed."""
        if self._timer is not None:
            self._timer.cancel()
        self._expires = at
        left = at - time.monotonic()
        self._timer = None if at == math.inf else self._loop.call_later(max(0.0, left), self._check_deadlines)

    def _check_deadlines(self) -> None:
        now, soonest = time.monotonic(), math.inf
        waiting = [request for queue in self._waiting.values() for request in queue]
        for request in [*waiting, *(each for step in self._steps.values() for each in step.requests)]:
            if request.future.done():
                continue
            if request.expires <= now:
                self._expire(request)
            else:
                soonest = min(soonest, request.expires)
        if self.over is None:
            self._set_timer(soonest)

    def _expire(self, request: StreamRequest[Any]) -> None:
        if request.step is None:
            late = DeadlineExceeded("no step of the session ended in time; nothing was sent")
        else:
            metadata = {"grpc_code": "DEADLINE_EXCEEDED"}
            late = DeadlineExceeded("the deadline passed before the answer came", metadata=metadata)
        request.future.set_exception(late)
        self._give_up(request)
        steps = [step for step in self._steps.values() if step.kind is not Kind.CONTROL]
        # With none in flight, this client was busy itself.
        if request.step is None and steps and all(step.given_up for step in steps):
            self.end(TransportError("no step of the session was answered", metadata=_UNAVAILABLE))

    def _give_up(self, request: StreamRequest[Any]) -> None:
        """Drop a request whose caller has stopped waiting: cancel its step if that has not begun, and drop its rows."""
        if request.step is None:
            self._waiting[request.kind].pop(request, None)
            return
        step = self._steps.get(request.step)
        if step is None:
            return
        if step.given_up:
            step.rows.clear()
        if step.apart and request.frame is None:
            place = step.requests.index(request)
            self._cancels.append(session_pb2.SessionCancel(step_id=request.step, item_indexes=[place]))
            self._wake.set()
        elif not step.cancelled:
            step.cancelled = True
            self._cancels.append(session_pb2.SessionCancel(step_id=request.step))
            self._wake.set()

    # --- the two ends -----------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        try:
            while True:
                if self._linger:  # callers that were just answered may share the next frame
                    self._linger = False
                    for _ in range(_TURNS):
                        await asyncio.sleep(0)
                while (frame := self._next()) is not None:
                    await self._call.write(frame.SerializeToString())
                self._wake.clear()
                await self._wake.wait()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the call has ended; the reader gets the reason

    async def _read(self) -> None:
        try:
            while True:
                response = await self._call.read()
                if isinstance(response, session_pb2.SessionResponse):
                    self._receive(response)
                else:
                    self.end(TransportError("the executor ended the session", metadata=_UNAVAILABLE))
                    return
        except grpc.aio.AioRpcError as error:
            self.end(error_from_rpc(error))
        except (grpc.aio.UsageError, asyncio.CancelledError):
            self.end(closed())  # the channel was closed under it: grpc.aio reports that by cancelling
        except Exception as error:
            self.end(TransportError(f"the session's answers cannot be read: {error!r}", metadata=_UNAVAILABLE))

    def _ended(self) -> ExecutorError:
        """The error of a step that was in flight when the stream ended, so its outcome is unknown."""
        error = self.over or closed()
        if isinstance(error, Draining):
            return Draining(f"the session ended before the answer came: {error.message}", metadata=_UNAVAILABLE)
        if isinstance(error, DeviceLost):
            return DeviceLost(error.message)
        if isinstance(error, TransportError) and error.metadata.get("grpc_code") == "CANCELLED":
            return TransportError(error.message, metadata=error.metadata)
        return TransportError(f"the session ended before the answer came: {error.message}", metadata=_UNAVAILABLE)
