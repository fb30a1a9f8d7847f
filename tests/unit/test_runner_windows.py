"""Sequences of a model whose layers all have a window: rows are those of `transformers` for the tokens that a sequence
has, whatever was given up behind its window, found again, or fed again.

The oracle knows no cache. Where only steps of few tokens are involved, bits are compared.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import PREFIX, Span, SpanResult, Step
from ferrum_rpc.engine import feeding
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.errors import KvBlocksExhausted, StepFailed
from tests.support.checkpoints import make_checkpoint
from tests.support.histories import STAGES, Histories, prompts, run_histories
from tests.support.inside import sequences
from tests.support.poison import fill_slots
from tests.support.state_world import ALL, SIZE, WINDOWS, World, fed, prompt

WINDOW, FREE = WINDOWS["mistral"]["sliding_window"], 32
MOST = (WINDOW - 1 + FREE) // SIZE + 2
"""Blocks that a sequence holds of its window."""


class WindowWorld(World):
    def __init__(self, folder: Any, **more: Any) -> None:
        super().__init__(folder, slots=None, family="mistral", **more)
        self.moved = 0

    def poison(self) -> None:
        """All but the null block, which kernels may read behind a window."""
        super().poison()
        with torch.inference_mode():
            fill_slots(self.runner.store, torch.arange(SIZE), 0.0)

    def missing_at(self, sequence: int, start: int) -> int:
        return self.runner.kv.missing(sequence, start)

    def blocks(self, sequence: int) -> int:
        return int((self.runner.kv.table(sequence) != 0).sum())

    def move(self, sequence: int, use: Any) -> int:
        """An export, and an import of what it had. Raises `KvBlocksExhausted`."""
        copy, layers = next(self.numbers), range(2)
        self.do("begin_export", sequence, copy)
        try:
            while self.do("feed_again", copy, 0):
                pass
            tokens, first = self.do("token_ids", copy), self.do("held_from", copy)
            count = len(tokens) - first
            parts = self.do("read_kv", copy, first, len(tokens), layers)
        finally:
            self.do("release", [copy])
        self.moved += count
        arrived = next(self.numbers)
        begin = self.do("begin_import", arrived, tokens, first, 0, use)
        assert begin >= first
        for layer, each in enumerate(parts) if begin < len(tokens) else ():
            missing = [part[len(part) // count * (begin - first) :] for part in each]
            self.do("write_kv", arrived, begin, len(tokens), layer, missing)
        assert self.do("commit_import", arrived) == len(tokens)
        self.has[arrived] = self.has[sequence]
        self.check()
        return arrived


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mistral"), "mistral", **WINDOWS["mistral"])


# --- any history ------------------------------------------------------------------------------------------------------


class WindowHistories(Histories):
    """Blocks are few."""

    drafts = st.lists(st.integers(0, 5), min_size=1, max_size=FREE)

    @initialize(blocks=st.sampled_from([60, 200]), tokens=prompts)
    def begin(self, blocks, tokens):
        self.world = WindowWorld(self.folder, blocks=blocks)
        self.create(tokens, published=True)

    def rejected(self, sequence):
        assert not self.world.missing(sequence), "it is within the last step"

    @precondition(lambda self: self.world.has)
    @rule(data=st.data(), use=st.sampled_from([None, PREFIX]), stays=st.booleans())
    def move(self, data, use, stays):
        world, sequence = self.world, self.sequence(data)
        if not world.has[sequence]:
            return
        try:
            world.move(sequence, use)
        except KvBlocksExhausted:
            world.check()
            return
        if not stays:
            world.release(sequence)

    @invariant()
    def a_sequence_holds_no_more_than_its_window(self):
        world = getattr(self, "world", None)
        for sequence in world.has if world else ():
            assert world.blocks(sequence) <= MOST


def test_rows_are_those_of_the_tokens_that_a_sequence_has(folder, monkeypatch):
    monkeypatch.setattr(feeding, "PIECE_TOKENS", 16)
    monkeypatch.setattr(WindowHistories, "folder", folder)
    run_histories(WindowHistories, 25)


# --- one by one -------------------------------------------------------------------------------------------------------


def test_a_model_with_windows_in_all_layers_says_how_far_a_truncation_is_free(folder):
    world = WindowWorld(folder)
    assert world.runner.device.free_truncation_tokens == FREE
    assert any(choice == f"kv_window={WINDOW}" for choice, _ in world.runner.device.choices)


@pytest.mark.parametrize(("changes", "why"), [({"sliding_window": None}, "none"), ({"sliding_window": 600}, "long")])
def test_without_a_window_that_sequences_outgrow_blocks_stay(tmp_path, changes, why):
    folder = make_checkpoint(tmp_path, "mistral", **changes)
    runner = build_runner(ModelSettings(str(folder), device="cpu", dtype="float32", block_size=SIZE, kv_blocks=100))
    assert runner.device.free_truncation_tokens is None and not runner.kv.has_window, why


def test_a_layer_without_a_window_keeps_all(tmp_path):
    mixed = make_checkpoint(tmp_path, "gemma2")
    runner = build_runner(ModelSettings(str(mixed), device="cpu", dtype="float32", block_size=SIZE, kv_blocks=100))
    assert not runner.kv.has_window


def test_a_sequence_longer_than_the_cache_is_fed(folder):
    """It needs the blocks of a window and of the step, and not those of its length."""
    world = WindowWorld(folder, blocks=40)
    tokens = prompt(400)
    sequence = fed(world, tokens[:60])
    for first in range(60, 400, 20):
        world.step(world.span(sequence, tokens[first : first + 20]))
    assert len(world.has[sequence]) == 400 > 40 * SIZE
    assert world.blocks(sequence) <= MOST


def test_what_was_given_up_is_found_by_others(folder):
    world = WindowWorld(folder)
    tokens = prompt(120)
    fed(world, tokens, [1], prefix=PREFIX)
    [outcome] = world.step(world.made([*tokens[:80], 5]))
    assert outcome.cached_tokens == 80


@pytest.mark.parametrize("known", [True, False])
def test_a_deep_truncation_tells_how_many_tokens_were_fed_again(folder, known):
    world = WindowWorld(folder)
    sequence = fed(world, prompt(120), [1], prefix=PREFIX if known else None)
    world.truncate(sequence, 50)
    [outcome] = world.step(world.span(sequence, [2]))
    assert outcome.recomputed_tokens == (0 if known else 50)
    [outcome] = world.step(world.span(sequence, [3]))
    assert outcome.recomputed_tokens == 0


@pytest.mark.parametrize("how", ["truncate", "fork", "span"])
def test_what_the_second_tier_has_is_not_fed_again(folder, tmp_path, how):
    """Rows are right, so it has its content."""
    world = WindowWorld(folder, blocks=60, kv_tier_dir=tmp_path)
    sequence = fed(world, prompt(120), [1], prefix=PREFIX)
    world.release(fed(world, prompt(world.runner.kv.free_blocks * SIZE, 1)))
    if how == "truncate":
        world.truncate(sequence, 52)
    while world.do("fetch_window", sequence, 52):
        pass
    span = world.fork(sequence, [2], 52) if how == "fork" else world.span(sequence, [2], 52)
    [outcome] = world.step(span)
    assert outcome.recomputed_tokens == 0
    world.end()


def test_a_pass_has_pieces_of_several_sequences_and_no_more_tokens_than_it_may(folder, monkeypatch):
    monkeypatch.setattr(feeding, "PIECE_TOKENS", 8)
    world = WindowWorld(folder)
    made = [fed(world, prompt(90, seed), [1]) for seed in range(5)]
    for each in made:
        world.truncate(each, 40)
    passes, compute = list[list[int]](), world.runner.compute
    forward = compute.forward

    def noted(spans: Any, *step: Any) -> Any:
        passes.append([len(span.tokens) for span in spans])
        return forward(spans, *step)

    monkeypatch.setattr(compute, "forward", noted)
    world.step(*[world.span(each, [2]) for each in made])
    assert passes.pop() == [1] * 5, "the step"
    assert passes[0] == [8] * 4 and max(map(sum, passes)) <= feeding.PASS_TOKENS["cpu"]
    assert sum(map(sum, passes)) == 5 * 40, "each token once"


@pytest.mark.parametrize("owed", [False, True])
def test_a_parent_goes_back_beside_its_forks(folder, owed):
    """They have what it had, wherever they begin. What it owes is fed once for all of them, and then for its own."""
    world = WindowWorld(folder)
    parent, length = fed(world, prompt(120), [1]), 121
    if owed:
        length = 70
        world.truncate(parent, length)
    forks = [world.fork(parent, [2], at) for at in (length, 25)]
    last, first, own = world.step(*forks, world.span(parent, [3], 10))
    assert (last.recomputed_tokens, first.recomputed_tokens) == (0, 0 if owed else 25)
    assert own.recomputed_tokens == 10 + length * owed


@pytest.mark.parametrize("stage", STAGES)
def test_a_fork_that_was_fed_is_gone_with_its_step(folder, stage):
    world = WindowWorld(folder)
    parent = fed(world, prompt(120), [1])
    free = world.runner.kv.free_blocks
    with pytest.raises(StepFailed), world.failing(stage, 2 if stage == "forward" else 1):
        world.step(world.fork(parent, [2], 50))
    world.check()
    assert world.runner.kv.free_blocks == free and sequences(world.runner.kv).keys() == {parent}
    [outcome] = world.step(world.fork(parent, [2], 50))
    assert outcome.recomputed_tokens == 50


def test_a_fork_is_refused_where_no_block_is_free_to_feed_it(folder):
    """Its parent's own item is as it would be alone."""
    world = WindowWorld(folder, blocks=40)
    parent = fed(world, prompt(60), prompt(60, 1))
    other = fed(world, prompt(3))
    world.do("reserve", other, (world.runner.kv.free_blocks - 1) * SIZE)
    before = set(sequences(world.runner.kv))
    fork, own = world.step(world.fork(parent, [2], 50), world.span(parent, [3]))
    assert isinstance(fork, KvBlocksExhausted) and isinstance(own, SpanResult)
    assert set(sequences(world.runner.kv)) == before


