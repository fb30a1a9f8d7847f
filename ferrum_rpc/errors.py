"""Every way in which the executor says no: one class per reason of the contract.

A scheduler reacts to the *reason*, so a reason is a type here, carries typed facts (the actual length, the limit that
was exceeded), and has one row in the wire floor's table of statuses. Messages are written for the person who reads
them at night and never contain an internal identifier. The same classes are raised by the client.

``sequence_changed`` is false for all but the reasons that say otherwise: a refusal leaves the sequence as it was.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Reason(enum.StrEnum):
    """``google.rpc.ErrorInfo.reason`` of every non-OK answer."""

    INVALID_REQUEST = "INVALID_REQUEST"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    HANDLE_UNKNOWN = "HANDLE_UNKNOWN"
    HANDLE_RELEASED = "HANDLE_RELEASED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    LEASE_UNKNOWN = "LEASE_UNKNOWN"
    INSTANCE_MISMATCH = "INSTANCE_MISMATCH"
    SEQUENCE_VERSION_MISMATCH = "SEQUENCE_VERSION_MISMATCH"
    SEQUENCE_BUSY = "SEQUENCE_BUSY"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    TRUNCATE_BEYOND_LENGTH = "TRUNCATE_BEYOND_LENGTH"
    KV_BLOCKS_EXHAUSTED = "KV_BLOCKS_EXHAUSTED"
    SEQUENCES_EXHAUSTED = "SEQUENCES_EXHAUSTED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    QUEUE_FULL = "QUEUE_FULL"
    OUTPUT_TOO_LARGE = "OUTPUT_TOO_LARGE"
    STARTING = "STARTING"
    DRAINING = "DRAINING"
    NOT_SUPPORTED = "NOT_SUPPORTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    DEVICE_LOST = "DEVICE_LOST"
    STEP_FAILED = "STEP_FAILED"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    TRANSPORT = "TRANSPORT"


class ExecutorError(Exception):
    """A typed refusal. ``metadata`` travels in ``ErrorInfo.metadata``; ``retry_after_s`` in ``RetryInfo``;
    ``field`` names the offending request field in ``BadRequest``."""

    reason: Reason
    position: int | None = None
    """Of a refused atomic group: which of its spans was refused. Does not travel; the service floor names the item."""

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str | int] | None = None,
        retry_after_s: float | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = {key: str(value) for key, value in (metadata or {}).items()}
        self.retry_after_s = retry_after_s
        self.field = field

    def number(self, key: str) -> int | None:
        """``metadata[key]`` as an integer, or None where it is absent or no number."""
        value = self.metadata.get(key, "")
        return int(value) if value.isdecimal() else None


class InvalidRequest(ExecutorError):
    """The request is malformed; sending it again cannot help."""

    reason = Reason.INVALID_REQUEST


class RequestIdReused(ExecutorError):
    """The request id is known with other content."""

    reason = Reason.REQUEST_ID_REUSED


class HandleUnknown(ExecutorError):
    """This process never gave out such a handle to this caller, or forgot it long ago."""

    reason = Reason.HANDLE_UNKNOWN


class HandleReleased(ExecutorError):
    """The sequence was released."""

    reason = Reason.HANDLE_RELEASED


class LeaseExpired(ExecutorError):
    """The lease ran out, or nobody used a sequence without one for too long; the blocks were freed."""

    reason = Reason.LEASE_EXPIRED


class LeaseUnknown(ExecutorError):
    """This process never gave out such a lease to this caller, or it was revoked."""

    reason = Reason.LEASE_UNKNOWN


class InstanceMismatch(ExecutorError):
    """The handle was minted by another process lifetime: prefill again."""

    reason = Reason.INSTANCE_MISMATCH


class SequenceVersionMismatch(ExecutorError):
    """The handle is stale; ``version`` and ``seq_len`` say where the sequence stands."""

    reason = Reason.SEQUENCE_VERSION_MISMATCH

    @property
    def version(self) -> int | None:
        """The sequence's actual version."""
        return self.number("version")

    @property
    def seq_len(self) -> int | None:
        """The sequence's actual length."""
        return self.number("seq_len")


class SequenceBusy(ExecutorError):
    """Another call on the same sequence is in flight."""

    reason = Reason.SEQUENCE_BUSY


class ContextLengthExceeded(ExecutorError):
    """The sequence would grow beyond the model's context (``max_context``, ``seq_len``)."""

    reason = Reason.CONTEXT_LENGTH_EXCEEDED


class TruncateBeyondLength(ExecutorError):
    """A truncation would make the sequence longer (``seq_len`` says how long it is)."""

    reason = Reason.TRUNCATE_BEYOND_LENGTH


class KvBlocksExhausted(ExecutorError):
    """Not enough free blocks (``needed_blocks``, ``free_blocks``): release or preempt, then try again."""

    reason = Reason.KV_BLOCKS_EXHAUSTED


class SequencesExhausted(ExecutorError):
    """As many sequences live as may (``max_sequences``), or as many leases (``max_leases``): release some."""

    reason = Reason.SEQUENCES_EXHAUSTED


class QuotaExceeded(ExecutorError):
    """The caller holds as much as it may (``max_sequences_per_caller``, ``max_blocks_per_caller``): release some of
    your own."""

    reason = Reason.QUOTA_EXCEEDED


class QueueFull(ExecutorError):
    """The bounded queue is full; nothing was started."""

    reason = Reason.QUEUE_FULL


class OutputTooLarge(ExecutorError):
    """The answer would exceed the message limit; checked before the forward."""

    reason = Reason.OUTPUT_TOO_LARGE


class Starting(ExecutorError):
    """The model is still loading; nothing was started."""

    reason = Reason.STARTING


class Draining(ExecutorError):
    """The executor is on its way out; nothing was started."""

    reason = Reason.DRAINING


class NotSupported(ExecutorError):
    """This model or version does not offer it, and its capabilities say so."""

    reason = Reason.NOT_SUPPORTED


class Unauthenticated(ExecutorError):
    """The call has no credentials, or wrong ones."""

    reason = Reason.UNAUTHENTICATED


class PermissionDenied(ExecutorError):
    """The caller is known and may not do this."""

    reason = Reason.PERMISSION_DENIED


class DeadlineExceeded(ExecutorError):
    """The deadline passed before the step was dispatched (server) or before the answer came (client)."""

    reason = Reason.DEADLINE_EXCEEDED


class Cancelled(ExecutorError):
    """The caller cancelled before the step was dispatched; nothing happened."""

    reason = Reason.CANCELLED


class DeviceLost(ExecutorError):
    """The device or the model thread is gone; the process must be restarted."""

    reason = Reason.DEVICE_LOST


class StepFailed(ExecutorError):
    """The forward pass or an operation on the cache raised, for want of device memory perhaps; every sequence of it is
    as it was before."""

    reason = Reason.STEP_FAILED


class InternalError(ExecutorError):
    """A bug in the executor, logged there with its stack. Whether the call took effect is not known."""

    reason = Reason.INTERNAL_ERROR


class TransportError(ExecutorError):
    """Client only: the connection failed, and no answer says what happened. Retry with the same request id."""

    reason = Reason.TRANSPORT


ERROR_BY_REASON: dict[Reason, type[ExecutorError]] = {cls.reason: cls for cls in ExecutorError.__subclasses__()}
"""The class of every reason; the client's way back from a status."""
