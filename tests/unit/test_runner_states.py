"""Sequences of a model with recurrent layers, whatever happens to them: rows are those of `transformers` for the tokens
that a sequence has, and slots are accounted for.

The oracle knows no cache: it computes each history anew. Rows are near it, because chunks, and tokens that are fed
again, add up in other orders. Where only steps of few tokens are involved, bits are compared: with those of a sequence
that never had what was taken back.
"""

from __future__ import annotations

import itertools
import tracemalloc
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from ferrum_rpc.attention.recurrent_steps import RecurrentStore
from ferrum_rpc.core import PREFIX, Accept, OutputSpec, Positions, Span, SpanResult, Step
from ferrum_rpc.engine import feeding, states
from ferrum_rpc.engine.assembly.size import LargestStep
from ferrum_rpc.errors import KvBlocksExhausted, StepFailed
from tests.support import queued
from tests.support.checkpoints import RECURRENT_SHAPE as SHAPE
from tests.support.histories import Histories, few, prompts, run_histories
from tests.support.rows import columns_of
from tests.support.state_world import (
    ALL,
    EVERY,
    FAMILIES,
    IMPORTED,
    LAST,
    OF_A_LIAR,
    PASS,
    PIECE,
    SIZE,
    SLOTS,
    Bits,
    Sabotage,
    World,
    fed,
    prompt,
)

BEGINS = ("a prompt that is found", "a fork in a step", "a fork")


@pytest.fixture(scope="module")
def folder(checkpoint_of):
    return checkpoint_of("qwen3_5", **SHAPE)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def each_folder(request, checkpoint_of):
    """Of a model without experts, and of one with them."""
    return checkpoint_of(request.param, **SHAPE)


@pytest.fixture(autouse=True)
def small_distances(monkeypatch):
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)
    monkeypatch.setattr(feeding, "PIECE_TOKENS", PIECE)
    monkeypatch.setattr(feeding, "PASS_TOKENS", {"cpu": PASS})


# --- any history ------------------------------------------------------------------------------------------------------


class StateHistories(Histories):
    """Slots are few."""

    family = "qwen3_5"
    queued = False
    device = "cpu"

    @initialize(tokens=prompts)
    def begin(self, tokens):
        self.world = World(
            self.folder,
            family=self.family,
            queued=self.queued,
            device=self.device,
            tensor_parallel=self.ranks,
            max_sequences=16,
        )
        self.create(tokens, published=True)

    def may_make(self):
        return len(self.world.has) + len(self.world.lies) < SLOTS

    @precondition(lambda self: self.world.has)
    @rule(data=st.data(), tokens=few | prompts)
    def accept(self, data, tokens):
        world, sequence = self.world, self.sequence(data)
        world.step(world.span(sequence, tokens, output=OutputSpec(Positions.ALL, Accept())))

    @precondition(lambda self: len(self.world.has) > 1)
    @rule(data=st.data(), tokens=prompts)
    def feed_all(self, data, tokens):
        world = self.world
        spans = [world.span(each, tokens[: data.draw(st.integers(1, len(tokens)))]) for each in sorted(world.has)]
        world.step(world.made(tokens), *spans)

    @precondition(lambda self: self.world.has)
    @rule(data=st.data(), use=st.sampled_from([None, PREFIX, IMPORTED]), stays=st.booleans())
    def move(self, data, use, stays):
        """An export and an import, or with the sequence gone between, as if it was parked."""
        world, sequence = self.world, self.sequence(data)
        if not world.has[sequence]:
            return
        taken = world.taken(sequence)
        if not stays:
            world.release(sequence)
        self.bring(taken, use)

    def bring(self, taken, use):
        state = self.world.runner.cache_state()
        try:
            self.world.bring(taken, use)
        except KvBlocksExhausted as error:
            assert "needed_blocks" in error.metadata or not state.free_slots
            assert self.world.runner.cache_state().free_blocks == state.free_blocks

    @precondition(lambda self: self.world.has and len(self.world.lies) < 2)
    @rule(tokens=prompts, at=st.integers(0, 90), journal=st.booleans())
    def forge(self, tokens, at, journal):
        """A caller imports what is not a number anywhere: nobody else may have anything of it."""
        self.bring(self.world.forged(tokens, at, journal=journal), OF_A_LIAR._replace(imported_from=0))

    @precondition(lambda self: self.world.lies)
    @rule(
        data=st.data(),
        tokens=few | prompts,
        cut=st.integers(0, 90),
        how=st.sampled_from(["found", "fed", "forked", "emptied"]),
    )
    def use_a_lie(self, data, tokens, cut, how):
        sequence = data.draw(st.sampled_from(sorted(self.world.lies)), label="sequence")
        if how == "found":
            self.believe(tokens)
        elif how == "emptied":
            self.empty_a_lie(sequence, tokens)
        else:
            self.go_on_with_a_lie(sequence, tokens, cut, fork=how == "forked")

    def believe(self, tokens):
        """Its caller finds it; what it computes without is right."""
        world, span = self.world, self.world.made(tokens, prefix=OF_A_LIAR)
        [outcome] = world.do("forward", Step((span,))).outcomes
        if isinstance(outcome, KvBlocksExhausted):
            return
        if world.do("imported_from", span.sequence) is not None:
            world.lies.add(span.sequence)
            return
        assert world.near(columns_of(outcome.rows)["logits"], tuple(tokens))
        world.do("release", [span.sequence])

    def go_on_with_a_lie(self, sequence, tokens, cut, *, fork):
        world = self.world
        length = world.runner.kv.length(sequence)
        if fork:
            span = world.fork(sequence, tokens, min(cut, length))
        else:
            span = Span(sequence, np.asarray(tokens, np.int32), max(1, length - cut), LAST)
        [outcome] = world.do("forward", Step((span,))).outcomes
        if not isinstance(outcome, KvBlocksExhausted):
            world.lies.add(span.sequence)
        world.check()

    def empty_a_lie(self, sequence, tokens):
        """What is computed from nothing is right, and for everybody; but its caller finds what it has imported."""
        world = self.world
        world.do("truncate", sequence, 0)
        [outcome] = world.do("forward", Step((Span(sequence, np.array(tokens, np.int32), 0, ALL),))).outcomes
        if isinstance(outcome, SpanResult) and world.do("imported_from", sequence) is None:
            assert world.near(columns_of(outcome.rows)["logits"], tuple(tokens))
        world.lies.remove(sequence)
        world.do("release", [sequence])

    @invariant()
    def slots_are_accounted_for(self):
        if hasattr(self, "world"):
            state = self.world.runner.cache_state()
            live = len(self.world.has) + len(self.world.lies)
            assert (state.total_slots, state.free_slots) == (SLOTS, SLOTS - live)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.do("release", [*self.world.lies])
        super().teardown()


