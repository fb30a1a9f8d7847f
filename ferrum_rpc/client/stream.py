"""One session stream: frames out in their order, answers back to whoever waits for them.

Steps are futures by step id; no task is made for a step. gRPC takes one write at a time, so one writer sends what lies
in the outbox, and one reader hands out what comes. Knows frames, and nothing of what they ask for.

A step keeps its place until the executor answers it, even when its caller has given up: only then is it out of flight
there. When the stream ends the fate of every step is unknown, and whoever owns the stream opens another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import grpc

from ferrum_rpc.client.calls import Metadata, closed
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.errors import DeadlineExceeded, Draining, ExecutorError, TransportError
from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.wire.status import error_from_rpc, error_from_status

METHOD: Final = "/ferrum_rpc.executor.v1.ModelExecutor/Session"

Answered = tuple[session_pb2.SessionResponse, list[session_pb2.SessionRows]]
"""The frame that answers a step, and the row frames that came before it."""


class _Step:
    """A step in flight. ``future`` is done early where its caller gave up."""

    __slots__ = ("counted", "future", "rows", "timer")

    def __init__(self, future: asyncio.Future[Answered], *, counted: bool) -> None:
        self.future = future
        self.counted = counted
        self.rows: list[session_pb2.SessionRows] = []
        self.timer: asyncio.TimerHandle | None = None


class SessionStream:
    """A stream that was opened with ``hello``; `open` makes it usable."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._loop = asyncio.get_running_loop()
        method: grpc.aio.StreamStreamMultiCallable[bytes, session_pb2.SessionResponse] = channel.stream_stream(
            METHOD, response_deserializer=session_pb2.SessionResponse.FromString
        )
        self._call = method(metadata=tuple(metadata))
        self._step_id = 0
        self._steps: dict[int, _Step] = {}
        self._slots = asyncio.Semaphore(1)
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self.over: ExecutorError | None = None
        self._writer = self._loop.create_task(self._write(), name="ferrum_rpc session writer")
        self._reader = self._loop.create_task(self._read(), name="ferrum_rpc session reader")

    @property
    def alive(self) -> bool:
        """Whether steps can be sent."""
        return self.over is None

    async def open(self, hello: session_pb2.SessionRequest, deadline: Deadline) -> session_pb2.SessionWelcome:
        """Say hello. Raises what the executor's refusal stands for, or why the stream ended; then it is of no use."""
        try:
            welcome = (await self.ask(hello, deadline.remaining(), counted=False))[0].welcome
        except (TransportError, Draining):
            raise self.over or TransportError("the session could not be opened") from None
        self._slots = asyncio.Semaphore(max(1, welcome.steps_in_flight))
        return welcome

    async def slot(self, deadline: Deadline) -> bool:
        """Wait until another step may be in flight; `ask` must follow at once. False: the stream has ended. Raises
        `DeadlineExceeded`, and gives the stream up where every step in flight was given up by its caller."""
        if self._slots.locked():
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await self._slots.acquire()
            except TimeoutError:
                if all(step.future.done() for step in self._steps.values() if step.counted):
                    self.end(TransportError("no step of the session was answered", metadata=_UNAVAILABLE))
                raise DeadlineExceeded("no step of the session ended in time; nothing was sent") from None
        else:
            await self._slots.acquire()  # does not wait
        if self.over is not None:
            self._slots.release()
            return False
        return True

    async def ask(self, frame: session_pb2.SessionRequest, within_s: float | None, *, counted: bool = True) -> Answered:
        """Send a frame and wait for its answer, at most ``within_s`` seconds. ``counted``: it uses the slot that was
        waited for. A frame whose caller gives up is followed by a cancel frame."""
        if self.over is not None:
            raise self._ended()
        self._step_id = step_id = frame.step_id = self._step_id + 1
        step = self._steps[step_id] = _Step(self._loop.create_future(), counted=counted)
        self._send(frame)
        if within_s is not None:
            step.timer = self._loop.call_later(within_s, self._expire, step_id)
        try:
            response, rows = await step.future
        except asyncio.CancelledError:
            self._give_up(step_id)
            raise
        finally:
            if step.timer is not None:
                step.timer.cancel()
        if response.HasField("error"):
            raise error_from_status(response.error)
        return response, rows

    async def close(self, deadline: Deadline, *, release_sequences: bool) -> int:
        """End the session on purpose; returns how many sequences were released. Raises what keeps it from ending well;
        it is over in any case."""
        frame = session_pb2.SessionRequest(close=session_pb2.SessionClose(release_sequences=release_sequences))
        try:
            return (await self.ask(frame, deadline.remaining(), counted=False))[0].goodbye.released_sequences
        finally:
            self.end(closed())

    def end(self, error: ExecutorError) -> None:
        """It is over: every step in flight fails with its fate unknown. Doing it twice is doing it once."""
        if self.over is not None:
            return
        self.over = error
        steps, self._steps = self._steps, {}
        for step in steps.values():
            if not step.future.done():
                step.future.set_exception(self._ended())
            if step.counted:
                self._slots.release()
        self._call.cancel()
        current = asyncio.current_task()
        for task in (self._writer, self._reader):
            if task is not current:
                task.cancel()

    # --- frames -----------------------------------------------------------------------------------------------------

    def _send(self, frame: session_pb2.SessionRequest) -> None:
        self._outbox.append(frame.SerializeToString())
        self._wake.set()

    def _take(self, response: session_pb2.SessionResponse) -> None:
        if response.HasField("rows"):
            step = self._steps.get(response.step_id)
            if step is not None and not step.future.done():
                step.rows.append(response.rows)
            return
        step = self._steps.pop(response.step_id, None)
        if step is None:
            return
        if step.counted:
            self._slots.release()
        if not step.future.done():
            step.future.set_result((response, step.rows))

    def _expire(self, step_id: int) -> None:
        step = self._steps.get(step_id)
        if step is not None and not step.future.done():
            step.future.set_exception(
                DeadlineExceeded("the deadline passed before the answer came", metadata=_DEADLINE_EXCEEDED)
            )
            self._give_up(step_id)

    def _give_up(self, step_id: int) -> None:
        """Its caller waits no longer: take it back if it has not begun. Its rows are nobody's."""
        step = self._steps.get(step_id)
        if step is not None:
            step.rows.clear()
            self._step_id += 1
            self._send(
                session_pb2.SessionRequest(step_id=self._step_id, cancel=session_pb2.SessionCancel(step_id=step_id))
            )

    # --- the two ends -----------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    await self._call.write(self._outbox.popleft())
                self._wake.clear()
                await self._wake.wait()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # the call has ended, and the reader is told why

    async def _read(self) -> None:
        try:
            while True:
                response = await self._call.read()
                if isinstance(response, session_pb2.SessionResponse):
                    self._take(response)
                else:
                    self.end(TransportError("the executor ended the session", metadata=_UNAVAILABLE))
                    return
        except grpc.aio.AioRpcError as error:
            self.end(error_from_rpc(error))
        except (grpc.aio.UsageError, asyncio.CancelledError):
            self.end(closed())  # the channel was closed under it: grpc.aio says so by cancelling
        except Exception as error:
            self.end(TransportError(f"the session's answers cannot be read: {error!r}", metadata=_UNAVAILABLE))

    def _ended(self) -> ExecutorError:
        """What the end of the stream means to a step in flight: nobody knows whether it ran."""
        error = self.over or closed()
        if isinstance(error, Draining):
            return Draining(f"the session ended before the answer came: {error.message}", metadata=_UNAVAILABLE)
        if isinstance(error, TransportError) and error.metadata.get("grpc_code") == "CANCELLED":
            return TransportError(error.message, metadata=error.metadata)
        return TransportError(f"the session ended before the answer came: {error.message}", metadata=_UNAVAILABLE)


_UNAVAILABLE: Final = {"grpc_code": "UNAVAILABLE"}
_DEADLINE_EXCEEDED: Final = {"grpc_code": "DEADLINE_EXCEEDED"}
