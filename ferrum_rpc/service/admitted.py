"""An item of a forward call that was admitted, and how it ends: freed, charged, recorded, whatever happens.

What ends an item may raise, for want of memory above all. That is a bug or worse, and no reason to leave anybody
waiting or a sequence busy: the item is answered with `InternalError`, and the others of its call and its step commit.
"""

from __future__ import annotations

from typing import NamedTuple

from ferrum_rpc.core import ItemOutcome, Span
from ferrum_rpc.errors import ExecutorError, InternalError
from ferrum_rpc.service.books import Books
from ferrum_rpc.service.records import Record
from ferrum_rpc.service.replay import Entry
from ferrum_rpc.service.supervisor import Background
from ferrum_rpc.service.transaction import FAILED


class Admitted(NamedTuple):
    """The item at ``place`` of its call, on its way through a step. ``entry`` is that of the replay log, if it has a
    request id."""

    place: int
    record: Record
    span: Span
    entry: Entry | None


def settle(books: Books, each: Admitted, outcome: ItemOutcome, now: float, *, heard: bool) -> ItemOutcome:
    """The item is over: its sequence is free again, and the duplicates hear of it. ``heard``: the caller still listens,
    which is a sign of life, ``now`` on `time.monotonic`. Returns what the item is answered with; never raises."""
    _, record, span, entry = each
    refused = isinstance(outcome, ExecutorError)
    try:
        record.busy = False
        if span.create and refused:
            books.stillborn(record)
        else:
            if span.create:
                books.born(record)
            books.quotas.settle(record)
            if heard:
                record.touch(now)
            if record.doom is not None:
                books.release([record], record.doom)
        if entry is not None:
            books.replay.finish(entry, outcome)
    except Exception as error:
        books.supervisor.note(Background.CALLBACK, error)
        return lost(books, each, refused=refused)
    return outcome


def lost(books: Books, each: Admitted, *, refused: bool = False) -> InternalError:
    """What ended the item was begun and not done, or not even begun: free its sequence, and tell the duplicates. One
    that the call was to create is released, unless the engine ``refused`` it. Returns what the item is answered with.
    """
    (_, record, span, entry), attempt = each, books.supervisor.attempt
    told = InternalError(FAILED)
    record.busy = False
    if not span.create:
        attempt(books.quotas.settle, record)
        if record.doom is not None:
            attempt(books.release, [record], record.doom)
    elif refused:
        attempt(books.stillborn, record)
    else:
        attempt(books.give_up, [record])
    if entry is not None:
        attempt(books.replay.finish, entry, told)
    return told