@pytest.mark.parametrize(
    ("options", "histories"),
    [({}, 25), ({"ranks": 2}, 12), ({"family": "qwen3_next"}, 8), ({"queued": True}, 12)],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else str(each),
)
def test_rows_are_those_of_the_tokens_that_a_sequence_has(options, histories, checkpoint_of, monkeypatch):
    options = {"family": "qwen3_5", **options}
    family = options["family"]
    monkeypatch.setattr(StateHistories, "folder", checkpoint_of(family, **FAMILIES[family]))
    for name, value in options.items():
        monkeypatch.setattr(StateHistories, name, value)
    run_histories(StateHistories, histories)


def test_the_first_chunk_of_a_sequence_is_computed_by_the_kernels_too(folder, monkeypatch):
    """It starts from a slot that no sequence has."""
    pieces, chunk = list[int](), queued.chunk_in_c

    def counted(shape, taps, inputs, state):
        pieces.append(len(inputs.log_decay))
        return chunk(shape, taps, inputs, state)

    monkeypatch.setattr(queued, "chunk_in_c", counted)
    world = World(folder, queued=True)
    pieces.clear()  # those of the first steps
    sequence = fed(world, tokens := prompt(60))
    assert sum(pieces) == 2 * len(tokens), "of both recurrent layers"
    world.step(world.span(sequence, tokens))
    assert sum(pieces) == 4 * len(tokens)


def test_steps_that_are_staged_and_replayed_have_the_bits_of_others(folder):
    """Decode, verify with rejected drafts and chunks. A step of spans of unlike lengths is not replayed."""
    worlds = staged, _ = World(folder, queued=True), World(folder, attention="torch")
    prompts = [prompt(30 + 20 * seed, seed) for seed in range(3)]
    first, second, third = ({fed(world, each) for world in worlds}.pop() for each in prompts)
    capture = staged.capture

    def rows_of(world: World, counts: dict[int, int]) -> list[np.ndarray]:
        outcomes = world.step(*(world.span(each, [each + 1] * count, output=ALL) for each, count in counts.items()))
        return [columns_of(each.rows)["logits"] for each in outcomes]

    for count in (1, 4, 1, 3):
        for chosen in ((first, second, third), (second,), (third, first), (second, third)):
            replays = capture.replays
            one, other = (rows_of(world, dict.fromkeys(chosen, count)) for world in worlds)
            assert all((mine == theirs).all() for mine, theirs in zip(one, other, strict=True))
            assert capture.replays == replays + 1
            for world in worlds if count > 1 else ():
                world.truncate(chosen[0], len(world.has[chosen[0]]) - count + 1)
    replays = capture.replays
    one, other = (rows_of(world, {first: 1, second: 2}) for world in worlds)
    assert all((mine == theirs).all() for mine, theirs in zip(one, other, strict=True))
    assert capture.replays == replays


# --- promises, one by one ---------------------------------------------------------------------------------------------


@pytest.fixture
def usual_distances(small_distances, monkeypatch):
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", 512)
    monkeypatch.setattr(feeding, "PIECE_TOKENS", 64)


def computed(world: World, *spans: Span) -> list[int]:
    """Tokens of each span that the prefix cache did not have."""
    return [len(span.tokens) - each.cached_tokens for span, each in zip(spans, world.step(*spans), strict=True)]


def test_of_a_prompt_that_is_known_at_most_two_blocks_are_computed(folder, usual_distances):
    world, known = World(folder, blocks=2000), prompt(480)
    assert computed(world, world.made(known)) == [480]
    assert computed(world, world.made(known)) == [SIZE]
    assert computed(world, world.made(known[:470])) == [470]  # it ends before the checkpoint
    [longer] = computed(world, world.made(known + prompt(40, seed=1)))
    assert longer == 40 + SIZE
    world.release(1)
    assert computed(world, world.made(known)) == [SIZE]


def test_of_prompts_that_part_the_third_one_finds_what_they_share(folder, usual_distances):
    world, shared = World(folder, blocks=2000), prompt(480)
    tails = [prompt(100, seed) for seed in (1, 2, 3)]
    for tail, wanted in zip(tails, (580, 580, 100), strict=True):
        assert computed(world, world.made(shared + tail)) == [wanted]


def test_a_long_prompt_in_chunks_is_found_from_its_last_checkpoint_on(folder, usual_distances):
    world, tokens = World(folder, blocks=2000), prompt(1300)
    made = world.made(tokens[:512])
    world.step(made)
    for first in (512, 1024):
        world.step(world.span(made.sequence, tokens[first : first + 512]))
    assert world.runner.states.pool.checkpoints == 3, "at 512, 1,024 and 1,296; not at the ends of the first chunks"
    assert computed(world, world.made(tokens)) == [4]
    assert computed(world, world.made(tokens[:1200])) == [1200 - 1024]


