"""Blocks are handed out once, counted right and found again."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.kv.pool import NULL_BLOCK, BlockPool, CacheCorrupt
from tests.support.inside import free_list, references


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def test_the_null_block_is_never_handed_out_and_does_not_count():
    pool = BlockPool(9)
    assert (pool.num_blocks, pool.total_blocks, pool.free_blocks) == (9, 8, 8)
    blocks = pool.allocate(8)
    assert sorted(blocks) == list(range(1, 9))
    assert NULL_BLOCK not in blocks


def test_allocation_is_all_or_nothing():
    pool = BlockPool(5)
    assert pool.allocate(5) is None
    assert pool.free_blocks == 4
    assert len(pool.allocate(4)) == 4
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="-1"):
        pool.allocate(-1)


@pytest.mark.parametrize("order", [None, [3, 1, 4, 2]])
def test_a_fresh_pool_hands_out_blocks_in_its_order(order):
    pool = BlockPool(5, order)
    expected = order or [1, 2, 3, 4]
    assert pool.allocate(3) == expected[:3]
    assert pool.allocate(1) == expected[3:]
    pool.reset()
    assert pool.allocate(4) == expected


@pytest.mark.parametrize("order", [[], [1, 2], [0, 1, 2, 3], [1, 2, 3, 3, 4], [1, 2, 3, 5]])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ValueError, match="order"):
        BlockPool(5, order)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks):
    with pytest.raises(ValueError, match="null block"):
        BlockPool(num_blocks)


def test_a_freed_block_is_the_next_one_out():
    pool = BlockPool(9)
    first, second, third = pool.allocate(3)
    pool.release([second])
    assert pool.allocate(1) == [second]
    pool.release([third, first])
    assert pool.allocate(2) == [third, first]


def test_a_block_is_its_single_holders_to_write_and_free_when_its_last_reference_goes():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    assert pool.is_writable(block)
    pool.acquire(ids(block))
    assert not pool.is_writable(block)
    pool.release([block])
    assert pool.is_writable(block) and pool.free_blocks == 2
    pool.release([block])
    assert pool.free_blocks == 3


def test_a_free_block_cannot_be_shared_or_released_and_nothing_changes_then():
    pool = BlockPool(5)
    held = pool.allocate(2)
    for broken in (pool.acquire, pool.release):
        with pytest.raises(CacheCorrupt, match="a free block"):
            broken(ids(held[0], 4))
    assert pool.free_blocks == 2
    assert references(pool).tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda pool: free_list(pool).append(0), "null block"),
        (lambda pool: references(pool).__setitem__(0, 1), "null block"),
        (lambda pool: references(pool).__setitem__(1, 2), "block 1 has 2 references and 1 holders"),
        (lambda pool: references(pool).__setitem__(3, 1), "block 3 has 1 references and 0 holders"),
        (lambda pool: free_list(pool).append(2), "block 2 has 1 references and is 1 times in the free list"),
        (lambda pool: free_list(pool).append(4), "block 4 has 0 references and is 2 times in the free list"),
        (lambda pool: free_list(pool).pop(), "block 3 has 0 references and is 0 times in the free list"),
    ],
)
def test_check_names_what_is_wrong(tamper, message):
    pool = BlockPool(5)
    pool.allocate(2)
    tamper(pool)
    with pytest.raises(CacheCorrupt, match=message):
        pool.check(np.array([0, 1, 1, 0, 0], np.int32))
