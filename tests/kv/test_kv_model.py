"""Any history of forks, steps, truncations and failures: every sequence reads exactly what was written to it.

Hypothesis plays runner and scheduler against `KvManager`. The oracle is a Python list of tokens per sequence; the store
is an array of integers in which free slots are garbage (`kv_world`). Reservations stay open over other operations and
are run, committed and rolled back in any order, which is more than the engine does.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ferrum_rpc.core import PrefixUse
from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.sequence import KvMisuse
from tests.support.inside import sequences
from tests.support.kv_world import World, Write, everything

CALLERS = (b"one", b"other")
USES = (
    *4 * (PrefixUse(),),
    *(PrefixUse(caller=each) for each in CALLERS),
    PrefixUse(b"salt"),
    PrefixUse(publishes=False),
    None,
)


def blocks_of(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


class KvMachine(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        usable=st.integers(3, 20),
        size=st.integers(1, 4),
        alphabet=st.sampled_from([None, 1, 1, 2]),
        tier=st.booleans(),
    )
    def start(self, data, usable, size, alphabet, tier):
        order = data.draw(st.permutations(range(1, usable + 1)))
        self.world = World(usable + 1, size, order, alphabet, tier=tier)
        self.alphabet = alphabet
        self.kv = self.world.kv
        self.open: list[Write] = []
        self.sequences = 0
        self.promised: dict[int, tuple[int, int]] = {}
        """Sequence -> (from, tokens): what it was promised, unless it went below that into what a fork may share."""
        self.forked: set[int] = set()
        self.forks_tried = 0
        self.held: dict[int, int] = {}
        """Sequence -> the length up to which it holds blocks."""
        self.followed: dict[bytes, bool] | None = None
        """Key of a block -> whether the tier alone has it: what a watcher knows who asks only when told of changes."""
        self.told = 0

    # --- choices ----------------------------------------------------------------------------------------------------

    @property
    def pinned(self) -> set[int]:
        return {write.reservation.sequence for write in self.open}

    @property
    def all_idle(self) -> list[int]:
        return sorted(set(self.world.tokens) - self.pinned - set(self.held))

    def idle(self, data) -> int:
        assume(self.all_idle)
        return data.draw(st.sampled_from(self.all_idle), label="sequence")

    def new(self) -> int:
        self.sequences += 1
        return self.sequences

    def length(self, sequence: int) -> int:
        return len(self.world.tokens[sequence])

    def shrunk_to(self, sequence: int, length: int) -> None:
        """A promise is counted from the lowest length; going below into what a fork shares may shorten it."""
        if sequence in self.promised:
            start, tokens = self.promised[sequence]
            self.promised[sequence] = (min(start, length), tokens)
            if sequence in self.forked and length < start:
                del self.promised[sequence]

    def reserve(self, data) -> Write | None:
        """Open one more reservation, or None where the pool is exhausted (and nothing changed)."""
        size, idle = self.kv.block_size, self.all_idle
        sequence = data.draw(st.sampled_from([*idle, 0]), label="sequence (0: a new one)")
        create = sequence == 0
        back = ahead = start = 0
        parent = None
        hold = data.draw(st.sampled_from([0, 0, 0, 1, 4, 9]), label="hold")
        prefix = None
        if create:
            sequence = self.new()
            prefix = data.draw(st.sampled_from(USES), label="prefix") if self.alphabet else None
            ahead = data.draw(st.sampled_from([0, 0, 1, 5]), label="ahead")
            parent = data.draw(st.sampled_from([None, *idle]), label="parent")
            if parent is not None:
                self.forks_tried += 1
                start = data.draw(st.integers(0, self.length(parent)), label="of the parent")
        else:
            back = data.draw(st.sampled_from([0, 0, 0, 1, 2, 3, size, 2 * size + 1, 100]), label="back")
            start = max(0, self.length(sequence) - back)
        count = data.draw(st.sampled_from([1, 1, 1, 2, 3, size, 2 * size + 1]), label="count")
        before = everything(self.kv)
        try:
            findable = data.draw(st.integers(0, count - 1), label="findable") if self.alphabet else None
            made = self.world.reserve(sequence, start, count, create, ahead, hold, parent, prefix, findable)
            self.forked |= {parent, sequence} if parent is not None else set()
            self.forked |= {sequence} if prefix is not None else set()  # others may find its blocks
            return made
        except KvBlocksExhausted as refusal:
            if parent is not None:  # what the parent was promised may be other blocks now
                assert self.kv.free_blocks >= len(before["free"])
                return None
            assert everything(self.kv) == before
            needed, free = refusal.number("needed_blocks"), refusal.number("free_blocks")
            lowest = start
            if hold:  # behind a promise: what lies between is held as well
                lowest = 0
            most = blocks_of(start + count + max(ahead, hold), size) - lowest // size
            assert free == self.kv.free_blocks < needed <= most
            promised = () if hold else self.promised.get(sequence, ())
            if promised and (start >= promised[0] or sequence not in self.forked):
                assert start + count > sum(promised), "a promise was broken"
            return None

    def commit(self, write: Write, kept: int | None = None) -> None:
        r = write.reservation
        created = r.created
        before = 0 if created else self.length(r.sequence)
        state = sequences(self.kv)[r.sequence]
        ahead = 0
        if created:
            ahead = state.promised_tokens if state.before_hold is None else state.before_hold[1]
        free = self.kv.free_blocks
        self.world.commit(write, kept)
        if r.start >= before:
            assert self.kv.free_blocks >= free, "a commit took blocks"
        if state.before_hold is not None:
            self.held[r.sequence] = sum((state.promised_from, state.promised_tokens))
        if ahead:
            self.promised[r.sequence] = (self.length(r.sequence), ahead)
        elif r.start < before:
            self.shrunk_to(r.sequence, r.start)

    # --- reservations that stay open --------------------------------------------------------------------------------

    @rule(data=st.data())
    def open_a_reservation(self, data):
        write = self.reserve(data)
        if write:
            self.open.append(write)

    @precondition(lambda self: any(not write.has_run for write in self.open))
    @rule(data=st.data())
    def run_some(self, data):
        waiting = [write for write in self.open if not write.has_run]
        self.world.run(*data.draw(st.lists(st.sampled_from(waiting), unique=True, min_size=1), label="step"))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit_one(self, data):
        write = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if not write.has_run:
            self.world.run(write)
        self.world.check_forward(write)
        self.commit(write)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit_a_part_of_one(self, data):
        """A draft of which some tokens were accepted."""
        write = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if not write.has_run:
            self.world.run(write)
        self.commit(write, data.draw(st.integers(1, len(write.tokens)), label="kept"))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def roll_back_one(self, data):
        self.world.rollback(self.open.pop(data.draw(st.integers(0, len(self.open) - 1))))

    @precondition(lambda self: any(write.reservation.held is not None for write in self.open))
    @rule(data=st.data(), crowded=st.booleans(), ends=st.sampled_from(["both", "first", "none"]))
    def a_token_is_written_behind_one_that_is_open(self, data, crowded, ends):
        """As the next step of a run before its token is known: what was promised for it is enough."""
        first = data.draw(st.sampled_from([write for write in self.open if write.reservation.held is not None]))
        r, free, before = first.reservation, self.kv.free_blocks, everything(self.kv)
        state = sequences(self.kv)[r.sequence]
        if r.start < state.length:
            with pytest.raises(KvMisuse):
                self.world.reserve_next(first)
            return
        if state.promised_end <= r.end:
            try:
                self.kv.rollback(self.world.reserve_next(first).reservation)  # in the block that is there
            except KvBlocksExhausted:
                assert r.end % self.kv.block_size == 0
            assert everything(self.kv) == before
            return
        self.open.remove(first)
        second = self.world.reserve_next(first)
        assert self.kv.free_blocks == free, "a block that was promised"
        self.kv.check()
        if not first.has_run:
            self.world.run(first)
        self.world.run(second)
        if crowded and self.kv.free_blocks:
            self.world.write(self.new(), self.kv.free_blocks * self.kv.block_size)
        if ends == "none":
            with pytest.raises(KvMisuse):
                self.kv.rollback(r)
            self.world.rollback(second)
            self.world.rollback(first)
            return
        self.commit(first)
        self.kv.check()
        self.world.check_forward(second)
        if ends == "both":
            self.commit(second)
        else:
            self.world.rollback(second)

    # --- a whole step, as the engine runs it ------------------------------------------------------------------------

    @rule(data=st.data(), spans=st.integers(1, 5))
    def a_step_of_which_any_part_fails(self, data, spans):
        ordered = self.alphabet is None
        others, before, tried = self.open, everything(self.kv, ordered=ordered), self.forks_tried
        self.open = list(others)
        step = []
        for _ in range(spans):
            write = self.reserve(data)
            if write:
                step.append(write)
                self.open.append(write)
        self.world.run(*step)
        failed = data.draw(st.sets(st.sampled_from(step)) if step else st.just(set()), label="failed")
        order = list(reversed(step)) if failed == set(step) else data.draw(st.permutations(step), label="closed")
        self.open = others
        for write in order:
            if write in failed:
                self.world.rollback(write)
            else:
                self.commit(write)
        if failed == set(step):
            after = everything(self.kv, ordered=ordered)
            if self.forks_tried > tried:
                # The end of a fork has others' spares looked at again: none is lost, and one too many may go.
                assert len(after["free"]) >= len(before["free"])
                before, after = (
                    {name: held[:2] for name, held in books["sequences"].items()} for books in (before, after)
                )
            assert after == before

    @precondition(lambda self: self.alphabet)
    @rule(
        data=st.data(),
        caller=st.sampled_from(CALLERS),
        publishes=st.booleans(),
        blocks=st.integers(1, 4),
        more=st.integers(0, 3),
    )
    def import_a_prompt(self, data, caller, publishes, blocks, more):
        """Its content is nothing that anybody computes."""
        use = PrefixUse(publishes=publishes, caller=caller, imported_from=0)
        self.begin_prompt(data, self.new(), use, blocks * self.kv.block_size + more)

    @precondition(lambda self: self.alphabet)
    @rule(data=st.data(), use=st.sampled_from(USES), blocks=st.integers(1, 4), more=st.integers(0, 3))
    def feed_a_prompt(self, data, use, blocks, more):
        """A new one, or what follows of one: a part of it may be found."""
        sequence = data.draw(st.sampled_from([0, *self.all_idle]), label="sequence (0: a new one)")
        new = use if sequence == 0 else None
        self.begin_prompt(data, sequence or self.new(), new, blocks * self.kv.block_size + more)

    def begin_prompt(self, data, sequence, prefix, count):
        create = sequence not in self.world.tokens
        start = 0 if create else self.length(sequence)
        tokens = self.world.draw(count)
        self.world.fetch(sequence, tokens, prefix, data.draw(st.integers(0, 3), label="blocks of the tier"))
        try:
            write = self.world.reserve(sequence, start, len(tokens), create, prefix=prefix, tokens=tokens)
        except KvBlocksExhausted:
            return
        self.forked |= {sequence}
        if data.draw(st.integers(0, 3), label="failed") == 0:
            self.world.rollback(write)
            return
        self.world.run(write)
        self.commit(write)

    @rule(data=st.data(), use=st.sampled_from(USES))
    def begin_an_import(self, data, use):
        """What another sequence has, in a new one. It stays open over other operations, and all of it may be found."""
        tokens = list(self.world.tokens[self.idle(data)])
        assume(tokens)
        sequence, count = self.new(), len(tokens)
        prefix = use if self.alphabet else None
        try:
            write = self.world.reserve(sequence, 0, count, True, prefix=prefix, findable=count, tokens=tokens)
        except KvBlocksExhausted:
            return
        slots = self.kv.slots(sequence, 0, count)
        assert len(set(slots.tolist())) == count and set(slots // self.kv.block_size) == set(write.reservation.table)
        self.forked |= {sequence}
        self.open.append(write)

    # --- a run: what it holds is there, whoever takes the rest ------------------------------------------------------

    @precondition(lambda self: set(self.held) - self.pinned)
    @rule(data=st.data(), steps=st.integers(0, 9))
    def a_run_goes_on_and_ends(self, data, steps):
        sequence = data.draw(st.sampled_from(sorted(set(self.held) - self.pinned)), label="running")
        for _ in range(min(steps, self.held[sequence] - self.length(sequence))):
            self.world.write(sequence, 1)
        if steps:
            del self.held[sequence]
            self.kv.end_hold(sequence)
            after = everything(self.kv)
            self.kv.end_hold(sequence)
            assert everything(self.kv) == after

    # --- between steps ----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def fork(self, data):
        parent = self.idle(data)
        at = data.draw(st.one_of(st.none(), st.integers(0, self.length(parent))), label="at")
        child, before, free = self.new(), everything(self.kv), self.kv.free_blocks
        promised = sequences(self.kv)[parent].promised_tokens
        most = blocks_of(promised, self.kv.block_size) + 1 if promised else 0
        try:
            self.world.fork(parent, child, at)
        except KvBlocksExhausted as refusal:
            assert free == refusal.number("free_blocks") < refusal.number("needed_blocks") <= most
            assert everything(self.kv) == before
            return
        assert free - self.kv.free_blocks <= most
        self.forked |= {parent, child}

    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.idle(data)
        length = data.draw(st.integers(0, self.length(sequence)), label="length")
        self.world.truncate(sequence, length)
        self.shrunk_to(sequence, length)

    @rule(data=st.data(), tokens=st.sampled_from([0, 1, 2, 4, 7, 12]))
    def ensure_capacity(self, data, tokens):
        sequence = self.idle(data)
        before = everything(self.kv)
        try:
            self.kv.ensure_capacity(sequence, tokens)
        except KvBlocksExhausted as refusal:
            assert refusal.number("needed_blocks") > refusal.number("free_blocks") == self.kv.free_blocks
            assert everything(self.kv) == before
            return
        self.promised[sequence] = (self.length(sequence), tokens)
        after = everything(self.kv)
        self.kv.ensure_capacity(sequence, tokens)
        assert everything(self.kv) == after

    @precondition(lambda self: self.kv.free_blocks)
    @rule()
    def somebody_takes_all_that_is_free(self):
        hog = self.new()
        self.world.write(hog, self.kv.free_blocks * self.kv.block_size)
        assert self.kv.free_blocks == 0

    @rule()
    def forget_what_is_published(self):
        """The tier keeps what it has, as where a block of it could not be read."""
        self.kv.prefixes.forget()

    @rule()
    def another_watches(self):
        self.followed = None

    @precondition(lambda self: self.world.tier is not None and self.world.tier.there)
    @rule(data=st.data())
    def the_tier_drops_a_block(self, data):
        key = data.draw(st.sampled_from(self.world.tier.hashes()), label="key")
        del self.world.tier.there[key]
        self.kv.prefixes.note_tier(key, there=False)

    @rule(data=st.data())
    def release(self, data):
        sequence = self.idle(data)
        self.world.release(sequence)
        self.promised.pop(sequence, None)

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def every_sequence_reads_what_was_written_to_it(self):
        self.world.check(self.pinned)
        for write in self.open:
            if write.has_run:
                self.world.check_forward(write)

    @invariant()
    def no_more_blocks_are_used_than_tokens_and_promises_need(self):
        if self.open:
            return
        size, used = self.kv.block_size, self.kv.total_blocks - self.kv.free_blocks
        states = sequences(self.kv).values()
        needed = sum(blocks_of(len(tokens), size) for tokens in self.world.tokens.values())
        promised = sum(blocks_of(state.promised_tokens, size) + 2 for state in states if state.promised_tokens)
        assert used <= needed + promised

    @invariant()
    def the_count_of_sequences_is_right(self):
        created = sum(write.reservation.created for write in self.open)
        assert self.kv.state().sequences == len(self.world.tokens) + created

    @invariant()
    def who_watches_knows_what_can_be_found(self):
        prefixes = self.kv.prefixes
        changes = prefixes.take_changes() if prefixes.changed != self.told else []
        if self.followed is None or changes is None:
            self.followed, changes = {}, prefixes.watch()
        self.told = prefixes.changed
        for change in changes:
            key = change.hash + change.caller
            self.followed.pop(key, None)
            if not change.hash:
                self.followed.clear()
            elif change.parked or change.parent is not None:
                self.followed[key] = change.parked
        published = {key for _, key in prefixes.blocks()}
        assert {key for key, parked in self.followed.items() if not parked} == published
        if self.world.tier is not None and not prefixes.leaving:
            assert {*self.followed} == published | {*self.world.tier.hashes()}

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.end(self.open)


KvMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEveryHistory = KvMachine.TestCase
