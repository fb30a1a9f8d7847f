"""Every refusal of the executor: one class per reason of the contract.

A scheduler reacts to the *reason*, so a reason is a type here, carries typed facts (the actual length, the limit that
was exceeded), and has one row in the wire floor's table of statuses. Messages are written for operators and never
contain an internal identifier. The client raises the same classes.

``sequence_changed`` is false for all but the reasons whose text here differs: a refusal leaves the sequence as it was.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Final

NAMED: Final = 8
"""Maximum number of names that an error shows of a list."""


def listed(kind: str, names: Sequence[str]) -> str:
    """``3 missing (a, b, c)``; with more than NAMED the first ones and an ellipsis."""
    shown = ", ".join(name[:160] for name in names[:NAMED])
    return f"{len(names)} {kind} ({shown}{', ...' if len(names) > NAMED else ''})"


def counted(count: int, noun: str) -> str:
    """``1 sequence``, ``2 sequences``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class Reason(enum.StrEnum):
    """``google.rpc.ErrorInfo.reason`` of every non-OK answer."""

    INVALID_REQUEST = "INVALID_REQUEST"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    HANDLE_UNKNOWN = "HANDLE_UNKNOWN"
    HANDLE_RELEASED = "HANDLE_RELEASED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    LEASE_UNKNOWN = "LEASE_UNKNOWN"
    TOKEN_MASK_UNKNOWN = "TOKEN_MASK_UNKNOWN"  # noqa: S105 - no secret
    GRAMMAR_UNKNOWN = "GRAMMAR_UNKNOWN"
    ADAPTER_UNKNOWN = "ADAPTER_UNKNOWN"
    ADAPTER_IN_USE = "ADAPTER_IN_USE"
    INSTANCE_MISMATCH = "INSTANCE_MISMATCH"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    SEQUENCE_VERSION_MISMATCH = "SEQUENCE_VERSION_MISMATCH"
    SEQUENCE_BUSY = "SEQUENCE_BUSY"
    CHAIN_BROKEN = "CHAIN_BROKEN"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    TRUNCATE_BEYOND_LENGTH = "TRUNCATE_BEYOND_LENGTH"
    KV_BLOCKS_EXHAUSTED = "KV_BLOCKS_EXHAUSTED"
    KV_CORRUPT = "KV_CORRUPT"
    SEQUENCES_EXHAUSTED = "SEQUENCES_EXHAUSTED"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    QUEUE_FULL = "QUEUE_FULL"
    OUTPUT_TOO_LARGE = "OUTPUT_TOO_LARGE"
    GRAMMAR_TOO_COMPLEX = "GRAMMAR_TOO_COMPLEX"
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
    """The reason of the class."""

    position: int | None = None
    """The index of the refused span of an atomic group. It is not sent; the service floor names the item."""

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

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            cls.reason = Reason[re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()]

    def number(self, key: str) -> int | None:
        """``metadata[key]`` as an integer, or None if it is absent or not a number."""
        value = self.metadata.get(key, "")
        return int(value) if value.isdecimal() else None


class InvalidRequest(ExecutorError):
    """The request is malformed; sending it again cannot help."""


def above(limit: str, maximum: int, count: int, what: str, field: str, *, advice: str = "") -> InvalidRequest:
    """The refusal of more than a limit of `GetInfo` allows, whose field there is ``limit``."""
    return InvalidRequest(
        f"{count} {what} exceed the limit of {maximum}{advice}", field=field, metadata={limit: maximum}
    )


class RequestIdReused(ExecutorError):
    """The request id was used with other content."""


class HandleUnknown(ExecutorError):
    """This process never issued such a handle to this caller, or no longer keeps it."""


class HandleReleased(ExecutorError):
    """The sequence was released."""


class LeaseExpired(ExecutorError):
    """The lease expired, or a sequence without one was unused for too long; the blocks were freed."""


class LeaseUnknown(ExecutorError):
    """This process never issued such a lease to this caller, or it was revoked."""


class TokenMaskUnknown(ExecutorError):
    """This caller has not registered such a mask, or it was evicted (``token_mask_id``): register it
    again."""


