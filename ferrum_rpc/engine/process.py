"""The engine in a process of its own, as the server sees it.

In one process the event loop and the model thread take turns with one interpreter: at four empty steps in flight a
session took 470 µs a step, all of them somebody's turn, and 360 with two interpreters (two cores, the caller on the
same ones). The process also stands for itself: a device that is lost, or memory that is, takes the engine and not the
server, which goes on to say so; and the server does not load torch.

Work goes over a pipe, answers come back over another (`engine.post`); what both sides must see at once, and rows of
size, lie in memory that they share (`engine.shared`). The queue's facts are the server's: it knows what it sent and,
from the shared page, what the engine has claimed. The engine dies with the server, whatever that died of.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import CacheState, StepTiming
from ferrum_rpc.engine.heartbeat import Heartbeat, process_clock
from ferrum_rpc.engine.post import Frames, Kind, Slot, Terms, WorkWriter, frame, read_turn
from ferrum_rpc.engine.shared import Arena, Page
from ferrum_rpc.engine.work import (
    LOOK_EVERY_S,
    Described,
    EngineCounters,
    Operation,
    State,
    Submission,
    completed,
    lost,
)
from ferrum_rpc.errors import Draining, ExecutorError

READ_BYTES: Final = 64 << 10
DYING_S: Final = 0.1
"""Seconds that the event loop waits to learn what a dead engine died of."""

ARENA_BYTES: Final = 4 << 30
"""Room for rows under way, in address space; what does not fit goes through the pipe. Memory is what rows touch."""


@dataclass(frozen=True, slots=True)
class Program:
    """``command`` starts a process that calls `engine.worker.work` with the descriptors that are its last arguments;
    ``setup`` is anything that can be pickled, for its eyes. ``on_news``: called with what it tells besides answers."""

    command: tuple[str, ...]
    setup: object
    on_news: Callable[[Any], object] = lambda news: None


class EngineDied(RuntimeError):
    """The engine process ended by itself."""


class EngineProcess:
    """An `Engine`. ``on_ready`` hears what the runner's ``info`` and ``device`` are; the other callbacks are those of
    `ModelThread`. ``slots``: pieces of work that may be under way at once, far more than queues allow."""

    def __init__(
        self,
        program: Program,
        *,
        loop: asyncio.AbstractEventLoop,
        max_step_items: int,
        max_step_tokens: int,
        on_ready: Callable[[Described], None],
        on_failed: Callable[[BaseException], None],
        on_step: Callable[[Sequence[StepTiming]], None] = lambda timings: None,
        heartbeat: Heartbeat | None = None,
        slots: int = 1 << 17,
    ) -> None:
        self._program = program
        self._loop = loop
        self._terms = Terms(program.setup, max_step_items, max_step_tokens)
        self._on_ready, self._on_failed, self._on_step = on_ready, on_failed, on_step
        self._heartbeat = heartbeat or Heartbeat()
        self._page = Page.create(slots)
        self._arena = Arena.create(ARENA_BYTES)
        self._slots = deque(range(slots))
        self._open: dict[int, Submission | Operation] = {}
        self._numbers: dict[Submission | Operation, int] = {}
        self._writer, self._frames = WorkWriter(), Frames()
        self._unsent = b""
        self._given_back: list[int] = []
        self._submitted = [0, 0]  # items and tokens, but for those that were cancelled
        self._stopping = False
        self._failure: BaseException | None = None
        self._ended = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.counters = EngineCounters()
        self.cache = CacheState(block_size=0, total_blocks=0, free_blocks=0, sequences=0)

    @property
    def queued_items(self) -> int:
        """See `Engine`."""
        return self._submitted[0] - int(self._page.claimed[0])

    @property
    def queued_tokens(self) -> int:
        """See `Engine`."""
        return self._submitted[1] - int(self._page.claimed[1])

    # --- the server's calls -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; it builds the runner first."""
        inbox, self._to_engine = os.pipe()
        self._from_engine, outbox = os.pipe()
        handed = (inbox, outbox, self._page.fd, self._arena.fd)
        facts = (*handed, len(self._slots), self._arena.size)
        self._process = subprocess.Popen(
            [*self._program.command, *map(str, facts)], pass_fds=handed, stdin=subprocess.DEVNULL
        )
        os.close(inbox)
        os.close(outbox)
        os.set_blocking(self._to_engine, False)
        os.set_blocking(self._from_engine, False)
        self._heartbeat.watch(self._page.signs, process_clock(self._process.pid))
        self._loop.add_reader(self._from_engine, self._on_readable)
        setup, early = pickle.dumps(self._terms), self._unsent
        self._unsent = b""
        self._send(len(setup).to_bytes(4, "little") + setup + early)

    def submit(self, submission: Submission) -> None:
        """See `Engine`."""
        if self._ended.is_set():
            self._loop.call_soon(submission.done, (self._last_words(),) * len(submission.spans), None)
            return
        slot = self._take_slot(submission)
        self._submitted[0] += len(submission.spans)
        self._submitted[1] += submission.tokens
        self._send(self._writer.write(slot, submission))

    def operate(self, operation: Operation) -> None:
        """See `Engine`."""
        if self._ended.is_set():
            self._loop.call_soon(operation.done, self._last_words())
            return
        command = pickle.dumps(operation.run)
        slot = self._take_slot(operation)
        self._send(frame(Kind.OPERATION, slot.to_bytes(4, "little"), command))

    def cancel(self, work: Submission | Operation) -> bool:
        """See `Engine`. Never waits: where the engine is claiming right now, it is too late."""
        slot, lock, states = self._numbers.get(work), self._page.lock, self._page.states
        if slot is None or not lock.try_enter():
            return False
        try:
            if states[slot] != Slot.QUEUED:
                return False
            states[slot] = Slot.CANCELLED
        finally:
            lock.leave()
        work.state = State.CANCELLED
        del self._open[slot], self._numbers[work]  # the slot is free again when the engine has seen it
        if isinstance(work, Submission):
            self._submitted[0] -= len(work.spans)
            self._submitted[1] -= work.tokens
        return True

    def trouble(self, now: float) -> str | None:
        """See `Engine`."""
        if self._ended.is_set():
            return "it has ended"
        return self._heartbeat.trouble(now)

    async def stop(self) -> bool:
        """See `Engine`. A process that hangs is killed."""
        self._stopping = True
        process = self._process
        if process is None:
            return True
        if not self._ended.is_set():
            self._send(frame(Kind.STOP))
        orderly = True
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), LOOK_EVERY_S)
            if not self._ended.is_set() and self.trouble(time.monotonic()) is not None:
                orderly = False
                process.kill()
        await asyncio.to_thread(process.wait)
        return orderly

    # --- sending ----------------------------------------------------------------------------------------------------

    def _take_slot(self, work: Submission | Operation) -> int:
        slot = self._slots.popleft()
        self._page.states[slot] = Slot.QUEUED
        self._open[slot], self._numbers[work] = work, slot
        return slot

    def _send(self, data: bytes) -> None:
        """Write what the pipe takes, the rest when it can take more."""
        if self._given_back:
            given, self._given_back = self._given_back, []
            data = frame(Kind.FREE, pickle.dumps(given)) + data
        if self._unsent or self._process is None:
            self._unsent += data
            return
        self._unsent = data[self._write(data) :]
        if self._unsent:
            self._loop.add_writer(self._to_engine, self._on_writable)

    def _on_writable(self) -> None:
        self._unsent = self._unsent[self._write(self._unsent) :]
        if not self._unsent:
            self._loop.remove_writer(self._to_engine)

    def _write(self, data: bytes) -> int:
        try:
            return os.write(self._to_engine, data)
        except BlockingIOError:
            return 0
        except OSError:  # it has died: the other pipe says so, and whoever waits is answered then
            return len(data)

    # --- hearing ----------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            data = os.read(self._from_engine, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._on_end()
            return
        for kind, body in self._frames.feed(data):
            if kind == Kind.TURN:
                self._on_turn(body)
            elif kind == Kind.READY:
                described, self.cache = pickle.loads(body)  # noqa: S301 - by our own engine
                completed(self._loop, self._on_ready, described)
            else:
                self._fail(pickle.loads(body))  # noqa: S301 - by our own engine

    def _on_turn(self, body: memoryview) -> None:
        turn = read_turn(body, self._look)
        self.counters, self.cache = turn.counters, turn.cache
        self._slots.extend(turn.free)
        if turn.news is not None:
            completed(self._loop, self._program.on_news, turn.news)
        for slot, result in turn.results:
            operation = self._close(slot)
            if isinstance(operation, Operation):
                completed(self._loop, operation.done, result)
        timings = []
        for slot, outcomes, timing in turn.answers:
            submission = self._close(slot)
            if isinstance(submission, Submission):
                completed(self._loop, submission.done, outcomes, timing)
                if timing is not None:
                    timings.append(timing)
        if timings:  # behind whatever the answers wake: callers do not wait for the meters
            self._loop.call_soon(self._on_step, timings)

    def _close(self, slot: int) -> Submission | Operation | None:
        work = self._open.pop(slot, None)
        self._slots.append(slot)
        if work is not None:
            work.state = State.CLAIMED
            del self._numbers[work]
        return work

    def _look(self, offset: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        """Rows in the arena. The engine hears that they may go when the last array over them is gone."""
        found: npt.NDArray[Any] = np.frombuffer(self._arena.memory, dtype, count, offset)
        found.flags.writeable = False
        weakref.finalize(found, self._give_back, offset).atexit = False
        return found

    def _give_back(self, offset: int) -> None:
        self._given_back.append(offset)  # it goes with whatever is sent next

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            completed(self._loop, self._on_failed, error)

    def _on_end(self) -> None:
        """The engine is gone: answer whatever it owes."""
        self._loop.remove_reader(self._from_engine)
        self._loop.remove_writer(self._to_engine)
        os.close(self._from_engine)
        os.close(self._to_engine)
        self._ended.set()
        if not self._stopping and self._failure is None:
            self._fail(EngineDied(f"the engine process ended by itself{self._status()}"))
        owed, self._open = self._open, {}
        self._numbers.clear()
        self._submitted = [int(each) for each in self._page.claimed]
        error = self._last_words()
        for work in owed.values():
            if isinstance(work, Submission):
                completed(self._loop, work.done, (error,) * len(work.spans), None)
            else:
                completed(self._loop, work.done, error)

    def _status(self) -> str:
        """It closed its pipe: it is dead, or about to be; but a driver may take seconds over it."""
        assert self._process is not None  # noqa: S101 - it was started
        try:
            return f" with status {self._process.wait(DYING_S)}"
        except subprocess.TimeoutExpired:
            return ""

    def _last_words(self) -> ExecutorError:
        if self._failure is not None:
            return lost(self._failure)
        return Draining("the executor has stopped; nothing was started")