def test_a_pass_that_fails_leaves_the_tokens_owed(folder):
    world = WindowWorld(folder)
    sequence = fed(world, prompt(120), [1])
    world.truncate(sequence, 50)
    with pytest.raises(StepFailed), world.failing("forward", 2):
        world.step(world.span(sequence, [2]))
    world.check()
    assert world.missing(sequence) == 50 - feeding.PIECE_TOKENS
    [outcome] = world.step(world.span(sequence, [2]))
    assert outcome.recomputed_tokens == 50


def test_tokens_fed_again_have_the_bits_of_single_ones(tmp_path):
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64}
    folder = make_checkpoint(tmp_path, "mistral", **WINDOWS["mistral"], **shape, num_key_value_heads=1)
    config = ModelSettings(str(folder), device="cpu", dtype="bfloat16", block_size=SIZE, kv_blocks=200)
    runner = build_runner(config)
    if not runner.device.exact_span_tokens:
        pytest.skip("rows of short spans need not have the bits of single decodes here")
    tokens = prompt(120)

    def rows(sequence: int, *, back: int | None) -> bytes:
        found = []
        with torch.inference_mode():
            for place, token in enumerate(tokens):
                span = Span(sequence, np.array([token], np.int32), place, ALL, create=not place)
                [outcome] = runner.forward(Step((span,))).outcomes
                found.append(outcome.rows.block["logits"][outcome.rows.first].tobytes())
            if back is not None:
                runner.truncate(sequence, back)
                span = Span(sequence, np.array(tokens[back : back + 1], np.int32), back, ALL)
                [outcome] = runner.forward(Step((span,))).outcomes
                assert outcome.recomputed_tokens == back
                assert outcome.rows.block["logits"][outcome.rows.first].tobytes() == found[back]
        return b"".join(found)

    rows(1, back=45)
    assert sequences(runner.kv)[1].length == 46


