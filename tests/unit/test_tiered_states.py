"""The second tier with a model that keeps states: prompts are found from the last checkpoint on, after checkpoints gave
their slots to others and after a restart."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.core import PREFIX
from ferrum_rpc.engine import checkpoint_files, states
from ferrum_rpc.engine.state_images import SlotImages
from ferrum_rpc.errors import StepFailed
from ferrum_rpc.kv.tiers import FileReader
from tests.support.checkpoints import RECURRENT_SHAPE as SHAPE
from tests.support.failing import failing
from tests.support.state_world import EVERY, IMPORTED, World, computed, fed, prompt

TOKENS = prompt(100)


@pytest.fixture(scope="module")
def folder(checkpoint_of):
    return checkpoint_of("qwen3_5", **SHAPE)


@pytest.fixture(autouse=True)
def small_distances(monkeypatch):
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)


def tiered(folder, tier, **more) -> World:
    return World(folder, kv_tier_dir=tier, **more)


def searched(world: World, tokens: list[int], prefix=PREFIX) -> int:
    """How many tokens of a new sequence are not found, also by a search of the second tier before."""
    fetched(world, tokens[:-1], prefix)
    return computed(world, tokens, prefix)


def fetched(world: World, tokens: list[int], prefix=PREFIX) -> int:
    """How many blocks come for a prompt."""
    while piece(world, tokens, prefix):
        pass
    blocks, about = 0, (0, 0, np.array(tokens, np.int32), prefix)
    while found := world.do("fetch_prefix", *about):
        blocks += found
    return blocks


def piece(world: World, tokens: list[int], prefix=PREFIX) -> bool:
    """Read the next piece of the checkpoint of a prompt."""
    more: bool = world.do("fetch_states", 0, 0, np.array(tokens, np.int32), prefix)
    world.check()
    return more


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_restart_a_prompt_is_computed_from_its_last_checkpoint_on(folder, tmp_path, ranks):
    """All checkpoints and blocks that others may find are written at the end."""
    world = tiered(folder, tmp_path, slots=30, tensor_parallel=ranks)
    fed(world, TOKENS, prefix=PREFIX)
    fed(world, prompt(100, seed=4))
    world.end()
    world.close()
    world = tiered(folder, tmp_path, slots=30, tensor_parallel=ranks)
    assert searched(world, [*TOKENS, 1]) == 5
    assert world.runner.states.pool.checkpoints == 1
    assert searched(world, [*TOKENS[:80], 1, 2]) == 80 + 2 - 72
    assert searched(world, prompt(100, seed=4)) == 100
    assert searched(world, TOKENS, PREFIX._replace(salt=b"other")) == 100
    world.end()
    world.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_gave_way_comes_back(folder, tmp_path, ranks):
    world = tiered(folder, tmp_path, slots=6, tensor_parallel=ranks)
    prompts = [prompt(100, seed) for seed in range(4)]
    for each in prompts:
        assert computed(world, each) == 100
    assert computed(world, prompts[0]) == 100
    for each in prompts:
        assert searched(world, each) == 4
    fed(world, prompts[0], prompts[1])
    assert searched(world, prompts[2]) == 4
    world.do("forget_prefixes")
    assert searched(world, TOKENS) == 100
    world.end()
    world.close()


def test_what_a_caller_imported_is_found_by_it_alone_after_a_restart(folder, tmp_path):
    here, world = World(folder), tiered(folder, tmp_path, slots=30)
    world.bring(here.taken(fed(here, TOKENS)), IMPORTED)
    world.end()
    world = tiered(folder, tmp_path, slots=30)
    assert searched(world, TOKENS) == 100
    world.do("forget_prefixes")
    world.end()
    world = tiered(folder, tmp_path, slots=30)
    world.bring(here.taken(1), IMPORTED)
    world.end()
    world = tiered(folder, tmp_path, slots=30)
    assert searched(world, TOKENS, IMPORTED._replace(imported_from=None)) == 4
    world.end()


def test_a_file_of_states_that_was_changed_is_a_miss(folder, tmp_path):
    world = tiered(folder, tmp_path, slots=30)
    fed(world, TOKENS, prefix=PREFIX)
    world.end()
    [files] = tmp_path.iterdir()
    last = world.runner.kv.checkpoint_key(1, 96)
    file = files / (b"s" + last).hex()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    world = tiered(folder, tmp_path, slots=30)
    assert fetched(world, TOKENS) == 72 // 4, "no block behind it is read"
    assert computed(world, TOKENS) == 100 - 72
    world.end()


def test_a_checkpoint_whose_slot_a_prompt_goes_on_in_is_kept(folder, tmp_path):
    world = tiered(folder, tmp_path, slots=2)
    first = fed(world, TOKENS, prefix=PREFIX)
    [span] = [world.made([*TOKENS[:24], *prompt(5, seed=1)])]
    assert [each.cached_tokens for each in world.step(span)] == [24]
    world.release(first)
    assert searched(world, [*TOKENS[:24], *prompt(5, seed=2)]) == 5
    world.end()


def test_blocks_come_back_to_a_checkpoint_that_stayed(folder, tmp_path):
    world = tiered(folder, tmp_path, slots=30, blocks=40)
    prompts = [prompt(100, seed) for seed in range(3)]
    for each in prompts:
        assert computed(world, each) == 100
    assert world.runner.states.pool.checkpoints == 12
    assert searched(world, prompts[0]) == 4
    world.end()


def test_without_a_slot_nothing_is_fetched(folder, tmp_path):
    world = tiered(folder, tmp_path)
    fed(world, TOKENS, prefix=PREFIX)
    world.end()
    world = tiered(folder, tmp_path, slots=3)
    held = [fed(world, TOKENS[:5]) for _ in range(3)]
    assert fetched(world, TOKENS) == 0
    world.release(held.pop())
    assert searched(world, TOKENS) == 4
    world.end()


# --- a checkpoint that comes back by pieces ---------------------------------------------------------------------------

OTHER = prompt(100, seed=4)


@pytest.fixture
def after(folder, tmp_path, monkeypatch):
    """What makes a runner that finds two prompts on disk. A piece has few rows."""
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 3000)
    made = list[World]()

    def make(**more) -> World:
        before = tiered(folder, tmp_path, **more | {"slots": 30})
        for each in (TOKENS, OTHER):
            fed(before, each, prefix=PREFIX)
        before.end()
        before.close()
        made.append(tiered(folder, tmp_path, **more))
        return made[-1]

    yield make
    for each in made:
        each.end()
        each.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_operation_reads_a_piece_and_what_has_not_come_as_a_whole_is_not_found(after, monkeypatch, ranks):
    world = after(slots=30, tensor_parallel=ranks)
    own, sizes, read = fed(world, prompt(5)), list[int](), FileReader.read
    monkeypatch.setattr(FileReader, "read", lambda file, size: sizes.append(size) or read(file, size))
    operations = 1
    while piece(world, TOKENS):
        operations += 1
        assert world.runner.cache_state().free_slots == 29, "it counts as free"
        assert computed(world, TOKENS, PREFIX._replace(publishes=False)) == 100
        world.step(world.span(own, [operations % 6]))
    assert operations > 5 and max(sizes[1:]) <= 4096 and sum(sizes) > 10_000
    assert searched(world, TOKENS) == 4


def test_a_checkpoint_whose_slot_is_needed_before_it_has_come_is_given_up(after):
    world = after(slots=2)
    assert piece(world, TOKENS) and piece(world, TOKENS)
    held = [fed(world, prompt(5, seed)) for seed in range(2)]
    assert not piece(world, TOKENS), "no slot is free"
    world.release(held.pop())
    assert searched(world, TOKENS) == 4


def test_a_checkpoint_that_comes_is_given_up_for_another_one(after):
    world = after(slots=3)
    assert piece(world, TOKENS) and piece(world, OTHER)
    assert world.runner.states.pool.checkpoints == 1
    assert searched(world, TOKENS) == searched(world, OTHER) == 4


def test_a_checkpoint_that_comes_is_forgotten_with_all_others(after):
    world = after(slots=30)
    assert piece(world, TOKENS)
    world.do("forget_prefixes")
    assert not piece(world, TOKENS) and world.runner.states.pool.checkpoints == 0
    assert searched(world, TOKENS) == 100


def test_the_pieces_that_came_of_a_damaged_file_are_not_used(after, tmp_path):
    world = after(slots=30)
    [folder] = tmp_path.iterdir()
    for file in folder.glob(b"s".hex() + "*"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert fetched(world, TOKENS) == 0 and world.runner.states.pool.checkpoints == 0
    assert searched(world, TOKENS) == 100


@pytest.mark.parametrize(("owner", "name"), [(SlotImages, "write"), (FileReader, "end")])
def test_a_piece_that_fails_takes_no_slot(after, owner, name):
    world = after(slots=3)
    with pytest.raises(StepFailed), failing(owner, name, of=lambda *_: True):
        while piece(world, TOKENS):
            pass
    world.check()
    assert world.runner.states.pool.checkpoints == 0 and world.runner.cache_state().free_slots == 3
    assert searched(world, TOKENS) == 4
