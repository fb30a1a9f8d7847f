"""Ranks that share a model: the rows of one, and a step that fails on any of them leaves all as they were."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import (
    Accept,
    FullLogits,
    Greedy,
    HiddenStates,
    NextToken,
    OutputKind,
    OutputSpec,
    Positions,
    RankState,
    Sample,
    SelectedTokens,
    Span,
    Step,
    TopTokens,
)
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.channel import Channel
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.ranks import links
from ferrum_rpc.engine.ranks.follower import Follower
from ferrum_rpc.engine.ranks.leader import Ranks, RemoteRank
from ferrum_rpc.engine.ranks.links import machine
from ferrum_rpc.errors import DeviceLost, NotSupported, StepFailed
from ferrum_rpc.kv.table import slots_for
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec
from tests.support.checkpoints import make_model
from tests.support.inside import in_flight, ranks_of, sequences
from tests.support.listed_kv_heads import LISTED, make_deci_checkpoint
from tests.support.ranks import World
from tests.support.rows import answered, copy_sequence
from tests.unit.test_runner_transactions import LARGEST, SCENARIOS, SILENT, SIZE, Saboteur, Twins, same_outcomes

LAYERS = 4
ALL = FullLogits()
CUTS = {"tensor": (2, 1), "pipeline": (1, 2), "both": (2, 2)}


FIRST_ATTEND = {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": LAYERS},
    "qwen3_5": FIRST_ATTEND | {"num_hidden_layers": LAYERS},
    "deepseek_v2": {},
    "deepseek_v3": {"num_hidden_layers": LAYERS},
}


@pytest.fixture(scope="module")
def checkpoints(checkpoint_of):
    """By family."""
    return {each: checkpoint_of(each, **sizes) for each, sizes in FAMILIES.items()}


@pytest.fixture(scope="module")
def checkpoint(checkpoints):
    return checkpoints["qwen3"]


def settings_of(checkpoint: Path, cut: tuple[int, int], **others: Any) -> ModelSettings:
    tensor, pipeline = cut
    settings = ModelSettings(str(checkpoint), device="cpu", dtype="float32", block_size=SIZE, kv_blocks=24)
    settings = replace(settings, state_slots=30)
    return replace(settings, tensor_parallel=tensor, pipeline_parallel=pipeline, **others)


def span(sequence: int, tokens: Sequence[int], start: int = 0, kind: Any = ALL, positions: Any = Positions.ALL) -> Span:
    return Span(sequence, np.array(tokens, np.int32), start, OutputSpec(positions, kind), create=start == 0)


# --- the same as one ------------------------------------------------------------------------------------------------


def test_a_text_over_gloo_is_that_of_one_rank(checkpoint_of):
    """Of half the layers: ranks wait for each other in this one interpreter. In shared memory all cuts have theirs in
    test_adapters_of_ranks.py."""
    checkpoint, texts = checkpoint_of(), []
    with closing(World(settings_of(checkpoint, CUTS["both"], rank_transport="gloo"))) as world:
        for runner in (build_runner(settings_of(checkpoint, (1, 1))), world.runner):
            text, fed = [3, 1, 4, 1, 5, 9, 2, 6], 0
            while len(text) < 56:
                [rows] = answered(runner, span(1, text[fed:], fed, Greedy(), Positions.LAST))
                fed = len(text)
                text.append(int(rows["token_ids"][0]))
            texts.append(text)
    assert texts[1] == texts[0]


MASK = b"m" * 32
MASKS = [(MASK, bytes(25) + b"\x55" * 15)]
KINDS: dict[str, Any] = {
    "greedy with its probability": Greedy(logprob=True),
    "sample": Sample(temperature=2.0, top_p=0.9, top_k=50, seed=5, repetition_penalty=1.2),
    "sample of an exact seed": Sample(temperature=1.5, seed=9, logprob=True),
    "sample of what only the last rank has": Sample(seed=3, mask=MASK, bias=((2, 5.0), (250, 1.0)), logprob=True),
    "top tokens": TopTokens(8),
    "selected": SelectedTokens((1, 200, 299)),
    "hidden": HiddenStates(),
    "scores": NextToken(following_token=5),
    "logits": FullLogits(),
}


def test_every_kind_of_output_is_compared():
    """But `Accept`: tests/numerics/test_vocab_parallel.py."""
    assert {type(kind) for kind in KINDS.values()} == {*get_args(OutputKind)} - {Accept}


@pytest.mark.parametrize(
    ("family", "cut", "transport"),
    [
        *(("qwen3", cut, "auto") for cut in CUTS.values()),
        *(("deepseek_v2", cut, "auto") for cut in CUTS.values()),
        ("deepseek_v3", CUTS["tensor"], "auto"),
        *((family, CUTS["tensor"], "gloo") for family in ("qwen3", "qwen3_5")),
        ("qwen3_5", CUTS["tensor"], "auto"),
    ],
    ids=str,
)
def test_every_kind_of_rows_is_that_of_one_rank(checkpoints, family, cut, transport):
    """In one step, behind a cached prefix, a fork and a roll-back."""
    checkpoint, found = checkpoints[family], []
    with closing(World(settings_of(checkpoint, cut, rank_transport=transport, kv_blocks=200))) as world:
        for runner in (build_runner(settings_of(checkpoint, (1, 1), kv_blocks=200)), world.runner):
            with torch.inference_mode():
                runner.change_masks(MASKS, [])
                answered(runner, span(1, range(20, 43)))
                runner.fork(1, [2, 3], 17)
                runner.truncate(3, 9)
                spans = [span(10 + at, range(at, 40 + at), 0, kind) for at, kind in enumerate(KINDS.values())]
                found.append(answered(runner, *spans, span(2, [7, 8, 9], 17), span(3, [4], 9)))
                runner.check()
    for name, one, ours in zip([*KINDS, "forked", "rolled back"], *found, strict=True):
        for column, values in one.items():
            if values.dtype.kind == "f":
                assert np.abs(values - ours[column]).max() <= 2e-5 * max(1.0, np.abs(values).max()), name
            else:
                assert (values == ours[column]).all(), name


def test_rows_without_a_seed_are_drawn_alike_on_all_ranks(checkpoint):
    """Or each would look for the token on another."""
    tokens = range(20, 60)
    with closing(World(settings_of(checkpoint, (2, 1)))) as world:
        drawn, top = span(1, tokens, kind=Sample(top_k=2)), span(2, tokens, kind=TopTokens(2))
        [sampled, best] = answered(world.runner, drawn, top)
    assert (sampled["token_ids"][:, None] == best["token_ids"]).any(axis=1).all()
    assert (sampled["token_ids"] != best["token_ids"][:, 0]).any()


@pytest.mark.parametrize("cut", [(2, 1), (2, 2)], ids=["tensor", "both"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_cache_is_read_and_written_as_if_one_rank_had_it(checkpoints, family, cut):
    """Sequences move between executors of any number of ranks."""
    checkpoint, texts = checkpoints[family], range(30, 53)
    with closing(World(settings_of(checkpoint, cut))) as world, torch.inference_mode():
        one, ours = build_runner(settings_of(checkpoint, (1, 1))), world.runner
        for source, target in ((one, ours), (ours, one)):
            expected = answered(source, span(1, texts))
            copy_sequence(source, 1, target, 2)
            for sequence, runner in ((1, source), (2, target)):
                expected += answered(runner, span(sequence, [5], len(texts)))
            assert np.abs(expected[1]["logits"] - expected[2]["logits"]).max() < 1e-4
            block = target.store.read_block(3)
            latents = cut[0] if target is ours and family != "qwen3" else 1  # which each rank has
            assert len(block) == target.store.block_bytes == latents * one.store.block_bytes
            target.store.write_block(4, block.tobytes())
            assert (target.store.read_block(4) == block).all()
            source.release([1])
            target.release([2])


@pytest.mark.parametrize("cut", [(2, 1), (4, 1), (2, 2)], ids=["2", "4", "2 x 2"])
def test_a_cache_of_layers_that_differ_is_read_and_written_as_if_one_rank_had_it(tmp_path, cut):
    """A rank has heads of its own in one layer, and in another the one that its neighbours have too."""
    checkpoint, texts = make_deci_checkpoint(tmp_path, vocab_size=500), range(30, 53)
    with closing(World(settings_of(checkpoint, cut))) as world, torch.inference_mode():
        one, ours = build_runner(settings_of(checkpoint, (1, 1))), world.runner
        assert one.info.kv_shapes == ours.info.kv_shapes == tuple((heads, 16) for heads in LISTED)
        assert one.info.kv_bytes_per_token == ours.info.kv_bytes_per_token == 2 * sum(LISTED) * 16 * 4
        held = sum(max(cut[0], heads) for heads in LISTED)
        assert ours.store.block_bytes == 2 * held * 16 * 4 * SIZE
        for source, target in ((one, ours), (ours, one)):
            expected = answered(source, span(1, texts))
            target.begin_import(2, source.token_ids(1), 0, 0, None)
            read = source.read_kv(1, 0, len(texts), range(LAYERS))
            assert [each.nbytes for each, _ in read] == [len(texts) * heads * 16 * 4 for heads in LISTED]
            for layer, parts in enumerate(read):
                target.write_kv(2, 0, len(texts), layer, parts)
            target.commit_import(2)
            for sequence, runner in ((1, source), (2, target)):
                expected += answered(runner, span(sequence, [5], len(texts)))
            assert np.abs(expected[1]["logits"] - expected[2]["logits"]).max() < 1e-4
            source.release([1])
            target.release([2])


# --- what cannot be cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "pipeline", "changes", "words"),
    [
        (3, 1, {}, "num_attention_heads"),
        (1, 5, {}, "has 4 layers"),
        (2, 1, {"path": "identity"}, "identity model"),
        (2, 1, {"model_backend": "hf"}, "transformers"),
    ],
)
def test_what_cannot_be_shared_is_refused(checkpoint, tensor, pipeline, changes, words):
    """Before any other rank is started."""
    with pytest.raises(NotSupported, match=words) as refusal:
        build_runner(settings_of(checkpoint, (tensor, pipeline), **changes))
    assert refusal.value.field in {"tensor_parallel", "pipeline_parallel", *changes}


@pytest.mark.parametrize(
    ("ranks", "changes", "words"),
    [
        (2, {"vocab_size": 50}, "parts of 64 tokens, multiples of 64, and the last rank would have none.* 1$"),
        (4, {"vocab_size": 300}, "parts of 128 tokens, .* 1, 2$"),
        (3, {"vocab_size": 300}, "num_attention_heads 4 must be a multiple of it.* 1, 2$"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_told_which_can(ranks, changes, words):
    spec = ModelSpec.from_config(make_model("qwen3", **changes).config.to_dict())
    with pytest.raises(NotSupported, match=words):
        Shard(0, ranks).of(spec)
    with pytest.raises(NotSupported, match="the model has 1 layer;"):
        Shard(0, 1, 0, 2).of(replace(spec, layers=spec.layers[:1]))


def test_containers_of_one_machine_share_no_memory(monkeypatch):
    """A rank finds rank 0's segment by its process id, which is another one there."""
    here = machine()
    monkeypatch.setattr(os, "readlink", lambda path: f"another {path}")
    assert machine() not in (here, socket.gethostname())


