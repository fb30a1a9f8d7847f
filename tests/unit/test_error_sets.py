"""Every error of the executor is in exactly one of the client's public sets, or needs a reaction of its own."""

from __future__ import annotations

from collections import Counter

import pytest

from ferrum_rpc import client
from ferrum_rpc.client.owner import FULL
from ferrum_rpc.client.retry import REFUSED_BEFORE_RUNNING, fate_unknown
from ferrum_rpc.errors import (
    ERROR_BY_REASON,
    DeviceLost,
    ExecutorError,
    InternalError,
    KvCorrupt,
    StepFailed,
)

SETS = ("CALLER_ERROR", "NO_ANSWER", "NO_CAPACITY", "OUT_OF_STEP", "SEQUENCE_GONE", "TRY_LATER")

IN_NO_SET = {
    StepFailed,  # try again once
    DeviceLost,  # the process ends: prefill elsewhere
    InternalError,  # a bug, of unknown outcome
    KvCorrupt,  # send the cache again, or prefill: its metadata says which
}


def test_every_error_is_in_exactly_one_set_or_in_none_for_a_reason() -> None:
    found = Counter(each for name in SETS for each in getattr(client, name))
    assert not [each for each, count in found.items() if count > 1]
    assert set(found) | IN_NO_SET == set(ERROR_BY_REASON.values()), "a new error needs a set, or a place in IN_NO_SET"
    assert not set(found) & IN_NO_SET


@pytest.mark.parametrize("name", SETS)
def test_the_sets_are_public_and_suit_except_and_isinstance(name: str) -> None:
    classes = getattr(client, name)
    assert name in client.__all__
    for each in classes:
        assert getattr(client, each.__name__) is each, "a program can name each of them"
        try:
            raise each("no")
        except classes as error:
            assert isinstance(error, ExecutorError)


@pytest.mark.parametrize("name", sorted(set(SETS) - {"NO_ANSWER"}))
def test_an_answered_refusal_of_a_set_leaves_no_outcome_unknown(name: str) -> None:
    assert not [each for each in getattr(client, name) if fate_unknown(each("no"))]


def test_the_sets_agree_with_what_the_client_does_itself() -> None:
    passes = {*client.TRY_LATER, *client.NO_ANSWER, *client.OUT_OF_STEP}
    assert set(REFUSED_BEFORE_RUNNING) <= passes, "what may be sent again is not the caller's mistake"
    assert not set(FULL) & {*client.SEQUENCE_GONE, *client.NO_ANSWER}
