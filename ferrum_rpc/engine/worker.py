"""The engine process's own side: `EngineLoop` between two pipes, in the process's main thread.

It has no event loop and no second thread: it waits for its pipe, and for the device. When the server is gone, so is
everything that this process was for, and it ends at once.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import Span, SpanOutcome, StepTiming
from ferrum_rpc.engine.heartbeat import Heartbeat
from ferrum_rpc.engine.loop import EngineLoop, Work
from ferrum_rpc.engine.post import Arrived, Description, Frames, Kind, Slot, Terms, Turn, WorkReader, frame, write_turn
from ferrum_rpc.engine.shared import Arena, Page
from ferrum_rpc.engine.work import Finished, Operation, Runner, State, Submission

READ_BYTES: Final = 1 << 20
OURS: Final = ("ferrum_rpc", "builtins")
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG
_STATES: Final = {Slot.QUEUED: State.QUEUED, Slot.CLAIMED: State.CLAIMED, Slot.CANCELLED: State.CANCELLED}
_SLOTS: Final = {state: slot for slot, state in _STATES.items()}


class SharedState:
    """The state of a piece of work, where both processes see it."""

    __slots__ = ()
    slot: int
    states: memoryview

    @property
    def state(self) -> State:
        """As the page has it."""
        return _STATES[Slot(self.states[self.slot])]

    @state.setter
    def state(self, value: State) -> None:
        self.states[self.slot] = _SLOTS[value]


class SentSubmission(SharedState, Submission):
    """A submission that came over the pipe."""

    __slots__ = ("slot", "states")

    def __init__(self, arrived: Arrived, states: memoryview, done: Callable[..., None]) -> None:
        self.slot, self.states = arrived.slot, states
        self.spans: tuple[Span, ...] = arrived.spans
        self.all_or_nothing, self.deadline, self.arrived = arrived.all_or_nothing, arrived.deadline, arrived.arrived
        self.caller = arrived.caller
        self.tokens = sum([len(span.tokens) for span in arrived.spans])
        self.done = partial(done, arrived.slot)


class SentOperation(SharedState, Operation):
    """An operation that came over the pipe."""

    __slots__ = ("slot", "states")

    def __init__(self, slot: int, run: Callable[[Any], object], states: memoryview, done: Callable[..., None]) -> None:
        self.slot, self.states, self.run, self.done = slot, states, run, partial(done, slot)


class PipeInbox:
    """An `Inbox` of what the pipe brings, made into work by ``accept``; ``before_waiting`` is called where none is."""

    def __init__(
        self, fd: int, accept: Callable[[int, memoryview], Sequence[Work]], before_waiting: Callable[[], object]
    ) -> None:
        self._fd = fd
        self._accept = accept
        self._before_waiting = before_waiting
        self._frames = Frames()
        self._arrived: deque[Work] = deque()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def get(self, block: bool = True, timeout: float | None = None) -> Work:
        """See `Inbox`."""
        while self.empty():
            self._before_waiting()
            if not self._poll.poll(None if timeout is None else timeout * 1e3):
                raise Empty
        return self._arrived.popleft()

    def get_nowait(self) -> Work:
        """See `Inbox`."""
        if self.empty():
            raise Empty
        return self._arrived.popleft()

    def empty(self) -> bool:
        """See `Inbox`. Takes what the pipe has."""
        if self._poll.poll(0):
            data = os.read(self._fd, READ_BYTES)
            if not data:
                os._exit(1)  # the server is gone
            for kind, body in self._frames.feed(data):
                self._arrived += self._accept(kind, body)
        return not self._arrived


class WorkerLoop(EngineLoop):
    """The loop of an engine process. ``news``: what is to be told besides answers, when it has changed."""

    def __init__(
        self,
        build: Callable[[], Runner],
        *,
        terms: Terms,
        pipes: tuple[int, int],
        page: Page,
        arena: Arena,
        news: Callable[[], object],
    ) -> None:
        inbox, self._outbox = pipes
        super().__init__(
            build,
            inbox=PipeInbox(inbox, self._accept, self._flush),
            lock=page.lock,
            max_step_items=terms.max_step_items,
            max_step_tokens=terms.max_step_tokens,
            on_ready=self._ready,
            on_failed=self._failed,
            heartbeat=Heartbeat(signs=page.signs),
        )
        self._page, self._arena, self._news = page, arena, news
        self._told_news: object = None
        self._reader = WorkReader()
        self._answers: list[tuple[int, tuple[SpanOutcome, ...], StepTiming | None]] = []
        self._results: list[tuple[int, object]] = []
        self._freed: list[int] = []

    def run(self) -> bool:
        """Build, and serve until told to stop. False: it broke, and the server knows why."""
        self._run()
        self._refuse_rest()
        return self._failure is None

    # --- work -------------------------------------------------------------------------------------------------------

    def _accept(self, kind: int, body: memoryview) -> Sequence[Work]:
        match kind:
            case Kind.WORK:
                return (SentSubmission(self._reader.read(body), self._page.states, self._answer),)
            case Kind.OPERATION:
                slot = int.from_bytes(body[:4], "little")
                command = pickle.loads(body[4:])  # noqa: S301 - by our own server
                return (SentOperation(slot, command, self._page.states, self._result),)
            case Kind.OUTPUT:
                self._reader.learn(body)
            case Kind.FREE:
                for offset in pickle.loads(body):  # noqa: S301 - by our own server
                    self._arena.give(offset)
            case Kind.STOP:
                return (None,)
        return ()

    def _forget(self, submission: Submission) -> None:
        claimed = self._page.claimed
        claimed[0] += len(submission.spans)
        claimed[1] += submission.tokens

    def _dropped(self, work: Submission | Operation) -> None:
        assert isinstance(work, SharedState)  # noqa: S101 - all of ours are
        self._freed.append(work.slot)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, slot: int, outcomes: tuple[SpanOutcome, ...], timing: StepTiming | None) -> None:
        self._answers.append((slot, outcomes, timing))

    def _result(self, slot: int, result: object) -> None:
        self._results.append((slot, result))

    def _told(self, timings: Sequence[StepTiming]) -> None:
        return None  # the server has them with the answers

    def _deliver(self, finished: Finished) -> None:
        for each in finished:
            each()
        self._flush()

    def _flush(self) -> None:
        """Send what there is to send."""
        news = self._news()
        if news == self._told_news:
            news = None
        if not (self._answers or self._results or self._freed) and news is None:
            return
        turn = Turn(self._answers, self._results, self._freed, self.counters, self.cache, news)
        self._answers, self._results, self._freed = [], [], []
        self._told_news = news or self._told_news
        self._send(write_turn(turn, self._place))

    def _place(self, rows: npt.NDArray[Any]) -> int | None:
        offset = self._arena.take(rows.nbytes)
        if offset is not None:
            np.copyto(np.frombuffer(self._arena.memory, rows.dtype, rows.size, offset).reshape(rows.shape), rows)
        return offset

    def _ready(self, runner: Runner) -> None:
        described = Description(runner.info, runner.device)
        self._send(frame(Kind.READY, pickle.dumps((described, self.cache))))

    def _failed(self, error: BaseException) -> None:
        self._send(frame(Kind.BROKEN, _pickled(error)))

    def _send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._outbox, rest) :]


def work(build: Callable[[Any], Runner], arguments: Sequence[str], news: Callable[[], object] = lambda: None) -> int:
    """The whole life of an engine process; returns its exit status. ``arguments`` are the descriptors and sizes that
    the server appended to the command; ``build`` makes the runner of its setup; ``news()`` is what is to be told
    besides answers, once it has changed."""
    _die_with_the_server()
    inbox, outbox, page_fd, arena_fd, slots, arena_size = map(int, arguments)
    terms: Terms = pickle.loads(_exactly(inbox, int.from_bytes(_exactly(inbox, 4), "little")))  # noqa: S301 - by our own server
    page, arena = Page(page_fd, slots), Arena(arena_fd, arena_size)
    loop = WorkerLoop(lambda: build(terms.setup), terms=terms, pipes=(inbox, outbox), page=page, arena=arena, news=news)
    return 0 if loop.run() else 1


def _die_with_the_server() -> None:
    """Signals are the server's to hear; its death is ours, where the system knows how."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(fd, count - len(data))
        if not more:
            os._exit(1)  # the server is gone
        data += more
    return data


def _pickled(error: BaseException) -> bytes:
    """An error that may hold what cannot be sent, or be of a class that the server would have to load torch for."""
    try:
        if type(error).__module__.partition(".")[0] not in OURS:
            raise TypeError(type(error).__name__)
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - our own
    except Exception:
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data
