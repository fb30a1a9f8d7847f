"""The engine process as the server sees it.

What waits in the queue is known here: what was sent, and from the shared memory what the engine has claimed of it. The
engine dies with the server, whatever that died of.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ferrum_rpc.core import CacheState, RankState, StepTiming
from ferrum_rpc.engine.api import (
    LOOK_EVERY_S,
    Described,
    EngineCounters,
    Finished,
    Interrupt,
    Operation,
    Submission,
    WorkState,
    deliver,
    ended,
)
from ferrum_rpc.engine.channel import READ_BYTES, Messages, dump
from ferrum_rpc.engine.liveness import Liveness, process_clock
from ferrum_rpc.engine.process.ipc import SharedMemory, pack_span
from ferrum_rpc.errors import ExecutorError

DYING_S: Final = 0.1
"""Seconds that the event loop waits for the exit status of a dead engine."""


@dataclass(frozen=True, slots=True)
class Program:
    """``command`` starts a process that calls `child.work` with its last arguments; ``setup`` is anything that can be
    pickled, for its ``build``. ``on_news`` is called with what it reports besides answers."""

    command: tuple[str, ...]
    setup: object
    on_news: Callable[[Any], object] = lambda news: None


class EngineDied(RuntimeError):
    """The engine process ended by itself."""


class EngineProcess:
    """An `Engine`; its arguments are those of `ModelThread`. ``slots``: pieces of work that may be under way at once,
    far more than queues allow."""

    def __init__(
        self,
        program: Program,
        *,
        loop: asyncio.AbstractEventLoop,
        on_ready: Callable[[Described], None],
        on_failed: Callable[[BaseException], None],
        on_step: Callable[[StepTiming, Sequence[float]], None] = lambda step, waits: None,
        liveness: Liveness | None = None,
        slots: int = 1 << 17,
        **limits: int,
    ) -> None:
        self._program, self._limits = program, limits
        self._loop = loop
        self._on_ready, self._on_failed, self._on_step = on_ready, on_failed, on_step
        self._liveness = liveness or Liveness()
        self._slots = deque(range(slots))
        self._open: dict[int, Submission | Operation] = {}
        self._shared = SharedMemory.create(slots)
        self._socket, self._theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._messages = Messages(self._shared.view)
        self._unsent = bytearray()
        self._submitted = [0, 0]  # items and tokens, but for those that were cancelled
        self._ready = False
        self._progress_at = 0.0  # when it last got work after it had none, or answered
        self._stopping = False
        self._failure: BaseException | None = None
        self._ended = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ranks: Sequence[RankState] = ()
        self.counters = EngineCounters()
        self.cache = CacheState(block_size=0, total_blocks=0, free_blocks=0, sequences=0)

    @property
    def queued_items(self) -> int:
        return self._submitted[0] - int(self._shared.claimed[0])

    @property
    def queued_tokens(self) -> int:
        return self._submitted[1] - int(self._shared.claimed[1])

    @property
    def ranks(self) -> Sequence[RankState]:
        found = list(self._ranks)
        if found and self._ended.is_set():
            found[0] = RankState(alive=False, resident_bytes=0)
        return found

    # --- the server's calls -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; it builds the runner first."""
        fds = self._theirs.fileno(), self._shared.fd
        command = [*self._program.command, *map(str, (*fds, len(self._shared.states)))]
        self._process = process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.PIPE)
        self._theirs.close()
        assert process.stdin is not None  # noqa: S101 - a pipe
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # broken: it has died already
            pipe.write(pickle.dumps((self._program.setup, self._limits)))
        self._liveness.cpu_clock, self._liveness.process = process_clock(process.pid), process.pid
        self._loop.add_reader(self._socket, self._on_readable)

    def submit(self, work: Submission | Operation) -> None:
        if self._ended.is_set():
            self._loop.call_soon(work.refuse, ended(self._failure))
            return
        work.slot = slot = self._slots.popleft()
        self._shared.states[slot] = WorkState.QUEUED
        if not self._open:
            self._progress_at = time.monotonic()
        self._open[slot] = work
        if work.behind is None:
            self._submitted[0] += len(work.spans)
            self._submitted[1] += work.tokens
        if isinstance(work, Operation):
            self._send((slot, work.run))
        else:
            spans = [pack_span(span) for span in work.spans]
            options = work.all_or_nothing, work.deadline, work.caller, work.arrived, work.on_tokens is not None
            behind = None
            if work.behind is not None:
                before, index = work.behind
                there = before is not None and self._open.get(before.slot) is before
                behind = before.slot if before is not None and there else -1, index
            self._send((slot, spans, *options, work.max_running, behind))

    def cancel(self, work: Submission | Operation) -> bool:
        """Never waits: while the engine claims its next step it is too late."""
        if work.state is not WorkState.QUEUED or not self._shared.try_enter():
            return False
        with self._shared:  # taken by `try_enter`
            if self._shared.states[work.slot] != WorkState.QUEUED:
                return False
            self._shared.states[work.slot] = work.state = WorkState.CANCELLED
        if work.behind is None:
            self._submitted[0] -= len(work.spans)
            self._submitted[1] -= work.tokens
        return True

    def interrupt(self, work: Submission, index: int | None, error: ExecutorError) -> None:
        if self._open.get(work.slot) is work:
            self._send((work.slot, Interrupt(None, index, error)))

    def hang_reason(self, now: float) -> str | None:
        if self._ended.is_set():
            return "it has ended"
        busy_since = float(self._shared.busy_since[0])
        if self._ready and self._open and not busy_since:  # one that was stopped never reads it
            busy_since = self._progress_at
        return self._liveness.hang_reason(now, busy_since, float(self._shared.waiting_since[0]))

    async def stop(self) -> bool:
        """A process that hangs is killed, or that loads while nothing waits for it."""
        self._stopping = True
        process = self._process
        if process is None:
            return True
        if not self._ended.is_set():
            self._send(None)
        if not self._ready and not self._open:
            process.kill()
        orderly = True
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), LOOK_EVERY_S)
            if not self._ended.is_set() and self.hang_reason(time.monotonic()) is not None:
                orderly = False
                process.kill()
        await asyncio.to_thread(process.wait)
        return orderly

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send(self, work: object) -> None:
        waiting = bool(self._unsent)
        self._unsent += dump(work)
        if not waiting:
            self._flush()

    def _flush(self) -> None:
        """Write what the socket takes, the rest when it can take more."""
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the engine has died: reading notices it, after what it has still answered
            sent = len(self._unsent)
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket, self._on_writable)

    def _on_writable(self) -> None:
        self._loop.remove_writer(self._socket)
        self._flush()

    # --- receiving --------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # it died before it read all that was sent
            data = b""
        if not data:
            self._on_end()
            return
        try:
            for message in self._messages.feed(data):
                if isinstance(message, tuple):
                    self._on_turn(*message)
                elif isinstance(message, Described):
                    self._ready = True
                    deliver(self._loop, [partial(self._on_ready, message)])
                else:
                    self._fail(message)
        except Exception as error:  # what is left of the stream means nothing: its callers get their answers by the end
            self._fail(error)
            assert self._process is not None  # noqa: S101 - it was started
            self._process.kill()
            self._on_end()

    def _on_turn(
        self, done: Sequence[Any], counters: Sequence[Any], cache: Sequence[int], ranks: Any, news: object
    ) -> None:
        chosen, answers, steps = done
        if ranks is not None:
            self._ranks = [RankState(*each) for each in ranks]
        self.counters, self.cache = EngineCounters(*counters), CacheState(*cache)
        self._progress_at = time.monotonic()
        finished: Finished = []
        if news is not None:
            finished.append(partial(self._program.on_news, news))
        for slot, tokens in chosen:
            running = self._open[slot]
            assert isinstance(running, Submission)  # noqa: S101 - operations have none
            if tokens is None:
                running.state = WorkState.CLAIMED
                assert running.begins is not None  # noqa: S101 - it is behind another
                finished.append(running.begins)
            else:
                assert running.on_tokens is not None  # noqa: S101 - it asked
                finished.append(partial(running.on_tokens, tokens))
        for slot, answer in answers:
            work = self._open.pop(slot)
            self._slots.append(slot)
            if work.state is not WorkState.CANCELLED:
                work.state = WorkState.CLAIMED
                finished.append(partial(work.done, *answer))
        deliver(self._loop, finished)
        for step in steps:  # behind whatever the answers wake: callers do not wait for the meters
            self._loop.call_soon(self._on_step, *step)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            deliver(self._loop, [partial(self._on_failed, error)])

    def _on_end(self) -> None:
        """The engine is gone: answer whatever it owes."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._ended.set()
        if not self._stopping and self._failure is None:
            assert self._process is not None  # noqa: S101 - it was started
            status = ""  # its socket is closed, so it is dead or about to be; but a driver may take seconds over it
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = f" with status {self._process.wait(DYING_S)}"
            self._fail(EngineDied(f"the engine process ended by itself{status}"))
        self._submitted = self._shared.claimed.tolist()
        self.counters.running = 0
        finished: Finished = []
        for work in self._open.values():
            if work.state is not WorkState.CANCELLED:
                work.state = WorkState.CLAIMED
                finished.append(partial(work.refuse, ended(self._failure)))
        self._open.clear()
        deliver(self._loop, finished)
