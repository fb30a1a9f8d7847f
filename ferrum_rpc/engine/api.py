"""The interface of an engine: submissions, operations, counters.

The service floor imports nothing else of an engine: a queue of spans and commands in front of one runner. The runner
is in a thread (`engine.thread`) or in a process of its own (`engine.process`).
"""

from __future__ import annotations

import asyncio
import enum
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

from ferrum_rpc.core import (
    CacheState,
    DeviceInfo,
    ModelInfo,
    RankState,
    Span,
    SpanOutcome,
    Step,
    StepResult,
    StepTiming,
)
from ferrum_rpc.engine.commands import Operations
from ferrum_rpc.errors import DeviceLost, Draining, ExecutorError

LOOK_EVERY_S: Final = 0.25
"""Seconds between two looks at an engine while the end of an engine is waited for."""

Finished = list[Callable[[], object]]
"""Completions of one turn of an engine, to be called where its callers live."""


@dataclass(frozen=True, slots=True)
class Described:
    """The properties of a loaded runner, which do not change."""

    info: ModelInfo
    device: DeviceInfo


class Constraining(Protocol):
    """The grammars of a runner's spans, as the loop uses them: see `engine.grammars.constraints`."""

    def ask(self, spans: Sequence[Span]) -> bool:
        """Ask for what spans that have arrived need. Whether some of it is not there yet."""

    def ready(self, spans: Sequence[Span]) -> bool:
        """Whether all that the spans need is there, or refused."""

    @property
    def any_slow(self) -> bool:
        """Whether `may_go_on` may be False."""

    def may_go_on(self, span: Span) -> bool:
        """Whether the next step of a run may begin: its mask is there, or soon will be."""

    def wait(self, seconds: float) -> None:
        """Wait for the first answer, at most for so long."""


class Feeding(Protocol):
    """See `engine.feeding`."""

    def missing(self, span: Span) -> int:
        """How many tokens must be fed again before ``span`` can run."""

    def feed(self, spans: Sequence[Span]) -> bool:
        """Feed a piece of what is missing before ``spans`` can run together; whether to go on with that. Raises
        `StepFailed` and `DeviceLost`."""


class Runner(Operations, Protocol):
    """The runner of an engine. Called from one thread only."""

    info: ModelInfo
    device: DeviceInfo

    depth: int
    """Steps that may be under way at once: 1, or 2 where a device computes one while the host begins the next."""

    on_device: bool
    """Whether a device computes the steps, so that `finish` waits for it."""

    follows: bool
    """Whether a step may continue runs of the step in flight (`Step.stops`)."""

    in_stages: bool
    """Whether steps under way are in different stages of the model, as many as there are stages: then `begin` takes a
    stage's time, and the next step should be begun as soon as there is one."""

    @property
    def constraints(self) -> Constraining | None:
        """What knows grammars; None: there are none."""

    @property
    def feeding(self) -> Feeding | None:
        """What feeds tokens again; None: nothing has to be."""

    @property
    def look_every_s(self) -> float | None:
        """The interval of `check_alive` while there is no work; None: never."""

    def check_alive(self) -> None:
        """Raise `DeviceLost` if a part of the compute is lost."""

    def ranks(self) -> Sequence[RankState]:
        """The processes that share the model, this one first, in the order of their ranks. Called by any thread."""

    def close(self) -> None:
        """Close the runner. Called last, outside of `context`, once."""

    def context(self) -> AbstractContextManager[object]:
        """Thread-local state of the device, entered once for the engine's life."""

    def begin(self, step: Step) -> Any:
        """Begin a step, which is a transaction, and return what `finish` takes. With a ``depth`` of 2 nothing waits for
        the device here. Raises `StepFailed` (rolled back, and no other step with it) or `DeviceLost`."""

    def ready(self, pending: Any) -> bool:
        """Whether `finish` would not wait. Never waits, never raises."""

    def finish(self, pending: Any) -> StepResult:
        """Complete the oldest step in flight. Raises as `begin`."""

    def end_hold(self, sequences: Sequence[int]) -> None:
        """Free the blocks that were reserved for runs that are over."""

    def cache_state(self) -> CacheState:
        """How full the cache is."""


class WorkState(enum.IntEnum):
    """The life of a submission or an operation."""

    QUEUED = 0
    CLAIMED = 1
    CANCELLED = 2


