"""Kept counts are those of a sequence's tokens: for any history of steps, failures, drafts, rollbacks and forks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ferrum_rpc.core import PREFIX, TokenArray, TokenCounts
from ferrum_rpc.kv import tokens as kv_tokens
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.tokens import TokenHistory, count_tokens

FED = st.one_of(*[st.lists(st.integers(0, 6), min_size=1, max_size=most) for most in (1, 3, 9)])


def naive(tokens: list[int], counted_from: int) -> dict[int, int]:
    counted = Counter(tokens[counted_from:])
    return {token: counted[token] for token in tokens}


def as_dict(counts: TokenCounts) -> dict[int, int]:
    assert counts.dtype == np.int32 and counts.flags.c_contiguous
    found = dict(counts.tolist())
    assert len(found) == len(counts), "each token once"
    return found


def ids(tokens: list[int]) -> TokenArray:
    return np.array(tokens, np.int32)


class Histories(RuleBasedStateMachine):
    """Sequences whose steps request penalties, or do not. Few tokens, so that prompts are found in the prefix cache."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvManager(200, 2)
        self.tokens: dict[int, list[int]] = {}
        self.next = 0

    @initialize(few=st.sampled_from([0, 2, 64]), counted_from=st.sampled_from([0, 3, 6]))
    def begin(self, few: int, counted_from: int) -> None:
        """Up to ``few`` are counted one by one."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(kv_tokens, "FEW", few)
        self.counted_from = counted_from

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    @rule(
        data=st.data(),
        fed=FED,
        request=st.sampled_from(["penalties"] * 6 + ["others", "none"]),
        rows=st.integers(1, 3),
        ends=st.sampled_from(["commit", "accept", "fail"]),
    )
    def step(self, data: st.DataObject, fed: list[int], request: str, rows: int, ends: str) -> None:
        """A span of one sequence, new or not, perhaps from an earlier position on."""
        sequence = data.draw(st.sampled_from([*[self.next] * (len(self.tokens) < 3), *self.tokens, *self.tokens]))
        held = self.tokens.get(sequence, [])
        start = data.draw(st.sampled_from([len(held), len(held), max(0, len(held) - 2), len(held) // 2]))
        create, prompt = sequence == self.next, ids(fed[:-1]) if len(fed) > 1 else None
        taken = self.kv.reserve(sequence, start, len(fed), create, prefix=PREFIX if create else None, prompt=prompt)
        self.next += create
        left, begin = fed[taken.cached :], start + taken.cached
        if request != "none":
            counted_from = self.counted_from + (request == "others")
            upto = max(1, len(left) - rows + 1)
            counts = self.kv.counts(sequence, begin, counted_from, ids(left[:upto]))
            assert as_dict(counts) == naive(held[:start] + fed[: taken.cached + upto], counted_from)
        if ends == "fail":
            self.kv.rollback(taken)
            return
        stay = fed if ends == "commit" else fed[: taken.cached + 1]
        self.kv.commit(taken, ids(stay))
        self.tokens[sequence] = held[:start] + stay

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([*self.tokens]))
        length = data.draw(st.integers(0, len(self.tokens[sequence])))
        self.kv.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([*self.tokens]))
        at = data.draw(st.integers(0, len(self.tokens[parent])))
        self.kv.fork(parent, self.next, at)
        self.tokens[self.next] = self.tokens[parent][:at]
        self.next += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([*self.tokens]))
        self.kv.release(sequence)
        del self.tokens[sequence]

    @invariant()
    def tokens_are_those(self) -> None:
        assert {each: self.kv.tokens(each).tolist() for each in self.tokens} == self.tokens


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


def test_counts_are_kept_while_every_step_reads_them_and_no_longer(monkeypatch):
    """A decode step counts its own token; one without penalties ends that, and the next one counts anew."""
    history, calls = TokenHistory(), list[int]()
    monkeypatch.setattr(
        kv_tokens, "count_tokens", lambda tokens, start: calls.append(len(tokens)) or count_tokens(tokens, start)
    )
    held = [1, 2, 2, 3] * 100
    history.write(0, ids(held))
    for token in (5, 2, 5, 9):
        assert as_dict(history.counts(len(held), 4, ids([token]))) == naive([*held, token], 4)
        history.write(len(held), ids([token]))
        held.append(token)
    assert calls == [400]
    history.write(len(held), ids([7]))
    held.append(7)
    assert history._kept is None
    assert as_dict(history.counts(len(held), 4, ids([1]))) == naive([*held, 1], 4)
    assert calls == [400, 405]
    history.write(400, ids([6, 6]))  # without penalties, after a step with them that failed
    assert as_dict(history.counts(402, 4, ids([1]))) == naive([*held[:400], 6, 6, 1], 4)