def test_a_sequence_that_decodes_keeps_a_checkpoint_every_512_tokens(folder, usual_distances):
    world = World(folder, blocks=2000)
    made = world.made(prompt(500), prefix=None)
    world.step(made)
    for each in prompt(20):
        world.step(world.span(made.sequence, [each]))
    world.truncate(made.sequence, 514)
    assert world.missing(made.sequence) == 2
    [outcome] = world.step(world.span(made.sequence, [1]))
    assert outcome.recomputed_tokens == 2
    world.truncate(made.sequence, 511)
    assert world.missing(made.sequence) == 511


def test_other_salts_and_adapters_never_find_a_checkpoint(folder):
    world, tokens = World(folder), prompt(60)
    uses = [PREFIX, PREFIX._replace(salt=b"other"), PREFIX._replace(adapter="other", fingerprint=bytes(32)), None]
    for use in uses:
        assert computed(world, world.made(tokens, prefix=use)) == [60]
    silent = PREFIX._replace(salt=b"silent", publishes=False)
    for _ in range(2):
        assert computed(world, world.made(tokens, prefix=silent)) == [60]


def test_tokens_are_fed_again_in_pieces_and_their_keys_and_values_stay(folder):
    world = World(folder)
    made = world.made(prompt(100), prefix=None)
    world.step(made)
    kept = world.runner.store.save(world.runner.kv.slots(made.sequence, 0, 90)).content
    world.truncate(made.sequence, 90)
    world.runner.states.forget_checkpoints()
    span, left = world.span(made.sequence, [1]), []
    with world.runner.context():
        while world.runner.feeding.feed([span]):
            left.append(world.runner.feeding.missing(span))
    assert left == [50, 10] and not world.missing(made.sequence)
    [outcome] = world.step(span)
    assert outcome.recomputed_tokens == 90
    now = world.runner.store.save(world.runner.kv.slots(made.sequence, 0, 90)).content
    assert all(torch.equal(one, other) for one, other in zip(kept, now, strict=True))
    [again] = world.step(world.span(made.sequence, [2]))
    assert again.recomputed_tokens == 0


@pytest.mark.parametrize("slots", [5, 7, 9])
def test_deep_cuts_of_more_sequences_than_there_are_free_slots_are_fed_piece_by_piece(folder, monkeypatch, slots):
    """What was fed for one of them is not dropped for another, or they would be fed for ever."""
    monkeypatch.setattr(feeding, "PIECE_TOKENS", 16)
    world = World(folder, slots=slots)
    made = [fed(world, prompt(60, seed), [1]) for seed in range(4)]
    cuts = [world.span(each, [1], 40) for each in made]
    passes = passes_before(world, monkeypatch, *cuts)
    assert sum(count for each in passes for _, count in each) <= len(made) * 40, "each token once"
    assert len(passes) < len(made) * 3
    assert all(isinstance(outcome, SpanResult) for outcome in world.step(*cuts))


def passes_before(world: World, monkeypatch: Any, *spans: Span) -> list[list[tuple[int, int]]]:
    """The forward passes that feed again what is missing before ``spans``: sequences, and how many tokens of each."""
    passes, run = list[list[tuple[int, int]]](), world.runner.compute.forward

    def noted(pieces: Any, *step: Any, **more: Any) -> Any:
        passes.append([(each.sequence, len(each.tokens)) for each in pieces])
        return run(pieces, *step, **more)

    with monkeypatch.context() as patch, world.runner.context():
        patch.setattr(world.runner.compute, "forward", noted)
        while world.runner.feeding.feed(spans):
            assert len(passes) < 100, "for ever"
    return passes


def behind(world: World, *lengths: int) -> list[int]:
    """Sequences of 90 tokens, each another one's, that were cut to ``lengths`` and have no checkpoint."""
    made = [fed(world, prompt(90, seed)) for seed in range(len(lengths))]
    for sequence, length in zip(made, lengths, strict=True):
        world.truncate(sequence, length)
    world.runner.states.forget_checkpoints()
    return made


@pytest.mark.parametrize(
    ("lengths", "of_a_pass", "of_a_step", "passes"),
    [
        ((50, 20, 60), 100, 8192, [[(1, 40), (2, 20), (3, 40)], [(1, 10), (3, 20)]]),
        ((30, 45, 5), 50, 8192, [[(1, 30)], [(2, 40), (3, 5)], [(2, 5)]]),
        ((30, 15), 100, 24, [[(1, 24)], [(1, 6), (2, 15)]]),
    ],
    ids=["pieces of several sequences", "a piece that does not fit waits", "no more tokens than a step may have"],
)
@pytest.mark.parametrize("slots", [3, 9])
def test_a_pass_feeds_the_next_pieces_in_the_order_of_spans(
    *, folder, monkeypatch, slots, lengths, of_a_pass, of_a_step, passes
):
    """Of a sequence, 40 tokens at most."""
    monkeypatch.setattr(feeding, "PASS_TOKENS", {"cpu": of_a_pass})
    world = World(folder, slots=slots, largest=LargestStep(of_a_step, 8))
    spans = [world.span(each, [1]) for each in behind(world, *lengths)]
    assert passes_before(world, monkeypatch, *spans) == passes
    assert [each.recomputed_tokens for each in world.step(*spans)] == [*lengths]


def test_a_pass_feeds_a_parent_once_for_itself_and_its_forks(folder, monkeypatch):
    world = World(folder, slots=12)
    [parent, other] = behind(world, 50, 30)
    spans = [world.fork(parent, [1], 45), world.span(parent, [2]), world.fork(parent, [3], 20), world.span(other, [4])]
    passes = passes_before(world, monkeypatch, *spans)
    assert all(len(dict(each)) == len(each) for each in passes) and passes[0] == [(parent, 40), (other, 30)]
    own, *_ = [each for span, each in zip(spans, world.step(*spans), strict=True) if span.sequence == parent]
    assert own.recomputed_tokens == 5, "but for what the first fork's states have"


