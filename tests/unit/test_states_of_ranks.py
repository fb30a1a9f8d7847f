"""States of recurrent layers on several ranks: what ranks may disagree about, what ends a rank, and what is said of all
of them. Any history of two ranks is in test_runner_states.py, and failures on each are in test_ranks.py."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.assembly.size import LargestStep, make_plan
from ferrum_rpc.errors import DeviceLost, StepFailed
from tests.support.checkpoints import RECURRENT_SHAPE as SHAPE
from tests.support.checkpoints import make_checkpoint
from tests.support.state_world import SLOTS, Sabotage, World, prompt, settings_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_5", **SHAPE)


def test_a_truncation_goes_no_deeper_than_what_another_rank_has_folded_in_a_step_that_failed(folder, monkeypatch):
    """Rank 0 fails in the first layer, in which the other rank has brought its states up to the step before."""
    folded = threading.Event()
    with closing(World(folder, tensor_parallel=2)) as world:
        made = world.made(prompt(20), prefix=None)
        world.step(made)
        for token in (1, 2, 3):
            world.step(world.span(made.sequence, [token]))
        assert world.runner.states.missing(made.sequence, 21) == 0
        phase: Any = world.ranked.followers[0].phase
        forward, other = world.runner.model.forward, phase.model.forward

        def fails(inputs, attend, recur):
            def recurred(*rows: Any) -> torch.Tensor:
                assert folded.wait(30)
                raise Sabotage

            return forward(inputs, attend, recurred)

        def told(inputs, attend, recur):
            def recurred(*rows: Any) -> torch.Tensor:
                found: torch.Tensor = recur(*rows)
                folded.set()
                return found

            return other(inputs, attend, recurred)

        with monkeypatch.context() as patch, pytest.raises(StepFailed):
            patch.setattr(world.runner.model, "forward", fails)
            patch.setattr(phase.model, "forward", told)
            world.step(world.span(made.sequence, [4]))
        assert world.runner.states.missing(made.sequence, 22) == 0, "within the last step"
        world.truncate(made.sequence, 21)
        [outcome] = world.step(world.span(made.sequence, [5]))
        assert outcome.recomputed_tokens == 21
        world.step(world.span(made.sequence, [5]))


def test_a_rank_that_cannot_copy_a_slot_ends(folder, monkeypatch):
    """Nothing may be answered as if it had."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with closing(World(folder, tensor_parallel=2)) as world:
        made = world.made(prompt(9), prefix=None)
        world.step(made)
        phase: Any = world.ranked.followers[0].phase
        monkeypatch.setattr(phase.slots, "copy", Mock(side_effect=MemoryError))
        world.do("fork", made.sequence, [7], 9)
        with pytest.raises(DeviceLost, match="rank 1 on thread 1 is gone"):
            world.step(world.span(made.sequence, [1]))


def test_slots_of_all_ranks_are_told(folder):
    one, both = (settings_of(folder, tensor_parallel=ranks, state_slots=SLOTS) for ranks in (1, 2))
    plans = [make_plan(choose(each), LargestStep(), 1 << 40) for each in (one, both)]
    assert plans[0].state_bytes == plans[1].state_bytes + plans[1].others.state_bytes
    assert plans[1].state_bytes == plans[1].others.state_bytes, "each has half of the key heads and the value heads"
    without = make_plan(choose(settings_of(folder, tensor_parallel=2, state_slots=SLOTS + 1)), LargestStep(), 1 << 40)
    assert without.all_bytes - plans[1].all_bytes == plans[0].state_bytes
    infos = []
    for settings in (1, 2):
        with closing(World(folder, tensor_parallel=settings)) as world:
            infos.append(world.runner.info)
            assert world.runner.cache_state().total_slots == SLOTS
    assert infos[0].state_bytes == infos[1].state_bytes == plans[0].state_bytes
    assert infos[0].states is not None and infos[1].states is None, "they do not move"
