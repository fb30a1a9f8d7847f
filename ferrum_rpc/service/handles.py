"""Handles: who a sequence is to the outside, and what became of those that are gone.

A handle's id is the process's instance id (8 random bytes) and 16 random bytes: unguessable, never reused, within a
process or across restarts. A handle of an earlier process, a released and an unknown one are different answers, because
a scheduler reacts differently to each. What was released is remembered for the last `TOMBSTONES` sequences; beyond that
it reads as unknown. The engine never sees a handle: it knows integers.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ferrum_rpc.core import HandleRef
from ferrum_rpc.errors import (
    ExecutorError,
    HandleReleased,
    HandleUnknown,
    InstanceMismatch,
    InvalidRequest,
    SequenceBusy,
    SequenceVersionMismatch,
)

INSTANCE_BYTES: Final = 8
SECRET_BYTES: Final = 16
TOMBSTONES: Final = 65_536


@dataclass(slots=True, eq=False)
class Record:
    """A live sequence as the service floor sees it: the engine's number, and what its next handle says.

    ``busy`` is true while a call on it is in flight. ``doomed`` asks whoever finishes that call to release it;
    ``mourners`` are called when its blocks are free.
    """

    sequence: int
    id: bytes
    length: int = 0
    version: int = 0
    busy: bool = False
    doomed: bool = False
    mourners: list[Callable[[], None]] = field(default_factory=list)

    @property
    def handle(self) -> HandleRef:
        """The handle that the caller must pass back next."""
        return HandleRef(self.id, self.length, self.version)


class HandleTable:
    """Live sequences by handle id, and the tombstones of the last ones that were released."""

    def __init__(self, tombstones: int = TOMBSTONES) -> None:
        self.instance = secrets.token_bytes(INSTANCE_BYTES)
        self._live: dict[bytes, Record] = {}
        self._gone: OrderedDict[bytes, type[ExecutorError]] = OrderedDict()
        self._tombstones = tombstones
        self._next_sequence = 1

    def __len__(self) -> int:
        return len(self._live)

    @property
    def instance_id(self) -> str:
        """Names this process lifetime."""
        return self.instance.hex()

    def mint(self) -> Record:
        """A new record; it is not live before `insert`."""
        record = Record(self._next_sequence, self.instance + secrets.token_bytes(SECRET_BYTES))
        self._next_sequence += 1
        return record

    def insert(self, record: Record) -> None:
        """The sequence exists from now on."""
        self._live[record.id] = record

    def remove(self, record: Record, answer: type[ExecutorError] = HandleReleased) -> bool:
        """The sequence is gone; its handle answers ``answer`` as long as it is remembered. False: it was not live."""
        if self._live.pop(record.id, None) is None:
            return False
        self._gone[record.id] = answer
        if len(self._gone) > self._tombstones:
            self._gone.popitem(last=False)
        return True

    def records(self) -> list[Record]:
        """All live sequences."""
        return list(self._live.values())

    def find(self, handle: HandleRef) -> Record:
        """The live sequence of a handle, whatever its version. Raises one of the four answers."""
        record = self._live.get(handle.id)
        if record is not None:
            return record
        if len(handle.id) != INSTANCE_BYTES + SECRET_BYTES:
            raise InvalidRequest(
                "this is not a handle: pass back the KvHandle that an answer carried", field="handle.id"
            )
        gone = self._gone.get(handle.id)
        if gone is not None:
            raise gone("the sequence of this handle was released")
        if handle.id[:INSTANCE_BYTES] != self.instance:
            raise InstanceMismatch("the handle is of another process lifetime; prefill the sequence again")
        raise HandleUnknown("no such sequence")

    def claim(self, handle: HandleRef, *, any_version: bool = False) -> Record:
        """`find`, and the handle must be current and no call in flight. The record is busy until the caller says
        otherwise."""
        record = self.find(handle)
        if record.busy:
            raise SequenceBusy("another call on this sequence is in flight")
        if not any_version and (handle.version != record.version or handle.seq_len != record.length):
            raise SequenceVersionMismatch(
                f"the handle is stale: the sequence stands at version {record.version} with {record.length} tokens",
                metadata={"version": record.version, "seq_len": record.length},
            )
        record.busy = True
        return record