def test_a_fork_without_a_slot_does_not_keep_the_sequences_behind_it_from_being_fed(folder, monkeypatch):
    """They need none: their own states advance."""
    world = World(folder, slots=3)
    first, second, third = behind(world, 50, 20, 30)
    spans = [world.fork(first, [1], 45), world.span(second, [1]), world.fork(second, [1], 10), world.span(third, [1])]
    assert passes_before(world, monkeypatch, *spans) == [[(second, 20), (third, 30)]]
    assert [type(each) for each in world.step(*spans)] == [KvBlocksExhausted, SpanResult, KvBlocksExhausted, SpanResult]


def test_what_is_fed_for_a_sequence_is_not_dropped_for_another_piece_of_its_pass(folder, monkeypatch):
    """The states of the first one are lost between two passes, and its piece comes before that of the second."""
    world = World(folder, slots=4)
    first, second = (fed(world, prompt(120, seed)) for seed in range(2))
    world.runner.states.forget_checkpoints()
    spans = [world.span(each, [1], 110) for each in (first, second)]
    with world.runner.context():
        world.runner.feeding.feed(spans)
        [lost, _] = world.runner.states.pool.items()
        world.runner.states.pool.drop(lost[0])
        fed(world, [1])
        assert [world.runner.feeding.missing(span) for span in spans] == [110, 70]
        world.runner.feeding.feed(spans)
        assert [world.runner.feeding.missing(span) for span in spans] == [70, 30]
    world.step(*spans)


def test_each_piece_has_the_adapter_of_its_span(folder, monkeypatch):
    world = World(folder)
    made = behind(world, 10, 10, 10)
    spans, seen = [world.span(each, [1], adapter=7 + each) for each in made], list[tuple[int, int]]()

    def noted(pieces: Any, *step: Any, **more: Any) -> None:
        seen.extend((each.sequence, each.adapter) for each in pieces)

    with monkeypatch.context() as patch, world.runner.context():
        patch.setattr(world.runner.compute, "forward", noted)
        world.runner.feeding.feed(spans)
    assert seen == [(each, 7 + each) for each in made]


