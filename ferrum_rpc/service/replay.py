"""Recorded answers: a retry with the same request id gets what the first call got, and nothing happens twice.

Keys are scoped: to the sequence for calls on one, to the caller's creations otherwise. An entry is first in flight (a
duplicate waits for it), then an answer, then possibly an answer without its rows, when the byte budget ran out or the
sequence ended. Refusals are not recorded: they changed nothing, and a retry deserves a fresh try.

Three bounds, oldest first: bytes of rows over all, answers over all, and answers of one sequence. The last may be
small: calls on a sequence come one at a time, so a retry is of one of the latest; and a duplicate that turns up later
still carries an old version and is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from ferrum_rpc.core import HandleRef, ItemAnswer, WorkItem
from ferrum_rpc.errors import ExecutorError, RequestIdReused

ENTRIES: Final = 65_536
ENTRIES_PER_SEQUENCE: Final = 32
DIGEST_BYTES: Final = 16
SHARED_BYTES: Final = 256
"""A recorded answer may keep a step's block of so few bytes alive: a copy of its own rows would take as much, and 3 µs
a sequence and step. A larger one is never kept, not even where all of it is the answer's: it may be a view of more."""

Recorded = ItemAnswer | tuple[HandleRef, ...]
"""A forward's answer; or the handles that a truncate, fork or release left."""


Key = tuple[bytes, str]


@dataclass(slots=True, eq=False)
class Entry:
    """One request id: a call in flight (``answer`` None, ``waiters`` duplicates wait for ``pending``), or an answer.

    ``pending`` is made by the first duplicate: nearly all calls have none, and a future each is what they would notice.
    """

    fingerprint: Hashable
    pending: asyncio.Future[Recorded | ExecutorError] | None = None
    answer: Recorded | None = None
    rows_bytes: int = 0
    waiters: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A duplicate's place at an entry; ``pending`` is None where the answer was there already."""

    entry: Entry
    pending: asyncio.Future[Recorded | ExecutorError] | None


