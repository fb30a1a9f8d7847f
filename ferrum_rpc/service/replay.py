"""Recorded answers: a retry with the same request id gets the first call's answer, and is not carried out again.

Request ids are unique in a `Scope`: the calls on one sequence, or one creation of a caller. An entry is first in flight
(duplicates wait for it), then an answer, then possibly an answer without its rows, when the byte budget ran out or the
sequence ended; sampled token ids, which cannot be recomputed, stay with it. Refusals are not recorded: they changed
nothing, and a retry may succeed.

There are three limits. The first is on the bytes of all rows; the oldest rows are dropped first. The second is on the
bytes of all else in answers; the oldest answer of the least recently used scope is dropped first. The third is on the
answers of one sequence. What exceeds the first two is dropped from the caller with most, so no caller loses its equal
share to another. Both count Python's memory, as measured, so no content of requests makes the log larger.

The third limit is small: calls on a sequence come one at a time, so a retry is of the latest answer, and a later
duplicate has an old version and is refused. It is above 1, because a fork changes no version, and because the network
may delay a duplicate by some steps: it then gets its answer instead of a refusal. It avoids cache misses as well as
memory: a decode step drops as many answers as it records, and those of 60,000 answers ago are scattered in memory.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from ferrum_rpc.core import HandleRef, ItemAnswer, OutputSpec, RowBlock, RowKind, Rows, Sample
from ferrum_rpc.errors import ExecutorError, RequestIdReused
from ferrum_rpc.service.fingerprints import HOW, OfADraft

RECORDS: Final = 40 << 20
"""Bytes of records, without rows: 60,000 of single steps, 38,000 of creations."""

ENTRIES_PER_SEQUENCE: Final = 32
PLAIN_BYTES: Final = 592
"""Bytes of a step's record besides its request id: entry, fingerprint, answer, handle."""

CREATION_BYTES: Final = 416
"""Further bytes of a creation, which has a scope of its own."""

SAMPLE_BYTES: Final = 448
HANDLE_BYTES: Final = 192
ROWS_BYTES: Final = 448
"""Bytes of an answer's rows besides their content: arrays and their containers."""

TOKEN_BYTES: Final = 4

SHARED_BYTES: Final = 256
"""A recorded answer may keep a step's block of so few bytes alive: a copy of its own rows would take as much, and 3 µs
a sequence and step. A larger one is never kept, not even where all of it is the answer's: it may be a view of more."""

Recorded = ItemAnswer | tuple[HandleRef, ...]
"""A forward's answer, or the handles that a truncate, fork or release returned."""

Outcome = Recorded | ExecutorError

Waiter = Callable[[Outcome], object]
"""A duplicate of a call in flight: called with the outcome of that call."""

Key = tuple[str, bytes | str]
"""A scope's name; see `scope_of`."""


class Scope(dict[str, "Entry"]):
    """The entries of a sequence, or the one of a creation, by request id, oldest first. A scope with entries is in the
    log under ``key``, in its ``owner``'s part."""

    __slots__ = ("key", "owner")
    owner: CallerAnswers

    def __init__(self, key: Key) -> None:
        self.key = key