class GrammarUnknown(ExecutorError):
    """This caller has not registered such a grammar, or it was evicted (``grammar_id``): register it again."""


class AdapterUnknown(ExecutorError):
    """No adapter of this name is loaded, or available for loading."""


class AdapterInUse(ExecutorError):
    """Sequences use the adapter (``sequences``: how many): release them first."""


class InstanceMismatch(ExecutorError):
    """The handle was issued by another process lifetime: prefill again."""


class LayoutMismatch(ExecutorError):
    """The cache to import is of another model, or has another layout: ``differs`` lists the differences, separated by
    commas, and each of these names has the value expected here."""


class SequenceVersionMismatch(ExecutorError):
    """The handle is stale; ``version`` and ``seq_len`` are those of the sequence."""

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


class ChainBroken(ExecutorError):
    """The item that this one follows left the sequence in another state than predicted; ``version`` and ``seq_len`` are
    the current ones, if known."""


class ContextLengthExceeded(ExecutorError):
    """The sequence would grow beyond the model's context (``max_context``, ``seq_len``)."""


class TruncateBeyondLength(ExecutorError):
    """A truncation would make the sequence longer (``seq_len`` is its length)."""


class KvBlocksExhausted(ExecutorError):
    """Not enough free blocks (``needed_blocks``, ``free_blocks``), or no free slot for the recurrent states of a
    sequence (``needed_slots``, ``free_slots``): release or preempt, then try again."""


class KvCorrupt(ExecutorError):
    """The received cache differs from the sent one (``next_token``: the first missing token): send it again. Or K or V
    are ``not_finite``: prefill the sequence there. Or the parked cache of a sequence was corrupted: the sequence has
    ended."""

    @property
    def not_finite(self) -> bool:
        """Whether values of the cache are NaN or infinite: the same cache is refused again."""
        return "not_finite" in self.metadata


class SequencesExhausted(ExecutorError):
    """The maximum of live sequences (``max_sequences``), leases (``max_leases``), parked bytes (``kv_park_bytes``) or
    loaded adapters (``max_adapters``, ``adapter_memory``) is reached: release some."""


class QuotaExceeded(ExecutorError):
    """The caller holds as much as it may (``max_sequences_per_caller``, ``max_blocks_per_caller``): release some of
    your own."""


class QueueFull(ExecutorError):
    """The bounded queue is full; nothing was started."""


class OutputTooLarge(ExecutorError):
    """The answer would exceed the message limit; checked before the forward."""


class GrammarTooComplex(ExecutorError):
    """A grammar needs more time or memory than the executor allows, to be compiled or for the mask of a row."""


class Starting(ExecutorError):
    """The model is still loading; nothing was started."""


class Draining(ExecutorError):
    """The executor is draining; nothing was started."""


class NotSupported(ExecutorError):
    """This model or version does not offer it; see its capabilities."""


class Unauthenticated(ExecutorError):
    """The call has no credentials, or invalid ones."""


class PermissionDenied(ExecutorError):
    """The caller is authenticated but not authorized."""


class DeadlineExceeded(ExecutorError):
    """The deadline passed before the step was dispatched (server) or before the answer came (client)."""


class Cancelled(ExecutorError):
    """The caller cancelled before the step was dispatched; nothing happened."""


class DeviceLost(ExecutorError):
    """The device or the model thread is lost; the process must be restarted."""


class StepFailed(ExecutorError):
    """The forward pass or an operation on the cache raised, perhaps for lack of device memory; all its sequences are
    unchanged."""


class InternalError(ExecutorError):
    """A bug in the executor, logged there with its stack. It is unknown whether the call took effect."""


class TransportError(ExecutorError):
    """Client only: the connection failed without an answer. Retry with the same request id.

    ``metadata["tls"]``, if present: the port has TLS (``expected``) or none (``absent``), unlike the client.
    """

    reason = Reason.TRANSPORT


ERROR_BY_REASON: dict[Reason, type[ExecutorError]] = {cls.reason: cls for cls in ExecutorError.__subclasses__()}
"""The class of every reason; the client's way back from a status."""
