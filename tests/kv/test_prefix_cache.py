"""Blocks that are found by their tokens: which hash they have, which goes first, and what they take from nobody."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.core import PrefixUse
from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.sequence import KvMisuse
from tests.support.kv_world import World, everything

SIZE = 4
USE = PrefixUse()


def world(usable: int, *, tier: bool = False) -> World:
    """In which all tokens are alike."""
    return World(usable + 1, SIZE, alphabet=1, tier=tier)


def test_the_block_that_was_released_longest_ago_goes_first_and_ends_before_beginnings():
    there = world(6)
    for sequence, salt in enumerate((b"older", b"newer")):
        there.write(sequence, 3 * SIZE, prefix=PrefixUse(salt))
    older, newer = there.blocks(0), there.blocks(1)
    for sequence in range(2):
        there.release(sequence)
    assert (there.kv.free_blocks, there.kv.state().cached_blocks) == (6, 6)
    for gone in (*older[::-1], *newer[::-1]):
        assert there.kv.prefixes.key_of(gone) is not None
        there.write(10, SIZE)
        assert there.kv.prefixes.key_of(gone) is None and there.blocks(10)[-1] == gone
        there.check()


@pytest.mark.parametrize("ran", [False, True])
def test_a_step_that_found_blocks_and_failed_leaves_no_trace(ran):
    """From the middle of a block on: the one that is full in part comes back."""
    there = world(12).wrote(0, 3 * SIZE, prefix=USE).wrote(1, SIZE + 1, prefix=USE)
    before = everything(there.kv)
    write = there.reserve(1, SIZE + 1, 3 * SIZE)
    assert write.reservation.cached == 2 * SIZE - 1
    if ran:
        there.run(write)
    there.rollback(write)
    assert everything(there.kv) == before
    there.check()
    write = there.reserve(1, SIZE + 1, 3 * SIZE)
    there.finish(write)
    assert there.blocks(1)[:3] == there.blocks(0) and there.kv.free_blocks == 12 - 5
    there.check()


def test_where_the_rest_finds_no_room_nothing_is_taken():
    there = world(6).wrote(0, 2 * SIZE, prefix=USE)
    there.release(0)
    there.write(1, 4 * SIZE)
    with there.exhausted(3, 2):
        there.reserve(2, 0, 3 * SIZE, create=True, prefix=USE)
    assert there.kv.state().cached_blocks == 2
    there.check()


def test_a_promise_holds_where_its_sequence_goes_back_into_what_it_published():
    """Nobody else has those blocks: they are its own again, and need no copy from an empty pool."""
    there = world(9).wrote(0, 3 * SIZE, prefix=USE).promised(0, 4 * SIZE).wrote(0, 2).full()
    there.truncate(0, 3 * SIZE - 1)
    there.full().check()
    there.wrote(0, 4 * SIZE).check()


def test_what_was_promised_is_published_when_the_promise_ends():
    there = world(12).wrote(0, SIZE, ahead=2 * SIZE, prefix=USE).wrote(0, 2 * SIZE)
    for sequence, blocks in ((1, 1), (2, 3)):
        write = there.reserve(sequence, 0, 3 * SIZE + 1, create=True, prefix=USE)
        assert write.reservation.cached == blocks * SIZE
        there.rollback(write)
        there.kv.ensure_capacity(0, 0)
    there.check()


def test_one_that_only_reads_publishes_nothing_and_a_fork_does_as_its_parent():
    there = world(16).wrote(0, 2 * SIZE, prefix=PrefixUse(publishes=False)).forked(0, 1).wrote(1, SIZE)
    assert len(there.kv.prefixes.published()) == 0
    there.wrote(2, SIZE, prefix=USE).forked(2, 3).wrote(3, 2 * SIZE)
    for sequence in range(4):
        there.release(sequence)
    assert there.kv.state().cached_blocks == 3
    there.check()


def test_what_the_tier_has_is_published_piece_by_piece_as_far_as_there_is_room():
    there = world(6, tier=True)
    there.write(0, 5 * SIZE, prefix=USE)
    tokens = there.tokens[0]
    there.release(0)
    there.write(1, 6 * SIZE)  # all blocks
    there.release(1)
    assert there.tier is not None and len(there.tier.there) == 5
    there.fetch(2, tokens, None, 9)
    assert there.kv.state().cached_blocks == 0, "one without the prefix cache finds nothing"
    for expected in (2, 4, 5, 5):
        there.fetch(2, tokens, USE, 2)
        assert there.kv.state().cached_blocks == expected
        there.check()
    there.write(2, 5 * SIZE + 1, prefix=USE)
    assert there.cached == 5 * SIZE
    there.check()
    there.release(2)
    there.write(3, 4 * SIZE)
    there.fetch(4, tokens, USE, 9)
    assert there.kv.state().cached_blocks == 2, "the others are in use"
    there.check()


def test_nothing_is_worth_reading_without_a_checkpoint_or_without_the_cache():
    there = world(6).wrote(0, 3 * SIZE, prefix=USE).wrote(1, SIZE)
    tokens = np.zeros(3 * SIZE, np.int32)
    assert there.kv.reach(2, 0, tokens, USE, lambda key: True)[0] == 3
    assert there.kv.reach(2, 0, tokens, USE, lambda key: False) == (0, b"")
    for sequence in (1, 2):
        assert there.kv.reach(sequence, 0, tokens, None, lambda key: True) == (0, b"")


def test_what_is_forgotten_is_found_no_more_and_its_blocks_are_empty():
    there = world(6).wrote(0, 3 * SIZE, prefix=USE).wrote(1, 2 * SIZE, prefix=PrefixUse(b"salt"))
    there.release(0)
    there.kv.prefixes.forget()
    there.check()
    assert (there.kv.state().cached_blocks, there.kv.free_blocks) == (0, 4)
    there.write(2, 2 * SIZE + 1, prefix=USE)
    assert there.cached == 0
    there.check()


def test_blocks_of_the_pool_are_not_put_behind_those_of_the_tier():
    """The table would have them in the wrong order."""
    there = world(8, tier=True)
    there.write(0, 3 * SIZE + 1, prefix=USE)
    first = there.blocks(0)[0]
    content, hashed = there.content[there.block_slots(first)].tobytes(), there.kv.prefixes.key_of(first)
    there.truncate(0, 1)
    there.kv.ensure_capacity(0, 1)  # the first block is withdrawn, and those behind it are not
    there.write(0, 1)
    assert there.kv.state().cached_blocks == 2 and there.tier is not None and hashed is not None
    there.tier.there[hashed] = content
    write = there.reserve(1, 0, 3 * SIZE + 1, create=True, prefix=USE)
    assert write.reservation.cached == 0, "a step reads nothing of the tier"
    there.rollback(write)
    there.fetch(2, [0] * 3 * SIZE, USE, 9)
    there.write(2, 3 * SIZE + 1, prefix=USE)
    there.check()
    assert there.cached == 3 * SIZE


@pytest.mark.parametrize("shared", [False, True])
def test_a_sequence_that_went_back_finds_the_block_that_it_stands_in(shared):
    there = world(8).wrote(0, 3 * SIZE, prefix=USE)
    if shared:
        there.fork(0, 1)
    blocks = there.blocks(0)
    there.truncate(0, SIZE + 1)
    before = everything(there.kv)
    write = there.reserve(0, SIZE + 1, 2 * SIZE)
    there.check({0})
    there.rollback(write)
    assert everything(there.kv) == before
    write = there.reserve(0, SIZE + 1, 2 * SIZE)
    assert write.reservation.cached == 2 * SIZE - 1
    there.finish(write)
    assert there.blocks(0)[:3] == blocks
    there.check()


@pytest.mark.parametrize("back", [0, 1])
def test_what_a_fork_published_of_a_promise_takes_no_block_when_the_fork_is_gone(back):
    """The parent filled a block of its promise, and perhaps went back into it since."""
    there = world(8).wrote(0, SIZE, ahead=2 * SIZE, prefix=USE).wrote(0, SIZE).forked(0, 1).wrote(1, SIZE)
    if back:
        there.truncate(0, 2 * SIZE - back)
    there.release(1)
    assert there.kv.free_blocks == 5, "the parent has two blocks and a spare"
    there.check()


@pytest.mark.parametrize("refused", [True, False])
def test_a_fork_that_never_was_publishes_nothing_of_what_its_parent_was_promised(refused):
    there = world(4).wrote(0, SIZE, ahead=SIZE, prefix=USE).wrote(0, SIZE)
    before = everything(there.kv)
    if refused:
        with pytest.raises(KvBlocksExhausted):
            there.reserve(1, 2 * SIZE, 9 * SIZE, create=True, parent=0)
    else:
        there.rollback(there.reserve(1, 2 * SIZE, 1, create=True, parent=0))
    assert everything(there.kv) == before
    assert there.kv.state().cached_blocks == 0


@pytest.mark.parametrize(("hog", "found"), [(3, 3), (5, 2), (6, 1), (7, 0)])
def test_what_is_overwritten_after_a_roll_back_stays_findable_while_there_is_room(hog, found):
    there = World(9, SIZE).wrote(0, 3 * SIZE, prefix=USE)
    old, [first, *_] = list(there.tokens[0]), there.blocks(0)
    there.truncate(0, 2)
    there.write(1, hog * SIZE)
    before, free = everything(there.kv, ordered=False), there.kv.free_blocks
    with there.exhausted(8, free):
        there.reserve(0, 2, 8 * SIZE)
    write = there.reserve(0, 2, 1)
    assert write.reservation.kept == (hog < 7) and (there.blocks(0) == [first]) is (hog == 7)
    there.run(write)
    there.rollback(write)
    assert everything(there.kv, ordered=False) == before
    there.check()
    there.write(0, 1)
    assert there.kv.free_blocks == free, "the old block counts as free"
    there.check()
    there.release(1)
    write = there.reserve(2, 0, 3 * SIZE + 1, create=True, prefix=USE, tokens=[*old, 0])
    assert write.reservation.cached == found * SIZE
    there.rollback(write)


def test_nothing_that_was_promised_or_is_needed_goes_into_a_copy():
    there = World(9, SIZE).wrote(0, 3 * SIZE, prefix=USE)
    there.truncate(0, 2)
    there.wrote(1, 1, ahead=3 * SIZE).full(free=1)
    write = there.reserve(0, 2, SIZE)
    assert write.reservation.kept == 0, "its second block takes the last one"
    there.rollback(write)
    there.kv.ensure_capacity(0, SIZE)
    write = there.reserve(0, 2, 1)
    assert (write.reservation.kept, write.reservation.spares_used) == (0, 0)
    there.finish(write)
    there.check()


ONE, OTHER = (PrefixUse(caller=each) for each in (b"one", b"other"))
IMPORTED = ONE._replace(imported_from=0)


def cached(there: World, use: PrefixUse, tokens: list[int]) -> int:
    write = there.reserve(99, 0, len(tokens) + 1, create=True, prefix=use, tokens=[*tokens, 0])
    found = write.reservation.cached
    there.run(write)
    there.rollback(write)
    there.check()
    return found


def test_what_a_caller_imported_and_what_follows_is_found_by_that_caller_alone():
    there = world(29).wrote(0, 2 * SIZE, prefix=IMPORTED).forked(0, 1).wrote(1, SIZE)
    whole = there.tokens[1]
    for sequence in range(2):
        there.release(sequence)
    assert [cached(there, each, whole) for each in (ONE, OTHER, USE)] == [3 * SIZE, 0, 0]
    there.write(2, 5 * SIZE, prefix=ONE)  # a hit, and two blocks more
    whole = there.tokens[2]
    assert [cached(there, each, whole) for each in (ONE, OTHER)] == [5 * SIZE, 0]
    there.write(3, 5 * SIZE, prefix=OTHER)
    assert there.cached == 3 * SIZE + (3 + 5) * SIZE, "the other caller computed all of it"
    there.write(4, 6 * SIZE, prefix=ONE)  # what was computed comes first
    assert not there.made[there.contents[4][-1]][0] and there.kv.imported_from(4) is None
    assert cached(there, USE, there.tokens[4]) == 6 * SIZE
    with pytest.raises(KvMisuse):
        there.reserve(5, 0, 1, create=True, prefix=PrefixUse(imported_from=0))


def test_a_sequence_is_for_everybody_again_without_what_was_imported():
    there = World(30, SIZE).wrote(0, 2 * SIZE, prefix=USE)
    write = there.reserve(1, 0, 4 * SIZE, create=True, prefix=IMPORTED, tokens=[*there.tokens[0], *range(90, 98)])
    there.finish(write)
    assert there.kv.imported_from(1) == 2 * SIZE, "what was there was not imported"
    there.truncate(1, 2 * SIZE + 1)
    there.write(1, 2 * SIZE)
    assert cached(there, USE, there.tokens[1]) == 2 * SIZE
    there.fork(1, 2, 2 * SIZE)
    there.truncate(1, 2 * SIZE)
    for sequence in (1, 2):
        there.write(sequence, 2 * SIZE)
        assert cached(there, USE, there.tokens[sequence]) == 4 * SIZE


@pytest.mark.parametrize("tier", [False, True])
def test_a_step_that_found_what_was_imported_and_failed_leaves_no_trace(tier):
    there = world(12, tier=tier).wrote(0, 2 * SIZE, prefix=USE)
    write = there.reserve(1, 0, 4 * SIZE, create=True, prefix=IMPORTED)
    there.finish(write)
    there.release(1)
    if tier:
        there.write(2, there.kv.free_blocks * SIZE)
        there.release(2)
    there.write(3, SIZE, prefix=ONE)
    there.fetch(3, [0] * 4 * SIZE, None, 9)
    before = everything(there.kv, ordered=False)
    for kept in (0, 3 * SIZE + 1):
        write = there.reserve(3, SIZE, 4 * SIZE)
        assert write.reservation.cached == 3 * SIZE and write.reservation.imported_before is not None
        there.run(write)
        if kept:
            there.commit(write, kept)
            assert there.kv.imported_from(3) == 2 * SIZE
        else:
            there.rollback(write)
            assert everything(there.kv, ordered=False) == before and there.kv.imported_from(3) is None
        there.check()
