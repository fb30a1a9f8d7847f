"""What may happen to the sequences of a `World`, whatever its model keeps behind keys and values: rules of a Hypothesis
machine. Each step says whether its rows are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from ferrum_rpc.core import PREFIX
from ferrum_rpc.errors import KvBlocksExhausted, StepFailed
from tests.support.state_world import ALL, LAST, VOCABULARY, World

STAGES = ("reserve", "plan", "forward", "select", "commit")

few = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)
prompts = st.tuples(st.integers(0, 1), st.integers(1, 90), st.integers(0, VOCABULARY - 1)).map(
    lambda each: [(each[0] + place * place) % VOCABULARY for place in range(each[1])] + [each[2]]
)


class Histories(RuleBasedStateMachine):
    """Prompts share their beginnings, so some are found in the prefix cache. All rules are drawn equally often, so few
    of them are no steps, and a history begins with a sequence that the others need: what is ``initialize`` makes the
    ``world`` and, by `create`, that one. ``drafts``: what may be taken back at no cost."""

    world: World
    folder: Any = None
    ranks = 1
    drafts = few

    def sequence(self, data):
        return data.draw(st.sampled_from(sorted(self.world.has)), label="sequence")

    def lengths(self, data, sequence):
        length = len(self.world.has[sequence])
        return data.draw(st.integers(max(0, length - 5), length) | st.integers(0, length), label="length")

    def may_make(self) -> bool:
        """Whether one more sequence may be made by itself."""
        return True

    @precondition(lambda self: self.may_make())
    @rule(tokens=prompts, published=st.booleans())
    def make(self, tokens, published):
        self.create(tokens, published)

    def create(self, tokens, published):
        self.world.step(self.world.made(tokens, prefix=PREFIX if published else None))

    @precondition(lambda self: self.world.has)
    @rule(data=st.data(), tokens=few | prompts, rows=st.sampled_from([LAST, ALL]))
    def feed(self, data, tokens, rows):
        self.world.step(self.world.span(self.sequence(data), tokens, output=rows))

    @precondition(lambda self: self.world.has)
    @rule(data=st.data(), tokens=few | prompts)
    def go_back_and_feed(self, data, tokens):
        sequence = self.sequence(data)
        self.world.step(self.world.span(sequence, tokens, self.lengths(data, sequence), ALL))

    @precondition(lambda self: self.world.has)
    @rule(data=st.data(), poisoned=st.booleans())
    def truncate(self, data, poisoned):
        sequence = self.sequence(data)
        self.world.truncate(sequence, self.lengths(data, sequence))
        if poisoned:
            self.world.poison()

    @precondition(lambda self: self.world.has)
    @rule(data=st.data())
    def verify_and_reject(self, data):
        world, sequence, tokens = self.world, self.sequence(data), data.draw(self.drafts, label="tokens")
        start = len(world.has[sequence])
        world.step(world.span(sequence, tokens, output=ALL))
        if len(world.has[sequence]) > start:
            world.truncate(sequence, start + data.draw(st.integers(0, len(tokens)), label="kept"))
            self.rejected(sequence)

    def rejected(self, sequence):
        """``sequence`` was cut within its last step."""

    @precondition(lambda self: self.world.has)
    @rule(data=st.data(), children=st.integers(1, 2))
    def fork(self, data, children):
        world, parent = self.world, self.sequence(data)
        at, made = self.lengths(data, parent), [next(world.numbers) for _ in range(children)]
        try:
            world.do("fork", parent, made, at)
        except KvBlocksExhausted as error:
            assert error.metadata["needed_slots"] == str(children)
        else:
            world.has |= dict.fromkeys(made, world.has[parent][:at])

    @precondition(lambda self: self.world.has)
    @rule(data=st.data(), tokens=few | prompts, together=few | prompts)
    def feed_a_child_beside_its_parent(self, data, tokens, together):
        world, parent = self.world, self.sequence(data)
        child = world.fork(parent, tokens, self.lengths(data, parent))
        world.step(world.span(parent, together, self.lengths(data, parent)), child)

    @precondition(lambda self: len(self.world.has) > 1)
    @rule(data=st.data(), tokens=few | prompts)
    def go_back_and_feed_all(self, data, tokens):
        self.world.step(*self.cuts(data, tokens))

    def cuts(self, data, tokens):
        return [self.world.span(each, tokens, self.lengths(data, each), ALL) for each in sorted(self.world.has)]

    @precondition(lambda self: self.world.has)
    @rule(
        data=st.data(), tokens=few | prompts, stage=st.sampled_from(STAGES), nth=st.integers(1, 2), again=st.booleans()
    )
    def fail(self, data, tokens, stage, nth, again):
        rank = data.draw(st.integers(0, self.ranks - 1), label="rank")
        world = self.world
        spans = [*self.cuts(data, tokens), world.made(tokens)]
        before = dict(world.has)
        try:
            with world.failing(stage, nth, rank):
                world.step(*spans)
        except StepFailed:
            assert world.has == before
            world.check()
            if again:
                world.step(*spans)

    @precondition(lambda self: len(self.world.has) > 1)
    @rule(data=st.data(), forgets=st.booleans())
    def release(self, data, forgets):
        self.world.release(self.sequence(data))
        if forgets:
            self.world.do("forget_prefixes")
        self.world.poison()

    def teardown(self):
        """Each sequence is fed once more and leaves. Then all is free."""
        if not hasattr(self, "world"):
            return
        for sequence in list(self.world.has):
            self.world.step(self.world.span(sequence, [1, 2], output=ALL))
            self.world.release(sequence)
        state = self.world.runner.cache_state()
        assert (state.free_blocks, state.free_slots) == (state.total_blocks, state.total_slots)
        self.world.close()


def run_histories(machine: type[Histories], histories: int, phases: Sequence[Phase] = tuple(Phase)) -> None:
    """So many of ``machine``, as it is set."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
            deadline=None,
            phases=phases,
        ),
    )
