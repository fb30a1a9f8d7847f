"""Reserve, then commit or rollback: who may write where, and that nothing is left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ferrum_rpc.core import CacheState
from ferrum_rpc.errors import ExecutorError, KvBlocksExhausted, TruncateBeyondLength
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.pool import NULL_BLOCK, CacheCorrupt
from ferrum_rpc.kv.sequence import KvMisuse
from ferrum_rpc.kv.table import slots_for
from tests.kv.kv_world import World, everything, owned_slots

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


def test_a_token_goes_into_the_last_block_while_there_is_room():
    w = world()
    w.write(A, 3)
    w.write(A, 1)
    assert w.kv.free_blocks == 7
    w.write(A, 1)
    assert w.kv.free_blocks == 6
    w.check()


def test_rolling_back_and_writing_in_one_transaction_overwrites_in_place():
    w = world()
    w.write(A, 10)
    blocks = w.blocks(A)
    write = w.reserve(A, 6, 3)
    assert write.reservation.overwritten.tolist() == [blocks[1] * 4 + 2, blocks[1] * 4 + 3, blocks[2] * 4]
    assert write.reservation.table.tolist() == blocks and write.reservation.copies == ()
    w.run(write)
    w.commit(write)
    assert w.kv.length(A) == 9
    w.check()


def test_only_committed_tokens_are_saved():
    w = world()
    w.write(A, 6)
    overwritten = w.reserve(A, 5, 9).reservation.overwritten
    assert overwritten.dtype == np.int64
    assert overwritten.tolist() == [w.blocks(A)[1] * 4 + 1]


def test_a_shorter_rewrite_frees_the_blocks_beyond_it_at_commit_and_not_before():
    w = world()
    w.write(A, 16)
    write = w.reserve(A, 2, 1)
    assert w.kv.free_blocks == 4
    w.run(write)
    w.commit(write)
    assert (w.kv.length(A), w.kv.free_blocks) == (3, 7)
    w.check()


def test_truncation_frees_whole_blocks_beyond_and_keeps_the_rest():
    w = world()
    w.write(A, 16)
    for length, free in ((15, 4), (12, 5), (9, 5), (1, 7), (0, 8)):
        w.truncate(A, length)
        assert w.kv.free_blocks == free
        w.check()
    w.write(A, 5)
    w.check()


def test_release_and_reset_give_everything_back():
    w = world()
    w.write(A, 10)
    w.fork(A, B, 6)
    w.kv.ensure_capacity(B, 9)
    w.release(A)
    w.release(B)
    assert w.kv.free_blocks == 8
    w.write(A, 10)
    w.kv.reset()
    assert w.kv.state()._replace(prefix_changes=0) == CacheState(4, total_blocks=8, free_blocks=8, sequences=0)
    w.kv.check()


def test_the_null_block_is_in_no_table_and_its_slots_have_no_owner():
    w = world(usable=6)
    w.write(A, 11)
    w.fork(A, B)
    w.write(B, 8)
    assert w.kv.free_blocks == 0
    assert NULL_BLOCK not in w.blocks(A) + w.blocks(B)
    assert not owned_slots(w.kv)[:4].any()


def test_a_slot_is_owned_up_to_the_length_of_its_sequence():
    w = world()
    w.write(A, 6)
    w.fork(A, B, 5)
    w.kv.ensure_capacity(A, 20)
    owned = owned_slots(w.kv)
    assert owned.shape == (9 * 4,) and owned.dtype == np.bool_
    assert np.flatnonzero(owned).tolist() == slots_for(np.array(w.blocks(A), np.int32), 0, 6, 4).tolist()


# --- sharing --------------------------------------------------------------------------------------------------------


def test_a_fork_takes_no_blocks_and_copies_nothing():
    w = world()
    w.write(A, 10)
    w.fork(A, B)
    w.fork(A, C, 5)
    w.fork(C, D, 0)
    assert w.kv.free_blocks == 5
    assert w.blocks(B) == w.blocks(A) and w.blocks(C) == w.blocks(A)[:2] and w.blocks(D) == []
    w.check()


def test_writing_behind_a_shared_block_copies_it_once():
    w = world()
    w.write(A, 6)
    w.fork(A, B)
    tail = w.blocks(A)[1]
    reservation = w.write(B, 1)
    assert reservation.copies == ((tail, w.blocks(B)[1]),) and w.blocks(B)[1] != tail
    assert w.write(B, 1).copies == ()
    assert w.write(A, 1).copies == (), "the last holder writes in place"
    assert w.blocks(A)[1] == tail
    w.check()


def test_truncate_into_shared_tail_copies_on_next_write():
    w = world()
    w.write(A, 12)
    w.fork(A, B)
    w.truncate(B, 6)
    shared = w.blocks(A)[1]
    assert w.write(B, 4).copies == ((shared, w.blocks(B)[1]),)
    w.check()
    w.truncate(A, 5)
    assert w.write(A, 1).copies == ()
    w.check()


def test_rewriting_into_a_shared_block_copies_only_what_stays():
    w = world()
    w.write(A, 12)
    w.fork(A, B)
    write = w.reserve(B, 6, 6)
    old, new = w.blocks(A), write.reservation.table.tolist()
    assert write.reservation.copies == ((old[1], new[1]),), "the third block is rewritten from its first slot on"
    assert new[0] == old[0] and new[2] != old[2]
    assert write.reservation.overwritten.size == 0, "nothing is overwritten in place"
    w.run(write)
    w.commit(write)
    w.check()
    assert w.reserve(A, 8, 4).reservation.copies == ()


def test_a_shared_block_that_is_rewritten_from_its_start_is_not_copied():
    w = world()
    w.write(A, 8)
    w.fork(A, B)
    reservation = w.write(B, 2, start=4)
    assert reservation.copies == ()
    assert w.blocks(B)[1] != w.blocks(A)[1]
    w.check()


def test_a_rewrite_across_shared_and_private_blocks_saves_only_the_private_ones():
    w = world()
    w.write(A, 8)
    w.fork(A, B)
    w.write(B, 6)
    write = w.reserve(B, 5, 9)
    blocks = write.reservation.table.tolist()
    assert write.reservation.copies == ((w.blocks(A)[1], blocks[1]),)
    assert write.reservation.overwritten.tolist() == slots_for(write.reservation.table, 8, 14, 4).tolist()
    w.run(write)
    w.rollback(write)
    w.check()


def test_two_forks_behind_one_block_in_one_step_both_copy_it():
    w = world()
    w.write(A, 6)
    w.fork(A, B)
    tail = w.blocks(A)[1]
    step = [w.reserve(A, 6, 1), w.reserve(B, 6, 1)]
    targets = [write.reservation.copies[0][1] for write in step]
    assert [write.reservation.copies[0][0] for write in step] == [tail, tail]
    assert len({tail, *targets}) == 3
    w.run(*step)
    for write in step:
        w.commit(write)
    w.check()
    assert w.kv.free_blocks == 5, "nobody holds the old block any more"


@pytest.mark.parametrize("first_ends", ["commit", "rollback"])
@pytest.mark.parametrize("second_ends", ["commit", "rollback"])
def test_forks_that_end_differently_do_not_disturb_each_other(first_ends, second_ends):
    w = world()
    w.write(A, 6)
    w.fork(A, B)
    first, second = w.reserve(A, 6, 1), w.reserve(B, 5, 3)
    w.run(first, second)
    getattr(w, first_ends)(first)
    w.check(pinned={B})
    w.check_forward(second)
    getattr(w, second_ends)(second)
    w.check()


def test_what_an_open_reservation_replaced_is_nobodys_to_write():
    w = world()
    w.write(A, 6)
    w.fork(A, B)
    tail = w.blocks(A)[1]
    replaced = w.reserve(A, 6, 1)
    assert w.reserve(B, 6, 1).reservation.copies[0][0] == tail, "B's is the only table with it, and still it copies"
    w.run(replaced)
    w.rollback(replaced)
    assert w.blocks(A)[1] == tail


def test_a_copy_source_outlives_the_release_of_its_other_holder():
    w = world(usable=3)
    w.write(A, 6)
    w.fork(A, B)
    write = w.reserve(A, 6, 1)
    w.release(B)
    assert w.kv.free_blocks == 0
    with pytest.raises(KvBlocksExhausted):
        w.reserve(C, 0, 1, create=True)
    w.run(write)
    w.commit(write)
    assert w.kv.free_blocks == 1
    w.check()


# --- nothing is left behind -----------------------------------------------------------------------------------------


def crowded() -> World:
    """Two forks behind a shared tail, spares, and two free blocks."""
    w = world(usable=9)
    w.write(A, 10)
    w.fork(A, B)
    w.write(B, 3)
    w.kv.ensure_capacity(B, 6)
    w.fork(B, C)
    assert w.kv.free_blocks == 2
    return w


def test_exhaustion_changes_nothing_and_says_what_is_missing():
    w = crowded()
    before = everything(w.kv)
    for sequence, start, count, needed in ((A, 10, 12, 3), (C, 0, 13, 4), (B, 13, 18, 3), (D, 0, 100, 25)):
        with pytest.raises(KvBlocksExhausted) as refusal:
            w.kv.reserve(sequence, start, count, create=sequence == D)
        assert refusal.value.metadata == {"needed_blocks": str(needed), "free_blocks": "2"}
        assert everything(w.kv) == before
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


def test_a_step_that_is_rolled_back_from_its_end_leaves_no_trace():
    w = crowded()
    before = everything(w.kv)
    step = [w.reserve(B, 11, 4), w.reserve(A, 9, 2), w.reserve(D, 0, 4, create=True)]
    w.run(*step)
    for write in reversed(step):
        w.rollback(write)
    assert everything(w.kv) == before
    w.check()


def test_rolling_back_a_creation_leaves_no_sequence():
    w = world()
    write = w.reserve(A, 0, 5, create=True)
    w.rollback(write)
    with pytest.raises(KvMisuse, match="does not exist"):
        w.kv.length(A)
    assert w.kv.state().sequences == 0
    w.write(A, 5)
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
        patch.setattr("ferrum_rpc.kv.manager.slots_for", out_of_memory)
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
    w = world()
    w.write(A, 5)
    w.write(B, 5)
    write = w.reserve(A, 5, 4)
    before = everything(w.kv)
    with pytest.raises(KvMisuse):
        touch(w.kv)
    assert everything(w.kv) == before
    w.run(write)
    w.commit(write)
    w.check()


def test_a_commit_of_a_part_forgets_the_rest_and_frees_its_blocks():
    w = world()
    w.write(A, w.size)
    w.fork(A, B, w.size - 1)
    for sequence, start in ((A, w.size), (B, w.size - 1), (A, 1)):  # behind it, into what is shared, and far back
        write = w.reserve(sequence, start, 3 * w.size + 2)
        w.run(write)
        w.commit(write, 2)
        w.check()
        assert w.kv.length(sequence) == start + 2 and len(w.blocks(sequence)) == -(-(start + 2) // w.size)
    assert w.kv.total_blocks - w.kv.free_blocks == len({*w.blocks(A), *w.blocks(B)})


def test_a_commit_of_a_part_keeps_what_was_promised():
    w = world()
    w.write(A, 1)
    w.kv.ensure_capacity(A, 2 * w.size)
    held = len(w.blocks(A)) + len(w.spares(A))
    write = w.reserve(A, 1, 3 * w.size)
    w.run(write)
    w.commit(write, 1)
    w.check()
    assert len(w.blocks(A)) + len(w.spares(A)) == held
    w.write(B, w.kv.free_blocks * w.size)
    w.write(A, 2 * w.size - 1)


@pytest.mark.parametrize("first", ["commit", "rollback"])
@pytest.mark.parametrize("second", ["commit", "rollback"])
def test_a_reservation_is_closed_once(first, second):
    w = world()
    w.write(A, 5)
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
    w = world()
    w.write(A, 5)
    w.write(B, 1)
    before = everything(w.kv)
    with pytest.raises(KvMisuse) as defect:
        misuse(w.kv)
    assert not isinstance(defect.value, ExecutorError)
    assert everything(w.kv) == before


def test_truncation_and_fork_never_grow_and_say_how_long_the_sequence_is():
    w = world()
    w.write(A, 5)
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
        (lambda kv: kv._pool._references.__setitem__(1, 7), "block 1 has 7 references and 3 holders"),
        (lambda kv: kv._pool._free.pop(), "times in the free list"),
        (lambda kv: kv._sequences[A].table.cut(1), "sequence 1 of 10 tokens has 1 blocks, not 3"),
        (lambda kv: kv._sequences[A].table.__setitem__(0, 2), "sequence 1 holds a block twice"),
        (lambda kv: kv._sequences[A].table.__setitem__(0, 0), "sequence 1 holds an invalid block"),
        (lambda kv: kv._sequences[A].table.__setitem__(0, 99), "sequence 1 holds an invalid block"),
        (lambda kv: kv._pool.release(kv._sequences[B].spares[:1]) or kv._sequences[B].spares.pop(0), "was promised"),
        (lambda kv: kv._pool.acquire(np.array(kv._sequences[B].spares)), "references and"),
        (lambda kv: setattr(kv._sequences[C], "length", 17), "sequence 3 of 17 tokens"),
        (lambda kv: kv._sequences[C].spares.extend(kv._sequences[B].spares), "references and"),
        (lambda kv: kv._sequences.pop(C), "references and"),
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
    state = w.kv._sequences[A]
    w.kv.reserve(A, 10, 1)
    w.kv.check()
    state.open.start = 0
    with pytest.raises(CacheCorrupt, match="is to write block 1, which is shared"):
        w.kv.check()


# --- where the blocks lie does not matter -----------------------------------------------------------------------------


def history(order: list[int] | None) -> tuple[list[list[int]], list[int], list[tuple[int, ...]]]:
    """A long random life over the pool of ``order``: all content, every free count, every shape of a reservation."""
    choice, w = random.Random(7), World(41, 4, order)
    free, shapes = [], []
    for sequence in range(1, 400):
        action = choice.choice(["new", "fork", "write", "write", "write", "rewrite", "truncate", "release"])
        known = sorted(w.tokens)
        one = choice.choice(known) if known else 0
        try:
            if action == "new" or not known:
                w.write(sequence, choice.randint(1, 9))
            elif action == "fork":
                w.fork(one, sequence, choice.randint(0, len(w.tokens[one])))
            elif action == "truncate":
                w.truncate(one, choice.randint(0, len(w.tokens[one])))
            elif action == "release":
                w.release(one)
            else:
                start = choice.randint(0, len(w.tokens[one])) if action == "rewrite" else None
                r = w.write(one, choice.randint(1, 6), start=start)
                shapes.append((len(r.copies), len(r.overwritten), len(r.table)))
        except KvBlocksExhausted:
            w.release(one)
        free.append(w.kv.free_blocks)
        w.check()
    return [w.tokens[sequence] for sequence in sorted(w.tokens)], free, shapes


def test_permuted_physical_blocks_hold_the_same_content():
    plain = history(None)
    assert max(copies for copies, *_ in plain[2]) == 1 and max(saved for _, saved, _ in plain[2]) > 3
    for seed in range(3):
        assert history(random.Random(seed).sample(range(1, 41), 40)) == plain
