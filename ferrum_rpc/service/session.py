"""One bidirectional stream of one scheduler: frames in, answers out, several steps in flight.

A frame is begun where it is read, by the same paths as the unary calls, so that frames claim their sequences in the
order in which they arrive; one task writes the answers of those that have ended. What the stream adds: a lease that
every frame renews, a bound on the steps in flight (a step counts until its answer is written, so a client that does not
read holds its own answers alone), and large answers in parts.

The end of the stream is not the client's word: killed, cut off and half-closed look the same. Steps that have not begun
are taken back, running ones commit, and the sequences wait for their lease. Only `close` ends them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import grpc
import structlog

from ferrum_rpc.errors import ExecutorError, InternalError, InvalidRequest, QueueFull, SequencesExhausted
from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.service.admission import check_room
from ferrum_rpc.service.auth import ARRIVED, CALLER
from ferrum_rpc.service.forward import ForwardCall
from ferrum_rpc.service.records import Account, Ending, Lease, Resource
from ferrum_rpc.service.rpc import CallLog, Context
from ferrum_rpc.service.session_kv import SessionKv
from ferrum_rpc.service.session_steps import Reply, Step, Steps
from ferrum_rpc.service.state import RETRY_AFTER_S, ServerState
from ferrum_rpc.service.supervisor import Background
from ferrum_rpc.service.transaction import FAILED
from ferrum_rpc.wire.info import SCHEMA_REVISION, seconds, set_seconds
from ferrum_rpc.wire.items import (
    Shape,
    fill_results,
    fill_step,
    items_from_proto,
    pressure_to_proto,
)
from ferrum_rpc.wire.rows import RowParts
from ferrum_rpc.wire.status import status_from_error

log = structlog.get_logger("ferrum_rpc.session")

DEFAULT_STEPS: Final = 4
LEAST_INLINE_BYTES: Final = 256
METHOD: Final = "ferrum_rpc.executor.v1.ModelExecutor/Session"

Answer = session_pb2.SessionResponse


class Sessions:
    """The open sessions of a server."""

    def __init__(self) -> None:
        self._open: set[Session] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session) -> None:
        """It is open."""
        self._open.add(session)

    def discard(self, session: Session) -> None:
        """It is over."""
        self._open.discard(session)

    def end(self, error: ExecutorError) -> None:
        """End every session with a status: the server goes."""
        for session in list(self._open):
            session.end(error)


class Session:
    """One stream. ``run`` serves it to its end."""

    def __init__(self, state: ServerState, calls: CallLog, sessions: Sessions, context: Context) -> None:
        self._state = state
        self._calls = calls
        self._sessions = sessions
        self._context = context
        self._account = state.quotas.account(CALLER.get())
        self._origin = object()  # marks the sequences of this session, and must not keep its call alive after it
        self._cache = SessionKv(
            state, self._account.caller, self._origin, lambda outcomes: calls.refused_items(METHOD, outcomes, context)
        )
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._steps = Steps(self._answer)
        self._last = 0
        self._most = self._inline = 0
        self._max_bytes = state.limits.max_session_response_bytes
        self._lease: Lease
        self._own_lease = False
        self._task: asyncio.Task[Any] | None = None
        self._ending: ExecutorError | None = None
        self._reading = False

    # --- the stream -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Frames until `close` or the end of the stream. Raises what ends the stream with a status."""
        self._task = asyncio.current_task()
        most = self._state.limits.max_sessions
        if len(self._sessions) >= most:
            raise SequencesExhausted(
                f"{len(self._sessions)} sessions are open and {most} may; end some",
                metadata={"max_sessions": most},
                retry_after_s=RETRY_AFTER_S,
            )
        self._account.take(Resource.SESSIONS)
        self._sessions.add(self)  # before `hello`: a stream that never says it must not hold up the server's end
        try:
            if (frame := await self._next()) is not None:
                await self._serve(self._hello(frame))
            if self._ending is not None:
                raise self._ending
        finally:
            self._sessions.discard(self)
            self._account.give(Resource.SESSIONS)

    async def _serve(self, welcome: Answer) -> None:
        self._state.sessions += 1
        writer = self._state.supervisor.start(Background.SESSION, self._steps.run, self._writer_failed)
        try:
            await self._write(welcome)
            while (frame := await self._next()) is not None:
                if not await self._take(frame):
                    self._ending = None  # it closed by itself
                    return
            # No `close`: a client that only half-closed, or that the server leaves, still reads.
            await self._steps.idle()
        finally:
            self._steps.abandon()
            writer.cancel()
            del self._steps  # it refers to this session: unread answers would live until the collector runs
            self._state.sessions -= 1

    async def _next(self) -> session_pb2.SessionRequest | None:
        """The next frame; None at the end of the stream, whichever side ends it."""
        if self._ending is not None:
            return None
        self._reading = True
        try:
            frame = await self._context.read()
        except asyncio.CancelledError:
            if self._ending is None or self._task is None:
                raise
            self._task.uncancel()
            return None
        finally:
            self._reading = False
        return None if frame is grpc.aio.EOF else frame

    def end(self, error: ExecutorError) -> None:
        """End the stream with a status: no frame is read any more, those that were are answered first."""
        if self._task is not None and self._ending is None:
            self._ending = error
            if self._reading:
                self._task.cancel()

    def _hello(self, frame: session_pb2.SessionRequest) -> Answer:
        """Open the session, or raise why not."""
        _ = self._state.model
        if frame.WhichOneof("frame") != "hello":
            raise InvalidRequest("the first frame of a session is `hello`", field="frame")
        hello, limits, leases = frame.hello, self._state.limits, self._state.leases
        self._last = frame.step_id
        self._most = min(hello.steps_in_flight or DEFAULT_STEPS, limits.max_steps_in_flight)
        self._inline = max(
            LEAST_INLINE_BYTES, min(hello.inline_bytes or limits.session_inline_bytes, limits.max_response_bytes)
        )
        if hello.lease_id:
            self._lease = leases.renew(hello.lease_id, self._account.caller.name)
        else:
            self._lease = leases.acquire(self._account.caller, client_name=hello.client_name)
            self._own_lease = True
        welcome = session_pb2.SessionWelcome(
            schema_revision=SCHEMA_REVISION,
            instance_id=self._state.handles.instance_id,
            lease_id=self._lease.id,
            steps_in_flight=self._most,
            inline_bytes=self._inline,
        )
        set_seconds(welcome.lease_ttl, self._lease.ttl_s)
        set_seconds(welcome.renew_every, self._lease.renew_every_s)
        return Answer(step_id=frame.step_id, welcome=welcome)

    async def _take(self, frame: session_pb2.SessionRequest) -> bool:
        """Begin what a frame asks for. False: it was the last. Raises what ends the stream: a client that breaks the
        frame order does not know which of its steps an answer is for."""
        kind = frame.WhichOneof("frame")
        if frame.step_id <= self._last:
            raise InvalidRequest(f"step_id must grow: {frame.step_id} after {self._last}", field="step_id")
        self._last = step = frame.step_id
        now = time.monotonic()
        ARRIVED.set(now)
        self._lease.renew(now)
        match kind:
            case "forward":
                await self._begin(step, self._begin_forward, frame.forward)
            case "truncate":
                await self._begin(step, self._cache.truncate, frame.truncate)
            case "fork":
                await self._begin(step, self._cache.fork, frame.fork)
            case "release":
                await self._begin(step, self._cache.release, frame.release)
            case "keep_alive":
                await self._answer(Step(step, reply=partial(self._on_keep_alive, step)), leaving=False)
            case "cancel":
                self._steps.take_back(frame.cancel.step_id)
            case "close":
                await self._steps.idle()
                await self._write(await self._on_close(step, frame.close))
                return False
            case _:
                raise InvalidRequest("a frame is empty, or a second `hello`", field="frame")
        return True

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _begin(self, step: int, begin: Callable[[Step, Any], None], request: Any) -> None:
        """Begin a step, which has claimed its sequences when this returns; or refuse it: too many are in flight."""
        if len(self._steps) < self._most:
            self._steps.begin(step, begin, request)
        else:
            await self._write(self._refusal(step, self._too_many()))

    def _begin_forward(self, step: Step, request: session_pb2.SessionForward) -> None:
        messages = request.items
        self._calls.methods[METHOD].items += len(messages)
        check_room(self._state, self._account, messages)
        call = ForwardCall(
            self._state,
            self._account,
            items_from_proto(messages, Shape.ANY, self._lease.id),
            all_or_nothing=request.all_or_nothing,
            deadline=time.monotonic() + seconds(request.timeout) if request.HasField("timeout") else None,
            max_bytes=self._max_bytes,
            origin=self._origin,
            hold=partial(self._hold, step),
        )
        step.calls, step.reply = (call,), partial(self._on_forward, step.number, request, call)

    def _hold(self, step: Step, account: Account, size: int) -> None:
        """Take room for a step's answer until it is written."""
        step.give_back = self._state.unread.take(self._context.peer(), account, size)

    def _on_forward(self, step: int, request: session_pb2.SessionForward, call: ForwardCall) -> Reply:
        outcomes = call.answer().outcomes
        self._calls.refused_items(METHOD, outcomes, self._context)
        response = Answer(step_id=step)
        forward = response.forward
        rows = RowParts(forward.row_blocks, fill_results(forward, request.items, outcomes), self._inline)
        fill_step(forward, self._state.pressure(), call.timing)
        return response, rows.frames(step)

    def _on_keep_alive(self, step: int) -> Reply:
        lease = self._state.leases.renew(self._lease.id, self._account.caller.name)
        answer = session_pb2.SessionKeepAliveAnswer(pressure=pressure_to_proto(self._state.pressure()))
        set_seconds(answer.ttl, lease.ttl_s)
        return Answer(step_id=step, keep_alive=answer), ()

    async def _on_close(self, step: int, request: session_pb2.SessionClose) -> Answer:
        state, released = self._state, 0
        if request.release_sequences:
            mine = [record for record in state.handles.records() if record.origin is self._origin]
            released = await state.ended(mine, Ending.RELEASED)
        if self._own_lease and not self._lease.members:
            state.leases.remove(self._lease, expired=False)
        return Answer(step_id=step, goodbye=session_pb2.SessionGoodbye(released_sequences=released))

    # --- writing ----------------------------------------------------------------------------------------------------

    async def _answer(self, step: Step, leaving: bool = True) -> None:
        """Write the answer of a step that has ended, the frames of its rows ahead of it. ``leaving``: it counted as in
        flight. The step refers to its reply no more: rows that are written part by part must not stay until the last.
        """
        reply, step.calls, step.reply = step.reply, (), None
        assert reply is not None  # noqa: S101 - it has ended, and is answered once
        rows: Iterable[Answer] = ()
        try:
            response, rows = reply()
        except ExecutorError as error:
            response = self._refusal(step.number, error)
        except Exception as error:
            response = self._refusal(step.number, InternalError(FAILED), cause=error)
        del reply
        try:
            for part in rows:
                await self._write(part)
            await self._write(response, leaving)
        except grpc.aio.BaseError as error:  # the stream is over
            log.debug("session_answer_not_written", step=step.number, error=repr(error))

    def _writer_failed(self, _: Exception) -> None:
        """An answer was lost, and its client would wait for it: better the stream ends, and the client asks again."""
        self.end(InternalError("the session failed internally; its log says more"))

    async def _write(self, answer: Answer, leaving: bool = False) -> None:
        async with self._writing:
            self._steps.leaving = leaving
            await self._context.write(answer)

    def _refusal(self, step: int, error: ExecutorError, cause: Exception | None = None) -> Answer:
        self._calls.refusals.note(METHOD, error, self._context, cause=cause)
        return Answer(step_id=step, error=status_from_error(error))

    def _too_many(self) -> QueueFull:
        return QueueFull(
            f"{len(self._steps)} steps are in flight and {self._most} may; await one",
            metadata={"steps_in_flight": self._most},
            retry_after_s=RETRY_AFTER_S,
        )