def test_who_connects_and_says_nothing_keeps_no_rank_away(monkeypatch):
    monkeypatch.setattr(links, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        ours = socket.create_connection(server.getsockname())
        with ThreadPoolExecutor() as threads:
            joining = threads.submit(links._authenticated, ours, b"key", challenges=False)
            gathered = threads.submit(links.gather, server, b"key", 1)
            channel = joining.result(10)
            channel.send(("hello", 1, "there", 5, "machine"))
            [member] = gathered.result(10)
    assert (member.number, member.host, member.address) == (1, "there", "127.0.0.1")
    channel.close()
    member.channel.close()


def test_what_waits_for_a_rank_inside_a_library_ends_with_it():
    """As the store of torch does, by which groups are joined: for two minutes."""
    ours, theirs = socket.socketpair()
    ranks, never = Ranks([RemoteRank(1, Channel(ours), "there")]), threading.Event()
    assert ranks.unless_lost(lambda: 7) == 7
    with pytest.raises(DeviceLost, match="rank 1 on there is gone"):
        ranks.unless_lost(lambda: theirs.close() or never.wait())
    never.set()
    ranks.close()


def test_what_a_rank_reports_of_itself_is_known_until_it_is_lost():
    ours, theirs = socket.socketpair()
    ranks = Ranks([RemoteRank(1, Channel(ours), "there")])
    assert ranks.states() == [RankState(alive=True, resident_bytes=0)]
    other = Channel(theirs)
    for resident in (1, 2):
        other.send(("heartbeat", resident, 3))
    [answer] = ranks.order("halt")
    other.send(("answer", 1, None))
    assert ranks.collect([answer]) == [None]
    assert ranks.states() == [RankState(alive=True, resident_bytes=2, device_bytes=3)]
    other.close()
    with pytest.raises(DeviceLost):
        ranks.ask("halt")
    assert ranks.states() == [RankState(alive=False, resident_bytes=2, device_bytes=3)]
    ranks.close()


def test_what_is_being_sent_to_a_rank_that_reads_nothing_ends_when_it_is_lost():
    """As to a process that was stopped: its socket stays open."""
    ours, theirs = socket.socketpair()
    ranks = Ranks([RemoteRank(1, Channel(ours), "there")])
    ranks.start_liveness_checks()
    with closing(theirs), closing(ranks), ThreadPoolExecutor() as threads:
        threads.submit(ranks.send, "cache", bytes(16 << 20)).result(30)
        with pytest.raises(DeviceLost, match="nothing was heard of it"):
            ranks.check_alive()


class Obeyed:
    """A phase that notes what it carries out. ``step`` fails."""

    def __init__(self, follower: Follower) -> None:
        self._follower, self.log = follower, list[str]()

    def __getattr__(self, method: str) -> Any:
        return lambda *_: self.log.append(method)

    def step(self) -> None:
        self.log.append("step")
        raise MemoryError

    def renew(self) -> None:
        self._follower.failed = False


def test_a_rank_that_has_failed_carries_out_what_needs_no_step_and_nothing_else_until_it_is_renewed():
    """Rank 0 sends more before it knows. It undoes the steps, and each rank has only its own part to undo."""
    ours, theirs = socket.socketpair()
    ranks = Ranks([RemoteRank(1, Channel(ours), "there")])
    follower = Follower(Channel(theirs), 1, Mock())
    phase: Any = Obeyed(follower)
    follower.phase = phase
    with ThreadPoolExecutor() as threads, closing(ranks):
        running = threads.submit(follower.run)
        ranks.send("step")
        for method in ("save", "change_masks", "step"):
            with pytest.raises(GroupAborted, match="a step before it failed"):
                ranks.ask(method)
        for method in ("halt", "adapter", "states", "images", "cache"):
            ranks.ask(method)
        assert phase.log == ["step", "halt", "adapter", "states", "images", "cache"]
        ranks.ask("renew")
        ranks.ask("save")
        assert phase.log[-1] == "save"
        ranks.close("enough")
        assert running.result(10) == "enough"


WHOLE = ("norm", "q_a_proj", "kv_a_proj", "mlp.gate.")
"""What each rank has of a layer."""


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {}), ("qwen3_5", {"linear_num_key_heads": 4}), ("deepseek_v2", {}), ("deepseek_v3", {})],
)
def test_a_rank_has_its_part_only(family, changes):
    """Every number of a checkpoint is on one rank, but for norms, what is made of a whole row, and heads that are fewer
    than ranks."""
    model = make_model(family, vocab_size=400, **changes)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    spec = ModelSpec.from_config(config)
    whole = layout(spec)
    for ranks, stages in ((2, 1), (4, 1), (2, 2)):
        seen = {name: np.zeros(placement.shape, int) for name, placement in whole.items()}
        for number in range(ranks * stages):
            for name, placement in layout(spec, Shard.at(number, ranks, stages)).items():
                shape, cut = placement.shape, placement.cut
                rows = np.zeros(shape, int)
                for first, end in ((0, shape[0]),) if cut is None else cut.ranges:
                    index = (slice(None),) * (0 if cut is None else cut.axis) + (slice(first, end),)
                    rows[index] = 1
                assert int(rows.sum()) in (np.prod(placement.local), placement.local[-1])  # one row may serve all heads
                seen[name] += rows
        for name, counts in seen.items():
            once = 1
            if any(each in name for each in WHOLE):
                once = ranks
            elif ".k_proj" in name or ".v_proj" in name:
                once = max(1, ranks // 2)
            elif "embed_tokens" in name and stages > 1 and spec.tied_embeddings:
                once = 2  # the head's stage has it too
            assert (counts == once).all(), (name, ranks, stages)


# --- failures -------------------------------------------------------------------------------------------------------


class RankedTwins(Twins):
    """As `Twins`, of ranks; what fails is on the rank ``victim``."""

    def __init__(self, settings: ModelSettings, victim: int) -> None:
        self.saboteur = Saboteur()
        self.world = World(settings, *([self.saboteur] if victim == 0 else [None, {victim: self.saboteur}]))
        self.other = World(settings)
        self.runner, self.twin = self.world.runner, self.other.runner
        if victim == 0:
            self.saboteur.infiltrate(self.runner)
        else:
            working: Any = self.world.followers[victim - 1].phase
            its = SimpleNamespace(
                attention=working.compute.attention, store=working.kv, model=working.model, info=self.runner.info
            )
            self.saboteur.infiltrate(its)  # type: ignore[arg-type]
        self.lengths, self._fed = {}, 0
        for runner in (self.runner, self.twin):
            self._poison(runner)

    def close(self) -> None:
        self.world.close()
        self.other.close()

    def snapshot(self) -> dict[str, Any]:
        found = super().snapshot()
        for sequence, state in sequences(self.runner.kv).items():
            slots = slots_for(state.table.view(len(state.table)), 0, state.length, SIZE)
            for number, follower in enumerate(self.world.followers, 1):
                for layer in range(len(follower.phase.kv.keys)):
                    read = ("cache", "read", slots, layer, self.runner.info.head_dim)
                    [parts] = ranks_of(self.runner).ask(*read, to=[number])
                    found["bits"][sequence, number, layer] = [each.tobytes() for each in parts]
        return found

    def _poison(self, runner: TorchRunner) -> None:  # type: ignore[override]
        (self.world if runner is self.runner else self.other).poison()


DRAFTS = "accept a part of drafts"


@pytest.mark.parametrize(
    ("family", "cut", "victim", "name"),
    [
        *(("qwen3", cut, victim, LARGEST[1]) for cut in CUTS.values() for victim in range(math.prod(cut))),
        *(("qwen3", cut, math.prod(cut) - 1, LARGEST[0]) for cut in CUTS.values()),
        *(("qwen3_5", (2, 1), *each) for each in ((0, DRAFTS), (0, LARGEST[1]), (1, DRAFTS), (1, LARGEST[0]))),
        *(("deepseek_v3", (2, 1), victim, LARGEST[victim]) for victim in (0, 1)),
        ("deepseek_v3", (2, 2), 3, LARGEST[0]),
    ],
)
def test_a_failure_on_any_rank_leaves_all_as_before(checkpoints, family, cut, victim, name):
    """In the step, and in every part of it."""
    with closing(RankedTwins(settings_of(checkpoints[family], cut), victim)) as twins:
        step = SCENARIOS[name](twins)
        points = ["plan", "forward", "attention plan", "save", "copy", "write 0", "attend 1"]
        if victim >= (cut[1] - 1) * cut[0]:
            points += ["select", "logits"]
        for point in points:
            raised = twins.fail(step, point)
            assert type(raised) is StepFailed, point
        twins.step(*step.spans, atomic=step.atomic)
        twins.finish()


@pytest.mark.parametrize("point", ["write 0", "attend 1"])
def test_a_step_without_rows_fails_where_a_later_stage_fails(checkpoint, point):
    """It is not committed before all stages have computed it."""
    with closing(RankedTwins(settings_of(checkpoint, CUTS["pipeline"]), 1)) as twins:
        twins.step(twins.span(1, 5))
        step = Step((twins.span(1, 6, output=SILENT), twins.span(2, 7, output=SILENT)))
        assert type(twins.fail(step, point)) is StepFailed
        twins.step(*step.spans)
        twins.finish()


@pytest.mark.parametrize("victim", ["change_masks", "step"])
def test_after_a_failure_every_rank_has_the_masks_of_rank_0(checkpoint, victim, monkeypatch):
    """Of a mask that another rank could not take, or that came while it skipped everything."""
    with closing(World(settings_of(checkpoint, (2, 1)))) as world, torch.inference_mode():
        runner, follower = world.runner, world.followers[0]
        runner.change_masks([(b"o" * 32, b"\xff" * 40)], [])
        with monkeypatch.context() as patch:
            patch.setattr(follower.phase, victim, Mock(side_effect=MemoryError))
            if victim == "step":
                with pytest.raises(StepFailed):
                    runner.forward(Step((span(1, [3, 1, 4]),)))
                follower.failed = True  # the next change is skipped, too
                follower.groups.abort()
            runner.change_masks(MASKS, [b"o" * 32])
            with pytest.raises(StepFailed):
                runner.forward(Step((span(1, [3, 1, 4]),)))
        expected = build_runner(settings_of(checkpoint, (1, 1)))
        expected.change_masks(MASKS, [])
        drawn = span(2, [3, 1, 4], kind=Sample(seed=3, mask=MASK), positions=Positions.LAST)
        assert answered(runner, drawn)[0]["token_ids"] == answered(expected, drawn)[0]["token_ids"]
        assert follower.phase.compute.masks.all() == MASKS


def test_what_is_imported_while_a_step_fails_on_a_rank_is_whole_on_all(checkpoint):
    """The rank has failed in a step that rank 0 still waits for, and what it is sent meanwhile is of no step."""
    with closing(World(settings_of(checkpoint, (2, 1)))) as world, torch.inference_mode():
        runner, follower = world.runner, world.followers[0]
        answered(runner, span(1, [3, 1, 4, 1, 5, 9]))
        tokens, parts = runner.token_ids(1), runner.read_kv(1, 0, 6, range(LAYERS))
        runner.begin_import(2, tokens, 0, 0, None)
        ranks_of(runner).ask("halt")
        follower.failed = True
        for layer, each in enumerate(parts):
            runner.write_kv(2, 0, 6, layer, each)
        follower.groups.abort()
        with pytest.raises(StepFailed):
            runner.forward(Step((span(3, [3, 1, 4]),)))
        runner.commit_import(2)
        expected, found = (answered(runner, span(each, [2], 6)) for each in (1, 2))
        assert (found[0]["logits"] == expected[0]["logits"]).all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_that_cannot_write_what_is_imported_ends(checkpoint, monkeypatch):
    with closing(World(settings_of(checkpoint, (2, 1)))) as world, torch.inference_mode():
        runner, follower = world.runner, world.followers[0]
        answered(runner, span(1, [3, 1, 4, 1, 5, 9]))
        tokens, parts = runner.token_ids(1), runner.read_kv(1, 0, 6, range(LAYERS))
        runner.begin_import(2, tokens, 0, 0, None)
        monkeypatch.setattr(follower.phase.kv, "write", Mock(side_effect=MemoryError))
        with pytest.raises(DeviceLost):
            for layer, each in enumerate(parts):
                runner.write_kv(2, 0, 6, layer, each)
            runner.commit_import(2)
            runner.forward(Step((span(2, [2], 6),)))


# --- steps under way in stages --------------------------------------------------------------------------------------


def test_steps_of_different_sequences_are_under_way_at_once(checkpoint):
    """And one that fails takes those behind it along, which changes nothing."""
    saboteur = Saboteur()
    with (
        closing(World(settings_of(checkpoint, (1, 2)), stages={1: saboteur})) as world,
        closing(World(settings_of(checkpoint, (1, 2)))) as other,
        torch.inference_mode(),
    ):
        runner, twin = world.runner, other.runner
        assert runner.depth == 2
        texts = {1: [3, 1, 4, 1, 5], 2: [9, 2, 6]}
        steps = [Step((span(sequence, text),)) for sequence, text in texts.items()]
        expected = [twin.forward(step) for step in steps]
        saboteur.arm("select")
        first = runner.begin(steps[0])
        with pytest.raises(StepFailed):  # when it is begun, or later: the other rank may have failed already
            runner.finish(runner.begin(steps[1]))
        with pytest.raises(StepFailed):
            runner.finish(first)
        runner.check()
        assert runner.cache_state().sequences == 0
        begun = [runner.begin(step) for step in steps]
        assert len(in_flight(runner)) == 2
        for pending, result in zip(begun, expected, strict=True):
            same_outcomes(runner.finish(pending), result)
