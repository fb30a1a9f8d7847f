"""Reserve, then commit or rollback: who may write where, and that nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.core import CacheState
from ferrum_rpc.errors import ExecutorError, TruncateBeyondLength
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.pool import CacheCorrupt
from ferrum_rpc.kv.sequence import KvMisuse
from ferrum_rpc.kv.table import slots_for
from tests.support.inside import free_list, pool_of, sequences
from tests.support.kv_world import World, everything

A, B, C, D = 1, 2, 3, 4


def world(usable: int = 8, size: int = 4) -> World:
    return World(usable + 1, size)


# --- one sequence ---------------------------------------------------------------------------------------------------


def test_a_new_sequence_takes_just_the_blocks_that_its_tokens_need():
    w = world()
    reservation = w.write(A, 9)
    assert reservation.table.tolist() == [1, 2, 3]
    assert reservation.copies == () and reservation.overwritten.size == 0
    assert slots_for(reservation.table, 7, 9, 4).tolist() == [11, 12]
    assert w.kv.state() == CacheState(block_size=4, total_blocks=8, free_blocks=5, sequences=1)


def test_rolling_back_and_writing_in_one_transaction_overwrites_in_place():
    w = world().wrote(A, 10)
    blocks = w.blocks(A)
    write = w.reserve(A, 6, 3)
    assert write.reservation.overwritten.tolist() == [blocks[1] * 4 + 2, blocks[1] * 4 + 3, blocks[2] * 4]
    assert write.reservation.table.tolist() == blocks and write.reservation.copies == ()
    w.finish(write)
    w.check()
    saved = w.reserve(A, 8, 9).reservation.overwritten
    assert (saved.dtype, saved.tolist()) == (np.int64, [blocks[2] * 4]), "only what was committed"


def test_a_shorter_rewrite_frees_the_blocks_beyond_it_at_commit_and_not_before():
    w = world().wrote(A, 16)
    write = w.reserve(A, 2, 1)
    assert w.kv.free_blocks == 4
    w.finish(write)
    assert (w.kv.length(A), w.kv.free_blocks) == (3, 7)
    w.check()


def test_release_and_reset_give_everything_back():
    w = world().wrote(A, 10).forked(A, B, 6).promised(B, 9)
    w.release(A)
    w.release(B)
    assert w.kv.free_blocks == 8
    w.write(A, 10)
    w.kv.reset()
    assert w.kv.state()._replace(prefix_changes=0) == CacheState(4, total_blocks=8, free_blocks=8, sequences=0)
    w.kv.check()


# --- sharing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["truncate", "rewrite"])
@pytest.mark.parametrize(
    ("length", "more", "start", "count", "copied"),
    [(6, 0, 6, 1, [1]), (12, 0, 6, 6, [1]), (8, 0, 4, 2, []), (8, 6, 5, 9, [1])],
    ids=["behind", "the third block from its first slot on", "from a block's start", "across its own blocks"],
)
def test_of_a_block_that_is_shared_what_stays_is_copied_once(*, length, more, start, count, copied, how):
    """B, a fork of A, has written ``more`` tokens of its own; these alone are saved when they are overwritten."""
    w = world().wrote(A, length)
    free = w.kv.free_blocks
    w.fork(A, B)
    assert w.kv.free_blocks == free and w.blocks(B) == w.blocks(A)
    if more:
        w.write(B, more)
    if how == "truncate":
        w.truncate(B, start)
    write = w.reserve(B, start, count)
    old, new = w.blocks(A), write.reservation.table
    assert write.reservation.copies == tuple((old[at], new[at]) for at in copied)
    own = slots_for(new, length, length + more, 4).tolist()
    assert write.reservation.overwritten.tolist() == (own if how == "rewrite" else [])
    w.finish(write)
    w.check()
    assert w.write(B, 1).copies == w.write(A, 1, start=start).copies == (), "the last holder writes in place"
    w.check()


# --- nothing is left behind -----------------------------------------------------------------------------------------


def crowded() -> World:
    """Two forks behind a shared tail, spares, and two free blocks."""
    w = world(usable=9).wrote(A, 10).forked(A, B).wrote(B, 3).promised(B, 6).forked(B, C)
    assert w.kv.free_blocks == 2
    return w


def test_exhaustion_changes_nothing_and_says_what_is_missing():
    w = crowded()
    for sequence, start, count, needed in ((A, 10, 12, 3), (C, 0, 13, 4), (B, 13, 18, 3), (D, 0, 100, 25)):
        with w.exhausted(needed, 2):
            w.kv.reserve(sequence, start, count, create=sequence == D)
    w.check()


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(
    ("sequence", "start", "count"), [(A, 10, 1), (A, 3, 4), (B, 13, 2), (B, 13, 9), (B, 9, 8), (C, 13, 4), (D, 0, 5)]
)
def test_rollback_leaves_no_trace(sequence, start, count, has_run):
    w = crowded()
    before = everything(w.kv)
    write = w.reserve(sequence, start, count, create=sequence == D)
    assert everything(w.kv) != before
    if has_run:
        w.run(write)
    w.rollback(write)
    assert everything(w.kv) == before
    w.check()


def test_an_operation_that_runs_out_of_memory_changes_nothing(monkeypatch):
    w = crowded()
    before = everything(w.kv)

    def out_of_memory(*_):
        raise MemoryError

    for name in ("ferrum_rpc.kv.table.BlockTable.make_room", "ferrum_rpc.kv.pool.BlockPool.allocate"):
        with monkeypatch.context() as patch:
            patch.setattr(name, out_of_memory)
            for sequence, start, count in ((A, 10, 4), (C, 5, 9), (D, 0, 1)):
                with pytest.raises(MemoryError):
                    w.kv.reserve(sequence, start, count, create=sequence == D)
                assert everything(w.kv) == before
    with monkeypatch.context() as patch:
        patch.setattr("ferrum_rpc.kv.reservations.slots_for", out_of_memory)
        with pytest.raises(MemoryError):
            w.kv.reserve(B, 11, 5)
        assert everything(w.kv) == before


# --- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "touch",
    [
        lambda kv: kv.reserve(A, 5, 1),
        lambda kv: kv.truncate(A, 5),
        lambda kv: kv.fork(A, C),
        lambda kv: kv.ensure_capacity(A, 1),
        lambda kv: kv.release(A),
        lambda kv: kv.reset(),
        lambda kv: kv.reserve(A, 0, 1, create=True),
        lambda kv: kv.fork(B, A),
    ],
)
def test_an_open_reservation_pins_its_sequence(touch):
    w = world().wrote(A, 5).wrote(B, 5)
    write = w.reserve(A, 5, 4)
    before = everything(w.kv)
    with pytest.raises(KvMisuse):
        touch(w.kv)
    assert everything(w.kv) == before
    w.finish(write)
    w.check()


def test_a_commit_of_a_part_keeps_what_was_promised():
    w = world().wrote(A, 1).promised(A, 8)
    held = len(w.blocks(A)) + len(w.spares(A))
    write = w.reserve(A, 1, 12)
    w.run(write)
    w.commit(write, 1)
    w.check()
    assert len(w.blocks(A)) + len(w.spares(A)) == held
    w.full().write(A, 7)


@pytest.mark.parametrize("first", ["commit", "rollback"])
@pytest.mark.parametrize("second", ["commit", "rollback"])
def test_a_reservation_is_closed_once(first, second):
    w = world().wrote(A, 5)
    for sequence in (A, B):
        reservation = w.kv.reserve(sequence, 0, 9, create=sequence == B)
        close = {
            "commit": lambda r=reservation: w.kv.commit(r, np.arange(9)),
            "rollback": lambda r=reservation: w.kv.rollback(r),
        }
        for count in (0, 10):  # none, or more than were reserved: it stays open
            with pytest.raises(KvMisuse):
                w.kv.commit(reservation, np.arange(count))
        close[first]()
        with pytest.raises(KvMisuse):
            close[second]()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda kv: kv.reserve(9, 0, 1),
        lambda kv: kv.truncate(9, 0),
        lambda kv: kv.fork(9, C),
        lambda kv: kv.fork(A, B),
        lambda kv: kv.fork(A, A),
        lambda kv: kv.fork(A, C, -1),
        lambda kv: kv.truncate(A, -1),
        lambda kv: kv.ensure_capacity(9, 0),
        lambda kv: kv.ensure_capacity(A, -1),
        lambda kv: kv.release(9),
        lambda kv: kv.length(9),
        lambda kv: kv.reserve(A, 6, 1),
        lambda kv: kv.reserve(A, -1, 1),
        lambda kv: kv.reserve(A, 5, 0),
        lambda kv: kv.reserve(C, 1, 1, create=True),
        lambda kv: kv.reserve(C, 0, 1, create=True, ahead=-1),
        lambda kv: kv.reserve(A, 5, 1, ahead=1),
    ],
)
def test_a_broken_rule_is_a_defect_and_never_a_refusal(misuse):
    w = world().wrote(A, 5).wrote(B, 1)
    before = everything(w.kv)
    with pytest.raises(KvMisuse) as defect:
        misuse(w.kv)
    assert not isinstance(defect.value, ExecutorError)
    assert everything(w.kv) == before


def test_truncation_and_fork_never_grow_and_say_how_long_the_sequence_is():
    w = world().wrote(A, 5)
    for grow in (lambda: w.kv.truncate(A, 6), lambda: w.kv.fork(A, B, 6)):
        with pytest.raises(TruncateBeyondLength) as refusal:
            grow()
        assert refusal.value.number("seq_len") == 5
    assert w.kv.state().sequences == 1


def test_a_block_holds_at_least_one_token():
    with pytest.raises(ValueError, match="0"):
        KvManager(4, 0)


# --- the audit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda kv: free_list(pool_of(kv)).pop(), "times in the free list"),
        (lambda kv: sequences(kv)[A].table.cut(1), "sequence 1 of 10 tokens has 1 blocks, not 3"),
        (lambda kv: sequences(kv)[A].table.__setitem__(0, 2), "sequence 1 holds a block twice"),
        (lambda kv: sequences(kv)[A].table.__setitem__(0, 0), "sequence 1 holds an invalid block"),
        (lambda kv: sequences(kv)[A].table.__setitem__(0, 99), "sequence 1 holds an invalid block"),
        (lambda kv: pool_of(kv).release(sequences(kv)[B].spares[:1]) or sequences(kv)[B].spares.pop(0), "was promised"),
        (lambda kv: pool_of(kv).acquire(np.array(sequences(kv)[B].spares)), "references and"),
        (lambda kv: setattr(sequences(kv)[C], "length", 17), "sequence 3 of 17 tokens"),
        (lambda kv: sequences(kv)[C].spares.extend(sequences(kv)[B].spares), "references and"),
        (lambda kv: sequences(kv).pop(C), "references and"),
    ],
)
def test_check_names_what_is_wrong(tamper, message):
    w = crowded()
    w.kv.check()
    tamper(w.kv)
    with pytest.raises(CacheCorrupt, match=message):
        w.kv.check()


def test_check_finds_a_write_into_a_shared_block():
    w = crowded()
    state = sequences(w.kv)[A]
    w.kv.reserve(A, 10, 1)
    w.kv.check()
    state.open.start = 0
    with pytest.raises(CacheCorrupt, match="is to write block 1, which is shared"):
        w.kv.check()
