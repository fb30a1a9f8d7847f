"""The second tier with a model that keeps states: prompts are found from the last checkpoint on, after checkpoints gave
their slots to others and after a restart."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.core import PREFIX
from ferrum_rpc.engine import states
from tests.support.checkpoints import RECURRENT_SHAPE as SHAPE
from tests.support.checkpoints import make_checkpoint
from tests.support.state_world import EVERY, IMPORTED, World, computed, fed, prompt

TOKENS = prompt(100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_5", **SHAPE)


@pytest.fixture(autouse=True)
def small_distances(monkeypatch):
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)


def tiered(folder, tier, **more) -> World:
    return World(folder, kv_tier_dir=tier, **more)


def searched(world: World, tokens: list[int], prefix=PREFIX) -> int:
    """How many tokens of a new sequence are not found, also by a search of the second tier before."""
    while world.do("fetch_prefix", 0, 0, np.array(tokens[:-1], np.int32), prefix):
        pass
    return computed(world, tokens, prefix)


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
    assert world.do("fetch_prefix", 0, 0, np.array(TOKENS, np.int32), PREFIX) == 72 // 4, "no block behind it is read"
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
    assert world.do("fetch_prefix", 0, 0, np.array(TOKENS, np.int32), PREFIX) == 0
    world.release(held.pop())
    assert searched(world, TOKENS) == 4
    world.end()
