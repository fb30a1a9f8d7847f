"""Handles: the external names of sequences, and how ended sequences ended.

A handle's id is the process's instance id (8 random bytes) and 16 random bytes: unguessable, never reused, within a
process or across restarts. It belongs to the caller that created it: to every other caller it reads as unknown, alive
or ended. A handle of an earlier process, an expired, a released and an unknown one give different answers, because a
scheduler reacts differently to each. The last `TOMBSTONES` ended sequences are remembered; older ones read as unknown.
The engine uses integers instead of handles.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Final

from ferrum_rpc.core import HandleRef
from ferrum_rpc.errors import (
    ExecutorError,
    HandleReleased,
    HandleUnknown,
    InstanceMismatch,
    InvalidRequest,
    LeaseExpired,
    SequenceBusy,
    SequenceVersionMismatch,
)
from ferrum_rpc.service.records import Account, SequenceEnd, SequenceRecord

INSTANCE_BYTES: Final = 8
SECRET_BYTES: Final = 16
TOMBSTONES: Final = 65_536


ANSWERS: Final[dict[SequenceEnd, tuple[type[ExecutorError], str]]] = {
    SequenceEnd.RELEASED: (HandleReleased, "the sequence of this handle was released"),
    SequenceEnd.REVOKED: (HandleReleased, "the sequence of this handle was released with its lease"),
    SequenceEnd.EXPIRED: (LeaseExpired, "the lease of this sequence ran out; prefill it again under a new one"),
    SequenceEnd.IDLE: (LeaseExpired, "this sequence was idle for too long and has no lease; prefill it again"),
    SequenceEnd.RESET: (HandleReleased, "the executor was reset; prefill the sequence again"),
    SequenceEnd.ABANDONED: (HandleReleased, "the call that created this sequence was given up"),
    SequenceEnd.LOST: (HandleReleased, "what was parked of this sequence could not be read back; prefill it again"),
}
"""The answer to the handle of an ended sequence."""


def gone(ending: SequenceEnd) -> ExecutorError:
    """The refusal for the handle of a sequence that ended in this way."""
    error, message = ANSWERS[ending]
    return error(message)


class HandleTable:
    """``live`` sequences by handle id, and the tombstones of the last ones that ended. ``foreign``: number of refused
    handles of other processes."""

    def __init__(self, tombstones: int = TOMBSTONES) -> None:
        self.instance = secrets.token_bytes(INSTANCE_BYTES)
        self.live: dict[bytes, SequenceRecord] = {}
        self._gone: OrderedDict[bytes, tuple[SequenceEnd, str]] = OrderedDict()
        self._tombstones = tombstones
        self._next_sequence = 0
        self.foreign = 0

    def __len__(self) -> int:
        return len(self.live)

    @property
    def instance_id(self) -> str:
        """The name of this process lifetime."""
        return self.instance.hex()

    def mint(self, account: Account) -> SequenceRecord:
        """A new record; it is not live before `insert`."""
        number = self.number()
        return SequenceRecord(number, self.instance + secrets.token_bytes(SECRET_BYTES), account, order=number)

    def number(self) -> int:
        """An unused sequence number for the engine."""
        self._next_sequence += 1
        return self._next_sequence

    def insert(self, record: SequenceRecord) -> None:
        self.live[record.id] = record

    def remove(self, record: SequenceRecord, ending: SequenceEnd = SequenceEnd.RELEASED) -> bool:
        """Remove the sequence and remember how it ended. False if it was not live."""
        if self.live.pop(record.id, None) is None:
            return False
        self._gone[record.id] = (ending, record.account.caller.name)
        if len(self._gone) > self._tombstones:
            self._gone.popitem(last=False)
        return True

    def has(self, handle_id: bytes, owner: str) -> bool:
        """Whether this is the handle of a live sequence of its owner."""
        record = self.live.get(handle_id)
        return record is not None and record.account.caller.name == owner

    def records(self) -> list[SequenceRecord]:
        """All live sequences, oldest first."""
        return list(self.live.values())

    def find(self, handle: HandleRef, owner: str = "") -> SequenceRecord:
        """The owner's live sequence of a handle, whatever its version. Raises one of the four answers."""
        record = self.live.get(handle.id)
        if record is not None and record.account.caller.name == owner:
            return record
        if len(handle.id) != INSTANCE_BYTES + SECRET_BYTES:
            raise InvalidRequest(
                "this is not a handle: pass back the KvHandle that an answer carried", field="handle.id"
            )
        ending, whose = self._gone.get(handle.id, (None, ""))
        if ending is not None and whose == owner:
            raise gone(ending)
        if handle.id[:INSTANCE_BYTES] != self.instance:
            self.foreign += 1
            raise InstanceMismatch("the handle is of another process lifetime; prefill the sequence again")
        raise HandleUnknown("no such sequence")

    def claim(
        self, handle: HandleRef, owner: str = "", now: float | None = None, any_version: bool = False
    ) -> SequenceRecord:
        """As `find`, but the handle must be current and no call in flight. The record is busy until the caller resets
        it. Whatever the result, the sequence counts as used (``now``: see `SequenceRecord.touch`)."""
        handle_id, length, version = handle
        record = self.live.get(handle_id)
        if record is None or record.account.caller.name != owner:
            record = self.find(handle, owner)
        record.touch(now)
        if record.busy:
            raise SequenceBusy("another call on this sequence is in flight")
        if not any_version and (version != record.version or length != record.length):
            raise stale(record)
        record.busy = True
        return record


def stale(record: SequenceRecord) -> SequenceVersionMismatch:
    """The refusal of a handle that is not the sequence's current one."""
    return SequenceVersionMismatch(
        f"the handle is stale: the sequence stands at version {record.version} with {record.length} tokens",
        metadata={"version": record.version, "seq_len": record.length},
    )
