"""How a call is repeated: after which failures, how often, and for how long.

Two layers, both safe because every mutating call carries a request id. gRPC's own retries (`channel.service_config`)
repeat a call that ended UNAVAILABLE. Above them stands `ResendPolicy`: the fate of a call is unknown (connection lost,
deadline passed), so the *same* request goes out again and the executor either runs it or replays its recorded answer.
Overload (RESOURCE_EXHAUSTED) is never repeated by either: the scheduler decides what to do about it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ferrum_rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    ExecutorError,
    HandleReleased,
    HandleUnknown,
    InstanceMismatch,
    InternalError,
    LeaseExpired,
    LeaseUnknown,
    QueueFull,
    SequenceBusy,
    Starting,
    TransportError,
)

Result = TypeVar("Result")

_ANSWERED_BY_GRPC = frozenset({"UNAVAILABLE", "INTERNAL", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED", "CANCELLED"})
"""Codes that, without the executor's own ErrorInfo, leave open whether the step ran."""

LONGEST_PAUSE_S = 1.0

REFUSED_BEFORE_RUNNING = (SequenceBusy, QueueFull, Starting, Draining, DeadlineExceeded, Cancelled)
"""Refusals of one attempt only: an earlier one of the same call may still have run."""

SEQUENCE_GONE = (InstanceMismatch, HandleUnknown, HandleReleased, LeaseExpired)
"""Refusals of a sequence that is gone. A release takes them as success; a forward must be prefilled again."""

LEASE_GONE = (LeaseExpired, LeaseUnknown, InstanceMismatch)
"""Refusals of a renewal, or of a creation, whose lease is gone: acquire another."""


@dataclass(frozen=True, slots=True)
class ResendPolicy:
    """How often a mutating call whose fate is unknown is sent again: same bytes, same request id, same handle.

    ``times``: resends after the first attempt. ``backoff_s``: pause before the first one, doubled each time up to
    `LONGEST_PAUSE_S`. ``attempt_timeout_s``: an attempt is given up after so long, so that there is time left for the
    next one; None gives each attempt all of the call's time. The call's own deadline bounds the whole.
    """

    times: int = 1
    backoff_s: float = 0.05
    attempt_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.times < 0 or self.backoff_s < 0 or (self.attempt_timeout_s is not None and self.attempt_timeout_s <= 0):
            raise ValueError(f"invalid policy: {self}")


NEVER_RESEND = ResendPolicy(times=0)
"""Leave every unknown fate to the caller."""


def fate_unknown(error: BaseException) -> bool:
    """Whether the step behind a failed call may have run: no answer of the executor rules it out."""
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
        """Pause, for ``least_s`` at least. False, at once: the deadline comes first."""
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
    """Send, and again while the model loads. Raises `Starting` when the time is over."""
    backoff = Backoff(deadline, first_s=0.05, longest_s=LONGEST_PAUSE_S)
    while True:
        try:
            return await send()
        except Starting:
            if not await backoff.wait():
                raise


class SingleFlight:
    """A value that is made by one caller at a time, while the others that need it wait: each in its turn would wait for
    an executor that is gone. A failure is shared by the callers that waited for it. Where the caller was cancelled or
    its own deadline passed (also while the executor starts), the next caller tries again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._making = asyncio.Lock()
        self._failures = 0
        self._failure: ExecutorError | None = None

    async def get(
        self, have: Callable[[], Result | None], make: Callable[[], Awaitable[Result]], deadline: Deadline
    ) -> Result:
        """What is there, or is made now. Raises what making it raised, and `DeadlineExceeded` (its fate is known:
        nothing was sent) where that took too long."""
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
