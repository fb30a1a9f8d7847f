"""Blocks behind a window: any history of steps, forks, truncations and imports, against a plain list of tokens.

A slot's number says of which tokens it is (`kv_world`). What a step reads are the slots of its window, and no others:
each of them must be there, and right. Whatever a sequence lacks is fed again, as `engine.feeding` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ferrum_rpc.core import PrefixUse, blocks_held
from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.sequence import KvMisuse
from ferrum_rpc.kv.table import slots_for
from ferrum_rpc.kv.windows import Window
from ferrum_rpc.prefix_hash import chained, root_of
from tests.support.inside import sequences
from tests.support.kv_world import GARBAGE, World, Write, everything

CALLERS = (b"one", b"other")
USES = (
    *3 * (PrefixUse(),),
    *(PrefixUse(caller=each) for each in CALLERS),
    PrefixUse(b"salt"),
    PrefixUse(publishes=False),
    None,
)
UNSEEN = -2
"""What a step may not look at."""


class WindowWorld(World):
    """A `World` of a model in which each token sees the last ``window`` positions. ``fed``: tokens fed again."""

    def __init__(self, num_blocks: int, size: int, window: int, free: int, alphabet: int | None = None, **more: Any):
        super().__init__(num_blocks, size, alphabet=alphabet, window=Window(window, free), **more)
        self.window, self.fed = window, 0

    def run(self, *writes: Write) -> None:
        self.save_leaving()
        for source, target in [pair for write in writes for pair in write.reservation.copies]:
            self.content[self.block_slots(target)] = self.content[self.block_slots(source)]
        for write in writes:
            write.saved = self.content[write.reservation.overwritten]
        for write in writes:
            r = write.reservation
            written = r.start + r.cached
            seen = self.seen(r.sequence, (write.base + write.tokens)[:written], r.table)
            write.content = self._followed(r.sequence, seen, write)
            self.content[slots_for(r.table, written, r.end, self.size)] = write.content[written:]

    def seen(self, sequence: int, tokens: list[int], table: np.ndarray) -> list[int]:
        """What the next token sees, behind ``tokens``: all of it is there, and was made for them."""
        first = max(0, len(tokens) - self.window + 1)
        found = [self._number(table, place) for place in range(first, len(tokens))]
        self._check_those(sequence, tokens, first, found)
        return [UNSEEN] * first + found

    def _number(self, table: np.ndarray, place: int) -> int:
        block = int(table[place // self.size])
        assert block, f"the block of position {place} is gone"
        return int(self.content[block * self.size + place % self.size])

    def _check_those(self, sequence: int, tokens: list[int], first: int, found: list[int]) -> None:
        for place, number in enumerate(found, first):
            assert number != GARBAGE
            caller, salt, made_for = self.made[number]
            assert (salt, made_for) == (self.salts[sequence], tuple(tokens[: place + 1]))
            assert caller in (b"", self.callers[sequence]), "what another caller imported"

    def _followed(self, sequence: int, content: list[int], write: Write) -> list[int]:
        content, tokens, salt = list(content), write.base + write.tokens, self.salts[sequence]
        for place in range(len(content), len(tokens)):
            window = [each for each in content[-self.window + 1 :] if each != UNSEEN] if self.window > 1 else []
            imported = write.imported or any(self.made[number][0] for number in window)
            caller = self.callers[sequence] if imported else b""
            made_for = tuple(tokens[: place + 1])
            key = object() if write.imported else (caller, salt, made_for, tuple(window) if imported else ())
            number = self._numbers.setdefault(key, len(self.made))
            if number == len(self.made):
                self.made.append((caller, salt, made_for))
            content.append(number)
        return content

    def fetch_window(self, sequence: int, start: int, most: int = 99) -> int:
        """What the runner does before a step that goes back. Returns how many blocks came."""
        fetched = self.kv.fetch_window(sequence, start, most)
        self.take_fetched(fetched, most)
        return len(fetched)

    def feed(self, sequence: int, start: int, piece: int = 3) -> None:
        """What the engine does before a span that begins at ``start``."""
        while self.kv.missing(sequence, start):
            first = self.kv.take_up(sequence, start)
            assert self.kv.length(sequence) == len(self.tokens[sequence])
            if first == start:
                continue
            tokens = self.tokens[sequence][first : min(start, first + piece)]
            reservation = self.kv.reserve(sequence, first, len(tokens))
            write = Write(reservation, tokens, self.tokens[sequence][:first])
            self.run(write)
            assert self.kv.commit(reservation, np.array(tokens, np.int32), again=True) == first + len(tokens)
            self.fed += len(tokens)

    def reserve(self, sequence: int, start: int, count: int, create: bool = False, *how: Any, **more: Any) -> Write:
        if not create:
            self.feed(sequence, start)
        return super().reserve(sequence, start, count, create, *how, **more)

    def fork_in_a_step(self, parent: int, child: int, at: int, count: int) -> Write:
        """What the engine does with a span that is to create ``child``. One that is refused leaves nothing."""
        if self.kv.missing(parent, at):
            try:
                self.kv.begin_fork(parent, child, at)
                self.tokens[child] = self.tokens[parent][:at]
                self.salts[child], self.callers[child] = self.salts[parent], self.callers[parent]
                self.feed(child, at)
            except KvBlocksExhausted:
                self.kv.end_begun()
                raise
            finally:
                self.tokens.pop(child, None)
        return super().reserve(child, at, count, True, parent=parent)

    def bring(self, sequence: int, tokens: list[int], prefix: PrefixUse | None, sent_from: int = 0) -> Write:
        """An import: its numbers come from elsewhere, from the window of its last token on, and from ``free`` tokens
        before that if they are sent."""
        ids = np.array(tokens, np.int32)
        taken = self.kv.reserve(sequence, 0, len(tokens), True, prefix=prefix, prompt=ids, sent_from=sent_from)
        needed = max(0, len(tokens) - self.window + 1) // self.size * self.size
        assert taken.cached >= min(needed, sent_from)
        self.salts[sequence] = ("own", sequence) if prefix is None else prefix.salt
        self.callers[sequence] = b"" if prefix is None else prefix.caller
        imported = prefix is not None and prefix.imported_from is not None
        write = Write(taken, tokens, [], imported=imported)
        self.save_leaving()
        write.saved = np.zeros(0)
        write.content = self._followed(sequence, [UNSEEN] * taken.cached, write)
        self.content[slots_for(taken.table, taken.cached, taken.end, self.size)] = write.content[taken.cached :]
        return write

    def check(self, pinned: set[int] | frozenset[int] = frozenset()) -> None:
        self.kv.check()
        self._spoil(pinned)
        for sequence, tokens in self.tokens.items():
            if sequence in pinned:
                continue
            state = sequences(self.kv)[sequence]
            assert self.kv.length(sequence) == len(tokens)
            assert self.kv.tokens(sequence).tolist() == tokens
            first, table = self.kv.held_from(sequence), np.array(self.blocks(sequence), np.int32)
            assert not self.kv.missing(sequence, state.length), "what it has can be used"
            self._check_those(
                sequence, tokens, first, [self._number(table, place) for place in range(first, state.length)]
            )

    def held(self, sequence: int) -> int:
        """Blocks that a sequence has."""
        return sum(block != 0 for block in self.blocks(sequence)) + len(self.spares(sequence))


class WindowMachine(RuleBasedStateMachine):
    @initialize(
        usable=st.integers(8, 40),
        size=st.integers(1, 4),
        window=st.integers(1, 9),
        free=st.integers(0, 6),
        alphabet=st.sampled_from([1, 1, 2]),
        tier=st.booleans(),
    )
    def start(self, usable, size, window, free, alphabet, tier):  # noqa: PLR0917
        self.world = WindowWorld(usable + 1, size, window, free, alphabet, tier=tier)
        self.kv, self.sequences, self.free = self.world.kv, 0, free
        self.promised: set[int] = set()
        self.open: list[Write] = []

    def new(self) -> int:
        self.sequences += 1
        return self.sequences

    @property
    def pinned(self) -> set[int]:
        return {write.reservation.sequence for write in self.open}

    def idle(self, data) -> int:
        idle = sorted(set(self.world.tokens) - self.pinned)
        assume(idle)
        return data.draw(st.sampled_from(idle), label="sequence")

    def finish(self, data, write: Write) -> None:
        """Or it fails, or stays open over other operations."""
        then = data.draw(st.sampled_from(["commit", "commit", "part", "fail", "stay"]), label="then")
        if then == "stay":
            self.open.append(write)
        elif then == "fail":
            self.world.rollback(write)
        else:
            self.world.run(write)
            r = write.reservation
            least = max(1, r.cached + 1)
            kept = len(write.tokens) if then == "commit" else data.draw(st.integers(least, len(write.tokens)))
            self.world.commit(write, kept)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data):
        write = self.open.pop(data.draw(st.integers(0, len(self.open) - 1), label="which"))
        self.world.run(write)
        self.world.commit(write)

    @rule(data=st.data(), use=st.sampled_from(USES), count=st.integers(1, 40), ahead=st.sampled_from([0, 0, 0, 3]))
    def create(self, data, use, count, ahead):
        tokens, sequence = self.world.draw(count), self.new()
        self.world.fetch(sequence, tokens, use, data.draw(st.integers(0, 2), label="blocks of the tier"))
        try:
            write = self.world.reserve(sequence, 0, count, True, ahead=ahead, prefix=use, tokens=tokens)
        except KvBlocksExhausted:
            return
        self.promised |= {sequence} if ahead else set()
        self.finish(data, write)

    @rule(data=st.data(), count=st.sampled_from([1, 1, 1, 2, 5, 20]), back=st.sampled_from([0, 0, 0, 1, 4, 15, 99]))
    def feed(self, data, count, back):
        """Behind its tokens, or some way back in the same step; a prompt may be found."""
        sequence = self.idle(data)
        length = len(self.world.tokens[sequence])
        start, tokens = max(0, length - back), self.world.draw(count)
        try:
            write = self.world.reserve(sequence, start, count, tokens=tokens)
        except KvBlocksExhausted:
            return
        self.finish(data, write)

    @rule(data=st.data(), tokens=st.integers(1, 9), back=st.sampled_from([0, 0, 7]), fails=st.booleans())
    def run_of_tokens(self, data, tokens, back, fails):
        """Its steps follow each other before they are committed, and what it holds is there."""
        world, sequence = self.world, self.idle(data)
        start = max(0, len(world.tokens[sequence]) - back)
        try:
            write = world.reserve(sequence, start, 1, hold=tokens)
        except KvBlocksExhausted:
            return
        if fails:
            world.rollback(write)
            return
        world.run(write)
        if start < self.kv.length(sequence):
            world.commit(write)
            write = world.reserve(sequence, start + 1, 1)
            world.run(write)
            tokens -= 1
        for _ in range(tokens):
            behind = world.reserve_next(write)
            world.run(behind)
            world.commit(write)
            write = behind
        world.commit(write)
        self.kv.end_hold(sequence)

    @rule(data=st.data(), few=st.integers(1, 6), end=st.booleans())
    def verify_and_reject(self, data, few, end):
        """To go back within a step of few tokens is free."""
        sequence, few = self.idle(data), min(few, self.free)
        assume(few)
        length = len(self.world.tokens[sequence])
        try:
            self.world.write(sequence, few)
        except KvBlocksExhausted:
            return
        back = length if end else data.draw(st.integers(length, length + few), label="length")
        self.world.truncate(sequence, back)
        assert not self.kv.missing(sequence, back)

    @rule(data=st.data(), most=st.integers(1, 3))
    def fetch(self, data, most):
        """For a span or a fork that there may never be."""
        sequence = self.idle(data)
        start, known = data.draw(st.integers(0, len(self.world.tokens[sequence])), label="start"), self.world.fed
        self.world.fetch_window(sequence, start, most)
        assert self.world.fed == known

    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.idle(data)
        self.world.truncate(sequence, data.draw(st.integers(0, len(self.world.tokens[sequence])), label="length"))

    @rule(data=st.data())
    def fork(self, data):
        parent, child = self.idle(data), self.new()
        at, before = data.draw(st.integers(0, len(self.world.tokens[parent])), label="at"), everything(self.kv)
        try:
            self.world.fork(parent, child, at)
        except KvBlocksExhausted:
            assert everything(self.kv) == before

    @rule(data=st.data(), count=st.integers(1, 6))
    def fork_in_a_step(self, data, count):
        parent, child = self.idle(data), self.new()
        at = data.draw(st.integers(0, len(self.world.tokens[parent])), label="at")
        before = everything(self.kv)
        try:
            write = self.world.fork_in_a_step(parent, child, at, count)
        except KvBlocksExhausted:
            assert everything(self.kv)["sequences"].keys() == before["sequences"].keys()
            return
        self.finish(data, write)

    @rule(data=st.data(), use=st.sampled_from(USES), count=st.integers(1, 30), forged=st.booleans())
    def bring(self, data, use, count, forged):
        tokens = self.world.draw(count)
        if forged and use is not None:
            use = use._replace(caller=data.draw(st.sampled_from(CALLERS)), imported_from=0)
        try:
            write = self.world.bring(self.new(), tokens, use, data.draw(st.integers(0, count), label="sent from"))
        except KvBlocksExhausted:
            return
        if data.draw(st.booleans(), label="broken"):
            self.world.rollback(write)
        else:
            self.world.commit(write)

    @rule(data=st.data(), tokens=st.sampled_from([0, 0, 1, 7]))
    def promise(self, data, tokens):
        sequence = self.idle(data)
        try:
            self.kv.ensure_capacity(sequence, tokens)
        except KvBlocksExhausted:
            return
        self.promised = self.promised - {sequence} | ({sequence} if tokens else set())

    @rule(data=st.data())
    def release(self, data):
        sequence = self.idle(data)
        self.world.release(sequence)
        self.promised.discard(sequence)

    @precondition(lambda self: self.kv.free_blocks)
    @rule()
    def everything_is_evicted(self):
        hog = self.new()
        hog_blocks = self.kv.free_blocks
        self.world.write(hog, hog_blocks * self.kv.block_size)
        self.world.release(hog)

    @invariant()
    def what_is_there_is_right(self):
        if hasattr(self, "world"):
            self.world.check(self.pinned)

    @invariant()
    def a_sequence_has_no_more_blocks_than_its_window_needs(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        kept = Window(world.window, self.free).kept
        for sequence in set(world.tokens) - self.pinned - self.promised:
            length = sequences(self.kv)[sequence].length
            last = len(world.tokens[sequence]) - length
            assert world.held(sequence) <= blocks_held(length, length, world.size, kept) or last, "behind its window"

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.end(self.open)


WindowMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEveryHistory = WindowMachine.TestCase


# --- one by one -------------------------------------------------------------------------------------------------------

SIZE, WINDOW, FREE = 4, 8, 4


def world(usable: int = 100, **how: Any) -> WindowWorld:
    return WindowWorld(usable + 1, SIZE, WINDOW, FREE, **how)


def found(of: WindowWorld, tokens: list[int], prefix: PrefixUse | None = PrefixUse()) -> int:  # noqa: B008 - a constant
    """How many of ``tokens`` a new sequence finds."""
    write = of.reserve(99, 0, len(tokens), True, prefix=prefix, tokens=tokens)
    cached = write.reservation.cached
    of.finish(write)
    of.release(99)
    return cached


def test_a_long_sequence_holds_the_blocks_of_its_window():
    each = world()
    each.write(1, 300, prefix=PrefixUse())
    assert each.held(1) == (WINDOW - 1 + FREE) // SIZE + 1
    for _ in range(20):
        each.write(1, 1)
        assert each.held(1) <= (WINDOW - 1 + FREE) // SIZE + 2
    assert each.kv.free_blocks == each.kv.total_blocks - each.held(1), "the others count as free"


def test_what_lies_behind_a_window_is_found_until_its_place_is_needed():
    each = world(usable=20)
    each.write(1, 60, prefix=PrefixUse())
    tokens = each.tokens[1]
    assert found(each, tokens[:30]) == 28
    each.write(2, 4 * each.kv.free_blocks)
    assert found(each, tokens[:30]) == 0


def test_a_prompt_is_found_without_the_blocks_before_its_window():
    """They were given up first, and are evicted first."""
    each = world(usable=20)
    each.write(1, 60, prefix=PrefixUse())
    tokens = each.tokens[1]
    each.write(2, 4 * (each.kv.free_blocks - 2))
    gone = [place for place, key in enumerate(hashes_of(each, tokens)) if each.kv.prefixes.block_of(key, b"") is None]
    assert gone, "some are evicted"
    each.release(2)
    assert found(each, [*tokens, 7]) == 60


def hashes_of(each: WindowWorld, tokens: list[int]) -> list[bytes]:
    root = root_of(bytes(32), PrefixUse().salt, "")
    return list(chained(root, np.array(tokens, np.int32), each.size))


@pytest.mark.parametrize("length", [60, 57, 56, 51, 31, 30, 28, 5, 4, 0])
@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("prefix", [PrefixUse(), None])
def test_a_truncation_feeds_again_what_is_not_found(length, evicted, prefix):
    each = world(usable=30)
    each.write(1, 60, prefix=prefix)
    if evicted:
        each.write(2, 4 * each.kv.free_blocks)
        each.release(2)
    each.truncate(1, length)
    assert each.kv.length(1) == length
    each.write(1, 1)
    free = length >= 60 - FREE
    known = prefix is not None and not evicted
    assert each.fed == (0 if free or known else length)
    assert each.kv.take_recomputed(1) == each.fed and each.kv.take_recomputed(1) == 0
    each.check()


@pytest.mark.parametrize(("length", "fed"), [(57, 0), (31, 3), (28, 0), (5, 1)])
@pytest.mark.parametrize("at_once", [False, True])
def test_what_the_tier_has_of_a_window_is_not_fed_again(length, fed, at_once):
    """And of that no more than the window needs. A step that goes back at once finds a block that its end is in."""
    each = world(usable=30, tier=True)
    each.write(1, 60, prefix=PrefixUse())
    each.write(2, 4 * each.kv.free_blocks)
    each.release(2)
    if not at_once:
        each.truncate(1, length)
    came = [each.fetch_window(1, length, 1) for _ in range(5)]
    assert sum(came) <= (WINDOW - 1) // SIZE + 2 and not came[-1]
    assert bool(sum(came)) == (length < 60 - FREE)
    each.finish(each.reserve(1, length, 1))
    assert each.fed == (0 if at_once else fed)
    each.check()


def test_what_the_tier_has_of_a_window_is_a_forks_too():
    each = world(usable=30, tier=True)
    each.write(1, 60, prefix=PrefixUse())
    each.write(2, 4 * each.kv.free_blocks)
    each.release(2)
    assert each.fetch_window(1, 30)
    each.finish(each.fork_in_a_step(1, 3, 30, 1))
    each.fork(1, 4, 30)
    each.write(4, 1)
    assert each.fed == 0
    each.check()


def test_without_the_prefix_cache_the_tier_is_not_asked():
    each = world(usable=30, tier=True)
    each.write(1, 60)
    assert each.fetch_window(1, 30) == 0 == each.fetch_window(99, 30)


def test_what_is_owed_goes_back_further_and_ends_with_the_next_tokens():
    each = world()
    each.write(1, 60)
    each.truncate(1, 40)
    each.truncate(1, 30)
    each.truncate(1, 30)
    assert each.kv.missing(1, 30) == 30
    each.feed(1, 12)
    assert (each.kv.missing(1, 12), each.kv.missing(1, 30)) == (0, 18)
    each.write(1, 2)
    assert each.fed == 30 and not each.kv.missing(1, 32)


def test_a_step_that_goes_back_and_fails_leaves_the_longer_sequence():
    """It owes the tokens that it had to give up, and has no others."""
    each = world()
    each.write(1, 60)
    before = list(each.tokens[1])
    write = each.reserve(1, 20, 3)
    each.run(write)
    each.rollback(write)
    each.check()
    assert each.kv.tokens(1).tolist() == before and each.kv.missing(1, 60) == 40
    each.write(1, 1)
    assert each.tokens[1][:60] == before


def test_a_fork_behind_the_window_is_fed_alone():
    each = world()
    each.write(1, 60)
    had = each.blocks(1)
    each.fork(1, 2, 20)
    each.write(2, 1)
    assert each.fed == 20 and each.blocks(1) == had and not each.kv.missing(1, 60)
    each.check()


@pytest.mark.parametrize("fails", [False, True])
def test_a_fork_in_a_step_behind_the_window_is_fed_alone(fails):
    """And is gone with its step if that fails."""
    each = world(usable=30)
    each.write(1, 60)
    had, free = each.blocks(1), each.kv.free_blocks
    write = each.fork_in_a_step(1, 2, 22, 1)
    assert each.fed == 22 and each.blocks(1) == had and not each.kv.missing(1, 60)
    if fails:
        each.rollback(write)
        assert 2 not in sequences(each.kv) and each.kv.free_blocks == free
    else:
        each.finish(write)
        assert each.tokens[2][:22] == each.tokens[1][:22] and each.kv.take_recomputed(2) == 22
    each.check()


def test_a_fork_in_a_step_behind_the_window_takes_what_is_found():
    each = world(usable=30)
    each.write(1, 60, prefix=PrefixUse())
    each.finish(each.fork_in_a_step(1, 2, 20, 1))
    assert each.fed == 0
    each.check()


def test_a_fork_that_was_begun_and_not_reserved_leaves_nothing():
    each = world(usable=30)
    each.write(1, 60)
    before = everything(each.kv)
    each.kv.begin_fork(1, 2, 20)
    assert each.kv.missing(2, 20) == 20
    with pytest.raises(KvBlocksExhausted):
        each.reserve(2, 20, 1, True, parent=1)
    assert everything(each.kv) == before
    each.kv.begin_fork(1, 2, 20)
    each.kv.end_begun()
    assert everything(each.kv) == before
    with pytest.raises(KvMisuse):
        each.kv.reserve(1, 20, 1, True, parent=1)


def test_without_a_block_to_feed_in_a_span_is_refused_and_the_sequence_stays():
    each = world(usable=20)
    each.write(1, 60)
    each.truncate(1, 40)
    each.write(2, 1)
    each.kv.ensure_capacity(2, 4 * each.kv.free_blocks)
    with pytest.raises(KvBlocksExhausted) as refusal:
        each.write(1, 1)
    assert refusal.value.number("needed_blocks") > refusal.value.number("free_blocks")
    each.check()
    each.release(2)
    each.write(1, 1)
    assert len(each.tokens[1]) == 41


@pytest.mark.parametrize("count", [1, 3, 9, 60])
@pytest.mark.parametrize("length", [5, 33, 64])
def test_a_step_and_a_promise_hold_no_more_blocks_than_are_charged(length, count):
    each = world()
    each.write(1, length)
    kept = Window(WINDOW, FREE).kept
    write = each.reserve(1, length, count)
    assert each.held(1) <= blocks_held(length, length + count, SIZE, kept)
    each.finish(write)
    assert each.held(1) <= blocks_held(length + count, length + count, SIZE, kept) <= (kept + SIZE - 2) // SIZE + 1
    each.kv.ensure_capacity(1, 20)
    end, promised = length + count, length + count + 20
    each.write(1, 18)
    assert each.held(1) <= blocks_held(end, promised, SIZE, kept)
    each.truncate(1, end - 3)
    assert each.held(1) <= blocks_held(end - 3, promised - 3, SIZE, kept)


def test_promised_blocks_stay_until_the_promise_ends():
    each = world(usable=30)
    each.write(1, 10)
    each.kv.ensure_capacity(1, 60)
    each.write(1, 60)
    each.write(2, 4 * each.kv.free_blocks)
    each.truncate(1, 10)
    assert not each.kv.missing(1, 10), "a promise covers the way back"
    each.write(1, 60)
    held = each.held(1)
    each.kv.ensure_capacity(1, 0)
    assert each.held(1) < held
    each.check()


def test_an_import_takes_the_blocks_of_its_window():
    each = world()
    each.commit(each.bring(1, each.draw(200), PrefixUse(caller=b"one", imported_from=0)))
    assert each.held(1) <= (WINDOW - 1 + FREE) // SIZE + 2
    assert not each.kv.missing(1, 200 - FREE), "what was free is free"
    each.commit(each.bring(2, each.draw(200), None, 200 - WINDOW))
    assert each.held(2) <= (WINDOW - 1) // SIZE + 2
    assert each.kv.missing(2, 200 - FREE), "it did not come"
    each.write(1, 5)
    each.check()
    each.truncate(1, 50)
    each.write(1, 1)
    assert each.fed == 50 and each.kv.imported_from(1) is None, "nothing of it is left"


def test_a_promise_counts_from_where_a_truncation_ends_and_not_from_where_tokens_are_fed_again():
    each = world(usable=40)
    each.write(1, 60)
    each.kv.ensure_capacity(1, 9)
    each.truncate(1, 20)
    each.feed(1, 20)
    each.write(2, 1)
    each.kv.ensure_capacity(2, 4 * each.kv.free_blocks)
    assert not each.kv.free_blocks
    each.write(1, 9)
    each.check()


def test_what_is_computed_behind_imported_blocks_that_were_found_is_for_the_caller_alone():
    each, one = world(usable=60), PrefixUse(caller=b"one")
    each.write(1, 60, prefix=one)
    each.write(2, 4 * each.kv.free_blocks)
    each.release(2)
    tokens = list(each.tokens[1])
    each.commit(each.bring(3, tokens[:40], one._replace(imported_from=0)))
    each.truncate(1, 40)
    each.write(1, 9)
    assert each.fed == 0 and each.kv.imported_from(1) == 28
    assert found(each, [*each.tokens[1], 0], PrefixUse(caller=b"other")) == 0
    each.check()
