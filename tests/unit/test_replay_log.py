"""The replay log, rule by rule, and against a model that looks at all of it: what is known, whose rows, their
bytes, and nothing of the step that weighs anything; and what a fingerprint tells apart, and that it is small."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.core import (
    Accept,
    CreateOptions,
    Follow,
    FullLogits,
    Greedy,
    HandleRef,
    HiddenStates,
    ItemAnswer,
    NextToken,
    OutputKind,
    OutputSpec,
    Positions,
    PrefixUse,
    RowDType,
    RowLogprobs,
    Rows,
    Run,
    Sample,
    SelectedTokens,
    TopTokens,
    WorkItem,
)
from ferrum_rpc.errors import RequestIdReused, StepFailed
from ferrum_rpc.service.fingerprints import digest, item_fingerprint
from ferrum_rpc.service.replay import (
    CREATION_BYTES,
    ENTRIES_PER_SEQUENCE,
    HANDLE_BYTES,
    PLAIN_BYTES,
    ROWS_BYTES,
    SAMPLE_BYTES,
    SHARED_BYTES,
    Entry,
    Key,
    ReplayLog,
    scope_of,
)
from tests.support.rows import logit_rows, token_rows

OWNER = "owner"
HANDLE = HandleRef(b"handle", 5, 3)
STEP = PLAIN_BYTES + len("00") + "".__sizeof__()
"""What the record of a step with an id of two characters takes."""


def rows_of(count: int) -> int:
    """What so many rows of tokens take."""
    return ROWS_BYTES + 4 * count


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
    assert log.rows == rows_of(2) * len(latest[1:])
    log.finish(waiting, ())
    assert known(log, key) == ["0", *latest[1:]]
    record(log, key, "60")
    assert known(log, key) == [*latest[1:], "60"], "what came first goes first, however late its answer was"


def test_creations_are_bounded_by_all_answers_alone() -> None:
    log = ReplayLog(1 << 20, 50 * (STEP + CREATION_BYTES))
    for number in range(60):
        record(log, scope_of(OWNER, b"", str(number)), str(number))
    assert [each for each in map(str, range(60)) if log.knows(scope_of(OWNER, b"", each), each)] == [
        str(number) for number in range(10, 60)
    ]


def test_an_answer_of_many_handles_counts_as_what_it_takes() -> None:
    """A fork of 128 is 24 kB: as many of them as of steps would be gigabytes."""
    log, key = ReplayLog(0, 100 * STEP), scope_of(OWNER, b"one")
    for number in range(10):
        log.finish(log.begin(log.scope(key), str(number), 0), (HANDLE,) * 128)
        assert log.bytes <= 100 * STEP
    assert known(log, key) == ["8", "9"]
    assert log.bytes == log.records == 2 * (STEP - 1 + 128 * HANDLE_BYTES)


def test_a_scope_that_is_all_in_flight_is_passed_over() -> None:
    log, waits, other = ReplayLog(1 << 20, STEP), scope_of(OWNER, b"waits"), scope_of(OWNER, b"other")
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


ITEMS = 32


def kept_of(log: ReplayLog, rows: Rows) -> Rows:
    """Record an answer; the rows that a retry would get."""
    entry = log.begin(log.scope(scope_of(OWNER, b"one")), "id", 0)
    log.finish(entry, ItemAnswer(HANDLE, rows))
    assert isinstance(entry.answer, ItemAnswer) and entry.answer.rows is not None
    return entry.answer.rows


@pytest.mark.parametrize("of_the_step", [1, ITEMS])
def test_a_recorded_row_of_logits_does_not_keep_the_steps_rows_alive(of_the_step: int) -> None:
    step = np.arange(ITEMS * 512, dtype=np.float32).reshape(ITEMS, 512)
    alive, expected = weakref.ref(step), step[0].tobytes()
    log = ReplayLog(1 << 30)
    kept = kept_of(log, Rows(logit_rows(step[:of_the_step]), 0, 1))
    del step
    assert alive() is None
    assert kept.block["logits"].tobytes() == expected
    assert log.rows == ROWS_BYTES + len(expected)


@pytest.mark.parametrize("sequences", [1, 2, SHARED_BYTES // 4, SHARED_BYTES])
def test_a_recorded_token_is_the_sequences_own_and_counts_for_itself_alone(sequences: int) -> None:
    step = token_rows(np.arange(sequences, dtype=np.uint32))
    log = ReplayLog(1 << 30)
    kept = kept_of(log, Rows(step, sequences - 1, 1))
    assert kept.block["token_ids"][kept.first : kept.first + kept.count].tolist() == [sequences - 1]
    assert log.rows == ROWS_BYTES + 4
    assert kept.block.nbytes <= SHARED_BYTES


TOKENS, PLAIN = np.array([7], np.int32), CreateOptions()
MASKS = (b"a" * 32, b"b" * 32)
DRAWN = Accept(Sample(seed=1), [[1, 2]], [[0.5, 0.5]])


def of(kind: OutputKind, **fields: Any) -> WorkItem:
    return WorkItem(1, HANDLE, TOKENS, None, OutputSpec(kind=kind), "id", PLAIN, **fields)


def new(**create: Any) -> WorkItem:
    return of(Greedy())._replace(handle=None, create=CreateOptions(**create))


def running(*stops: int) -> WorkItem:
    return of(Greedy(), run=Run(8, stops))


DIFFERENT: dict[str, list[WorkItem]] = {
    "where it stands": [
        of(Greedy()),
        of(Greedy())._replace(handle=HANDLE._replace(seq_len=4)),
        of(Greedy())._replace(handle=HANDLE._replace(version=4)),
        of(Greedy())._replace(truncate_to=5),
        of(Greedy())._replace(create=CreateOptions(fork=True)),
        of(Greedy())._replace(create=CreateOptions(fork=True), handle=HANDLE._replace(id=b"another")),
        of(Greedy(), follow=Follow(feed_chosen=True)),
        of(Greedy())._replace(handle=None),
    ],
    "tokens": [of(Greedy())._replace(tokens=np.array(each, np.int32)) for each in ([7], [8], [7, 7], range(100))],
    "outputs": [
        *map(of, [Greedy(), Greedy(logprob=True), TopTokens(1), TopTokens(2), FullLogits(), HiddenStates()]),
        *map(of, [FullLogits(RowDType.F16), HiddenStates(RowDType.F16), Sample(), Sample(seed=0), Sample(seed=1)]),
        *map(of, [NextToken(), NextToken(1), NextToken(following_token=1), Sample(top_k=1), Sample(top_p=0.5)]),
        of(Greedy())._replace(output=OutputSpec(Positions.ALL)),
        of(SelectedTokens((1,)))._replace(output=OutputSpec(Positions.ALL, SelectedTokens((1,)))),
    ],
    "selected tokens": [of(SelectedTokens(each)) for each in ((1, 23), (12, 3), (1, 2, 3), (3, 2, 1), (123,))],
    "log-probabilities": [
        of(kind(logprobs=RowLogprobs(top_k, ids)))
        for kind in (Greedy, Sample, NextToken)
        for top_k in (0, 5)
        for ids in ((), (5,), (5, 5), (5, 6))
        if top_k or ids
    ],
    "biases": [
        of(Sample(bias=each)) for each in ((), ((1, 0.5),), ((1, 0.5), (2, 0.5)), ((2, 0.5), (1, 0.5)), ((1, 1.0),))
    ],
    "masks": [
        *[of(Sample(mask=each)) for each in (b"", *MASKS)],
        *[of(Sample(row_masks=each)) for each in (MASKS, MASKS[::-1], (*MASKS, b""), (b"", *MASKS))],
        of(Sample(row_masks=(b"".join(MASKS),))),
    ],
    "runs": [
        *[of(Greedy(), run=run) for run in (None, Run(8), Run(9))],
        *[running(*stops) for stops in ((1,), range(20), range(1, 21))],
    ],
    "drafts": [
        *map(of, [Accept(), Accept(Sample()), Accept(Sample(seed=1)), Accept(Sample(bias=((1, 0.5),))), DRAWN]),
        *map(of, [Accept(Sample(seed=1), [[2, 1]], [[0.5, 0.5]]), Accept(Sample(seed=1), [[1, 2]], [[0.25, 0.75]])]),
        *map(of, [Accept(None, [[1], [2]], [[1.0], [1.0]]), Accept(None, [[1, 2]], [[1.0, 1.0]])]),
    ],
    "options": [
        new(),
        *[new(reserve_tokens=1), new(lease_id="lease"), new(adapter="lease"), new(prefix=None)],
        *[new(prefix=PrefixUse(b"a"), adapter="b"), new(prefix=PrefixUse(b"ab")), new(prefix=PrefixUse(b"ab", False))],
        *[new(prefix=PrefixUse(b"a" * 1024)), new(prefix=PrefixUse(b"a" * 1023 + b"b"))],
    ],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_fingerprint_tells_apart_all_that_may_differ_within_a_scope(name: str) -> None:
    items = DIFFERENT[name]
    assert len({item_fingerprint(each) for each in items}) == len(items)
    for each in items:
        again = copy.deepcopy(each)._replace(item_id=2, request_id="another")
        assert item_fingerprint(again) == item_fingerprint(each)


def size_of(value: object) -> int:
    """Bytes of a value with all that it refers to."""
    size = sys.getsizeof(value)
    if isinstance(value, tuple):
        return size + sum(map(size_of, value))
    names = [each.name for each in fields(value)] if is_dataclass(value) else []
    return size + sum(size_of(getattr(value, name)) for name in names)


@pytest.mark.parametrize(
    "item",
    [
        new(prefix=PrefixUse(b"s" * 900_000), adapter="a" * 256, lease_id="l" * 49),
        of(SelectedTokens(tuple(range(1000, 5096)))),
        of(Greedy(logprobs=RowLogprobs(256, tuple(range(1000, 5096))))),
        of(NextToken(logprobs=RowLogprobs(256, tuple(range(1000, 5096))))),
        of(Sample(bias=tuple((1000 + each, each / 3) for each in range(512)), row_masks=MASKS * 100)),
        of(Accept(Sample(bias=((1, 0.5),) * 512, seed=1 << 63), np.ones((64, 64), np.uint32), np.ones((64, 64)))),
        running(*range(1000, 1256)),
        of(Greedy())._replace(tokens=np.arange(1 << 20, dtype=np.int32)),
        of(Sample(0.7, 50, 0.9, 0.1, seed=1 << 63, presence_penalty=0.1, mask=MASKS[0])),
    ],
    ids=["salt", "selected", "logprobs", "scores", "biases and masks", "draft", "stop ids", "tokens", "sample"],
)
def test_a_fingerprint_is_small_whatever_the_item_holds(item: WorkItem) -> None:
    assert size_of(item_fingerprint(item)) <= PLAIN_BYTES + SAMPLE_BYTES


FLOATS = st.sampled_from([-0.0, 0.0, 0.5])
IDS = st.lists(st.integers(0, 300), max_size=3).map(tuple)
BESIDE = st.none() | st.builds(RowLogprobs, st.integers(0, 1), IDS)
OUTPUTS = st.builds(
    OutputSpec,
    st.sampled_from(Positions),
    st.builds(Greedy, st.booleans(), BESIDE)
    | st.builds(SelectedTokens, IDS)
    | st.builds(NextToken, st.integers(0, 1), st.none() | st.integers(0, 1), BESIDE)
    | st.builds(
        Sample,
        temperature=FLOATS,
        bias=st.lists(st.tuples(st.integers(0, 1), FLOATS), max_size=2).map(tuple),
        seed=st.none() | st.integers(0, 1),
        logprobs=BESIDE,
        row_masks=st.lists(st.sampled_from([b"", *MASKS]), max_size=2).map(tuple),
    ),
)


@given(one=OUTPUTS, other=OUTPUTS)
def test_outputs_have_one_digest_exactly_where_they_are_equal(one: OutputSpec, other: OutputSpec) -> None:
    assert (digest(one) == digest(other)) == (one == other)
    assert digest(copy.deepcopy(one)) == digest(one)


class Kept:
    """What the log should keep: a list of answers, oldest first, and rows as the serial number of their record."""

    def __init__(self, budget: int, records: int) -> None:
        self.budget, self.records, self.serial = budget, records, 0
        self.owners: dict[str, None] = {}  # by when their first call that is known came
        self.scopes: dict[Key, dict[str, list[int]]] = {}  # the least recently used first; [serial, rows, the rest]

    def record(self, key: Key, request_id: str, size: int) -> None:
        self.owners.setdefault(key[0])
        scope = self.scopes[key] = self.scopes.pop(key, {})
        self.serial += 1
        scope[request_id] = [self.serial, size, STEP - 2 + len(request_id)]
        if len(scope) > ENTRIES_PER_SEQUENCE:
            del scope[next(iter(scope))]
        while sum(each[2] for each in self.all()) > self.records:
            owner = self.largest(lambda each: each[2])
            first = next(each for each in self.scopes if each[0] == owner)
            del self.scopes[first][next(iter(self.scopes[first]))]
            if not self.scopes[first]:
                del self.scopes[first]
                if not any(key[0] == owner for key in self.scopes):
                    del self.owners[owner]
        while self.rows > self.budget:
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
    def rows(self) -> int:
        return sum(each[1] for each in self.all())


OWNERS = {"a": "x", "b": "x", "c": "y", "d": "z"}
CALLS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.sampled_from(["", "", "", "end"])),
    min_size=15,  # the longer, the more has to go
    max_size=80,
)


@given(
    calls=CALLS, budget=st.sampled_from([0, rows_of(2), 3 * rows_of(3), 1 << 20]), records=st.integers(STEP, 12 * STEP)
)
def test_any_history_keeps_what_the_model_keeps(calls: list[tuple[str, int, str]], budget: int, records: int) -> None:
    log, kept = ReplayLog(budget, records), Kept(budget, records)
    for number, (name, rows, ending) in enumerate(calls):
        key = scope_of(OWNERS[name], name.encode())
        if ending:
            log.forget_rows(key)
            for each in kept.scopes.get(key, {}).values():
                each[1] = 0
            continue
        record(log, key, str(number), rows)
        kept.record(key, str(number), rows_of(rows) if rows else 0)
        assert (log.rows, log.bytes) == (kept.rows, kept.rows + sum(each[2] for each in kept.all()))
        for each in "abcd":
            here = kept.scopes.get(scope_of(OWNERS[each], each.encode()), {})
            found = log.scope(scope_of(OWNERS[each], each.encode()))
            assert list(found) == list(here)
            for entry, (_, size, _) in zip(found.values(), here.values(), strict=True):
                assert entry.rows_bytes == size
                assert isinstance(entry.answer, ItemAnswer) and (entry.answer.rows is not None) == (size > 0)
