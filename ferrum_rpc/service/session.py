"""One bidirectional stream of one scheduler: frames in, answers out, several steps in flight.

A frame is begun in the turn that reads it, by the same paths as unary calls, so frames claim their sequences in the
order of arrival; one task writes the answers of steps that have ended. The stream adds a lease that every frame renews,
a bound on the steps in flight (a step counts until its answer is written, so a client that does not read delays only
its own answers), and large answers in parts.

The server cannot distinguish the causes of a stream's end: a client may be killed, disconnected or half-closed. Steps
that have not begun are cancelled, running ones commit, and the sequences live on with their lease. Only `close` ends
them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import grpc
import structlog

from ferrum_rpc.core import ItemOutcome
from ferrum_rpc.errors import ExecutorError, InternalError, InvalidRequest, QueueFull, SequencesExhausted
from ferrum_rpc.executor.v1 import forward_pb2, session_pb2
from ferrum_rpc.service.admission import check_queue_capacity
from ferrum_rpc.service.forward import ForwardCall
from ferrum_rpc.service.guard.auth import ARRIVED, CALLER
from ferrum_rpc.service.records import RETRY_AFTER_S, LeaseRecord, Resource, SequenceEnd
from ferrum_rpc.service.rpc import CallLog
from ferrum_rpc.service.session_kv import PendingFrame, SessionKv
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import BackgroundTask
from ferrum_rpc.service.trace_context import Context
from ferrum_rpc.service.transaction import FAILED
from ferrum_rpc.wire.info import SCHEMA_REVISION, duration, seconds
from ferrum_rpc.wire.items import (
    CallShape,
    fill_pressure,
    fill_results,
    fill_step,
    items_from_proto,
    name_from_proto,
)
from ferrum_rpc.wire.rows import RowParts
from ferrum_rpc.wire.status import CODE_BY_REASON, status_from_error

log = structlog.get_logger("ferrum_rpc.session")

DEFAULT_STEPS: Final = 4
MIN_INLINE_BYTES: Final = 256
MIXED_TOKENS_REVISION: Final = 7
"""Clients of this revision read tokens of several steps from one frame, and need none of a run that its answer brings
before the next frame is due: a frame costs both sides more than a token."""

TOKENS_EVERY_S: Final = 0.02
TOKENS_S_OF_A_RUN: Final = 0.001
LONGEST_TOKENS_S: Final = 0.06
"""Minimum time between two frames of tokens: the first, or the second for each run in it, and the third at most. The
tokens of a run cost the two processes about 50 µs a frame, so they take a twentieth of the time."""

METHOD: Final = "ferrum_rpc.executor.v1.ModelExecutor/Session"

Answer = session_pb2.SessionResponse


def end_sessions(sessions: set[Session], error: ExecutorError) -> None:
    """End every open session with a status, because the server stops."""
    for session in list(sessions):
        session.end(error)


class Session:
    """One stream, which ``run`` serves to its end."""

    def __init__(self, state: ServerState, calls: CallLog, sessions: set[Session], context: Context) -> None:
        self._state = state
        self._calls = calls
        self._sessions = sessions
        self._context = context
        self._account = state.quotas.account(CALLER.get())
        self._origin = object()  # marks the sequences of this session without keeping its call alive
        self._cache = SessionKv(
            state, self._account.caller, self._origin, lambda outcomes: calls.refused_items(METHOD, outcomes, context)
        )
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._open: dict[int, PendingFrame] = {}
        self._ended: deque[PendingFrame] = deque()
        self._chosen: dict[int, dict[int, tuple[int, list[int]]]] = {}  # by step and item: how many before, tokens
        self._wants_tokens = self._mixes_tokens = self._tokens_due = False
        self._tokens_after = 0.0  # on the clock of the event loop
        self._tokens_timer: asyncio.TimerHandle | None = None
        self._wake: asyncio.Future[None] | None = None  # the writer waits for a step that ends
        self._idle: asyncio.Future[None] | None = None  # the reader waits until all are answered
        self._leaving = (
            False  # the last message of an answer is being written: the client may read it before the write returns
        )
        self._last = 0
        self._max_steps = self._inline = 0
        self._max_bytes = state.limits.max_session_response_bytes
        self._lease: LeaseRecord
        self._own_lease = False
        self._task: asyncio.Task[Any] | None = None
        self._ending: ExecutorError | None = None
        self._reading = False

    # --- the stream -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Process frames until `close` or the end of the stream. Raises the error that ends it with a status."""
        self._task = asyncio.current_task()
        limit = self._state.limits.max_sessions
        if len(self._sessions) >= limit:
            raise SequencesExhausted(
                f"{len(self._sessions)} of at most {limit} sessions are open; end some",
                metadata={"max_sessions": limit},
                retry_after_s=RETRY_AFTER_S,
            )
        self._account.allocate(Resource.SESSIONS)
        self._sessions.add(self)  # before `hello`, which may never come: a stopping server must end the stream
        try:
            if (frame := await self._next()) is not None:
                await self._serve(self._hello(frame))
            if self._ending is not None:
                raise self._ending
        finally:
            self._sessions.discard(self)
            self._account.free(Resource.SESSIONS)

    async def _serve(self, welcome: Answer) -> None:
        self._state.sessions += 1
        writer = self._state.supervisor.start(BackgroundTask.SESSION, self._answer_ended, self._writer_failed)
        try:
            await self._write(welcome)
            while (frame := await self._next()) is not None:
                if not await self._begin_frame(frame):
                    self._ending = None  # it closed by itself
                    return
            # No `close`: a client that only half-closed, or whose server stops, still reads.
            await self._until_idle()
        finally:
            for step in self._open.values():  # cancel what has not begun, and let the rest run without a caller
                for call in step.calls:
                    call.abandon()
                if step.free_answer is not None:
                    step.free_answer()
            self._open.clear()  # a cycle with this session: unread answers would stay until the collector runs
            self._ended.clear()
            writer.cancel()
            if self._tokens_timer is not None:
                self._tokens_timer.cancel()
            self._state.sessions -= 1

    async def _next(self) -> session_pb2.SessionRequest | None:
        """The next frame; None at the end of the stream, from either side."""
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
        """End the stream with a status: no more frames are read, and those that were are answered first."""
        if self._task is not None and self._ending is None:
            self._ending = error
            if self._reading:
                self._task.cancel()

    def _hello(self, frame: session_pb2.SessionRequest) -> Answer:
        """Open the session. Raises the refusal."""
        _ = self._state.model
        if frame.WhichOneof("frame") != "hello":
            raise InvalidRequest("the first frame of a session must be `hello`", field="frame")
        hello, limits, leases = frame.hello, self._state.limits, self._state.leases
        client_name = name_from_proto(hello.client_name, "hello.client_name")
        self._last = frame.step_id
        self._wants_tokens, self._mixes_tokens = hello.tokens, hello.client_revision >= MIXED_TOKENS_REVISION
        self._max_steps = min(hello.steps_in_flight or DEFAULT_STEPS, limits.max_steps_in_flight)
        self._inline = max(
            MIN_INLINE_BYTES, min(hello.inline_bytes or limits.session_inline_bytes, limits.max_response_bytes)
        )
        if hello.lease_id:
            self._lease = leases.renew(hello.lease_id, self._account.caller.name)
        else:
            self._lease = leases.acquire(self._account.caller, client_name=client_name)
            self._own_lease = True
        welcome = session_pb2.SessionWelcome(
            schema_revision=SCHEMA_REVISION,
            instance_id=self._state.handles.instance_id,
            lease_id=self._lease.id,
            steps_in_flight=self._max_steps,
            inline_bytes=self._inline,
            lease_ttl=duration(self._lease.ttl_s),
            renew_every=duration(self._lease.renew_every_s),
        )
        return Answer(step_id=frame.step_id, welcome=welcome)

    async def _begin_frame(self, frame: session_pb2.SessionRequest) -> bool:
        """Begin the step of a frame. False: it was the last frame. Raises the error that ends the stream: with a broken
        frame order, answers cannot be matched to steps."""
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
            case "reserve" | "truncate" | "fork" | "release":
                await self._begin(step, partial(self._cache.begin, kind), getattr(frame, kind))
            case "keep_alive":
                await self._answer(PendingFrame(step, reply=self._on_keep_alive), leaving=False)
            case "cancel":
                self._cancel(frame.cancel)
            case "close":
                await self._until_idle()
                await self._write(await self._on_close(step, frame.close))
                return False
            case _:
                raise InvalidRequest("a frame must not be empty, nor a second `hello`", field="frame")
        return True

    def _cancel(self, request: session_pb2.SessionCancel) -> None:
        """Cancel the calls of a step, or of some of its items, each of which is then a call of its own."""
        step, items = self._open.get(request.step_id), set(request.item_indexes)
        if step is not None:
            for index, call in enumerate(step.calls):
                if not items or (step.parts is not None and index in items):
                    call.cancel()

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _begin(self, number: int, begin: Callable[[PendingFrame, Any], None], request: Any) -> None:
        """Begin a step in the turn of the event loop that read its frame, without a task of its own: ``begin`` sets its
        ``calls``, which have claimed their sequences, and its ``reply``. An error that it raises is the answer, as is
        the refusal if too many steps are in flight."""
        if isinstance(request, session_pb2.SessionForward) and request.release:
            try:
                self._cache.release_before(request)
            except InvalidRequest as error:
                await self._write(self._refusal(number, error))
                return
        in_flight = len(self._open) - self._leaving
        if in_flight >= self._max_steps:
            refusal = QueueFull(
                f"{in_flight} of at most {self._max_steps} steps are in flight; await one",
                metadata={"steps_in_flight": self._max_steps},
                retry_after_s=RETRY_AFTER_S,
            )
            await self._write(self._refusal(number, refusal))
            return
        step = self._open[number] = PendingFrame(number)
        try:
            begin(step, request)
        except Exception as error:
            step.calls, step.reply, step.parts = (), partial(_raise, error), None
        step.waits = len(step.calls) or 1
        for index, call in enumerate(step.calls):
            call.when_ended(partial(self._one_ended, step, index))
        if not step.calls:
            self._one_ended(step, 0)

    def _one_ended(self, step: PendingFrame, index: int) -> None:
        step.waits -= 1
        if step.parts is not None:
            step.parts.append(index)
        if (not step.waits) if step.parts is None else len(step.parts) == 1:
            self._ended.append(step)
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _on_tokens(self, number: int, chosen: list[tuple[int, int, int]], item: int | None = None) -> None:
        """Called with new tokens of a step's runs. ``item``: their item, if each item is a call of its own."""
        runs = self._chosen.setdefault(number, {})
        for index, first, token in chosen:
            runs.setdefault(index if item is None else item, (first, []))[1].append(token)
        if self._tokens_timer is None and not self._tokens_due:
            self._tokens_timer = asyncio.get_running_loop().call_at(self._tokens_after, self._wake_for_tokens)

    def _begin_forward(self, step: PendingFrame, request: session_pb2.SessionForward) -> None:
        messages: Sequence[forward_pb2.ForwardItem] = request.items
        self._calls.methods[METHOD].items += len(messages)
        step.items, step.began = len(messages), ARRIVED.get()
        check_queue_capacity(self._state, self._account, messages)
        messages = list(messages)  # read from the request again, each would be wrapped again, in 0.15 µs
        items = items_from_proto(messages, CallShape.FRAME, self._state.capabilities, self._lease.id)
        call = partial(
            ForwardCall,
            self._state,
            self._account,
            deadline=time.monotonic() + seconds(request.timeout) if request.HasField("timeout") else None,
            max_bytes=self._max_bytes,
            origin=self._origin,
            peer=self._context.peer,
        )
        on_tokens = partial(self._on_tokens, step.number) if self._wants_tokens else None
        if not request.apart:
            whole = call(items, all_or_nothing=request.all_or_nothing, on_tokens=on_tokens)
            step.calls, step.reply, step.free_answer = (
                (whole,),
                partial(self._on_forward, messages, whole),
                whole.free_answer,
            )
            return
        if request.all_or_nothing:
            raise InvalidRequest("all_or_nothing must not be set with `apart`", field="all_or_nothing")
        if not items:
            raise InvalidRequest("the call has no items", field="items")
        calls = [
            call([item], on_tokens=None if on_tokens is None else partial(on_tokens, item=index))
            for index, item in enumerate(items)
        ]
        step.calls, step.reply, step.parts = calls, partial(self._on_part, messages, calls, step), []
        step.free_answer = partial(_free_answers, calls)

    def _on_forward(
        self, messages: Sequence[forward_pb2.ForwardItem], call: ForwardCall, response: Answer
    ) -> Iterable[Answer]:
        self._chosen.pop(response.step_id, None)  # the answer has them
        outcomes = call.answer().outcomes
        self._calls.refused_items(METHOD, outcomes, self._context)
        forward = response.forward
        rows = RowParts(forward.row_blocks, fill_results(forward, messages, outcomes), self._inline)
        fill_step(forward, self._state.pressure(), call.timing)
        return rows.frames(response.step_id)

    def _on_part(
        self,
        messages: Sequence[forward_pb2.ForwardItem],
        calls: Sequence[ForwardCall],
        step: PendingFrame,
        response: Answer,
    ) -> Iterable[Answer]:
        """The items that have ended since the last part."""
        ended, step.parts = step.parts or [], []
        if (chosen := self._chosen.get(step.number)) is not None:  # the answer has those of runs that have ended
            for index in ended:
                chosen.pop(index, None)
            if not chosen:
                del self._chosen[step.number]
        outcomes = [_only_outcome(calls[index]) for index in ended]
        self._calls.refused_items(METHOD, outcomes, self._context)
        forward = response.forward
        items = [messages[index] for index in ended]
        rows = RowParts(forward.row_blocks, fill_results(forward, items, outcomes, ended), self._inline)
        forward.more = bool(step.waits)
        fill_step(forward, self._state.pressure(), calls[ended[-1]].timing)
        return rows.frames(response.step_id)

    def _on_keep_alive(self, response: Answer) -> Iterable[Answer]:
        lease = self._state.leases.renew(self._lease.id, self._account.caller.name)
        fill_pressure(response.keep_alive.pressure, self._state.pressure())
        response.keep_alive.ttl.CopyFrom(duration(lease.ttl_s))
        return ()

    async def _on_close(self, step: int, request: session_pb2.SessionClose) -> Answer:
        state, released = self._state, 0
        if request.release_sequences:
            mine = [record for record in state.handles.records() if record.origin is self._origin]
            released = await state.ended(mine, SequenceEnd.RELEASED)
        if self._own_lease and not self._lease.members:
            state.leases.remove(self._lease, expired=False)
        return Answer(step_id=step, goodbye=session_pb2.SessionGoodbye(released_sequences=released))

    # --- writing ----------------------------------------------------------------------------------------------------

    async def _until_idle(self) -> None:
        while self._open:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    async def _answer_ended(self) -> None:
        """Answer the steps in the order in which they end, until cancelled."""
        while True:
            while self._ended or self._tokens_due:
                for _ in range(len(self._ended)):  # before tokens that are due: those may be of runs that follow
                    while self._chosen and not self._mixes_tokens:  # older clients want them first
                        await self._write_chosen()
                    await self._answer_next()
                if self._tokens_due:
                    await self._write_chosen()
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    async def _answer_next(self) -> None:
        step = self._ended.popleft()
        more = bool(step.waits)
        try:
            await self._answer(step, more=more)
        finally:
            self._leaving = False
            if not more and self._open.pop(step.number, None) is not None and step.free_answer is not None:
                step.free_answer()
            if not self._open and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    def _wake_for_tokens(self) -> None:
        """Have the tokens written that runs have chosen. Those of fast steps were gathered: a frame costs the client
        more than a token."""
        self._tokens_timer, self._tokens_due = None, True
        self._wake_writer()

    async def _write_chosen(self) -> None:
        """Write the tokens that runs have chosen since the last time: one frame, or one per step for older clients."""
        chosen, self._chosen, self._tokens_due = self._chosen, {}, False
        every_s = max(TOKENS_EVERY_S, TOKENS_S_OF_A_RUN * sum(map(len, chosen.values())))
        self._tokens_after = asyncio.get_running_loop().time() + min(LONGEST_TOKENS_S, every_s)
        answer = Answer()
        for number, runs in chosen.items():
            step_id = number
            if not self._mixes_tokens:
                answer, step_id = Answer(step_id=number), 0
            for item, (first, token_ids) in runs.items():
                answer.tokens.runs.add(item_index=item, first=first, token_ids=token_ids, step_id=step_id)
            if not self._mixes_tokens:
                await self._write_tokens(answer)
        if self._mixes_tokens and chosen:
            await self._write_tokens(answer)

    async def _write_tokens(self, answer: Answer) -> None:
        try:
            await self._write(answer)
        except grpc.aio.BaseError as error:  # the stream is over
            log.debug("session_tokens_not_written", error=repr(error))

    async def _answer(self, step: PendingFrame, leaving: bool = True, more: bool = False) -> None:
        """Write the answer of a step that has ended, preceded by the frames of its rows. ``leaving``: it counted as in
        flight. ``more``: it is a part, and not the last. The step drops its reply after the last part, because rows
        written part by part must not stay until then."""
        reply = step.reply
        if not more:
            step.calls, step.reply = (), None
        assert reply is not None  # noqa: S101 - it has ended, and is answered once
        items = step.items if step.parts is None else len(step.parts)
        response, code = Answer(step_id=step.number), "OK"
        rows: Iterable[Answer] = ()
        try:
            rows = reply(response)
        except ExecutorError as error:
            response, code = self._refusal(step.number, error), CODE_BY_REASON[error.reason].name
        except Exception as error:
            response, code = self._refusal(step.number, InternalError(FAILED), cause=error), "INTERNAL"
        del reply
        if items:
            elapsed_s = time.monotonic() - step.began
            self._calls.session_items.observe_all(elapsed_s, items)
            self._calls.slowest.note(METHOD, self._account.caller.name, elapsed_s, code)
        try:
            for part in rows:
                await self._write(part)
            await self._write(response, leaving and not more)
        except grpc.aio.BaseError as error:  # the stream is over
            log.debug("session_answer_not_written", step=step.number, error=repr(error))

    def _writer_failed(self, _: Exception) -> None:
        """End the stream after an answer was lost: its client would wait for it, and retries instead."""
        self.end(InternalError("the session failed internally; its log says more"))

    async def _write(self, answer: Answer, leaving: bool = False) -> None:
        async with self._writing:
            self._leaving = leaving
            await self._context.write(answer)

    def _refusal(self, step: int, error: ExecutorError, cause: Exception | None = None) -> Answer:
        self._calls.refusals.note(METHOD, error, self._context, cause=cause)
        return Answer(step_id=step, error=status_from_error(error))


def _only_outcome(call: ForwardCall) -> ItemOutcome:
    """The outcome of the one item of a call; a refusal of the call is the item's."""
    try:
        [outcome] = call.answer().outcomes
    except ExecutorError as error:
        return error
    found: ItemOutcome = outcome
    return found


def _free_answers(calls: Iterable[ForwardCall]) -> None:
    for call in calls:
        if call.free_answer is not None:
            call.free_answer()


def _raise(error: Exception, _: Answer) -> NoReturn:
    raise error
