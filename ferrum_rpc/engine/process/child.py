"""The engine process's own side: `EngineLoop` behind a socket, in the process's main thread.

It has no event loop and no second thread: it waits for its socket, and for the device. When the server is gone it ends
at once.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from queue import Empty
from typing import Any, Final

from ferrum_rpc.core import StepTiming
from ferrum_rpc.engine.api import (
    Described,
    EngineCounters,
    Finished,
    Interrupt,
    Operation,
    Runner,
    Submission,
    WorkState,
)
from ferrum_rpc.engine.channel import READ_BYTES, Messages, dump, end_with_parent, leave_signals
from ferrum_rpc.engine.loop import EngineLoop, Work
from ferrum_rpc.engine.process.ipc import SharedMemory, unpack_span

COUNTERS: Final = attrgetter(*(each.name for each in fields(EngineCounters)))
OURS: Final = ("ferrum_rpc", "builtins")
RANKS_EVERY_S: Final = 1.0
"""How often the memory of ranks is read and sent."""


class ChildLoop(EngineLoop):
    """The loop of an engine process, and its inbox. ``news()`` is what to report besides answers, once it changed."""

    def __init__(
        self,
        build: Callable[[], Runner],
        connection: socket.socket,
        shared: SharedMemory,
        news: Callable[[], object],
        **limits: int,
    ) -> None:
        super().__init__(build, inbox=self, lock=shared, on_ready=self._report, on_failed=self._send_error, **limits)
        self._socket, self._shared, self._news = connection, shared, news
        self._messages = Messages(shared.view)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._arrived: deque[Work] = deque()
        self._answers: list[tuple[int, tuple[Any, ...]]] = []
        self._chosen: list[tuple[int, Any]] = []
        self._steps: list[tuple[StepTiming, Sequence[float]]] = []
        self._submissions: dict[int, Submission] = {}  # by slot, for what interrupts and what follows them
        self._reported: object = None
        self._ranks_at = 0.0  # when to report them next

    @property
    def busy_since(self) -> float:
        return float(self._shared.busy_since[0])

    @busy_since.setter
    def busy_since(self, value: float) -> None:
        self._shared.busy_since[0] = value

    @property
    def waiting_since(self) -> float:
        return float(self._shared.waiting_since[0])

    @waiting_since.setter
    def waiting_since(self, value: float) -> None:
        self._shared.waiting_since[0] = value

    def run(self) -> int:
        """Build, and serve until the server asks to stop. The exit status: 0, or 1 if it broke."""
        self._run()
        self._refuse_rest()
        return 0 if self._failure is None else 1

    # --- work -------------------------------------------------------------------------------------------------------

    def get(self, block: bool = True, timeout: float | None = None) -> Work:
        while self.empty():
            if not block:
                raise Empty
            self._flush()
            if not self._poll.poll(None if timeout is None else timeout * 1000):
                raise Empty
        return self._arrived.popleft()

    def empty(self) -> bool:
        if self._poll.poll(0):
            data = self._socket.recv(READ_BYTES)
            if not data:
                os._exit(1)  # the server is gone
            self._arrived += map(self._accept, self._messages.feed(data))
        return not self._arrived

    def _accept(self, message: tuple[Any, ...] | None) -> Work:
        if message is None:
            return None
        slot, what, *rest = message
        done = partial(self._answer, slot)
        work: Submission | Operation
        if isinstance(what, Interrupt):
            return replace(what, work=self._submissions.get(slot))
        if rest:
            spans = tuple([unpack_span(*span) for span in what])
            atomic, deadline, caller, arrived, wanted, max_running, behind = rest
            on_tokens, begins = partial(self._on_tokens, slot) if wanted else None, None
            if behind is not None:
                before, index = behind
                behind, begins = (self._submissions.get(before), index), partial(self._on_tokens, slot, None)
            work = Submission(spans, done, atomic, deadline, caller, arrived, on_tokens, max_running, behind, begins)
            self._submissions[slot] = work
        else:
            work = Operation(what, done)
        work.slot = slot
        return work

    def _cancelled(self, work: Submission | Operation) -> bool:
        cancelled = self._shared.states[work.slot] == WorkState.CANCELLED
        if cancelled:
            self._answer(work.slot)
        return cancelled

    def _claimed(self, work: Submission | Operation) -> None:
        self._shared.states[work.slot] = WorkState.CLAIMED
        if work.behind is None:
            self._shared.claimed += (len(work.spans), work.tokens)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _on_step_done(self, step: StepTiming, waits: Sequence[float]) -> None:
        self._steps.append((step, waits))

    def _answer(self, slot: int, *answer: Any) -> None:
        self._submissions.pop(slot, None)
        self._answers.append((slot, answer))

    def _on_tokens(self, slot: int, chosen: Any) -> None:
        self._chosen.append((slot, chosen))

    def _deliver(self, finished: Finished) -> None:
        for each in finished:
            each()
        self._flush()

    def _flush(self) -> None:
        """Send what there is to send."""
        news = self._news()
        if news == self._reported:
            news = None
        due = time.monotonic() >= self._ranks_at
        if self._answers or self._chosen or self._steps or news is not None or due:
            self._send_turn(news)
            self._reported = news or self._reported

    def _send_turn(self, news: object = None) -> None:
        answers, self._answers = self._answers, []
        chosen, self._chosen = self._chosen, []
        steps, self._steps = self._steps, []
        ranks, now = None, time.monotonic()
        if now >= self._ranks_at:
            ranks, self._ranks_at = [tuple(each) for each in self._find_ranks()], now + RANKS_EVERY_S
        self._send(((chosen, answers, steps), COUNTERS(self.counters), tuple(self.cache), ranks, news))

    def _report(self, runner: Runner) -> None:
        self._send_turn()
        self._send(Described(runner.info, runner.device))

    def _send_error(self, error: BaseException) -> None:
        """Send its text only where the server would load torch for its class, or may not have it."""
        if type(error).__module__.partition(".")[0] not in OURS:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        self._send(error)

    def _send(self, message: object) -> None:
        self._socket.sendall(dump(message, self._shared.place))


def work(build: Callable[[Any], Runner], arguments: Sequence[str], news: Callable[[], object] = lambda: None) -> int:
    """The whole life of an engine process; returns its exit status. ``arguments`` are what the server appended to the
    command; ``build`` makes the runner of its setup; ``news()`` is what to report besides answers, once it changed."""
    leave_signals()
    end_with_parent()
    fd, memory, slots = map(int, arguments)
    setup, limits = pickle.load(sys.stdin.buffer)  # noqa: S301 - by our own server
    with socket.socket(fileno=fd) as connection:
        return ChildLoop(partial(build, setup), connection, SharedMemory(memory, slots), news, **limits).run()