@pytest.mark.parametrize("slots", [4, 9], ids=["one in another slot", "all in other slots"])
@pytest.mark.parametrize("late", [False, True], ids=["before its layers", "behind them"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_pass_that_fails_changes_nothing_of_any_of_its_sequences(folder, monkeypatch, slots, late, nth):
    """The last one has states that a pass may advance in their own slot; the others have longer ones."""
    world = World(folder, slots=slots)
    made = [fed(world, prompt(90, seed)) for seed in range(3)]
    world.truncate(made[2], 70)
    world.runner.states.forget_checkpoints()
    has, free = dict(world.has), world.runner.cache_state().free_slots
    cuts = [world.span(made[0], [1], 85), world.span(made[1], [1], 80), world.span(made[2], [1])]
    run, passes = world.runner.compute.forward, itertools.count(1)

    def fails(*step: Any, **more: Any) -> Any:
        number = next(passes)
        if number == nth and not late:
            raise Sabotage
        rows = run(*step, **more)
        if number == nth:
            raise Sabotage
        return rows

    with monkeypatch.context() as broken, pytest.raises(StepFailed):
        broken.setattr(world.runner.compute, "forward", fails)
        world.step(*cuts)
    assert world.has == has and world.runner.cache_state().free_slots == free
    world.check()
    if slots == 9:
        assert [world.missing(each) for each in made[:2]] == [0, 0], "their own states are as they were"
    for again in (cuts[2:], cuts[1:], cuts):
        world.step(*again)


def test_what_was_fed_again_gives_its_slot_to_a_span_before_and_then_its_own_is_refused(folder):
    world = World(folder, slots=2)
    sequence, made = fed(world, prompt(60)), world.made([1, 2])
    world.runner.states.forget_checkpoints()
    outcomes = world.step(made, world.span(sequence, [1], 40))
    assert [type(each) for each in outcomes] == [SpanResult, KvBlocksExhausted]
    assert outcomes[1].metadata == {"needed_slots": "1", "free_slots": "0"}
    world.step(world.span(sequence, [3]), world.span(made.sequence, [4]))
    world.release(made.sequence)
    [cut] = world.step(world.span(sequence, [1], 40))
    assert isinstance(cut, SpanResult)


@pytest.mark.parametrize("at", [24, 30, 40, 48, 59])
def test_a_deep_fork_is_fed_in_the_slot_of_the_checkpoint_that_it_starts_from_if_it_is_the_last(
    folder, monkeypatch, at
):
    """The step that makes the fork then takes that slot for it. The parent keeps its own states."""
    monkeypatch.setattr(feeding, "PIECE_TOKENS", 4)
    world = World(folder, slots=2)
    sequence = fed(world, prompt(60))
    [(_, slot)], before = world.runner.states.pool.items(), world.missing(sequence)
    [made] = world.step(child := world.fork(sequence, [1], at))
    assert isinstance(made, SpanResult) and world.runner.states.pool.items() == []
    assert world.runner.cache_state().free_slots == 0 and before == world.missing(sequence) == 0
    world.step(world.span(sequence, [3], output=ALL), world.span(child.sequence, [2], output=ALL))
    world.release(child.sequence)
    assert world.runner.states.pool.take() == slot


@pytest.mark.parametrize(("slots", "missing"), [(2, [16]), (3, [40, 16]), (4, [16, 16])])
def test_of_forks_between_steps_the_last_one_goes_on_in_the_slot_of_the_checkpoint(folder, slots, missing):
    """Those before it have lost it then, unless another slot was free for each."""
    world = World(folder, slots=slots)
    parent = fed(world, prompt(60))
    world.truncate(parent, 40)
    pool = world.runner.states.pool
    for key, slot in pool.items():
        if world.runner.states.store.slots[slot].length != 24:
            pool.drop(key)
    made = [next(world.numbers) for _ in missing]
    world.do("fork", parent, made, 40)
    world.has |= dict.fromkeys(made, world.has[parent])
    assert [world.missing(each) for each in made] == missing
    for each in made:
        world.step(world.span(each, [1], output=ALL))
    assert world.missing(parent) == (16 if slots == 4 else 40)


def test_a_deep_fork_without_any_slot_is_refused_and_the_checkpoints_of_other_spans_stay(folder):
    world = World(folder, slots=2)
    sequence = fed(world, prompt(60))
    at_24 = world.fork(sequence, [1], 24)
    made, refused = world.step(at_24, world.fork(sequence, [1], 40))
    assert isinstance(made, SpanResult) and made.recomputed_tokens == 0
    assert refused.metadata == {"needed_slots": "1", "free_slots": "0"}
    [refused] = world.step(world.fork(sequence, [1], 40))
    assert refused.metadata == {"needed_slots": "1", "free_slots": "0"}
    assert world.missing(sequence) == 0
    world.step(world.span(sequence, [3]), world.span(at_24.sequence, [2]))


@pytest.mark.parametrize("late", [False, True], ids=["before its layers", "behind them"])
def test_a_deep_fork_that_fails_in_the_slot_of_its_checkpoint_gives_it_back(folder, monkeypatch, late):
    world = World(folder, slots=2)
    sequence = fed(world, prompt(60))
    run = world.runner.compute.forward

    def fails(*step: Any, **more: Any) -> None:
        if late:
            run(*step, **more)
        raise Sabotage

    with monkeypatch.context() as broken, pytest.raises(StepFailed):
        broken.setattr(world.runner.compute, "forward", fails)
        world.step(world.fork(sequence, [1], 40))
    world.check()
    assert world.runner.cache_state().free_slots == 1
    world.step(child := world.fork(sequence, [1], 40))
    world.step(world.span(sequence, [3], output=ALL), world.span(child.sequence, [2], output=ALL))


@pytest.mark.parametrize("known", [0, 10, 60])
def test_a_chunk_of_drafts_that_are_rejected_leaves_the_states_to_be_fed_again(folder, known):
    world, accepts = World(folder), OutputSpec(Positions.ALL, Accept())
    if known:
        span = world.span(fed(world, prompt(known)), prompt(50, seed=1), output=accepts)
    else:
        span = world.made(prompt(50), accepts, prefix=None)
    [outcome] = world.step(span)
    assert known < outcome.length < known + 50
    assert world.missing(span.sequence) > 0
    world.step(world.span(span.sequence, [1, 2], output=ALL))
    world.step(world.span(span.sequence, [3]))


@pytest.mark.parametrize(
    ("steps", "use", "checkpoints", "then"),
    [
        ([prompt(48), [1, 2], (48, prompt(40, seed=2))], None, 3, (54, 6)),
        ([prompt(100), (48, prompt(40, seed=2))], None, 5, (54, 6)),
        ([[1, 2], (0, prompt(40))], None, 1, (23, 23)),
        ([prompt(73), prompt(40, seed=1)], PREFIX, 5, (75, 3)),
        ([prompt(20), [1, 2, 3, 4], [1], [2]], None, 1, (25, 0)),
        ([prompt(20), [1, 2, 3, 4], prompt(40, seed=2)], None, 2, (54, 6)),
        ([prompt(20), [1, 2, 3, 4], prompt(40, seed=2)], PREFIX, 3, (61, 1)),
    ],
    ids=[
        "a chunk from where one is due",
        "a chunk from one",
        "a chunk from nothing",
        "a prompt that ends where one is due",
        "steps",
        "a chunk from one that steps have left",
        "a published chunk from one that steps have left",
    ],
)
def test_checkpoints_are_those_that_are_due_and_no_others(folder, steps, use, checkpoints, then):
    """``then``: a length, and what is missing behind a truncation to it."""
    world = World(folder, slots=20)
    sequence = fed(world, steps[0], prefix=use)
    for each in steps[1:]:
        start, tokens = each if isinstance(each, tuple) else (None, each)
        world.step(world.span(sequence, tokens, start))
    assert world.runner.states.pool.checkpoints == checkpoints
    world.truncate(sequence, then[0])
    assert world.missing(sequence) == then[1]
    world.step(world.span(sequence, [1]))


def test_a_copy_that_fails_leaves_the_states_to_be_fed_again(folder, monkeypatch):
    """Without a slot apart the states of a deep cut take the place of the longer ones."""

    def fails(source: Any, into: Any, length: int) -> None:
        into.states.fill_(torch.nan)
        raise Sabotage

    world = World(folder, slots=2)
    fed(world, [1])
    sequence = fed(world, prompt(60))
    with monkeypatch.context() as broken:
        broken.setattr(world.runner.states.store, "copy", fails)
        with pytest.raises(StepFailed):
            world.step(world.span(sequence, [1], 40))
    world.step(world.span(sequence, [1], 60))


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *itertools.product(("a copy", "a checkpoint that is saved"), BEGINS),
        ("a checkpoint that is saved", "an import"),
    ],
)
def test_memory_that_a_slot_lacks_takes_neither_slots_nor_blocks(folder, monkeypatch, how, what):
    """The checkpoint that is saved is another one, and at last the one that the prompt begins at."""
    world, history = World(folder, slots=4), prompt(60)
    sequence = fed(world, history, prefix=PREFIX)
    pool, kv, taken = world.runner.states.pool, world.runner.kv, world.taken(sequence)

    def fails(*_: Any) -> None:
        raise MemoryError

    def state() -> tuple[Any, ...]:
        there = world.runner.cache_state()
        return there.free_slots, there.free_blocks, there.sequences, kv.length(sequence)

    def begin() -> None:
        if how == "a prompt that is found":
            [outcome] = world.step(world.made([*history[:57], 1], prefix=PREFIX))
            assert outcome.cached_tokens == 56
        elif how == "a fork in a step":
            world.step(world.fork(sequence, [1], 60))
        elif how == "an import":
            world.bring(taken, PREFIX)
        else:
            world.do("fork", sequence, [child := next(world.numbers)], 60)
            world.has[child] = world.has[sequence]

    for live in range(1, 3 if what == "a copy" else 4):
        before = state()
        with monkeypatch.context() as broken:
            if what == "a copy":
                broken.setattr(world.runner.states.store, "copy", fails)
            else:
                broken.setattr(pool, "on_drop", fails)
            with pytest.raises(StepFailed):
                begin()
        assert state() == before
        world.check()
        begin()
        assert world.runner.cache_state().free_slots == 4 - live - 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a copy failed"), torch.OutOfMemoryError()])
