"""Sequences of a model with recurrent layers that leave a runner and come to another one, or back: nothing is computed
again, bits are those of a sequence that stayed, and nobody else finds what was imported."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.core import PREFIX, Span, Step
from ferrum_rpc.engine import states
from ferrum_rpc.errors import KvBlocksExhausted, StepFailed
from tests.support.checkpoints import RECURRENT_SHAPE as SHAPE
from tests.support.checkpoints import make_checkpoint
from tests.support.state_world import EVERY, IMPORTED, LAST, OF_A_LIAR, SIZE, Bits, World, computed, fed, prompt

TOKENS = prompt(100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_5", **SHAPE)


@pytest.fixture(autouse=True)
def small_distances(monkeypatch):
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)


def test_a_sequence_that_moves_has_the_bits_of_one_that_stays_at_every_length(folder):
    """Also after a truncation to any length within the last step."""
    here, there, dice = Bits(folder), Bits(folder), np.random.default_rng(5)
    made = here.world.made([1], prefix=None)
    here.rows(made)
    stays, lengths = made.sequence, set()
    while (length := len(here.world.has[stays])) < 75:
        here.rows(here.world.span(stays, prompt(step := int(dice.integers(1, 7)), seed=length)))
        comes = there.world.bring(here.world.taken(stays), None)
        kept = length + int(dice.integers(0, step + 1))
        for bits, sequence in ((here, stays), (there, comes)):
            bits.world.truncate(sequence, kept)
            assert bits.world.missing(sequence) == 0
        for tokens in ([3], [1, 4]):
            last = range(kept - 12, kept)
            missing = [
                [each.world.runner.states.missing(which, length) > 0 for length in last]
                for each, which in ((here, stays), (there, comes))
            ]
            assert missing[0] == missing[1]
            assert there.rows(there.world.span(comes, tokens)) == here.rows(here.world.span(stays, tokens))
        there.world.release(comes)
        here.world.truncate(stays, kept + 1)
        lengths.add((length + step) % 4)
    assert lengths == {0, 1, 2, 3}


def test_a_prompt_moves_with_its_last_checkpoint(folder):
    here, there = World(folder), World(folder)
    stays = fed(here, TOKENS)
    comes = there.bring(here.taken(stays), None)
    assert there.missing(comes) == 0
    for length, missing in ((97, 1), (96, 0), (95, 95)):
        there.truncate(comes, length)
        assert there.missing(comes) == missing
    [outcome] = there.step(there.span(comes, [1, 2]))
    assert outcome.recomputed_tokens == 95


def test_what_was_to_be_fed_again_is_fed_again_there(folder):
    here, there = World(folder), World(folder)
    stays = fed(here, TOKENS)
    here.truncate(stays, 98)
    taken = here.taken(stays)
    assert taken.states.slot is None and taken.states.checkpoint.length == 96
    comes = there.bring(taken, None)
    assert there.missing(comes) == 2
    there.step(there.span(comes, [1]))
    here.do("forget_prefixes")
    comes = there.bring(here.taken(stays), None)
    assert there.missing(comes) == 98
    there.step(there.span(comes, [1]))


def test_an_export_takes_no_slot_and_an_import_without_one_leaves_nothing(folder):
    world = World(folder, slots=2)
    sequence, other = fed(world, TOKENS[:30]), fed(world, TOKENS[:9])
    taken, before = world.taken(sequence), world.runner.cache_state()
    with pytest.raises(KvBlocksExhausted) as refused:
        world.bring(taken, PREFIX)
    assert refused.value.metadata == {"needed_slots": "1", "free_slots": "0"}
    assert world.runner.cache_state() == before
    world.release(other)
    comes = world.bring(taken, PREFIX)
    assert world.missing(comes) == 0 and world.runner.cache_state().free_slots == 0


def test_the_copy_of_an_export_is_of_the_moment_at_which_it_was_made(folder):
    world = World(folder)
    sequence, copy = fed(world, TOKENS[:30], [1, 2]), 99
    world.do("begin_export", sequence, copy)
    wanted = world.do("read_states", sequence)
    world.step(world.span(sequence, [3, 4, 5]))
    assert world.do("read_states", copy) == wanted
    world.do("begin_export", sequence, copy + 1)
    world.do("release", [copy, copy + 1])
    world.check()
    assert not world.runner.states.copies


def test_an_import_that_is_given_up_gives_its_slot_back(folder):
    world = World(folder)
    before = world.runner.cache_state()
    assert world.do("begin_import", 99, np.array(TOKENS, np.int32), 0, PREFIX) == 0
    assert world.runner.cache_state().free_slots == before.free_slots - 1
    world.do("release", [99])
    assert world.runner.cache_state() == before
    world.check()


def test_states_of_another_shape_are_refused_and_the_import_can_go_on(folder):
    world = World(folder)
    sequence = fed(world, TOKENS[:30], [1, 2])
    taken = world.taken(sequence)
    slot = taken.states.slot
    for wrong in (
        slot._replace(states=slot.states[:-4]),
        slot._replace(gates=slot.gates + bytes(16)),
        slot._replace(folded=slot.folded[:1]),
        slot._replace(folded=(-99, 0)),
    ):
        with pytest.raises(StepFailed):
            world.bring(taken._replace(states=taken.states._replace(slot=wrong)), None)
        world.do("commit_import", next(world.numbers) - 1, taken.states)
    world.runner.check()


@pytest.mark.parametrize(("use", "others"), [(IMPORTED, 100), (PREFIX, 4)], ids=["one caller's", "trusted"])
def test_an_import_s_checkpoint_is_found_by_whom_its_blocks_are_for(folder, use, others):
    here, there = World(folder), World(folder)
    taken = here.taken(fed(here, TOKENS))
    there.bring(taken, use)
    assert computed(there, TOKENS, use._replace(imported_from=None)) == 4
    assert computed(there, TOKENS) == others
    assert computed(there, TOKENS, PREFIX._replace(caller=bytes([7] * 16))) == 4  # what the last one has computed


def test_a_checkpoint_within_a_block_is_for_its_sequence_alone(folder):
    here, there = World(folder), World(folder, size=5, slots=30)
    comes = there.bring(here.taken(fed(here, TOKENS)), PREFIX)
    assert computed(there, TOKENS) == 100
    there.truncate(comes, 97)
    assert there.missing(comes) == 1
    there.step(there.span(comes, [1]))


def test_what_follows_an_import_is_its_caller_s_until_the_sequence_is_empty(folder):
    """Although the prefix cache had the import's tokens: states are of all of them."""
    world = World(folder, slots=30)
    taken = world.taken(fed(world, TOKENS[:96], TOKENS[96:]))
    fed(world, TOKENS, prefix=PREFIX)
    comes = world.bring(taken, IMPORTED)
    more, at = prompt(60, seed=2), 96
    world.truncate(comes, at)
    world.step(world.span(comes, more))
    assert computed(world, TOKENS[:at] + more) == 60
    world.truncate(comes, 0)
    world.step(world.span(comes, other := prompt(90, seed=3)))
    assert computed(world, other) <= SIZE