def test_a_sequence_that_moves_takes_its_window_along(folder):
    world = WindowWorld(folder)
    sequence = fed(world, prompt(120), [1])
    arrived = world.move(sequence, None)
    assert world.moved <= MOST * SIZE
    world.step(world.span(arrived, [2, 3]))
    world.truncate(sequence, 30)
    arrived = world.move(sequence, None)
    [outcome] = world.step(world.span(arrived, [2, 3]))
    assert outcome.recomputed_tokens == 0, "it was fed again before it left"


@pytest.mark.parametrize("how", ["tensor_parallel", "pipeline_parallel"])
def test_ranks_feed_again_what_rank_0_has_given_up(folder, how):
    with closing(WindowWorld(folder, **{how: 2})) as world:
        assert world.runner.device.free_truncation_tokens == FREE
        sequence = fed(world, prompt(120), [1])
        assert world.blocks(sequence) <= MOST
        world.truncate(sequence, 50)
        [outcome] = world.step(world.span(sequence, [2]))
        assert outcome.recomputed_tokens == 50
        world.step(world.span(world.move(sequence, None), [3]))


def test_a_step_under_way_ends_before_tokens_are_fed_again(folder):
    world = WindowWorld(folder)
    first, other = fed(world, prompt(120), [1]), fed(world, prompt(70, 1), [1])
    world.runner.depth = 2
    with torch.inference_mode():
        under_way = world.runner.begin(Step((world.span(first, [2]),)))
        pending = world.runner.begin(Step((world.span(other, [3], 20),)))
        assert under_way.ended is not None
        outcomes = [world.runner.finish(each).outcomes[0] for each in (under_way, pending)]
    assert [each.recomputed_tokens for each in outcomes] == [0, 20]
    world.runner.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_stands_in_the_null_block_changes_no_row(tmp_path, dtype):
    """Kernels of long spans read whole tiles of keys, and so a part of what is gone."""
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64}
    folder = make_checkpoint(tmp_path, "mistral", **WINDOWS["mistral"], **shape, num_key_value_heads=1)
    tokens, rows = prompt(160), []
    for value in (0.0, 100.0):
        runner = build_runner(ModelSettings(str(folder), device="cpu", dtype=dtype, block_size=SIZE, kv_blocks=200))
        assert not any(buffer[:, :, 0].any() for buffer in runner.store.buffers), "whatever memory had there"
        with torch.inference_mode():
            fill_slots(runner.store, torch.arange(SIZE), value)
            for start, count in ((0, 70), (70, 50), (120, 1), (121, 39)):
                span = Span(1, np.array(tokens[start : start + count], np.int32), start, ALL, create=not start)
                [outcome] = runner.forward(Step((span,))).outcomes
        assert runner.kv.held_from(1) > 0
        rows.append(outcome.rows.block["logits"].tobytes())
    assert rows[0] == rows[1]
