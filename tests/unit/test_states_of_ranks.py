"""States of recurrent layers on several ranks: what ranks may disagree about, what ends a rank, what is said of all of
them, and how they move to other numbers of ranks. Any history of two ranks is in test_runner_states.py, and failures on
each are in test_ranks.py."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack, closing
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.core import PREFIX, RecurrentShape, StateLengths, StateRows, StateTensors
from ferrum_rpc.engine import states
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.assembly.size import LargestStep, make_plan
from ferrum_rpc.engine.ranks.images import RowsOfRanks
from ferrum_rpc.errors import DeviceLost, StepFailed
from ferrum_rpc.kv.tiers import STATES
from tests.support.checkpoints import RECURRENT_SHAPE as SHAPE
from tests.support.state_world import EVERY, FAMILIES, SLOTS, Sabotage, World, fed, prompt, settings_of


@pytest.fixture(scope="module")
def folder(checkpoint_of):
    return checkpoint_of("qwen3_5", **SHAPE)


def fails_apart(world: World, sequence: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which rank 0 fails in the first layer, in which the other rank has brought its states up to the step
    before."""
    folded = threading.Event()
    assert world.ranked is not None
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
        world.step(world.span(sequence, [4]))


def test_a_truncation_goes_no_deeper_than_what_another_rank_has_folded_in_a_step_that_failed(folder, monkeypatch):
    with closing(World(folder, tensor_parallel=2)) as world:
        sequence = fed(world, prompt(20), [1], [2], [3])
        assert world.runner.states.missing(sequence, 21) == 0
        fails_apart(world, sequence, monkeypatch)
        assert world.runner.states.missing(sequence, 22) == 0, "within the last step"
        world.truncate(sequence, 21)
        [outcome] = world.step(world.span(sequence, [5]))
        assert outcome.recomputed_tokens == 21
        world.step(world.span(sequence, [5]))


@pytest.mark.parametrize(("rank", "stage"), [(0, "select"), (1, "select"), (0, "commit")])
def test_a_step_that_went_back_and_failed_leaves_the_journal_of_every_rank(folder, rank, stage):
    """It has overwritten rows of the last step, which the next one reads."""
    with closing(World(folder, tensor_parallel=2)) as world:
        sequence = fed(world, prompt(20), [1], [2], [3, 4])
        with pytest.raises(StepFailed), world.failing(stage, 1, rank):
            world.step(world.span(sequence, [5, 0], start=22))
        [outcome] = world.step(world.span(sequence, [1]))  # its row is right
        assert outcome.recomputed_tokens == 0


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
    assert infos[0].states == infos[1].states is not None, "they move between both"


# --- states that move -------------------------------------------------------------------------------------------------

TOKENS = prompt(100)


CUTTABLE = ("qwen3_5, 2 key heads", "qwen3_5, 4 key heads")
"""Models that four ranks can share, also with fewer key heads than ranks."""


@pytest.fixture(scope="module", params=CUTTABLE)
def cuttable(request, checkpoint_of):
    """Such a model, by its name in `FAMILIES`."""
    return {"folder": checkpoint_of("qwen3_5", **FAMILIES[request.param]), "family": request.param}


def content(taken: Any) -> list[tuple[StateRows, bytes]]:
    return [(rows, data.tobytes()) for rows, data in taken.pieces]


def test_a_sequence_moves_between_any_numbers_of_ranks(cuttable, monkeypatch):
    """Its states are the same bytes wherever it is, and it goes on as if it had stayed: within the last step, and from
    its checkpoint on."""
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)
    with ExitStack() as stack:
        worlds = [stack.enter_context(closing(World(**cuttable, tensor_parallel=ranks))) for ranks in (1, 2, 4)]
        for source, target in itertools.permutations(worlds, 2):
            stays = fed(source, TOKENS, [1, 2, 3, 4])
            taken = source.taken(stays)
            comes = target.bring(taken, None)
            again = target.taken(comes)
            assert again.states == taken.states and None not in taken.states
            assert content(again) == content(taken)
            target.truncate(comes, 102)
            assert target.missing(comes) == 0
            target.step(target.span(comes, [5, 0]))
            target.truncate(comes, 98)
            [outcome] = target.step(target.span(comes, [3]))
            assert outcome.recomputed_tokens == 2
            source.release(stays)
            target.release(comes)


def test_states_of_ranks_are_those_of_one(cuttable):
    """Channel by channel, as the whole model has them."""
    found = []
    for ranks in (1, 2, 4):
        with closing(World(**cuttable, tensor_parallel=ranks)) as world:
            taken = world.taken(fed(world, TOKENS[:20], [1, 2, 3]))
        found.append(np.concatenate([data.view(np.float32) for _, data in taken.pieces]))
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], atol=2e-5 * np.abs(found[0]).max())


@st.composite
def cuts(draw: st.DrawFn) -> tuple[StateTensors, int]:
    ranks, keys, sharing = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    values = max(ranks, keys * sharing)
    return StateTensors(RecurrentShape(keys, values, 3, 2), 3, "bfloat16", "float32", 32), ranks


