"""Retries: after which failures, how often, and for how long; and the errors by what a program does about them.

There are two layers, both safe because every mutating call has a request id. gRPC's own retries
(`channel.service_config`) repeat a call that ended with UNAVAILABLE. `ResendPolicy` is for calls of unknown outcome
(connection lost, deadline passed): the *same* request is sent again, and the executor either runs it or replays its
recorded answer. Neither retries after overload (RESOURCE_EXHAUSTED), which is left to the scheduler.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ferrum_rpc.errors import (
    AdapterInUse,
    AdapterUnknown,
    Cancelled,
    ChainBroken,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    ExecutorError,
    GrammarTooComplex,
    GrammarUnknown,
    HandleReleased,
    HandleUnknown,
    InstanceMismatch,
    InternalError,
    InvalidRequest,
    KvBlocksExhausted,
    LayoutMismatch,
    LeaseExpired,
    LeaseUnknown,
    NotSupported,
    OutputTooLarge,
    PermissionDenied,
    QueueFull,
    QuotaExceeded,
    RequestIdReused,
    SequenceBusy,
    SequencesExhausted,
    SequenceVersionMismatch,
    Starting,
    TokenMaskUnknown,
    TransportError,
    TruncateBeyondLength,
    Unauthenticated,
)

Result = TypeVar("Result")

_ANSWERED_BY_GRPC = frozenset({"UNAVAILABLE", "INTERNAL", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED", "CANCELLED"})
"""Codes that, without the executor's ErrorInfo, leave open whether the step ran."""

LONGEST_PAUSE_S = 1.0

REFUSED_BEFORE_RUNNING = (SequenceBusy, QueueFull, Starting, Draining, DeadlineExceeded, Cancelled)
"""Refusals of one attempt only: an earlier attempt of the same call may have run."""

SEQUENCE_GONE = (InstanceMismatch, HandleUnknown, HandleReleased, LeaseExpired)
"""Refusals of a lost sequence. A release counts them as success; otherwise prefill the sequence again."""

NO_CAPACITY = (KvBlocksExhausted, QuotaExceeded)
"""Refusals for lack of cache, or of this caller's share of the executor: release or preempt a sequence, then make the
call again. Nothing has changed."""

TRY_LATER = (QueueFull, SequencesExhausted, Starting, Draining)
"""Refusals that pass by themselves, at this executor or at another one: wait for ``retry_after_s``, then make the call
again. Nothing has changed."""

NO_ANSWER = (TransportError, DeadlineExceeded, Cancelled)
"""Errors without an answer of the executor. The outcome may be unknown (`Sequence.in_doubt`): making the same call
again settles it."""

OUT_OF_STEP = (SequenceVersionMismatch, SequenceBusy, ChainBroken, RequestIdReused)
"""Refusals of a call that assumes another state of the sequence than the executor has. Nothing has changed."""

CALLER_ERROR = (
    InvalidRequest,
    NotSupported,
    ContextLengthExceeded,
    TruncateBeyondLength,
    OutputTooLarge,
    GrammarTooComplex,
    TokenMaskUnknown,
    GrammarUnknown,
    AdapterUnknown,
    AdapterInUse,
    LayoutMismatch,
    LeaseUnknown,
    Unauthenticated,
    PermissionDenied,
)
"""Refusals of a call that this executor will refuse again: change the call. Nothing has changed."""

LEASE_GONE = (LeaseExpired, LeaseUnknown, InstanceMismatch)
"""Refusals of a renewal or creation whose lease is gone: acquire another."""


@dataclass(frozen=True, slots=True)
class ResendPolicy:
    """How often a mutating call of unknown outcome is sent again, with the same bytes, request id and handle.

    ``times``: resends after the first attempt. ``backoff_s``: pause before the first one, doubled each time up to
    `LONGEST_PAUSE_S`. ``attempt_timeout_s``: the time limit of an attempt, which leaves time for the next one; None
    gives each attempt all of the call's time. The call's own deadline limits the total.
    """

    times: int = 1
    backoff_s: float = 0.05
    attempt_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.times < 0 or self.backoff_s < 0 or (self.attempt_timeout_s is not None and self.attempt_timeout_s <= 0):
            raise ValueError(f"invalid policy: {self}")


