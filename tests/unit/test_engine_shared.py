"""The memory that a server and its engine process share."""

from __future__ import annotations

import os
import select
import signal
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.engine.shared import KEPT_BYTES, PAGE, Arena, Page

SIZE = 64 * PAGE


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * PAGE), st.integers(0, 99)), max_size=60))
def test_what_is_taken_from_the_arena_is_nobody_elses(moves: list[tuple[bool, int, int]]) -> None:
    arena = Arena.create(SIZE)
    held: dict[int, int] = {}
    try:
        for take, count, which in moves:
            if take:
                first = arena.take(count)
                free = SIZE - sum(-(-size // PAGE) * PAGE for size in held.values())
                if first is None:
                    assert held, "an empty arena has room"
                    continue
                assert first % PAGE == 0 and first + count <= SIZE and count <= free
                assert all(first + count <= other or other + size <= first for other, size in held.items())
                held[first] = count
            elif held:
                first = sorted(held)[which % len(held)]
                del held[first]
                arena.give(first)
        for first in list(held):
            arena.give(first)
        assert arena.take(SIZE) == 0, "all of it is one piece again"
    finally:
        os.close(arena.fd)


def test_memory_beyond_what_is_kept_goes_back() -> None:
    arena = Arena.create(4 * KEPT_BYTES)
    first = arena.take(3 * KEPT_BYTES)
    assert first == 0
    np.frombuffer(arena.memory, np.uint8)[: 3 * KEPT_BYTES] = 1
    assert os.stat(arena.fd).st_blocks * 512 >= 3 * KEPT_BYTES
    arena.give(first)
    assert os.stat(arena.fd).st_blocks * 512 <= KEPT_BYTES
    os.close(arena.fd)


def test_a_page_is_one_for_both_and_its_lock_is_held_by_one() -> None:
    page = Page.create(4)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - the other process
        try:
            mine = Page(page.fd, 4)
            with mine.lock:
                mine.states[2], mine.claimed[0], mine.signs[1] = 1, 5, 2.5
                os.write(told, b"x")
                signal.pause()
        finally:
            os._exit(1)
    os.read(ready, 1)
    assert (page.states[2], page.claimed[0], page.signs[1]) == (1, 5, 2.5)
    assert not page.lock.try_enter(), "the other side has it"
    watched: Any = os.pidfd_open(child)
    os.kill(child, signal.SIGKILL)
    assert select.select([watched], [], [], 30)[0]
    os.waitpid(child, 0)
    assert page.lock.try_enter(), "the dead hold nothing"
    page.lock.leave()
    for fd in (watched, ready, told, page.fd):
        os.close(fd)
