"""One bidirectional stream of one scheduler: frames in, answers out, several steps in flight.

A frame is taken in its turn, runs in a task of its own and is answered when it is done, by the same paths as the unary
calls. A step of one item needs no task of its own: it is begun where its frame is read, and answered by the one task
that writes all such answers. What the stream adds: a lease that every frame renews, a bound on the steps in flight (a
step counts until its answer is written, so a client that does not read holds its own answers and nobody else's), and
large answers in parts.

The end of the stream is not the client's word: killed, cut off and half-closed look the same. Steps that have not begun
are taken back, running ones commit, and the sequences wait for their lease. Only `close` ends them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc
import structlog

from ferrum_rpc.errors import ExecutorError, InternalError, InvalidRequest, QueueFull, SequencesExhausted
from ferrum_rpc.executor.v1 import forward_pb2, session_pb2
from ferrum_rpc.service.books import RETRY_AFTER_S, Books
from ferrum_rpc.service.calls import CallLog, Context
from ferrum_rpc.service.forward import ForwardAnswer, ForwardPath, TakeBack
from ferrum_rpc.service.handles import Ending
from ferrum_rpc.service.identity import caller
from ferrum_rpc.service.leases import Lease
from ferrum_rpc.service.lone import Lone, LoneSteps
from ferrum_rpc.service.quotas import Resource
from ferrum_rpc.service.row_parts import row_parts
from ferrum_rpc.service.session_cache import SessionCache
from ferrum_rpc.wire.facts import seconds, set_seconds
from ferrum_rpc.wire.items import (
    Shape,
    fill_pressure,
    fill_results,
    fill_timing,
    item_from_proto,
    items_from_proto,
    pressure_to_proto,
    with_lease,
)
from ferrum_rpc.wire.revision import SCHEMA_REVISION
from ferrum_rpc.wire.status import status_from_error

log = structlog.get_logger("ferrum_rpc.session")

DEFAULT_STEPS: Final = 4
LEAST_INLINE_BYTES: Final = 256
METHOD: Final = "ferrum_rpc.executor.v1.ModelExecutor/Session"

Answer = session_pb2.SessionResponse
Reply = tuple[Answer, int]
"""A frame's answer, and the bytes of its rows."""


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

    def __init__(self, books: Books, calls: CallLog, sessions: Sessions, context: Context) -> None:
        self._books = books
        self._calls = calls
        self._sessions = sessions
        self._context = context
        self._forward = ForwardPath(books)
        self._caller = caller()
        self._origin = object()  # marks the sequences of this session, and must not keep its call alive after it
        self._cache = SessionCache(
            books, self._caller, self._origin, lambda outcomes: calls.refused_items(METHOD, outcomes, context)
        )
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._steps: dict[int, asyncio.Future[None]] = {}
        self._lone = LoneSteps(self._forward, self._write_lone)
        self._lone_frames: dict[Lone, session_pb2.SessionRequest] = {}
        self._take_backs: dict[int, Callable[[], object]] = {}
        self._leaving: int | None = None  # the step whose answer is being written: its client may know before we do
        self._last = 0
        self._most = self._inline = 0
        self._max_bytes = books.limits.max_session_response_bytes
        self._lease: Lease
        self._own_lease = False
        self._task: asyncio.Task[Any] | None = None
        self._ending: ExecutorError | None = None
        self._reading = False

    # --- the stream -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Frames until `close` or the end of the stream. Raises what ends the stream with a status."""
        self._task = asyncio.current_task()
        books, most = self._books, self._books.limits.max_sessions
        if len(self._sessions) >= most:
            raise SequencesExhausted(
                f"{len(self._sessions)} sessions are open and {most} may; end some",
                metadata={"max_sessions": most},
                retry_after_s=RETRY_AFTER_S,
            )
        account = books.quotas.account(self._caller)
        account.take(Resource.SESSIONS)
        self._sessions.add(self)  # before `hello`: a stream that never says it must not hold up the server's end
        try:
            if (frame := await self._next()) is not None:
                await self._serve(self._hello(frame))
            if self._ending is not None:
                raise self._ending
        finally:
            self._sessions.discard(self)
            account.give(Resource.SESSIONS)

    async def _serve(self, welcome: Answer) -> None:
        self._books.sessions += 1
        writer = asyncio.create_task(self._lone.run())
        try:
            await self._write(welcome)
            while (frame := await self._next()) is not None:
                if not await self._take(frame):
                    self._ending = None  # it closed by itself
                    return
            # Not told to close. A client that only half-closed, or that the server leaves, still reads.
            await asyncio.gather(*self._steps.values())
        finally:
            self._lone.abandon()
            for task in (*self._steps.values(), writer):
                task.cancel()
            self._books.sessions -= 1

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
        _ = self._books.model
        if frame.WhichOneof("frame") != "hello":
            raise InvalidRequest("the first frame of a session is `hello`", field="frame")
        hello, limits, leases = frame.hello, self._books.limits, self._books.leases
        self._last = frame.step_id
        self._most = min(hello.steps_in_flight or DEFAULT_STEPS, limits.max_steps_in_flight)
        self._inline = max(
            LEAST_INLINE_BYTES, min(hello.inline_bytes or limits.session_inline_bytes, limits.max_response_bytes)
        )
        if hello.lease_id:
            self._lease = leases.renew(hello.lease_id, self._caller.name)
        else:
            self._lease = leases.acquire(self._caller, client_name=hello.client_name)
            self._own_lease = True
        welcome = session_pb2.SessionWelcome(
            schema_revision=SCHEMA_REVISION,
            instance_id=self._books.handles.instance_id,
            lease_id=self._lease.id,
            steps_in_flight=self._most,
            inline_bytes=self._inline,
        )
        set_seconds(welcome.lease_ttl, self._lease.ttl_s)
        set_seconds(welcome.renew_every, self._lease.renew_every_s)
        return Answer(step_id=frame.step_id, welcome=welcome)

    async def _take(self, frame: session_pb2.SessionRequest) -> bool:
        """Begin what a frame asks for. False: it was the last. Raises what ends the stream: a client that breaks the
        frame order cannot be told which of its steps an answer is for."""
        kind = frame.WhichOneof("frame")
        if frame.step_id <= self._last:
            raise InvalidRequest(f"step_id must grow: {frame.step_id} after {self._last}", field="step_id")
        self._last = step = frame.step_id
        self._lease.renew(time.monotonic())
        match kind:
            case "forward":
                await self._begin_forward(frame)
            case "truncate":
                await self._begin(step, lambda: self._on_cache(step, self._cache.truncate(frame.truncate)))
            case "fork":
                await self._begin(step, lambda: self._on_cache(step, self._cache.fork(frame.fork)))
            case "release":
                await self._begin(step, lambda: self._on_cache(step, self._cache.release(frame.release)))
            case "keep_alive":
                await self._answered(step, lambda: self._on_keep_alive(step))
            case "cancel":
                take_back_now = self._take_backs.get(frame.cancel.step_id)
                if take_back_now is not None:
                    take_back_now()
            case "close":
                await asyncio.gather(*self._steps.values())
                await self._write(await self._on_close(step, frame.close))
                return False
            case _:
                raise InvalidRequest("a frame is empty, or a second `hello`", field="frame")
        return True

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _begin(self, step: int, answer: Callable[[], Awaitable[Reply]]) -> None:
        if await self._has_room(step):
            self._steps[step] = asyncio.create_task(self._run_step(step, answer))

    async def _begin_forward(self, frame: session_pb2.SessionRequest) -> None:
        step, request = frame.step_id, frame.forward
        if not await self._has_room(step) or self._begin_lone(frame):
            return
        take_back = self._take_backs[step] = TakeBack()
        task = self._run_step(step, lambda: self._on_forward(step, request, take_back))
        self._steps[step] = asyncio.create_task(task)

    def _begin_lone(self, frame: session_pb2.SessionRequest) -> bool:
        """Begin a step of one item. False: it takes a task."""
        step, request = frame.step_id, frame.forward
        if len(request.items) != 1 or request.all_or_nothing or not self._forward.has_room(request.items, self._caller):
            return False
        try:
            item = with_lease(item_from_proto(request.items[0], Shape.ANY), self._lease.id)
        except ExecutorError:
            return False
        lone = self._lone.begin(
            item,
            caller=self._caller,
            deadline=_deadline(request),
            max_bytes=self._max_bytes,
            origin=self._origin,
        )
        if lone is None:
            return False
        self._calls.method(METHOD).items += 1
        self._steps[step], self._lone_frames[lone] = lone.answered, frame
        self._take_backs[step] = partial(self._lone.take_back, lone)
        return True

    async def _write_lone(self, lone: Lone) -> None:
        frame = self._lone_frames.pop(lone)
        step = frame.step_id
        try:
            reply = self._on_lone(frame, lone)
        except Exception as error:
            reply = self._refused(step, error)
        await self._send(step, *reply)
        self._forget(step)

    def _on_lone(self, frame: session_pb2.SessionRequest, lone: Lone) -> Reply:
        answer = lone.answer()
        if lone.began:
            self._books.failpoints.reach("before_reply")
        return self._reply(frame.step_id, frame.forward.items, answer)

    async def _has_room(self, step: int) -> bool:
        """Whether one more step may be in flight; if not, the frame is refused."""
        if len(self._steps) - (self._leaving is not None) < self._most:
            return True
        await self._write(self._refusal(step, self._too_many()))
        return False

    async def _run_step(self, step: int, answer: Callable[[], Awaitable[Reply]]) -> None:
        try:
            await self._answered(step, answer)
        finally:
            self._forget(step)

    def _forget(self, step: int) -> None:
        """The step is answered."""
        del self._steps[step]
        if self._leaving == step:
            self._leaving = None
        self._take_backs.pop(step, None)

    async def _answered(self, step: int, answer: Callable[[], Awaitable[Reply]]) -> None:
        """Run a step and write its answer, whatever it is."""
        try:
            reply = await answer()
        except Exception as error:
            reply = self._refused(step, error)
        await self._send(step, *reply)

    async def _on_forward(self, step: int, request: session_pb2.SessionForward, take_back: TakeBack) -> Reply:
        self._calls.method(METHOD).items += len(request.items)
        messages = request.items
        self._forward.check_room(messages, self._caller)
        items = [
            each if isinstance(each, ExecutorError) else with_lease(each, self._lease.id)
            for each in items_from_proto(messages, Shape.ANY)
        ]
        answer = await self._forward.forward(
            items,
            caller=self._caller,
            all_or_nothing=request.all_or_nothing,
            deadline=_deadline(request),
            max_bytes=self._max_bytes,
            origin=self._origin,
            take_back=take_back,
        )
        return self._reply(step, messages, answer)

    def _reply(self, step: int, messages: Sequence[forward_pb2.ForwardItem], answer: ForwardAnswer) -> Reply:
        self._calls.refused_items(METHOD, answer.outcomes, self._context)
        response = Answer(step_id=step)
        forward = response.forward
        row_bytes = fill_results(forward, messages, answer.outcomes)
        fill_pressure(forward.pressure, self._books.pressure())
        if answer.timing is not None:
            fill_timing(forward.timing, answer.timing)
        return response, row_bytes

    async def _on_cache(self, step: int, answer: Awaitable[session_pb2.SessionHandlesAnswer]) -> Reply:
        return Answer(step_id=step, handles=await answer), 0

    async def _on_keep_alive(self, step: int) -> Reply:
        lease = self._books.leases.renew(self._lease.id, self._caller.name)
        answer = session_pb2.SessionKeepAliveAnswer(pressure=pressure_to_proto(self._books.pressure()))
        set_seconds(answer.ttl, lease.ttl_s)
        return Answer(step_id=step, keep_alive=answer), 0

    async def _on_close(self, step: int, request: session_pb2.SessionClose) -> Answer:
        books, released = self._books, 0
        if request.release_sequences:
            mine = [record for record in books.handles.records() if record.origin is self._origin]
            released = await books.ended(mine, Ending.RELEASED)
        if self._own_lease and not self._lease.members:
            books.leases.remove(self._lease, expired=False)
        return Answer(step_id=step, goodbye=session_pb2.SessionGoodbye(released_sequences=released))

    # --- writing ----------------------------------------------------------------------------------------------------

    async def _send(self, step: int, response: Answer, row_bytes: int) -> None:
        """Write a step's answer, its rows ahead of it where they are many."""
        try:
            if row_bytes > self._inline:
                for part in row_parts(response, self._inline):
                    await self._write(part)
            await self._write(response, leaving=step if step in self._steps else None)
        except Exception as error:  # the stream is over: nobody is there to be told
            log.debug("session_answer_not_written", step=step, error=repr(error))

    async def _write(self, answer: Answer, leaving: int | None = None) -> None:
        async with self._writing:
            self._leaving = leaving
            await self._context.write(answer)

    def _refused(self, step: int, error: Exception) -> Reply:
        """The answer of a step that failed."""
        if isinstance(error, ExecutorError):
            return self._refusal(step, error), 0
        internal = InternalError("the executor failed internally; its log says more")
        return self._refusal(step, internal, cause=error), 0

    def _refusal(self, step: int, error: ExecutorError, cause: Exception | None = None) -> Answer:
        self._calls.refusals.note(METHOD, error, self._context, cause=cause)
        return Answer(step_id=step, error=status_from_error(error))

    def _too_many(self) -> QueueFull:
        return QueueFull(
            f"{len(self._steps)} steps are in flight and {self._most} may; await one",
            metadata={"steps_in_flight": self._most},
            retry_after_s=RETRY_AFTER_S,
        )


def _deadline(request: session_pb2.SessionForward) -> float | None:
    """On `time.monotonic`."""
    return time.monotonic() + seconds(request.timeout) if request.HasField("timeout") else None
