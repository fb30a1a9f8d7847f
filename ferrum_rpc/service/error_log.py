"""Counts every refusal, and logs it with its reason, its caller, and what an operator should do about it.

A scheduler that is refused in a loop must not fill the disk: per reason `BURST` events are logged, then one per second
with the number that were left out. The counters include all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from ferrum_rpc.errors import ExecutorError, Reason
from ferrum_rpc.service.guard.auth import CALLER
from ferrum_rpc.service.trace_context import Context, ids_of

log = structlog.get_logger("ferrum_rpc.service")

BURST: Final = 20
PER_SECOND: Final = 1.0
MESSAGE_CHARACTERS: Final = 300
"""Maximum length of a logged message, which may quote the request."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The log level of a refusal, and what an operator should do. info: the caller's mistake. warning: the operator can
    help, mostly with more capacity. error: a fault of the executor."""

    level: str
    action: str


ADVICE: Final[dict[Reason, Advice]] = {
    Reason.INVALID_REQUEST: Advice("info", "correct the scheduler: the message names the field"),
    Reason.REQUEST_ID_REUSED: Advice("info", "give every new operation of the scheduler a new request id"),
    Reason.HANDLE_UNKNOWN: Advice("info", "look for a scheduler that keeps handles after it released them"),
    Reason.HANDLE_RELEASED: Advice(
        "info",
        "the message says what ended it; after a release, look for a scheduler that still uses it",
    ),
    Reason.LEASE_EXPIRED: Advice("info", "see why the scheduler did not renew in time, or raise lease_ttl_s"),
    Reason.LEASE_UNKNOWN: Advice("info", "none: the scheduler acquires a new lease"),
    Reason.TOKEN_MASK_UNKNOWN: Advice(
        "info", "none: the scheduler registers it again; if often, raise max_token_masks"
    ),
    Reason.GRAMMAR_UNKNOWN: Advice("info", "none: the scheduler registers it again; if often, raise max_grammars"),
    Reason.ADAPTER_UNKNOWN: Advice("info", "load it (`ferrum-rpc adapters --load`), or correct its name"),
    Reason.ADAPTER_IN_USE: Advice("info", "let the schedulers release its sequences first (`ferrum-rpc sequences`)"),
    Reason.INSTANCE_MISMATCH: Advice("info", "none after a restart: the scheduler prefills again"),
    Reason.LAYOUT_MISMATCH: Advice("info", "move sequences between executors of the same model and types only"),
    Reason.SEQUENCE_VERSION_MISMATCH: Advice("info", "look for two schedulers that share a sequence"),
    Reason.SEQUENCE_BUSY: Advice("info", "look for a scheduler that sends two calls on a sequence at once"),
    Reason.CHAIN_BROKEN: Advice("info", "none: a step that was sent ahead found another state than expected"),
    Reason.CONTEXT_LENGTH_EXCEEDED: Advice("info", "let the scheduler stop at max_context of GetInfo"),
    Reason.TRUNCATE_BEYOND_LENGTH: Advice("info", "correct the scheduler's idea of the sequence's length"),
    Reason.KV_BLOCKS_EXHAUSTED: Advice("warning", "raise kv_memory, or let the scheduler run fewer sequences at once"),
    Reason.KV_CORRUPT: Advice("warning", "see what changes bytes on their way: memory, a proxy, a file"),
    Reason.SEQUENCES_EXHAUSTED: Advice("warning", "raise the limit that it names, or find who does not release"),
    Reason.QUOTA_EXCEEDED: Advice("warning", "raise the caller's quota, or let it release sequences of its own"),
    Reason.QUEUE_FULL: Advice("warning", "slow the schedulers down, add an executor, or raise max_queued_items"),
    Reason.OUTPUT_TOO_LARGE: Advice("info", "ask for fewer rows or less per row, or raise max_response_bytes"),
    Reason.GRAMMAR_TOO_COMPLEX: Advice("info", "simplify the grammar; the message says where it became too large"),
    Reason.STARTING: Advice("info", "wait until the health check answers SERVING"),
    Reason.DRAINING: Advice("info", "send new sequences to another executor"),
    Reason.NOT_SUPPORTED: Advice("info", "let the scheduler read the capabilities of GetInfo first"),
    Reason.UNAUTHENTICATED: Advice("warning", "give the scheduler valid credentials, or find who is probing"),
    Reason.PERMISSION_DENIED: Advice("warning", "name the caller among the operators if it should be one"),
    Reason.DEADLINE_EXCEEDED: Advice("warning", "allow more time, or slow the schedulers down: the queue is too long"),
    Reason.CANCELLED: Advice("info", "none: the caller gave up before its step"),
    Reason.DEVICE_LOST: Advice("error", "restart the executor; every handle is lost"),
    Reason.STEP_FAILED: Advice("error", "read the message: the forward pass raised; the sequences are unchanged"),
    Reason.INTERNAL_ERROR: Advice("error", "report this stack trace: it is a bug in the executor"),
    Reason.TRANSPORT: Advice("error", "none: only a client raises this"),
}
"""The log's side of the error table; its wire side is ``wire/status.py``."""


@dataclass(slots=True)
class _Bucket:
    """Events that may still be logged for a reason."""

    left: float
    since: float
    suppressed: int = 0

    def take(self, now: float) -> bool:
        self.left = min(float(BURST), self.left + (now - self.since) * PER_SECOND)
        self.since = now
        if self.left < 1.0:
            self.suppressed += 1
            return False
        self.left -= 1.0
        return True


class ErrorLog:
    """Counts refusals by reason, and logs them at a bounded rate. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        now = clock()
        self.counts: dict[Reason, int] = dict.fromkeys(ADVICE, 0)
        self._buckets = {reason: _Bucket(float(BURST), now) for reason in ADVICE}

    def note(
        self,
        method: str,
        error: ExecutorError,
        context: Context,
        *,
        item: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Count and log the refusal of a call, or of the ``item`` of one. ``cause``: the exception of the handler if
        that was not a refusal."""
        reason = error.reason
        self.counts[reason] += 1
        bucket = self._buckets[reason]
        if not bucket.take(self._clock()):
            return
        advice, suppressed, bucket.suppressed = ADVICE[reason], bucket.suppressed, 0
        fields = {
            "reason": reason.value,
            "method": method,
            "message": error.message[:MESSAGE_CHARACTERS],
            "item": item,
            "suppressed": suppressed or None,
            "exc_info": cause,
            **ids_of(context),
            "caller": CALLER.get().name,
            "action": advice.action,
        }
        getattr(log, advice.level)(
            "request_refused", **{name: value for name, value in fields.items() if value is not None}
        )
