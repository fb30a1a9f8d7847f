"""What the client does by itself when an answer is missing, and how long it may take.

Two layers, both safe because every mutating call carries a request id. gRPC's own retries (`channel.service_config`)
repeat a call that ended UNAVAILABLE. Above them stands `ResendPolicy`: the fate of a call is unknown (connection lost,
deadline passed), so the *same* request goes out again and the executor either runs it or replays its recorded answer.
Overload (RESOURCE_EXHAUSTED) is never repeated by either: the scheduler decides what to do about it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

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

_ANSWERED_BY_GRPC = frozenset({"UNAVAILABLE", "INTERNAL", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED", "CANCELLED"})
"""Codes that, without the executor's own ErrorInfo, leave open whether the step ran."""

LONGEST_PAUSE_S = 1.0

REFUSED_BEFORE_RUNNING = (SequenceBusy, QueueFull, Starting, Draining, DeadlineExceeded, Cancelled)
"""Refusals of this attempt alone: an earlier one of the same call may still have run."""

SEQUENCE_GONE = (InstanceMismatch, HandleUnknown, HandleReleased, LeaseExpired)
"""Answers that say that a sequence is gone. A release takes them as success; a forward must be prefilled again."""

LEASE_GONE = (LeaseExpired, LeaseUnknown, InstanceMismatch)
"""Answers to a renewal, or to a creation, that say that the lease is gone: acquire another."""


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
            raise ValueError(f"no such policy: {self}")

    def pause(self, resend: int) -> float:
        """Seconds before a resend, the first being 0."""
        return min(self.backoff_s * 2.0 ** min(resend, 30), LONGEST_PAUSE_S)


NEVER_RESEND = ResendPolicy(times=0)
"""Leave every unknown fate to the caller."""


def fate_unknown(error: BaseException) -> bool:
    """Whether the step behind a failed call may have run: no answer of the executor says that it did not."""
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