class ReplayLog:
    """Request ids and what was answered, within ``budget`` bytes of rows and ``entries`` answers."""

    def __init__(self, budget: int, entries: int = ENTRIES) -> None:
        self._budget = budget
        self._max_answers = entries
        self._in_flight: dict[Key, Entry] = {}
        self._answers: OrderedDict[Key, Entry] = OrderedDict()
        self._with_rows: OrderedDict[Key, Entry] = OrderedDict()
        self._scopes: dict[bytes, list[str]] = {}
        self.bytes = 0
        self.replays = 0

    def find(self, scope: bytes, request_id: str, fingerprint: Hashable) -> Entry | None:
        """The entry of an earlier call with this id, or None. Raises `RequestIdReused` where its content differs."""
        key = (scope, request_id)
        entry = self._in_flight.get(key) or self._answers.get(key)
        if entry is not None and entry.fingerprint != fingerprint:
            raise RequestIdReused("this request id was used with other content", field="request_id")
        return entry

    def knows(self, scope: bytes, request_id: str) -> bool:
        """Whether there is an entry with this id, whatever its content."""
        key = (scope, request_id)
        return key in self._in_flight or key in self._answers

    def in_flight(self, scope: bytes, request_id: str) -> Entry | None:
        """The entry of a call with this id that has not ended."""
        return self._in_flight.get((scope, request_id))

    def begin(self, scope: bytes, request_id: str, fingerprint: Hashable) -> Entry:
        """Note a call that is about to start; `finish` must follow."""
        entry = Entry(fingerprint)
        self._in_flight[scope, request_id] = entry
        return entry

    def finish(
        self, scope: bytes, request_id: str, outcome: Recorded | ExecutorError, *, creation: bool = False
    ) -> None:
        """The call ended: record its answer, or forget it if it was refused. Wakes the duplicates. ``creation``: the
        scope is not a sequence's, and only the bounds over all hold."""
        key = (scope, request_id)
        entry = self._in_flight.pop(key)
        if entry.pending is not None:
            entry.pending.set_result(outcome)
        if isinstance(outcome, ExecutorError):
            return
        entry.answer = outcome
        if isinstance(outcome, ItemAnswer) and outcome.rows is not None:
            rows = outcome.rows
            entry.rows_bytes = rows.nbytes
            self.bytes += entry.rows_bytes
            if rows.block.nbytes > SHARED_BYTES:
                entry.answer = outcome._replace(rows=rows.alone())
            self._with_rows[key] = entry
        self._answers[key] = entry
        if not creation:
            mine = self._scopes.get(scope)
            if mine is None:
                mine = self._scopes[scope] = []  # short: a deque takes 600 bytes for the first
            mine.append(request_id)
            if len(mine) > ENTRIES_PER_SEQUENCE:
                self._drop((scope, mine.pop(0)))
        if len(self._answers) > self._max_answers or self.bytes > self._budget:
            self._evict()

    def forget_rows(self, scope: bytes) -> None:
        """The sequence ended: its rows make room. That its calls were answered is still known."""
        for request_id in self._scopes.get(scope, ()):
            entry = self._with_rows.pop((scope, request_id), None)
            if entry is not None:
                self._shed(entry)

    def join(self, entry: Entry) -> Ticket:
        """Ask for an entry's answer. From now until `leave` the first call is waited for, and not taken back when its
        own caller is cancelled; so whoever asks must join before anything else can run."""
        if entry.answer is not None:
            return Ticket(entry, None)
        if entry.pending is None:
            entry.pending = asyncio.get_running_loop().create_future()
        entry.waiters += 1
        return Ticket(entry, entry.pending)

    def leave(self, ticket: Ticket) -> None:
        """The answer was had, or is no longer wanted."""
        if ticket.pending is not None:
            ticket.entry.waiters -= 1

    async def answer(self, ticket: Ticket) -> Recorded | ExecutorError:
        """What the first call got, once it is there; an item's answer is marked as replayed."""
        outcome = await self.settled(ticket)
        self.replays += 1
        return outcome._replace(replayed=True) if isinstance(outcome, ItemAnswer) else outcome

    async def settled(self, ticket: Ticket) -> Recorded | ExecutorError:
        """What the first call got, once it is there."""
        outcome = ticket.entry.answer if ticket.pending is None else await asyncio.shield(ticket.pending)
        assert outcome is not None  # noqa: S101 - no call is pending, so the answer is there
        return outcome

    def _evict(self) -> None:
        while len(self._answers) > self._max_answers:
            self._drop(next(iter(self._answers)))
        while self.bytes > self._budget:
            _, entry = self._with_rows.popitem(last=False)
            self._shed(entry)

    def _drop(self, key: Key) -> None:
        entry = self._answers.pop(key, None)
        if entry is None:
            return
        if self._with_rows.pop(key, None) is not None:
            self.bytes -= entry.rows_bytes
        mine = self._scopes.get(key[0])
        if mine is not None:
            if mine and mine[0] == key[1]:  # answers are dropped oldest first, so it is the first or gone already
                mine.pop(0)
            if not mine:
                del self._scopes[key[0]]

    def _shed(self, entry: Entry) -> None:
        """Keep the answer, without its rows."""
        self.bytes -= entry.rows_bytes
        entry.rows_bytes = 0
        if isinstance(entry.answer, ItemAnswer):
            entry.answer = entry.answer._replace(rows=None)


def item_fingerprint(item: WorkItem) -> Hashable:
    """What makes two work items the same call. The item id is the caller's own business and not part of it."""
    tokens = item.tokens.tobytes()
    if len(tokens) >= DIGEST_BYTES:
        tokens = hashlib.blake2b(tokens, digest_size=DIGEST_BYTES).digest()
    return (item.handle, tokens, item.truncate_to, item.output, item.create)


def scope_of(owner: str, handle_id: bytes = b"") -> bytes:
    """Where a caller's request ids are unique: among the calls on one of its sequences, or among its creations."""
    return owner.encode() + b"\0" + handle_id