def test_a_state_that_goes_back_to_tokens_of_others_is_not_theirs(folder):
    """The import takes the first 96 tokens from the prefix cache, and its states are left as a checkpoint at 72."""
    world = World(folder, slots=30)
    ours = fed(world, TOKENS, prefix=PREFIX)
    comes = world.bring(world.forged(TOKENS, 0, journal=True), OF_A_LIAR._replace(imported_from=0))
    assert world.do("imported_from", comes) == 96
    world.runner.states.pool.drop(world.runner.kv.checkpoint_key(ours, 72))
    world.do("truncate", comes, 72)
    world.do("forward", Step((Span(comes, np.array(prompt(40), np.int32), 72, LAST),)))
    assert computed(world, [*TOKENS[:72], 1]) == 72 - 48 + 1


def test_a_checkpoint_of_tokens_that_others_have_is_not_theirs(folder):
    """Also if theirs was dropped meanwhile."""
    world = World(folder, slots=30)
    fed(world, TOKENS, prefix=PREFIX)
    taken, sequence = world.forged(TOKENS, 72, journal=False), 99
    first = world.do("begin_import", sequence, taken.tokens, 0, OF_A_LIAR._replace(imported_from=0))
    assert first == 96
    world.runner.states.forget_checkpoints()
    for layer, parts in enumerate(taken.parts):
        world.do("write_kv", sequence, first, 100, layer, [each[len(each) // 100 * first :] for each in parts])
    world.do("commit_import", sequence, taken.states)
    assert computed(world, [*TOKENS[:72], 1]) == 72 + 1


def test_a_park_keeps_from_where_on_content_is_imported(folder):
    world = World(folder, slots=30)
    taken = world.taken(fed(world, TOKENS))
    fed(world, TOKENS[:50], prefix=PREFIX)
    comes = world.bring(taken, IMPORTED)
    assert world.do("imported_from", comes) == 48
    found = fed(world, TOKENS, prefix=IMPORTED._replace(imported_from=None))
    for length, imported_from in ((98, 48), (49, 48), (48, 48), (30, 30), (0, None)):
        world.truncate(found, length)
        assert world.do("imported_from", found) == imported_from