@pytest.mark.parametrize("what", ["the copy", "the checkpoint that is saved"])
def test_a_checkpoint_that_cannot_be_kept_fails_no_step_and_takes_no_slot(folder, monkeypatch, what, error):
    world = World(folder, slots=3)
    first, second = (fed(world, prompt(60, seed), prefix=PREFIX) for seed in range(2))
    pool = world.runner.states.pool
    assert pool.checkpoints == world.runner.cache_state().free_slots == 1

    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as broken, capture_logs() as logs:
        owner, name = (world.runner.states.store, "copy") if what == "the copy" else (pool, "on_drop")
        broken.setattr(owner, name, fails)
        world.step(*(world.span(each, prompt(20), output=ALL) for each in (first, second)))
    assert [each["error"] for each in logs if each["event"] == "checkpoint_not_kept"] == [type(error).__name__] * 2
    assert world.runner.cache_state().free_slots == 1
    world.truncate(second, 75)
    world.step(*(world.span(each, [1], output=ALL) for each in (first, second)))


def test_a_device_that_is_lost_while_a_checkpoint_is_kept_is_an_error(folder, monkeypatch):
    world = World(folder, slots=3)
    sequence = fed(world, prompt(60))
    with monkeypatch.context() as broken, pytest.raises(torch.AcceleratorError):
        broken.setattr(world.runner.states.store, "copy", Mock(side_effect=torch.AcceleratorError("lost")))
        world.step(world.span(sequence, prompt(20)))
    world.runner.check()
    with monkeypatch.context() as broken, pytest.raises(torch.AcceleratorError):
        broken.setattr(world.runner.states.store, "copy", Mock(side_effect=RuntimeError("Triton Error [CUDA]")))
        broken.setattr(states, "check_device", Mock(side_effect=torch.AcceleratorError("lost")))
        world.do("forward", Step((world.span(sequence, prompt(20), 80),)))
    world.runner.check()


@pytest.mark.parametrize("slots", [3, 4, 9])
def test_a_copy_that_fails_ends_the_pieces_before_it(folder, monkeypatch, slots):
    world = World(folder, slots=slots)
    made = [fed(world, prompt(90, seed)) for seed in range(3)]
    world.runner.states.forget_checkpoints()
    cuts, copies, copy = [world.span(each, [1], 80) for each in made], itertools.count(1), RecurrentStore.copy

    def fails(store: Any, source: Any, into: Any, length: int) -> None:
        copy(store, source, into, length)
        if next(copies) == 2:
            raise Sabotage

    with monkeypatch.context() as broken, pytest.raises(StepFailed):
        broken.setattr(RecurrentStore, "copy", fails)
        world.step(*cuts)
    world.check()
    world.step(*(world.span(each, [2]) for each in made))
    world.step(*cuts)


def test_a_prompt_that_fails_gives_back_the_slots_of_its_checkpoints(folder):
    world = World(folder)
    with pytest.raises(StepFailed), world.failing("select", 1):
        world.step(world.made(prompt(60)))
    world.check()
    assert world.runner.cache_state().free_slots == SLOTS and not world.runner.states.pool.checkpoints


def test_a_fork_has_what_was_fed_again_of_its_parent(folder):
    world = World(folder)
    parent, child = fed(world, prompt(100)), next(world.numbers)
    world.truncate(parent, 90)
    world.runner.states.forget_checkpoints()
    with world.runner.context():
        world.runner.feeding.feed([world.span(parent, [1])])
    world.do("fork", parent, [child], 90)
    world.has[child] = world.has[parent]
    assert world.missing(child) == 90 - PIECE
    world.step(world.span(child, [1]))


def test_a_prompt_s_last_checkpoint_stays_when_another_chunk_does_not_continue_it(folder):
    world = World(folder, slots=20)
    fed(world, prompt(62), [1, 2, 3], prompt(40, seed=1), prefix=PREFIX)
    assert computed(world, world.made(prompt(62))) == [2]


def test_the_checkpoint_at_which_a_prompt_was_found_is_its_sequence_s_too(folder):
    world = World(folder, slots=20)
    fed(world, prompt(62), prefix=PREFIX)
    [outcome] = world.step(span := world.made(prompt(62) + prompt(40, seed=1)))
    assert outcome.cached_tokens == 60
    world.truncate(span.sequence, 61)
    assert world.missing(span.sequence) == 1


def test_what_is_fed_again_for_a_fork_is_not_the_parent_s(folder):
    world = World(folder)
    parent = fed(world, prompt(100))
    [outcome] = world.step(world.fork(parent, [1], 90))
    assert outcome.recomputed_tokens == 0
    [outcome] = world.step(world.span(parent, [1]))
    assert outcome.recomputed_tokens == 0


