"""The table is a list of blocks that an array program can read without a copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.kv.table import BlockTable, blocks_for, slots_for


@given(st.lists(st.one_of(st.lists(st.integers(1, 10**9), max_size=20), st.integers(0, 40))))
def test_a_table_behaves_like_a_list(actions):
    table, expected = BlockTable(), []
    for action in actions:
        if isinstance(action, list):
            table.extend(action)
            expected += action
        else:
            assert table.cut(action) == expected[action:]
            del expected[action:]
        assert len(table) == len(expected)
        assert table.view(len(table)).tolist() == table.whole.tolist() == expected
        assert [table[index] for index in range(len(table))] == expected


def test_views_are_int32_show_what_is_set_and_the_whole_follows_the_storage():
    table = BlockTable(np.arange(1, 9, dtype=np.int32))
    view = table.view(8)
    assert view.dtype == np.int32 and table.whole is table.whole
    table[7] = 1234
    assert view[7] == table.whole[7] == 1234
    table.make_room(1000)
    table[7] = 5678
    assert table.whole[7] == 5678


@pytest.mark.parametrize("index", [-1, 3, 7])
def test_entries_that_do_not_exist_cannot_be_reached(index):
    table = BlockTable(np.array([4, 5, 6], np.int32))
    with pytest.raises(IndexError):
        table[index]
    with pytest.raises(IndexError):
        table[index] = 1


def test_appending_moves_the_storage_a_logarithmic_number_of_times():
    table, moves, storage = BlockTable(), 0, None
    for block in range(1, 20_001):
        table.extend([block])
        moves += storage is not table.view(1).base
        storage = table.view(1).base
    assert moves <= 13


def test_room_that_was_made_is_not_moved_again():
    table = BlockTable()
    table.make_room(1000)
    view = table.view(1000)
    table.extend(list(range(1, 1001)))
    assert view.tolist() == list(range(1, 1001))


@given(st.data(), st.integers(1, 7), st.integers(0, 40))
def test_slots_are_block_times_size_plus_offset(data, size, end):
    blocks = blocks_for(end, size)
    assert (blocks - 1) * size < end <= blocks * size or end == blocks == 0
    table = data.draw(st.lists(st.integers(1, 2**31 - 1), min_size=blocks, max_size=blocks + 3))
    start = data.draw(st.integers(0, end))
    skip = data.draw(st.lists(st.integers(0, blocks), unique=True))
    slots = slots_for(np.array(table, np.int32), start, end, size, skip)
    assert slots.dtype == np.int64
    expected = [table[p // size] * size + p % size for p in range(start, end) if p // size not in skip]
    assert slots.tolist() == expected