@dataclass(slots=True, eq=False)
class Entry:
    """One request id: a call in flight (``answer`` None) with its duplicates, the ``waiters``, or an answer.
    ``record_bytes`` is its share of the budget of records once it has an answer, ``rows_bytes`` that of its rows, or 0.
    A call with waiters is not cancelled with its own caller.

    ``older`` and ``newer`` are set while it has rows: the answers with rows are a ring, which takes 100 bytes and 0.5
    µs less per answer than an `OrderedDict`.
    """

    scope: Scope
    request_id: str
    fingerprint: Hashable
    answer: Recorded | None = field(default=None, init=False)
    rows_bytes: int = field(default=0, init=False)
    record_bytes: int = field(default=0, init=False)
    waiters: tuple[Waiter, ...] = field(default=(), init=False)
    older: Entry = field(init=False)
    newer: Entry = field(init=False)

    def repeated(self, fingerprint: Hashable) -> Entry:
        """The entry, for a later call with its id. Raises `RequestIdReused` if the content differs."""
        if self.fingerprint != fingerprint:
            raise RequestIdReused("this request id was used with other content", field="request_id")
        return self

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter, which no longer needs the answer."""
        self.waiters = tuple([each for each in self.waiters if each is not waiter])


class CallerAnswers:
    """One caller's part of the log: its scopes, the least recently used first; ``rows`` is the head of the ring of its
    answers with rows. ``records`` and ``bytes`` are the sizes of its records and its rows."""

    __slots__ = ("bytes", "records", "rows", "scopes")

    def __init__(self) -> None:
        self.scopes: OrderedDict[Key, Scope] = OrderedDict()
        self.rows = Entry(Scope(("", "")), "", None)
        self.rows.older = self.rows.newer = self.rows
        self.records = 0
        self.bytes = 0


class ReplayLog:
    """Request ids and their answers, within ``budget`` bytes of rows and ``records`` bytes of all else. The fields
    ``rows`` and ``records`` are the present sizes."""

    def __init__(self, budget: int, records: int = RECORDS) -> None:
        self._budget = budget
        self._max_records = records
        self._owners: dict[str, CallerAnswers] = {}
        self.records = 0
        self.rows = 0
        self.replays = 0

    @property
    def bytes(self) -> int:
        """Bytes of recorded answers: request ids, digests of requests, handles, tokens that stay, and rows."""
        return self.records + self.rows

    @property
    def limit(self) -> int:
        """The maximum of ``bytes``."""
        return self._max_records + self._budget

    def scope(self, key: Key) -> Scope:
        """The scope of this name; a new one, not in the log, if it has no entries. It must not be kept beyond the
        present turn of the event loop."""
        owner = self._owners.get(key[0])
        scope = None if owner is None else owner.scopes.get(key)
        return Scope(key) if scope is None else scope

    def knows(self, key: Key, request_id: str) -> bool:
        """Whether there is an entry with this id, whatever its content."""
        return request_id in self.scope(key)

    def begin(self, scope: Scope, request_id: str, fingerprint: Hashable) -> Entry:
        """Record a call that is about to start under an id new to its scope; `finish` must follow."""
        if scope:
            scope.owner.scopes.move_to_end(scope.key)
        else:
            name = scope.key[0]
            owner = self._owners.get(name)
            if owner is None:
                owner = self._owners[name] = CallerAnswers()
            owner.scopes[scope.key] = scope
            scope.owner = owner
        entry = scope[request_id] = Entry(scope, request_id, fingerprint)
        return entry

    def finish(self, entry: Entry, outcome: Outcome) -> None:
        """Record the answer of an ended call, or remove its entry if it was refused; then the waiters are called, in a
        turn of the event loop of their own. If recording raises, they still wait: call `finish` again, with a
        refusal."""
        if isinstance(outcome, ExecutorError):
            self._forget(entry)
        else:
            self._record(entry, outcome)
        if entry.waiters:
            waiters, entry.waiters = entry.waiters, ()
            for waiter in waiters:
                asyncio.get_running_loop().call_soon(waiter, outcome)

    def _record(self, entry: Entry, answer: Recorded) -> None:
        scope = entry.scope
        owner, rows = scope.owner, None
        if isinstance(answer, ItemAnswer):
            rows = answer.rows
            if rows is not None and rows.block.nbytes > SHARED_BYTES:
                answer = answer._replace(rows=rows.detached())
        entry.answer = answer
        entry.record_bytes = size = record_bytes(entry)
        self.records += size
        owner.records += size
        if rows is not None:
            entry.rows_bytes = size = ROWS_BYTES + rows.nbytes
            self.rows += size
            owner.bytes += size
            latest, end = owner.rows.older, owner.rows
            entry.older, entry.newer = latest, end
            latest.newer = end.older = entry
        if len(scope) > ENTRIES_PER_SEQUENCE:
            self._drop_oldest(scope)
        if self.records > self._max_records or self.rows > self._budget:
            self._evict()

    def forget_rows(self, key: Key) -> None:
        """Drop the rows of a sequence that ended, and keep its entries."""
        for entry in self.scope(key).values():
            if entry.rows_bytes:
                self._shed(entry)

    def repeat(self, outcome: Outcome) -> Outcome:
        """The answer for a later call with the same id: that of an item is marked as replayed."""
        self.replays += 1
        return outcome._replace(replayed=True) if isinstance(outcome, ItemAnswer) else outcome

    def _evict(self) -> None:
        while self.records > self._max_records:
            owner = max(self._owners.values(), key=_records)
            scope = next(iter(owner.scopes.values()))
            if not self._drop_oldest(scope):  # all of it is in flight
                owner.scopes.move_to_end(scope.key)
        while self.rows > self._budget:
            self._shed(max(self._owners.values(), key=_bytes).rows.newer)

    def _drop_oldest(self, scope: Scope) -> bool:
        """Drop the oldest answer of a scope. False if it has none."""
        for entry in scope.values():
            if entry.answer is not None:
                self._forget(entry)
                return True
        return False

    def _forget(self, entry: Entry) -> None:
        scope = entry.scope
        if scope.get(entry.request_id) is not entry:
            return
        self.records -= entry.record_bytes
        scope.owner.records -= entry.record_bytes
        if entry.rows_bytes:
            self._unlink(entry)
        del scope[entry.request_id]
        if not scope:
            del scope.owner.scopes[scope.key]
            if not scope.owner.scopes:
                del self._owners[scope.key[0]]

    def _unlink(self, entry: Entry) -> None:
        """Remove it from the ring of answers with rows."""
        older, newer = entry.older, entry.newer
        older.newer, newer.older = newer, older
        del entry.older, entry.newer  # or dropped entries would live as long
        self.rows -= entry.rows_bytes
        entry.scope.owner.bytes -= entry.rows_bytes
        entry.rows_bytes = 0

    def _shed(self, entry: Entry) -> None:
        """Keep the answer, without its rows. The tokens of a run or a draft stay, as part of the record: they cannot be
        sampled again for a caller that has shown them."""
        self._unlink(entry)
        answer = entry.answer
        if isinstance(answer, ItemAnswer):
            rows = None
            if answer.rows is not None and (answer.ended is not None or type(entry.fingerprint) is OfADraft):
                first, count = answer.rows.first, answer.rows.count
                tokens = answer.rows.block["token_ids"][first : first + count].copy()
                rows = Rows(RowBlock.of(RowKind.TOKENS, tokens), 0, count)
            entry.answer = answer._replace(rows=rows)


def record_bytes(entry: Entry) -> int:
    """Bytes of an answered entry without its rows; tokens that stay when its rows are dropped count from the
    beginning."""
    answer, known = entry.answer, entry.fingerprint
    size = PLAIN_BYTES + entry.request_id.__sizeof__()
    if entry.scope.key[1].__class__ is str:
        size += CREATION_BYTES
    if answer.__class__ is not ItemAnswer:
        return size + HANDLE_BYTES * len(answer or ())
    if known.__class__ is tuple:
        how = known[HOW]
        if how.__class__ is OutputSpec and how.kind.__class__ is Sample:
            size += SAMPLE_BYTES
    elif known.__class__ is OfADraft:
        size += SAMPLE_BYTES
    if (answer.ended is not None or known.__class__ is OfADraft) and answer.rows is not None:
        size += ROWS_BYTES + TOKEN_BYTES * answer.rows.count
    return size


_records: Final = attrgetter("records")
_bytes: Final = attrgetter("bytes")


def scope_of(owner: str, handle_id: bytes, request_id: str = "") -> Key:
    """The scope in which a caller's request ids are unique: the calls on one of its sequences, or, if ``handle_id`` is
    empty, one of its creations, each of which is a scope of its own, so that they are dropped one by one."""
    return (owner, handle_id or request_id)