def test_a_fork_that_is_refused_drops_no_checkpoint(folder):
    world = World(folder, slots=4)
    [sequence] = [fed(world, prompt(60), prefix=PREFIX)]
    before, free = world.runner.states.pool.items(), world.runner.cache_state().free_slots
    with pytest.raises(KvBlocksExhausted) as refused:
        world.do("fork", sequence, [next(world.numbers) for _ in range(5)], 60)
    assert refused.value.metadata == {"needed_slots": "5", "free_slots": str(free)}
    assert before and world.runner.states.pool.items() == before


def test_without_a_slot_a_sequence_is_refused_and_says_why(folder):
    world = World(folder, slots=2)
    first, second, third = (world.made(prompt(9)) for _ in range(3))
    *made, refused = world.step(first, second, third)
    assert [each.length for each in made] == [9, 9]
    assert refused.metadata == {"needed_slots": "1", "free_slots": "0"}
    assert world.runner.cache_state().free_slots == 0
    [chunk] = world.step(world.span(first.sequence, prompt(40)))
    assert isinstance(chunk, KvBlocksExhausted), "a chunk needs a slot besides its sequence's"
    assert [each.length for each in world.step(world.span(first.sequence, prompt(32)))] == [9 + 32]
    world.release(second.sequence)
    assert [each.length for each in world.step(world.span(first.sequence, prompt(40)))] == [9 + 32 + 40]


def test_checkpoints_that_are_kept_and_those_dropped_for_others_are_counted(folder, usual_distances):
    """One that nobody needs any more is not among them."""

    def counted() -> tuple[int, int, int]:
        state = world.runner.cache_state()
        return state.free_slots, state.checkpoints, state.checkpoints_dropped

    world = World(folder, slots=3)
    first = fed(world, prompt(60), prefix=PREFIX)
    assert counted() == (2, 1, 0)
    second = fed(world, prompt(9))
    assert counted() == (1, 1, 0)
    third = fed(world, prompt(9))
    assert counted() == (0, 0, 1)
    world.release(second)
    world.release(third)
    fed(world, prompt(60, seed=1), prefix=PREFIX)
    assert counted() == (1, 1, 1)
    [made] = world.step(world.made([*prompt(60, seed=1), 1]))
    assert made.cached_tokens == 56 and counted() == (0, 0, 2), "it goes on in the slot of the last one"
    world.release(first)
    fed(world, prompt(60, seed=2), prefix=None)
    world.do("forget_prefixes")
    assert counted() == (0, 0, 2)


@pytest.mark.parametrize("slots", [3, 4, 5])
def test_a_group_that_is_refused_says_how_many_slots_it_needs_and_how_many_it_could_have(folder, slots):
    """Two creations, a fork and a chunk need one each, and a step of few tokens none."""
    world = World(folder, slots=slots)
    first, second = fed(world, prompt(9)), fed(world, prompt(9))
    group = [
        world.made(prompt(5)),
        world.span(first, [1]),
        world.made(prompt(40)),
        world.fork(second, [2], 9),
        world.span(second, prompt(40)),
    ]
    alone, before = world.made(prompt(9, seed=1)), world.runner.cache_state()
    *refused, made = world.do("forward", Step((*group, alone), (range(5),))).outcomes
    [error] = set(refused)
    assert error.metadata == {"needed_slots": "4", "free_slots": str(slots - 2)}
    assert error.position == {3: 0, 4: 2, 5: 4}[slots]
    assert isinstance(made, SpanResult) and world.runner.cache_state().free_slots == before.free_slots - 1
    world.do("release", [alone.sequence])
    if slots == 5:
        assert all(isinstance(each, SpanResult) for each in world.step(*group[:-1])), "without the chunk"


def test_a_group_that_lacks_blocks_does_not_name_slots(folder):
    world = World(folder, blocks=20)
    group = [world.made(prompt(9)), world.made(prompt(90))]
    one, other = world.do("forward", Step(tuple(group), (range(2),))).outcomes
    assert one is other and "needed_blocks" in one.metadata and "needed_slots" not in one.metadata


@pytest.mark.parametrize("tokens", [5, 60])
def test_a_prompt_begins_in_the_slot_of_the_checkpoint_that_it_begins_at_if_it_is_the_last(
    folder, usual_distances, tokens
):
    """The checkpoint counts as free, unless another span of the step reads it."""
    known, others = prompt(60), [prompt(tokens, seed) for seed in (1, 2)]
    for slots in (2, 3):
        world = World(folder, slots=slots)
        world.step(first := world.made(known))
        assert world.runner.cache_state().free_slots == slots - 1 and world.runner.states.pool.checkpoints == 1
        longer = [world.made(known + other) for other in others]
        made, refused = world.step(*longer)
        assert made.cached_tokens == 56 and refused.metadata["needed_slots"] == "1"
        world.truncate(longer[0].sequence, 50)
        world.release(first.sequence)
        world.step(world.span(longer[0].sequence, [1, 2]))


@pytest.mark.parametrize("tokens", [5, 60])
def test_a_prompt_that_fails_in_the_slot_of_a_checkpoint_gives_it_back(folder, usual_distances, tokens):
    world, known = World(folder, slots=2), prompt(60)
    world.step(world.made(known))
    span = world.made(known + prompt(tokens, seed=1))
    with pytest.raises(StepFailed), world.failing("commit", 1):
        world.step(span)
    assert world.runner.cache_state().free_slots == 1 and world.runner.states.pool.checkpoints == 0
    [made] = world.step(span)
    assert made.cached_tokens == 0


def test_of_a_step_s_spans_none_is_refused_for_the_checkpoints_of_another(folder):
    world = World(folder, slots=3)
    outcomes = world.step(*(world.made(prompt(60, seed)) for seed in range(3)))
    assert [each.length for each in outcomes] == [60] * 3