@given(cuts(), st.sampled_from(["states", "channels", "gates"]), st.data())
def test_rows_of_ranks_together_are_the_rows_that_were_cut(cut, tensor, data):
    """Wherever pieces end, and a rank's rows of one piece follow those of the piece before."""
    tensors, ranks = cut
    shape, of_ranks = tensors.shape, RowsOfRanks(*cut)
    size = {"states": 6 * 4, "channels": 2 * shape.channels, "gates": 8 * shape.value_heads}[tensor]
    total = tensors.row_count(tensor, StateLengths(20, 20, (10, 12, 14)))
    ends = sorted({total, *data.draw(st.lists(st.integers(1, total), max_size=5))})
    numbers = np.random.default_rng(0).integers(0, 256, total * size).astype(np.uint8)
    next_rows = [0] * ranks
    for first, end in zip([0, *ends], ends, strict=False):
        rows, content = StateRows("slot", tensor, first, end - first), numbers[first * size : end * size]
        own = {rank: of_ranks.of(rank, rows) for rank in range(ranks)}
        for rank, each in own.items():
            assert each.first == (next_rows[rank] if tensor == "states" else first)
            next_rows[rank] = each.first + each.rows
        parts = {rank: np.frombuffer(of_ranks.cut(rank, rows, content), np.uint8) for rank in own if own[rank].rows}
        assert (of_ranks.join(rows, size, parts) == content).all()
    if tensor == "states":
        assert next_rows == [total // ranks] * ranks


def test_states_of_which_ranks_have_folded_different_tokens_do_not_move(folder, monkeypatch):
    """The sequence does, from its checkpoint on. After its next step they move again."""
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)
    with closing(World(folder, tensor_parallel=2)) as here, closing(World(folder)) as there:
        sequence = fed(here, TOKENS, [1], [2])
        fails_apart(here, sequence, monkeypatch)
        taken = here.taken(sequence)
        assert taken.states.slot is None and taken.states.checkpoint is not None
        comes = there.bring(taken, None)
        assert there.missing(comes) == 102 - 96
        there.step(there.span(comes, [1]))
        here.step(here.span(sequence, [4]))
        comes = there.bring(here.taken(sequence), None)
        assert there.missing(comes) == 0
        there.step(there.span(comes, [1]))
        assert not any(each.before_change for each in here.slots())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_to_move_states_fails_that_operation_alone(folder, rank, monkeypatch):
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)
    with closing(World(folder, tensor_parallel=2)) as world:
        sequence = fed(world, TOKENS, [1, 2])
        taken, free = world.taken(sequence), world.runner.cache_state().free_slots
        stages = {0: "export", 1: "images"}
        for nth in (1, 2, 3):
            with pytest.raises(StepFailed), world.failing(stages[rank], nth, rank):
                world.taken(sequence)
            copy = next(world.numbers) - 1
            if rank == 0 or nth > 2:  # or the export did not begin
                world.do("release", [copy])
        assert not any(each.before_change for each in world.slots())
        assert content(world.taken(sequence)) == content(taken)
        stages[0] = "import"
        for nth in (2, 3, 7):
            with pytest.raises(StepFailed), world.failing(stages[rank], nth, rank):
                world.bring(taken, None)
            world.do("release", [next(world.numbers) - 1])
            assert world.runner.cache_state().free_slots == free
        comes = world.bring(taken, None)
        assert content(world.taken(comes)) == content(taken)
        world.step(world.span(comes, [3]), world.span(sequence, [3]))


def test_where_a_rank_has_no_snapshot_the_others_keep_none(cuttable):
    with closing(World(**cuttable, tensor_parallel=4)) as world:
        sequence = fed(world, TOKENS[:20], [1, 2])
        refused = pytest.raises(StepFailed, match="rank 2 on thread 2: states could not be moved")
        with refused, world.failing("images", 1, 2):
            world.taken(sequence)
        assert not any(each.before_change for each in world.slots())
        world.taken(sequence)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_that_do_not_fit_change_no_rank_and_the_import_can_go_on(folder, ranks):
    with closing(World(folder, tensor_parallel=ranks)) as world:
        taken = world.taken(fed(world, TOKENS[:30], [1, 2]))
        slot, firsts = taken.states.slot, {rows.tensor: (rows, data) for rows, data in reversed(taken.pieces)}
        assert list(firsts) == ["gates", "channels", "states"]
        wrongs = [
            (slot, rows, more) for rows, data in firsts.values() for more in (data[:-4], np.append(data, data[:4]))
        ]
        rows, data = firsts["states"]
        wrongs += [(slot._replace(folded=folded), rows, data) for folded in (slot.folded[:1], (-99, 0))]
        for wrong, rows, more in wrongs:
            states_of = taken.states._replace(slot=wrong)
            with pytest.raises(StepFailed):
                world.bring(taken._replace(states=states_of, pieces=[(rows, more)]), None)
            comes = next(world.numbers) - 1
            for piece in taken.pieces:
                world.do("write_states", comes, taken.states, [piece])
            world.do("commit_import", comes, taken.states)
            assert content(world.taken(comes)) == content(taken)
            world.do("release", [comes])


def test_a_checkpoint_of_which_ranks_have_folded_different_tokens_is_not_written(folder, tmp_path, monkeypatch):
    """And the process ends without waiting for it; others are written."""
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)
    with closing(World(folder, slots=30, tensor_parallel=2, kv_tier_dir=tmp_path)) as world:
        sequence = fed(world, TOKENS[:46], TOKENS[46:47], TOKENS[47:48], prefix=PREFIX)
        keys = {at: world.runner.kv.checkpoint_key(sequence, at) for at in (24, 48)}
        world.runner.states.pool.drop(keys[48])
        fails_apart(world, sequence, monkeypatch)
        world.step(world.span(sequence, TOKENS[48:]))
        assert all(map(world.runner.states.has_checkpoint, keys.values()))
        world.end()
    [files] = tmp_path.iterdir()
    assert {at: (files / (STATES + key).hex()).exists() for at, key in keys.items()} == {24: True, 48: False}
