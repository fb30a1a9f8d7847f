"""Every error of the executor is in exactly one of the client's public sets, or needs a reaction of its own."""

from __future__ import annotations

from collections import Counter

from ferrum_rpc import client
from ferrum_rpc.client.owner import FULL
from ferrum_rpc.client.retry import REFUSED_BEFORE_RUNNING
from ferrum_rpc.errors import ERROR_BY_REASON, DeviceLost, InternalError, KvCorrupt, StepFailed

SETS = ("CALLER_ERROR", "NO_ANSWER", "NO_CAPACITY", "OUT_OF_STEP", "SEQUENCE_GONE", "TRY_LATER")

IN_NO_SET = {
    StepFailed,  # try again once
    DeviceLost,  # the process ends: prefill elsewhere
    InternalError,  # a bug, of unknown outcome
    KvCorrupt,  # send the cache again, or prefill: its metadata says which
}


def test_every_error_is_in_exactly_one_set_or_in_none_for_a_reason() -> None:
    assert all(type(getattr(client, name)) is tuple for name in SETS), "for `except` and `isinstance`"
    found = Counter(each for name in SETS for each in getattr(client, name))
    assert not [each for each, count in found.items() if count > 1]
    assert set(found) | IN_NO_SET == set(ERROR_BY_REASON.values()), "a new error needs a set, or a place in IN_NO_SET"
    assert not set(found) & IN_NO_SET


def test_the_sets_agree_with_what_the_client_does_itself() -> None:
    passes = {*client.TRY_LATER, *client.NO_ANSWER, *client.OUT_OF_STEP}
    assert set(REFUSED_BEFORE_RUNNING) <= passes, "what may be sent again is not the caller's mistake"
    assert not set(FULL) & {*client.SEQUENCE_GONE, *client.NO_ANSWER}