NEVER_RESEND = ResendPolicy(times=0)
"""Leave every unknown outcome to the caller."""


def fate_unknown(error: BaseException) -> bool:
    """Whether the step of a failed call may have run, because no answer of the executor rules it out."""
    if isinstance(error, asyncio.CancelledError | InternalError):
        return True
    if isinstance(error, TransportError | DeadlineExceeded | Cancelled | Draining):
        return error.metadata.get("grpc_code") in _ANSWERED_BY_GRPC
    return not isinstance(error, ExecutorError)


class Deadline:
    """A point ``at`` on the monotonic clock, or None: never."""

    __slots__ = ("at",)

    def __init__(self, at: float | None) -> None:
        self.at = at

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """``timeout_s`` seconds from now."""
        return cls(None if timeout_s is None else time.monotonic() + timeout_s)

    def remaining(self, at_most: float | None = None) -> float | None:
        """Seconds left, not below 0 and not above ``at_most``."""
        if self.at is None:
            return at_most
        left = max(0.0, self.at - time.monotonic())
        return left if at_most is None else min(left, at_most)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.at is not None and time.monotonic() >= self.at


class Backoff:
    """Pauses between attempts, each twice as long as the one before, up to ``longest_s``."""

    def __init__(self, deadline: Deadline, first_s: float, longest_s: float) -> None:
        self._deadline = deadline
        self._pause_s = first_s
        self._longest_s = longest_s

    async def wait(self, least_s: float | None = None) -> bool:
        """Pause, for at least ``least_s``. False, without a pause: the deadline comes first."""
        left, pause_s = self._deadline.remaining(), max(self._pause_s, least_s or 0.0)
        if left is not None and left <= pause_s:
            return False
        await asyncio.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        return True

    @classmethod
    def while_busy(cls, deadline: Deadline, most_s: float | None = 5.0) -> Backoff:
        """While an earlier call on a sequence, whose fate is unknown, may still run: for ``most_s`` seconds in all."""
        return cls(Deadline.after(deadline.remaining(most_s)), first_s=0.005, longest_s=0.25)


async def retry_while_starting(send: Callable[[], Awaitable[Result]], deadline: Deadline) -> Result:
    """Send, and retry while the model loads. Raises `Starting` when the time is over."""
    backoff = Backoff(deadline, first_s=0.05, longest_s=LONGEST_PAUSE_S)
    while True:
        try:
            return await send()
        except Starting:
            if not await backoff.wait():
                raise


class SingleFlight:
    """A value that one caller makes while the others that need it wait; otherwise each in turn would wait for an
    executor that is gone. The callers that waited share a failure. If the caller was cancelled or its own deadline
    passed (also while the executor starts), the next caller tries again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._making = asyncio.Lock()
        self._failures = 0
        self._failure: ExecutorError | None = None

    async def get(
        self, have: Callable[[], Result | None], make: Callable[[], Awaitable[Result]], deadline: Deadline
    ) -> Result:
        """The present value, or a new one. Raises the error of making it, and `DeadlineExceeded` (of known outcome:
        nothing was sent) if that took too long."""
        failures = self._failures
        try:
            async with asyncio.timeout(deadline.remaining()), self._making:
                if (value := have()) is not None:
                    return value
                if self._failure is not None and self._failures != failures:
                    raise self._failure
                try:
                    return await make()
                except (DeadlineExceeded, Starting):
                    raise
                except ExecutorError as error:
                    self._failures, self._failure = self._failures + 1, error
                    raise
        except TimeoutError:
            raise DeadlineExceeded(f"{self._what} took too long; nothing was sent") from None