def test_a_child_keeps_the_checkpoints_of_its_parent_s_tokens_when_the_parent_goes_another_way(folder):
    """In the step that makes the child the parent is fed other tokens, and has checkpoints of those then."""
    world = World(folder, slots=12)
    made = world.made(prompt(80), prefix=None)
    world.step(made)
    child = world.fork(made.sequence, [4], 76)
    world.step(world.span(made.sequence, prompt(50, seed=5), 10), child)
    world.truncate(child.sequence, 60)
    assert world.missing(child.sequence) == 12
    world.step(world.span(child.sequence, [1]))


def test_what_a_sequence_remembers_does_not_grow_with_the_times_that_it_went_back(folder):
    """Each time leaves a checkpoint of its own, which is dropped for the next ones."""
    world = World(folder, slots=3)
    sequence = fed(world, prompt(6), [1], [2])

    def remembered(times: int) -> int:
        for each in range(times):
            world.step(world.span(sequence, [1], 3 + each % 2))
            for token in (2, 5, 4, 0):
                world.step(world.span(sequence, [token]))
        found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, states.__file__)])
        return sum(each.size for each in found.statistics("filename"))

    tracemalloc.start()
    try:
        few = remembered(10)
        assert remembered(40) <= few + 1000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("how", ["a step", "a truncation", "a fork", "a fork in a step"])
def test_checkpoints_of_tokens_that_were_replaced_are_not_those_of_the_new_ones(folder, how):
    """The prompt's end is a checkpoint, where small steps keep none."""
    world, other = World(folder, slots=12), prompt(60, seed=5)
    sequence, first = fed(world, prompt(62), prefix=PREFIX), other[:30]
    if how == "a step":
        world.step(world.span(sequence, first, 30))
    elif how == "a fork in a step":
        world.step(child := world.fork(sequence, first, 30))
        sequence = child.sequence
    else:
        if how == "a fork":
            world.do("fork", sequence, [child := next(world.numbers)], 30)
            world.has[child], sequence = world.has[sequence], child
        world.truncate(sequence, 30)
        world.step(world.span(sequence, first))
    for tokens in (other[30:], [1], [2]):
        world.step(world.span(sequence, tokens))
    world.truncate(sequence, 61)
    world.step(world.span(sequence, [3]))


def test_what_is_taken_back_within_the_last_step_leaves_no_trace_in_any_bit(each_folder):
    check_bits(Bits(each_folder), prompt(20), 0)


def test_what_is_taken_back_leaves_no_trace_on_two_ranks(folder):
    bits = Bits(folder, tensor_parallel=2)
    with closing(bits.world):
        check_bits(bits, prompt(20), 1)


def check_bits(bits: Bits, history: list[int], victim: int) -> None:
    world = bits.world
    made = world.made(history, prefix=None)
    bits.rows(made)
    for kept in (3, 0, 5, 1):
        bits.rows(world.span(made.sequence, draft := prompt(5, seed=kept)))
        world.truncate(made.sequence, len(history) + kept)
        history += draft[:kept]
        child = world.fork(made.sequence, [4], len(history))
        [of_child, own] = bits.rows(child, world.span(made.sequence, [2]))
        assert own == bits.alone([*history, 2])
        assert of_child == bits.alone([*history, 4])
        with pytest.raises(StepFailed), world.failing("commit", 1):
            bits.rows(world.span(made.sequence, [1, 3], len(history)))
        with pytest.raises(StepFailed), world.failing("forward", 1, victim):
            bits.rows(world.span(made.sequence, [1, 3], len(history)))
        history.append(2)
        assert bits.rows(world.span(made.sequence, [5, 0])) == [bits.alone([*history, 5, 0])]
        history += [5, 0]
        world.release(child.sequence)


@pytest.mark.parametrize("tokens", [32, 50, 256])
def test_pieces_of_several_sequences_in_a_pass_have_the_bits_of_single_tokens(folder, monkeypatch, tokens):
    monkeypatch.setattr(feeding, "PIECE_TOKENS", 32)
    monkeypatch.setattr(feeding, "PASS_TOKENS", {"cpu": tokens})
    bits, histories = Bits(folder, slots=9), [prompt(60, seed) for seed in range(4)]
    world, lengths = bits.world, (40, 33, 7, 52)
    made = [world.made(history[:30], prefix=None) for history in histories]
    for span, history in zip(made, histories, strict=True):
        bits.rows(span)
        for tokens_behind in (history[30:], [1], [2]):
            bits.rows(world.span(span.sequence, tokens_behind))
    world.runner.states.forget_checkpoints()
    cuts = [world.span(span.sequence, [1], length) for span, length in zip(made, lengths, strict=True)]
    assert max(map(len, passes_before(world, monkeypatch, *cuts))) == {32: 2, 50: 3, 256: 4}[tokens]
    alone = [bits.alone([*history[:length], 1]) for history, length in zip(histories, lengths, strict=True)]
    assert bits.rows(*cuts) == alone


def test_a_deep_cut_that_fails_or_is_refused_leaves_every_bit_of_the_longer_sequence(each_folder):
    """Its tokens were fed again, apart from the states that the sequence has."""
    bits, history = Bits(each_folder), prompt(60)
    world = bits.world
    made = world.made(history[:32], prefix=None)
    bits.rows(made)
    bits.rows(world.span(made.sequence, history[32:]))
    deep = world.span(made.sequence, [1], 40)
    with pytest.raises(StepFailed), world.failing("commit", 1):
        bits.rows(deep)
    assert world.missing(made.sequence) == 0
    held = [next(world.numbers) for _ in range(SLOTS - 1)]
    world.do("fork", made.sequence, held, 60)  # no slot is left to feed them apart
    world.do("release", held)
    assert bits.rows(world.span(made.sequence, [2])) == [bits.alone([*history, 2])]
    [outcome] = world.do("forward", Step((world.span(made.sequence, [1], 40),))).outcomes
    assert outcome.recomputed_tokens == 0, "that checkpoint is there still"
    assert columns_of(outcome.rows)["logits"].tobytes() == bits.alone([*history[:40], 1])
