"""Sequences of a model with recurrent layers that leave a runner and come to another one, or back: nothing is computed
again, bits are those of a sequence that stayed, and nobody else finds what was imported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.core import PREFIX, Accept, MovedStates, OutputSpec, Positions, Span, StateRows, Step
from ferrum_rpc.engine import states
from ferrum_rpc.errors import KvBlocksExhausted, StepFailed
from tests.support.checkpoints import RECURRENT_SHAPE as SHAPE
from tests.support.state_world import (
    ALL,
    EVERY,
    IMPORTED,
    LAST,
    OF_A_LIAR,
    SIZE,
    SLOTS,
    Bits,
    World,
    computed,
    fed,
    prompt,
)

TOKENS = prompt(100)


@pytest.fixture(scope="module")
def folder(checkpoint_of):
    return checkpoint_of("qwen3_5", **SHAPE)


@pytest.fixture(autouse=True)
def small_distances(monkeypatch):
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sequence_that_moves_has_the_bits_of_one_that_stays_at_every_length(folder, ranks):
    """Also after a truncation to any length within the last step."""
    here, there = (Bits(folder, tensor_parallel=ranks) for _ in range(2))
    with closing(here.world), closing(there.world):
        check_moves(here, there)


def check_moves(here: Bits, there: Bits) -> None:
    dice = np.random.default_rng(5)
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


@pytest.mark.parametrize(("known", "drafts"), [(10, 5), (60, 50)], ids=["a few", "a chunk"])
def test_states_of_rejected_drafts_do_not_move(folder, known, drafts):
    here, there, accepts = World(folder), World(folder), OutputSpec(Positions.ALL, Accept())
    sequence = fed(here, TOKENS[:known])
    [outcome] = here.step(here.span(sequence, prompt(drafts, seed=1), output=accepts))
    assert known < outcome.length < known + drafts - 1
    taken = here.taken(sequence)
    assert all(each is None or each.length <= outcome.length for each in taken.states)
    comes = there.bring(taken, None)
    there.step(there.span(comes, [1]))


@pytest.mark.parametrize("forks", [False, True], ids=["a truncation", "a fork"])
def test_no_checkpoint_of_more_tokens_moves(folder, forks):
    """Before the sequence is fed again."""
    here, there = World(folder), World(folder)
    sequence = fed(here, TOKENS)
    if forks:
        here.do("fork", sequence, [child := next(here.numbers)], 50)
        here.has[child], sequence = tuple(TOKENS[:50]), child
    else:
        here.truncate(sequence, 50)
    taken = here.taken(sequence)
    assert taken.states.slot is None and taken.states.checkpoint.length == 48
    comes = there.bring(taken, None)
    assert there.missing(comes) == 2
    there.step(there.span(comes, [1]))


def test_states_of_a_fork_move_as_they_are_for_its_tokens(folder):
    here, there = World(folder), World(folder)
    parent, child = fed(here, TOKENS[:30], [1, 2, 3]), next(here.numbers)
    here.do("fork", parent, [child], 31)
    here.has[child] = here.has[parent][:31]
    taken = here.taken(child)
    assert taken.states.slot.length == 31
    comes = there.bring(taken, None)
    assert there.missing(comes) == 0
    there.step(there.span(comes, [4]))


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


def give_away(world: World, sequence: int) -> None:
    """All slots are used anew, by forks, by prompts, and by an import."""
    other = World.taken(world, sequence)
    world.release(sequence)
    for seed in range(SLOTS - 1):
        fed(world, prompt(60, seed=9 + seed))
    world.bring(other, None)


CHANGES: dict[str, Callable[[World, int], object]] = {
    "a step": lambda world, sequence: world.step(world.span(sequence, [3, 4, 5])),
    "a chunk and a step": lambda world, sequence: [
        world.step(world.span(sequence, tokens)) for tokens in (TOKENS[:40], [1], [2])
    ],
    "a deep cut": lambda world, sequence: world.step(world.span(sequence, [3], 26)),
    "a cut to nothing": lambda world, sequence: [
        world.truncate(sequence, 0),
        *(world.step(world.span(sequence, [each])) for each in (3, 4)),
    ],
    "other sequences": give_away,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cut", [0, 1], ids=["whole", "cut"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_export_reads_the_states_of_the_moment_at_which_it_began(folder, change, cut, ranks):
    with closing(World(folder, tensor_parallel=ranks)) as world:
        check_moment(world, cut, CHANGES[change])


def check_moment(world: World, cut: int, change: Callable[[World, int], object]) -> None:
    sequence = fed(world, TOKENS[:30], [1, 2, 3])
    world.truncate(sequence, 33 - cut)
    now, later = 98, 99
    for number in (now, later):
        world.do("hold_states", sequence, number)
    lengths = world.do("state_lengths", later)
    assert lengths == world.do("state_lengths", now) and None not in lengths
    wanted = world.pieces(now, lengths)
    world.do("close_states", now)
    first, half = wanted[: len(wanted) // 2], len(wanted) // 2
    assert same(first, world.pieces(later, lengths)[:half])
    change(world, sequence)
    assert world.do("state_lengths", later) == lengths
    assert same(wanted, world.pieces(later, lengths))
    world.do("close_states", later)
    assert not any(each.before_change for each in world.slots())
    world.check()


def same(one: Any, other: Any) -> bool:
    """Whether these are the same rows, bit for bit."""
    return [(rows, data.tobytes()) for rows, data in one] == [(rows, data.tobytes()) for rows, data in other]


def test_an_export_that_ends_leaves_no_copy_of_states(folder):
    world = World(folder)
    sequence, copy = fed(world, TOKENS[:30]), 99
    world.do("begin_export", sequence, copy)
    world.do("release", [copy])
    with pytest.raises(StepFailed):
        world.do("state_lengths", copy)
    assert not any(each.before_change for each in world.runner.states.store.slots)
    world.check()


@torch.inference_mode()
def test_an_export_copies_a_slot_that_a_step_changes_and_no_other(folder):
    world = World(folder)
    sequence, number, [rows] = fed(world, TOKENS[:30], [1, 2]), 99, [StateRows("slot", "states", 0, 1)]
    world.do("hold_states", sequence, number)
    [slot] = [each for each in world.runner.states.store.slots if each.length == 32 and each.before_change]
    for value in (1.0, 2.0):
        slot.states[0, 0] = value
        assert (world.do("read_states", number, [rows])[0].view(np.float32) == value).all(), "it is the slot's"
    world.step(world.made(TOKENS[:9]))
    assert slot.before_change
    world.do("forward", Step((world.span(sequence, [3]),)))
    assert not slot.before_change
    slot.states[0, 0] = 3.0
    assert (world.do("read_states", number, [rows])[0].view(np.float32) == 2.0).all(), "it is a copy"


@pytest.mark.parametrize("slots", [2, 7], ids=["no slot for the checkpoint", "slots"])
def test_an_import_is_given_up_after_any_piece_and_leaves_nothing(folder, slots):
    here, world = World(folder), World(folder, slots=slots)
    taken, tokens = here.taken(fed(here, TOKENS[:60], [1, 2])), np.array([*TOKENS[:60], 1, 2], np.int32)
    held = [fed(world, TOKENS[:9], prefix=None)] if slots == 2 else []
    before = world.runner.cache_state()
    for count in range(0, len(taken.pieces) + 1, 3):
        world.do("begin_import", sequence := 99 + count, tokens, 0, 0, PREFIX)
        world.do("write_states", sequence, taken.states, taken.pieces[:count])
        state = world.runner.cache_state()
        assert (state.free_slots, state.total_slots) == (before.free_slots - 1, slots), "a checkpoint counts as free"
        world.runner.check()
        world.do("release", [sequence])
        assert world.runner.cache_state() == before and not world.runner.states.pool.checkpoints
        world.check()
    comes = world.bring(taken, None)
    assert world.missing(comes) == 0
    world.step(world.span(comes, [1]), *(world.span(each, [2]) for each in held))


def test_a_checkpoint_that_arrives_gives_its_slot_to_a_sequence_and_is_not_half_loaded(folder):
    here, world = World(folder), World(folder, slots=2)
    taken = here.taken(fed(here, TOKENS))
    first = next(place for place, (rows, _) in enumerate(taken.pieces) if rows.image == "checkpoint")
    for taken_by_others in (False, True):
        world.do("begin_import", sequence := next(world.numbers), taken.tokens, 0, 0, None)
        for layer, parts in enumerate(taken.parts):
            world.do("write_kv", sequence, 0, 100, layer, parts)
        world.do("write_states", sequence, taken.states, taken.pieces[: first + 1])
        assert world.runner.states.pool.checkpoints == 1
        other = fed(world, [1, 2]) if taken_by_others else None
        world.do("write_states", sequence, taken.states, taken.pieces[first + 1 :])
        world.do("commit_import", sequence, taken.states)
        world.has[sequence] = (*TOKENS,)
        world.check()
        if other is not None:
            world.step(world.span(other, [3]))
            world.release(other)
        world.truncate(sequence, 98)
        assert world.missing(sequence) == (98 if taken_by_others else 2)
        world.step(world.span(sequence, [1]))
        world.release(sequence)


@pytest.mark.parametrize("then", ["all", "a checkpoint", "nothing"])
def test_states_of_a_stream_that_broke_are_not_those_of_the_next_one(folder, then):
    """The first one has brought all of it, and its trailer was not right."""
    here, world = World(folder), World(folder)
    taken, other = here.taken(fed(here, TOKENS)), here.taken(fed(here, prompt(100, seed=5)))
    world.do("begin_import", sequence := next(world.numbers), taken.tokens, 0, 0, None)
    for layer, parts in enumerate(taken.parts):
        world.do("write_kv", sequence, 0, 100, layer, parts)
    world.do("write_states", sequence, other.states, other.pieces)
    images = {"all": ("slot", "checkpoint"), "a checkpoint": ("checkpoint",), "nothing": ()}[then]
    states = MovedStates(**{each: getattr(taken.states, each) for each in images})
    world.do("write_states", sequence, states, [each for each in taken.pieces if each[0].image in images])
    assert world.runner.states.pool.checkpoints == 1
    world.do("commit_import", sequence, states)
    assert world.runner.states.pool.checkpoints == (then != "nothing")
    world.has[sequence] = (*TOKENS,)
    assert world.missing(sequence) == {"all": 0, "a checkpoint": 4, "nothing": 100}[then]
    world.step(world.span(sequence, [1]))
    world.truncate(sequence, 97)
    world.step(world.span(sequence, [2]))
    world.release(sequence)
    assert world.runner.cache_state().free_slots == SLOTS
    assert not [key for key, _ in world.runner.states.pool.items() if len(key) == 8]


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


def test_an_import_between_unlike_blocks_is_found_from_its_next_checkpoint_on(folder):
    """Or at once, where the checkpoint that came ends with a block."""
    here, there = World(folder), World(folder, size=5, slots=30)
    comes, history = there.bring(here.taken(fed(here, TOKENS)), PREFIX), [*TOKENS]
    assert there.runner.states.checkpoint_tokens == 20
    while len(history) < 119:
        there.step(there.span(comes, [1]))
        history.append(1)
        assert computed(there, history, PREFIX._replace(publishes=False)) == len(history)
    there.step(there.span(comes, [2, 3]))
    assert computed(there, [*history, 2, 3]) == 1
    there.bring(here.taken(fed(here, prompt(63, seed=4), prefix=PREFIX)), PREFIX)
    assert computed(there, [*prompt(63, seed=4), 1]) == 4


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


def test_an_import_that_is_emptied_has_nothing_of_what_came(folder):
    """Its states reach back to the beginning, and are no numbers."""
    world = World(folder)
    comes = world.bring(world.forged(TOKENS[:20], 0, journal=True), None)
    world.lies.remove(comes)
    world.has[comes] = ()
    world.truncate(comes, 0)
    assert world.missing(comes) == 0
    world.step(world.span(comes, [1, 2, 3], output=ALL))


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


def test_a_checkpoint_that_is_known_takes_no_slot_again(folder):
    here, there = World(folder), World(folder, slots=30)
    taken = here.taken(fed(here, TOKENS))
    fed(there, TOKENS, prefix=PREFIX)
    before = there.runner.states.pool.checkpoints
    there.bring(taken, PREFIX)
    assert there.runner.states.pool.checkpoints == before


def test_a_checkpoint_of_tokens_that_others_have_is_not_theirs(folder):
    """Also if theirs was dropped meanwhile."""
    world = World(folder, slots=30)
    fed(world, TOKENS, prefix=PREFIX)
    taken, sequence = world.forged(TOKENS, 72, journal=False), 99
    first = world.do("begin_import", sequence, taken.tokens, 0, 0, OF_A_LIAR._replace(imported_from=0))
    assert first == 96
    world.runner.states.forget_checkpoints()
    for layer, parts in enumerate(taken.parts):
        world.do("write_kv", sequence, first, 100, layer, [each[len(each) // 100 * first :] for each in parts])
    world.do("write_states", sequence, taken.states, taken.pieces)
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
