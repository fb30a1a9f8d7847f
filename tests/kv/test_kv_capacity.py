"""What `ensure_capacity` promises is there, whatever the others take."""

from __future__ import annotations

import pytest

from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.sequence import KvMisuse
from tests.support.kv_world import World, everything

A, B = 1, 2


def world(usable: int = 12, size: int = 4) -> World:
    return World(usable + 1, size)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 17])
def test_promised_tokens_find_their_blocks_one_by_one_and_at_once(length, tokens):
    for chunk in (1, max(tokens, 1)):
        w = world().wrote(A, length).promised(A, tokens).full()
        for _ in range(tokens // chunk):
            w.wrote(A, chunk).check()
        assert w.kv.length(A) == length + tokens
        assert w.spares(A) == [], "a kept promise holds nothing back"
        with pytest.raises(KvBlocksExhausted):
            w.write(A, w.size)


def test_a_later_promise_replaces_the_earlier_and_zero_gives_all_back():
    w = world().wrote(A, 4)
    for tokens, spares in ((16, 4), (5, 2), (20, 5), (0, 0)):
        w.promised(A, tokens).check()
        assert len(w.spares(A)) == spares and w.kv.free_blocks == 11 - spares


@pytest.mark.parametrize("end", ["write", "truncate"])
def test_a_spare_for_a_fork_that_went_its_own_way_goes_back_when_the_step_is_over(end):
    w = world().wrote(A, 6).promised(A, 2).forked(A, B)
    assert len(w.spares(A)) == 1
    w.write(B, 1) if end == "write" else w.truncate(B, 4)
    w.kv.trim_spares()
    assert w.spares(A) == []


@pytest.mark.parametrize(
    ("usable", "length", "promised", "written", "needed", "shared"), [(2, 6, 2, 0, 1, 4), (5, 8, 8, 8, 2, 12)]
)
def test_a_fork_that_a_promise_has_no_spares_for_is_refused(*, usable, length, promised, written, needed, shared):
    """And one of ``shared`` tokens, which takes fewer, is not."""
    w = world(usable).wrote(A, length).promised(A, promised)
    if written:
        w.write(A, written)
    with w.exhausted(needed, needed - 1):
        w.fork(A, B)
    w.forked(A, B, shared).wrote(A, promised, start=length).check()


@pytest.mark.parametrize("how", ["truncate", "rewrite"])
@pytest.mark.parametrize("back", [8, 9, 13, 16])
def test_a_promise_holds_for_going_back_into_what_a_fork_shares(how, back):
    w = world().wrote(A, 8).promised(A, 8).wrote(A, 8).forked(A, B).full()
    if how == "truncate":
        w.truncate(A, back)
    for start in range(back, 16):
        w.wrote(A, 1, start=start).check()
    w.wrote(A, 8, start=8).check()


def test_a_hold_behind_a_promise_takes_copies_of_what_a_fork_shares_between_them():
    for free in (2, 3):
        w = World(7 + free, 1).wrote(A, 1, ahead=1).wrote(A, 2).forked(A, B).full(free)
        if free < 3:  # of the step, of the hold, and of the block behind the promise
            with w.exhausted(3, 2):
                w.reserve(A, 3, 1, hold=1)
            continue
        w.finish(w.reserve(A, 3, 1, hold=1))
        assert w.kv.free_blocks == 0
        w.wrote(A, 1).check()


@pytest.mark.parametrize(
    ("promised", "how", "spares", "free", "end"),
    [(0, "truncate", 0, 11, 4), (8, "truncate", 2, 9, 12), (8, "rewrite", 1, 9, 11)],
)
def test_a_promise_is_counted_from_the_lowest_length_since(promised, how, spares, free, end):
    """It holds up to ``end``, and what it does not cover is free."""
    w = world().wrote(A, 32).promised(A, promised)
    if how == "truncate":
        w.truncate(A, 4)
    else:
        w.write(A, 5, start=3)
    assert (len(w.spares(A)), w.kv.free_blocks) == (spares, free)
    w.full()
    if promised:
        w.write(A, end - w.kv.length(A))
    w.check()


def test_going_back_into_shared_blocks_takes_what_is_free_and_never_fails():
    for usable, spares in ((5, 2), (4, 1)):  # a copy and one more; the fork has the rest
        w = world(usable).wrote(A, 12).forked(A, B).promised(A, 4)
        assert len(w.spares(A)) == 1
        w.truncate(A, 6)
        assert len(w.spares(A)) == spares
        w.check()
    w.write(A, 2)
    with pytest.raises(KvBlocksExhausted):
        w.write(A, 1)


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_sequence_can_be_made_with_room_ahead(ends):
    w = world()
    write = w.reserve(A, 0, 6, create=True, ahead=9)
    assert w.kv.free_blocks == 8
    w.run(write)
    getattr(w, ends)(write)
    if ends == "rollback":
        assert w.kv.free_blocks == 12 and w.kv.state().sequences == 0
        return
    w.write(A, 7)
    w.truncate(A, 6)
    w.full().wrote(A, 9).check()
    assert w.spares(A) == []


def test_a_write_beyond_the_promise_does_not_use_up_its_copies():
    """A fork shares the promised block, so a spare waits for its copy; what goes behind the promise needs another."""
    w = world(usable=3, size=1).wrote(A, 1, ahead=1).wrote(A, 1).forked(A, B)
    assert len(w.spares(A)) == 1 and w.kv.free_blocks == 0
    with w.exhausted(1, 0):
        w.write(A, 1)
    w.wrote(A, 1, start=1).check()


def test_the_block_of_a_token_behind_an_open_write_outlives_the_end_of_a_fork():
    """The spare for a block that B shared is surplus at the commit. It is that one that goes."""
    w = world().wrote(A, 4).promised(A, 16).wrote(A, 4).forked(A, B)
    first = w.reserve(A, 8, 4)
    second = w.reserve_next(first)
    w.run(first)
    w.run(second)
    w.release(B)
    w.commit(first)
    w.check_forward(second)
    w.commit(second)
    w.check()
    assert len(w.blocks(A)) == 4 and len(w.spares(A)) == 1, "the last of 20 tokens"


def test_a_token_behind_an_open_write_takes_no_block_that_was_promised_for_others():
    w = world().wrote(A, 4).promised(A, 8).wrote(A, 4).forked(A, B)
    first = w.reserve(A, 8, 4)
    assert len(w.spares(A)) == 1, "the copy of what B shares"
    with w.exhausted(1, w.kv.free_blocks):
        w.reserve_next(first)
    w.finish(first)
    w.check()


@pytest.mark.parametrize("started", [True, False])
def test_only_one_token_is_reserved_behind_an_open_write_that_appends(started):
    w = world().wrote(A, 5)
    with pytest.raises(KvMisuse):
        w.kv.reserve_next(A)
    back = w.reserve(A, 2, 3)
    with pytest.raises(KvMisuse):
        w.kv.reserve_next(A)
    w.rollback(back)
    first = w.reserve(A, 5, 1, hold=4)
    second = w.reserve_next(first)
    before = everything(w.kv)
    for misuse in (w.reserve_next, w.rollback):
        with pytest.raises(KvMisuse):
            misuse(first)
    assert everything(w.kv) == before
    w.rollback(second)
    if started:
        w.finish(first)
        w.kv.end_hold(A)
    else:
        w.rollback(first)
    w.check()
