"""The replay log, rule by rule, and against a model that looks at all of it: what is known, whose rows, their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_rpc.core import CreateOptions, HandleRef, ItemAnswer, OutputSpec, Rows, WorkItem
from ferrum_rpc.errors import RequestIdReused, StepFailed
from ferrum_rpc.service.replay import ENTRIES_PER_SEQUENCE, Entry, Key, ReplayLog, item_fingerprint, scope_of
from tests.rows import token_rows

OWNER = "owner"
HANDLE = HandleRef(b"handle", 5, 3)


def answer(rows: int = 0, handle: HandleRef = HANDLE) -> ItemAnswer:
    return ItemAnswer(handle, Rows(token_rows(np.zeros(rows, np.uint32)), 0, rows) if rows else None)


def record(log: ReplayLog, key: Key, request_id: str, rows: int = 0) -> Entry:
    entry = log.begin(log.scope(key), request_id, 0)
    log.finish(entry, answer(rows))
    return entry


def known(log: ReplayLog, key: Key) -> list[str]:
    return [each for each in map(str, range(100)) if log.knows(key, each)]


def test_a_sequence_keeps_its_latest_answers_and_not_those_in_flight() -> None:
    log, key = ReplayLog(1 << 20), scope_of(OWNER, b"one")
    waiting = log.begin(log.scope(key), "0", 0)  # a release that waits for the calls before it
    for number in range(1, 60):
        record(log, key, str(number), rows=2)
    latest = [str(number) for number in range(60 - ENTRIES_PER_SEQUENCE, 60)]
    assert known(log, key) == ["0", *latest[1:]]
    assert log.scope(key)["0"] is waiting
    assert log.bytes == 8 * len(latest[1:])
    log.finish(waiting, ())
    assert known(log, key) == ["0", *latest[1:]]
    record(log, key, "60")
    assert known(log, key) == [*latest[1:], "60"], "what came first goes first, however late its answer was"


def test_creations_are_bounded_by_all_answers_alone() -> None:
    log = ReplayLog(1 << 20, entries=50)
    for number in range(60):
        record(log, scope_of(OWNER, b"", str(number)), str(number))
    assert [each for each in map(str, range(60)) if log.knows(scope_of(OWNER, b"", each), each)] == [
        str(number) for number in range(10, 60)
    ]


def test_the_bound_over_all_takes_the_oldest_answer_of_the_scope_that_was_used_least_recently() -> None:
    log, idle, busy = ReplayLog(1 << 20, entries=6), scope_of(OWNER, b"idle"), scope_of(OWNER, b"busy")
    for number in range(3):
        record(log, busy, str(number))
    for number in range(3):
        record(log, idle, str(number))
    record(log, busy, "3")
    assert (known(log, idle), known(log, busy)) == (["1", "2"], ["0", "1", "2", "3"])
    record(log, busy, "4")
    record(log, busy, "5")
    assert (known(log, idle), known(log, busy)) == ([], ["0", "1", "2", "3", "4", "5"])


def test_a_caller_loses_nothing_to_one_that_has_more() -> None:
    """Rows and answers: what is too much is taken from the caller that has most, whoever came last."""
    log, mine = ReplayLog(40, entries=10), scope_of("small", b"one")
    first = record(log, mine, "0", rows=2)
    for number in range(100):
        record(log, scope_of("large", b"", str(number)), str(number), rows=2)
    assert log.bytes == 40 and known(log, mine) == ["0"]
    assert isinstance(first.answer, ItemAnswer) and first.answer.rows is not None
    assert [each for each in map(str, range(100)) if log.knows(scope_of("large", b"", each), each)] == [
        str(number) for number in range(91, 100)
    ]
    for number in range(1, 5):
        record(log, mine, str(number), rows=2)
    assert known(log, mine) == ["0", "1", "2", "3", "4"], "half is everybody's where there are two"
    assert log.bytes == 40


def test_a_scope_that_is_all_in_flight_is_passed_over() -> None:
    log, waits, other = ReplayLog(1 << 20, entries=1), scope_of(OWNER, b"waits"), scope_of(OWNER, b"other")
    entry = log.begin(log.scope(waits), "0", 0)
    record(log, other, "0")
    record(log, other, "1")
    assert (known(log, waits), known(log, other)) == (["0"], ["1"])
    log.finish(entry, answer())
    assert len(known(log, waits)) + len(known(log, other)) == 1


def test_a_refusal_leaves_nothing() -> None:
    log, key = ReplayLog(1 << 20), scope_of(OWNER, b"one")
    log.finish(log.begin(log.scope(key), "0", 0), StepFailed("it did"))
    assert not log.knows(key, "0") and log.scope(key) is not log.scope(key), "no scope is kept for it either"


def test_the_oldest_rows_go_first_whosever_they_are_and_the_answers_stay() -> None:
    log, keys = ReplayLog(20), [scope_of(OWNER, bytes([number])) for number in range(3)]
    entries = [record(log, key, str(number), rows=2) for number in range(2) for key in keys]
    with_rows = [isinstance(each.answer, ItemAnswer) and each.answer.rows is not None for each in entries]
    assert with_rows == [False, False, False, False, True, True] and log.bytes == 16
    assert all(known(log, key) == ["0", "1"] for key in keys)
    log.forget_rows(keys[2])
    assert log.bytes == 8 and known(log, keys[2]) == ["0", "1"]


def test_other_content_under_a_known_id_is_refused() -> None:
    log, key = ReplayLog(1 << 20), scope_of(OWNER, b"one")
    entry = record(log, key, "0")
    assert log.scope(key)["0"].repeated(0) is entry
    with pytest.raises(RequestIdReused):
        entry.repeated(1)


def test_scopes_are_those_of_one_owner_and_one_sequence_or_creation() -> None:
    keys = [
        scope_of(owner, handle, request_id)
        for owner in ("", "a", "b")
        for handle, request_id in ((b"h", "r"), (b"r", "r"), (b"", "r"), (b"", "h"))
    ]
    assert len(set(keys)) == len(keys)
    assert scope_of("a", b"h", "r") == scope_of("a", b"h", "s") == scope_of("a", b"h")


def test_a_fingerprint_tells_apart_all_that_may_differ_within_a_scope() -> None:
    tokens, spec, plain = np.array([7], np.int32), OutputSpec(), CreateOptions()
    item = WorkItem(1, HANDLE, tokens, None, spec, "id", plain)
    others = [
        item._replace(handle=HANDLE._replace(seq_len=4)),
        item._replace(handle=HANDLE._replace(version=4)),
        item._replace(tokens=np.array([8], np.int32)),
        item._replace(tokens=np.array([7, 7], np.int32)),
        item._replace(tokens=np.arange(100, dtype=np.int32)),
        item._replace(truncate_to=5),
        item._replace(output=OutputSpec(kind=spec.kind.__class__(logprob=True))),
    ]
    new = [
        item._replace(handle=None),
        item._replace(handle=None, tokens=np.array([8], np.int32)),
        item._replace(handle=None, create=CreateOptions(reserve_tokens=1)),
        item._replace(handle=None, create=CreateOptions(lease_id="lease")),
    ]
    assert len({item_fingerprint(each) for each in (item, *others, *new)}) == 1 + len(others) + len(new)
    assert item_fingerprint(item._replace(item_id=2, tokens=tokens.copy())) == item_fingerprint(item)


class Kept:
    """What the log should keep: a list of answers, oldest first, and rows as the serial number of their record."""

    def __init__(self, budget: int, entries: int) -> None:
        self.budget, self.entries, self.serial = budget, entries, 0
        self.owners: dict[str, None] = {}  # by when their first call that is known came
        self.scopes: dict[Key, dict[str, list[int]]] = {}  # the least recently used first; [serial, bytes of rows]

    def record(self, key: Key, request_id: str, size: int) -> None:
        self.owners.setdefault(key[0])
        scope = self.scopes[key] = self.scopes.pop(key, {})
        self.serial += 1
        scope[request_id] = [self.serial, size]
        if len(scope) > ENTRIES_PER_SEQUENCE:
            del scope[next(iter(scope))]
        if sum(map(len, self.scopes.values())) > self.entries:
            owner = self.largest(lambda each: 1)
            first = next(each for each in self.scopes if each[0] == owner)
            del self.scopes[first][next(iter(self.scopes[first]))]
            if not self.scopes[first]:
                del self.scopes[first]
                if not any(key[0] == owner for key in self.scopes):
                    del self.owners[owner]
        while self.bytes > self.budget:
            owner = self.largest(lambda each: each[1])
            kept = [each for key, scope in self.scopes.items() if key[0] == owner for each in scope.values() if each[1]]
            min(kept)[1] = 0

    def largest(self, weight: Callable[[list[int]], int]) -> str:
        """The caller that has most; of several, the one whose first call that is known came first."""
        had = dict.fromkeys(self.owners, 0)
        for key, scope in self.scopes.items():
            had[key[0]] += sum(map(weight, scope.values()))
        return max(had, key=lambda owner: had[owner])

    def all(self) -> Iterator[list[int]]:
        for scope in self.scopes.values():
            yield from scope.values()

    @property
    def bytes(self) -> int:
        return sum(each[1] for each in self.all())


OWNERS = {"a": "x", "b": "x", "c": "y", "d": "z"}
CALLS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.sampled_from(["", "", "", "end"])), max_size=80
)


@settings(deadline=None)
@given(calls=CALLS, budget=st.sampled_from([0, 8, 40, 1 << 20]), entries=st.integers(1, 30))
def test_any_history_keeps_what_the_model_keeps(calls: list[tuple[str, int, str]], budget: int, entries: int) -> None:
    log, kept = ReplayLog(budget, entries), Kept(budget, entries)
    for number, (name, rows, ending) in enumerate(calls):
        key = scope_of(OWNERS[name], name.encode())
        if ending:
            log.forget_rows(key)
            for each in kept.scopes.get(key, {}).values():
                each[1] = 0
            continue
        record(log, key, str(number), rows)
        kept.record(key, str(number), 4 * rows)
        assert log.bytes == kept.bytes
        for each in "abcd":
            here = kept.scopes.get(scope_of(OWNERS[each], each.encode()), {})
            found = log.scope(scope_of(OWNERS[each], each.encode()))
            assert list(found) == list(here)
            for entry, (_, size) in zip(found.values(), here.values(), strict=True):
                assert entry.rows_bytes == size
                assert isinstance(entry.answer, ItemAnswer) and (entry.answer.rows is not None) == (size > 0)
