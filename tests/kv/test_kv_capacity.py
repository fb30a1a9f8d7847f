"""What `ensure_capacity` promises is there, whatever the others take."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.sequence import KvMisuse
from tests.kv.kv_world import World, Write, everything

A, B, C, HOG = 1, 2, 3, 99


def world(usable: int = 12, size: int = 4) -> World:
    return World(usable + 1, size)


def hog(w: World) -> None:
    """Somebody takes every block that is left."""
    if w.kv.free_blocks:
        w.write(HOG, w.kv.free_blocks * w.size)
    assert w.kv.free_blocks == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 17])
def test_promised_tokens_find_their_blocks_one_by_one_and_at_once(length, tokens):
    for chunk in (1, max(tokens, 1)):
        w = world()
        w.write(A, length)
        w.kv.ensure_capacity(A, tokens)
        hog(w)
        for _ in range(tokens // chunk):
            w.write(A, chunk)
            w.check()
        assert w.kv.length(A) == length + tokens
        assert w.spares(A) == [], "a kept promise holds nothing back"
        with pytest.raises(KvBlocksExhausted):
            w.write(A, w.size)


def test_spares_are_neither_free_nor_anybody_elses():
    w = world()
    w.write(A, 4)
    w.kv.ensure_capacity(A, 8)
    assert (w.kv.free_blocks, w.kv.total_blocks) == (9, 12)
    assert len(w.spares(A)) == 2
    with pytest.raises(KvBlocksExhausted):
        w.write(B, 10 * w.size)


def test_asking_again_takes_nothing_more():
    w = world()
    w.write(A, 5)
    w.kv.ensure_capacity(A, 8)
    before = everything(w.kv)
    w.kv.ensure_capacity(A, 8)
    assert everything(w.kv) == before


def test_a_later_promise_replaces_the_earlier_and_zero_gives_all_back():
    w = world()
    w.write(A, 4)
    for tokens, spares in ((16, 4), (5, 2), (20, 5), (0, 0)):
        w.kv.ensure_capacity(A, tokens)
        assert len(w.spares(A)) == spares and w.kv.free_blocks == 11 - spares
        w.check()


def test_a_promise_that_cannot_be_kept_is_not_made():
    w = world(usable=4)
    w.write(A, 5)
    w.kv.ensure_capacity(A, 4)
    before = everything(w.kv)
    with pytest.raises(KvBlocksExhausted) as refusal:
        w.kv.ensure_capacity(A, 12)
    assert refusal.value.metadata == {"needed_blocks": "2", "free_blocks": "1"}
    assert everything(w.kv) == before


def test_the_copy_of_a_shared_tail_counts():
    w = world()
    w.write(A, 6)
    w.fork(A, B)
    for sequence in (A, B):
        w.kv.ensure_capacity(sequence, 1)
        assert len(w.spares(sequence)) == 1
    hog(w)
    for sequence in (A, B):
        assert len(w.write(sequence, 1).copies) == 1 - (sequence == B)
    w.check()


def test_a_spare_for_a_copy_that_is_not_needed_any_more_goes_back():
    w = world()
    w.write(A, 6)
    w.fork(A, B)
    w.kv.ensure_capacity(A, 5)
    assert len(w.spares(A)) == 2
    w.release(B)
    w.write(A, 1)
    assert len(w.spares(A)) == 1
    assert w.kv.free_blocks == 9


@pytest.mark.parametrize("end", ["write", "truncate"])
def test_a_spare_for_a_fork_that_went_its_own_way_goes_back_when_the_step_is_over(end):
    w = world()
    w.write(A, 6)
    w.kv.ensure_capacity(A, 2)
    w.fork(A, B)
    assert len(w.spares(A)) == 1
    w.write(B, 1) if end == "write" else w.truncate(B, 4)
    w.kv.trim_spares()
    assert w.spares(A) == []


def test_a_fork_of_a_promised_sequence_keeps_the_promise():
    w = world()
    w.write(A, 6)
    w.kv.ensure_capacity(A, 2)
    assert w.spares(A) == []
    w.fork(A, B)
    assert len(w.spares(A)) == 1 and w.spares(B) == []
    hog(w)
    with pytest.raises(KvBlocksExhausted):
        w.write(B, 1)
    w.write(A, 2)
    w.check()


def test_a_fork_that_would_break_a_promise_is_refused():
    w = world()
    w.write(A, 6)
    w.kv.ensure_capacity(A, 2)
    hog(w)
    before = everything(w.kv)
    with pytest.raises(KvBlocksExhausted) as refusal:
        w.fork(A, B)
    assert refusal.value.metadata == {"needed_blocks": "1", "free_blocks": "0"}
    assert everything(w.kv) == before
    w.fork(A, B, 4)
    w.write(A, 2)
    w.check()


@pytest.mark.parametrize("how", ["truncate", "rewrite"])
@pytest.mark.parametrize("back", [8, 9, 13, 16])
def test_a_promise_holds_for_going_back_into_what_a_fork_shares(how, back):
    w = world()
    w.write(A, 8)
    w.kv.ensure_capacity(A, 8)
    w.write(A, 8)
    w.fork(A, B)
    hog(w)
    if how == "truncate":
        w.truncate(A, back)
    for start in range(back, 16):
        w.write(A, 1, start=start)
        w.check()
    w.write(A, 8, start=8)
    w.check()


def test_a_fork_that_a_promise_has_no_spares_for_is_refused():
    w = world(usable=5)
    w.write(A, 8)
    w.kv.ensure_capacity(A, 8)
    w.write(A, 8)
    before = everything(w.kv)
    with pytest.raises(KvBlocksExhausted) as refusal:
        w.fork(A, B)
    assert refusal.value.metadata == {"needed_blocks": "2", "free_blocks": "1"}
    assert everything(w.kv) == before
    w.fork(A, B, 12)
    w.write(A, 8, start=8)
    w.check()


def test_a_hold_behind_a_promise_takes_copies_of_what_a_fork_shares_between_them():
    for free in (2, 3):
        w = World(7 + free, 1)
        w.write(A, 1, ahead=1)
        w.write(A, 2)
        w.fork(A, B)
        w.write(HOG, w.kv.free_blocks - free)
        if free < 3:  # of the step, of the hold, and of the block behind the promise
            with pytest.raises(KvBlocksExhausted) as refusal:
                w.reserve(A, 3, 1, hold=1)
            assert refusal.value.metadata == {"needed_blocks": "3", "free_blocks": "2"}
            continue
        held = w.reserve(A, 3, 1, hold=1)
        w.run(held)
        w.commit(held)
        assert w.kv.free_blocks == 0
        w.write(A, 1)
        w.check()


def test_what_a_fork_took_for_a_promise_goes_back_with_the_fork():
    w = world()
    w.write(A, 8)
    w.kv.ensure_capacity(A, 8)
    w.write(A, 8)
    w.fork(A, B)
    assert (len(w.spares(A)), w.kv.free_blocks) == (2, 6)
    w.release(B)
    assert (w.spares(A), w.kv.free_blocks) == ([], 8)


@pytest.mark.parametrize("how", ["truncate", "rewrite"])
def test_rejected_drafts_do_not_use_a_promise_up(how):
    w = world()
    w.write(A, 3)
    w.kv.ensure_capacity(A, 14)
    hog(w)
    accepted = 3
    while accepted < 17:
        if how == "truncate":
            w.truncate(A, accepted)
        w.write(A, min(5, 17 - accepted), start=accepted)
        w.check()
        accepted += 1
    assert w.kv.length(A) == 17


def test_truncating_keeps_spares_and_frees_what_was_never_promised():
    w = world()
    w.write(A, 32)
    w.kv.ensure_capacity(A, 8)
    assert (len(w.spares(A)), w.kv.free_blocks) == (2, 2)
    w.truncate(A, 4)
    assert (len(w.spares(A)), w.kv.free_blocks) == (2, 9)
    hog(w)
    w.write(A, 8)
    w.check()


def test_a_promise_is_counted_from_the_lowest_length_since():
    w = world()
    w.write(A, 32)
    w.kv.ensure_capacity(A, 8)
    w.write(A, 5, start=3)
    assert (len(w.spares(A)), w.kv.free_blocks) == (1, 9), "up to 11"
    hog(w)
    w.write(A, 3)
    w.check()


def test_truncation_without_a_promise_keeps_nothing():
    w = world()
    w.write(A, 32)
    w.truncate(A, 4)
    assert w.spares(A) == [] and w.kv.free_blocks == 11


def test_going_back_into_shared_blocks_takes_what_is_free_and_never_fails():
    w = world(usable=5)
    w.write(A, 12)
    w.fork(A, B)
    w.kv.ensure_capacity(A, 4)
    assert len(w.spares(A)) == 1
    w.truncate(A, 6)
    assert len(w.spares(A)) == 2, "a copy and one more"
    w.check()

    w = world(usable=4)
    w.write(A, 12)
    w.fork(A, B)
    w.kv.ensure_capacity(A, 4)
    w.truncate(A, 6)
    assert len(w.spares(A)) == 1, "the fork has the rest"
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
    hog(w)
    w.write(A, 9)
    w.check()
    assert w.spares(A) == []


def test_no_room_ahead_is_no_sequence():
    w = world(usable=4)
    before = everything(w.kv)
    with pytest.raises(KvBlocksExhausted) as refusal:
        w.reserve(A, 0, 6, create=True, ahead=11)
    assert refusal.value.metadata == {"needed_blocks": "5", "free_blocks": "4"}
    assert everything(w.kv) == before


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 12), st.integers(1, 20))
def test_no_history_of_an_unshared_sequence_breaks_its_promise(data, size, length, tokens):
    w = World(41, size)
    w.write(A, length)
    w.kv.ensure_capacity(A, tokens)
    hog(w)
    low = length
    for turn in range(data.draw(st.integers(1, 12))):
        now = w.kv.length(A)
        action = data.draw(st.sampled_from(["write", "write", "fail", "truncate"]))
        back = data.draw(st.integers(0, now))
        start = data.draw(st.sampled_from([now, now, back]))
        if action == "truncate":
            w.truncate(A, back)
            low = min(low, back)
            continue
        count = data.draw(st.integers(0, max(0, low + tokens - start)))
        if not count:
            continue
        write = w.reserve(A, start, count)
        w.run(write)
        if action == "fail":
            w.rollback(write)
        else:
            w.commit(write)
            low = min(low, start)
        w.check()
        if w.kv.free_blocks:
            w.write(HOG + 1 + turn, w.kv.free_blocks * size)


def test_a_write_beyond_the_promise_does_not_use_up_its_copies():
    """A fork shares the promised block, so a spare waits for its copy; what goes behind the promise needs another."""
    w = world(usable=3, size=1)
    w.write(A, 1, ahead=1)
    w.write(A, 1)
    w.fork(A, B)
    assert len(w.spares(A)) == 1 and w.kv.free_blocks == 0
    before = everything(w.kv)
    with pytest.raises(KvBlocksExhausted):
        w.write(A, 1)
    assert everything(w.kv) == before
    w.write(A, 1, start=1)
    w.check()


def promised_behind_a_fork(tokens: int) -> tuple[World, Write]:
    """A was promised ``tokens`` tokens from position 4 on, and has 8; B shares all of them. A writes 4 more."""
    w = world()
    w.write(A, 4)
    w.kv.ensure_capacity(A, tokens)
    w.write(A, 4)
    w.fork(A, B)
    first = w.reserve(A, 8, 4)
    return w, first


def test_the_block_of_a_token_behind_an_open_write_outlives_the_end_of_a_fork():
    """The spare for a block that B shared is surplus at the commit. It is that one that goes."""
    w, first = promised_behind_a_fork(16)
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
    w, first = promised_behind_a_fork(8)
    assert len(w.spares(A)) == 1, "the copy of what B shares"
    before = everything(w.kv)
    with pytest.raises(KvBlocksExhausted):
        w.reserve_next(first)
    assert everything(w.kv) == before
    w.run(first)
    w.commit(first)
    w.check()


@pytest.mark.parametrize("started", [True, False])
def test_only_one_token_is_reserved_behind_an_open_write_that_appends(started):
    w = world()
    w.write(A, 5)
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
        w.run(first)
        w.commit(first)
        w.kv.end_hold(A)
    else:
        w.rollback(first)
    w.check()
