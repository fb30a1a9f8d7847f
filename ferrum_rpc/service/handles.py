"""Handles: the names of sequences outside of this process, and how those that are gone ended.

A handle's id is the process's instance id (8 random bytes) and 16 random bytes: unguessable, never reused, within a
process or across restarts. It belongs to the caller that created it: to every other one it reads as unknown, alive or
gone. A handle of an earlier process, an expired, a released and an unknown one are different answers, because a
scheduler reacts differently to each. What is gone is remembered for the last `TOMBSTONES` sequences; beyond that it
reads as unknown. The engine has integers instead of handles.
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
"""The answer to the handle of a sequence that is gone."""


def gone(ending: SequenceEnd) -> ExecutorError:
    """The refusal of a handle whose sequence has ended so."""
    error, message = ANSWERS[ending]
    return error(message)


class HandleTable:
    """``live`` sequences by handle id, and the tombstones of the last ones that were released. ``foreign``: how often a
    handle of another process was refused."""

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
        """Names this process lifetime."""
        return self.instance.hex()

    def mint(self, account: Account) -> SequenceRecord:
        """A new record; it is not live before `insert`."""
        number = self.number()
        return SequenceRecord(number, self.instance + secrets.token_bytes(SECRET_BYTES), account, order=number)

    def number(self) -> int:
        """A number for the engine that no sequence had."""
        self._next_sequence += 1
        return self._next_sequence

    def insert(self, record: SequenceRecord) -> None:
        self.live[record.id] = record

    def remove(self, record: SequenceRecord, ending: SequenceEnd = SequenceEnd.RELEASED) -> bool:
        """The sequence is gone, which is remembered for a while. False: it was not live."""
        if self.live.pop(record.id, None) is None:
            return False
        self._gone[record.id] = (ending, record.owner)
        if len(self._gone) > self._tombstones:
            self._gone.popitem(last=False)
        return True

    def has(self, handle_id: bytes, owner: str) -> bool:
        """Whether this names a live sequence of its owner's."""
        record = self.live.get(handle_id)
        return record is not None and record.owner == owner

    def records(self) -> list[SequenceRecord]:
        """All live sequences, oldest first."""
        return list(self.live.values())

    def find(self, handle: HandleRef, owner: str = "") -> SequenceRecord:
        """The owner's live sequence of a handle, whatever its version. Raises one of the four answers."""
        record = self.live.get(handle.id)
        if record is not None and record.owner == owner:
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
        self, handle: HandleRef, owner: str = "", *, any_version: bool = False, now: float | None = None
    ) -> SequenceRecord:
        """`find`, and the handle must be current and no call in flight. The record is busy until the caller says
        otherwise. Whatever else comes of it, the sequence was used (``now``: see `SequenceRecord.touch`)."""
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