@dataclass(slots=True, eq=False)
class Submission:
    """Spans of one call. ``done`` is called on the event loop, exactly once unless the submission was cancelled, with
    one outcome per span and, if a step ran, its timing. ``deadline`` is on `time.monotonic`. ``caller`` is a number of
    whose it is: callers share the steps. ``arrived``: when its call did, on the same clock; now, where it is 0.
    ``on_tokens`` is called on the event loop, ahead of ``done``, with what its runs chose in a step: (index of the
    span, tokens before, token) of each. ``runs``: how many of its spans have one; ``interrupts``: the
    errors that end them early, by index, or by None for all. ``max_running``: runs of its caller that may be under way
    at a time (`engine.places`); ``placed``: they hold their places already, and wait for a step. ``fed``: what could be
    fed again for it was (`engine.behind`). ``slot`` is its place in the memory that an engine process shares.

    ``behind``: the submission that it follows and the index of the span there, if it waits for one: see
    `engine.chains`. It has one span, with a run; the engine fills in the token. It is not part of the queue. If it
    begins, ``begins`` is called on the event loop, ahead of that submission's ``done``; else ``done`` is called with
    no outcomes, and nothing has happened. ``over``: whether the engine has answered or dropped it."""

    spans: tuple[Span, ...]
    done: Callable[[tuple[SpanOutcome, ...], StepTiming | None], None]
    all_or_nothing: bool = False
    deadline: float | None = None
    caller: int = 0
    arrived: float = 0.0
    on_tokens: Callable[[list[tuple[int, int, int]]], object] | None = None
    max_running: int = sys.maxsize
    behind: tuple[Submission | None, int] | None = None
    begins: Callable[[], object] | None = None
    tokens: int = field(init=False)
    runs: int = field(init=False)
    interrupts: dict[int | None, ExecutorError] = field(default_factory=dict)
    state: WorkState = WorkState.QUEUED
    slot: int = -1
    over: bool = False
    placed: bool = False
    fed: bool = False

    def __post_init__(self) -> None:
        tokens = runs = 0
        for span in self.spans:
            tokens += len(span.tokens)
            if span.run is not None:
                runs += 1
        self.tokens, self.runs = tokens, runs
        self.arrived = self.arrived or time.monotonic()

    def refuse(self, error: ExecutorError) -> None:
        """Answer every span with ``error``."""
        self.done((error,) * len(self.spans), None)

    def hand_back(self) -> None:
        """Answer that it does not begin behind the submission that it follows."""
        self.done((), None)


@dataclass(frozen=True, slots=True, eq=False)
class Interrupt:
    """End the runs of a submission at the next step, or the run of the span ``index``; ``error`` says why. Without
    effect where they are over. What has not begun is refused, where all of it is interrupted."""

    work: Submission | None
    index: int | None
    error: ExecutorError


@dataclass(slots=True, eq=False)
class Operation:
    """An integer operation on the cache, run between steps. ``done`` gets the result or the error, on the loop, exactly
    once unless the operation was cancelled. An engine in a process of its own takes `Command`s only."""

    run: Callable[[Any], object]
    done: Callable[[object], None]
    state: WorkState = WorkState.QUEUED
    slot: int = -1
    spans: ClassVar[tuple[Span, ...]] = ()
    tokens: ClassVar[int] = 0
    behind: ClassVar[None] = None

    def refuse(self, error: ExecutorError) -> None:
        """Answer with ``error``."""
        self.done(error)


@dataclass(slots=True)
class EngineCounters:
    """Work done since the start, and runs that are under way. Written by the engine, read anywhere. ``tokens`` were
    committed; of the ``searched_tokens`` among them the prefix cache had ``cached_tokens``. ``recomputed_tokens`` were
    fed again for recurrent states, besides."""

    steps: int = 0
    tokens: int = 0
    searched_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    rows: int = 0
    blocks_copied: int = 0
    forward_s: float = 0.0
    running: int = 0


class Engine(Protocol):
    """A queue and a runner behind it. Called from the event loop; nothing here waits but `stop`.

    ``cache`` is as of the last turn, ``queued_items`` and ``queued_tokens`` are what waits for a step.
    """

    counters: EngineCounters
    cache: CacheState

    @property
    def queued_items(self) -> int:
        """Spans that wait."""

    @property
    def queued_tokens(self) -> int:
        """Their tokens."""

    @property
    def ranks(self) -> Sequence[RankState]:
        """See `Runner.ranks`; none while it loads. Called by any thread."""

    def start(self) -> None:
        """Begin to load, and then to serve."""

    def submit(self, work: Submission | Operation) -> None:
        """Queue work. It is answered through its ``done``, even when the engine has ended."""

    def cancel(self, work: Submission | Operation) -> bool:
        """Take work back. True: it will never run and ``done`` is not called. False: it is past the point of no
        return."""

    def interrupt(self, work: Submission, index: int | None, error: ExecutorError) -> None:
        """End its runs at the next step, or one of them: see `Interrupt`."""

    def hang_reason(self, now: float) -> str | None:
        """The reason why the engine makes no progress, or None; ``now`` is on `time.monotonic`."""

    async def stop(self) -> bool:
        """Finish the queued work, then end; an engine that still loads, and has nothing to do, is abandoned. False: it
        hung and did not end by itself, or its thread is abandoned."""


def deliver(loop: asyncio.AbstractEventLoop, finished: Finished) -> None:
    """Call all of it. What one raises goes to the loop's exception handler: the others are answered all the same."""
    for each in finished:
        try:
            each()
        except Exception as error:
            loop.call_exception_handler({"message": "an answer of the engine could not be taken", "exception": error})


def lost(error: BaseException) -> DeviceLost:
    """The error for callers of an engine that failed."""
    if isinstance(error, DeviceLost):
        return DeviceLost(f"{error.message}; the executor must be restarted")
    return DeviceLost(f"the model thread failed ({type(error).__name__}); the executor must be restarted")


def ended(failure: BaseException | None) -> ExecutorError:
    """The error for work that will not run any more."""
    return Draining("the executor has stopped; nothing was started") if failure is None else lost(failure)
