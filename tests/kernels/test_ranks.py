"""Ranks as on GPUs, as far as a host shows it: staged steps, recorded with what ranks say to each other in them.

Ranks are threads here. A recording runs again when it is replayed (`Rerun`), so what it says is said again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.distributed.gloo import GlooGroup
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.distributed.nccl import NcclGroup
from ferrum_rpc.engine.assembly import build, choose
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.cuda import select
from ferrum_rpc.engine.cuda.compute import StagedCompute
from ferrum_rpc.engine.cuda.first_steps import DECODES
from ferrum_rpc.engine.cuda.graphs import buckets
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.ranks import placing
from ferrum_rpc.engine.ranks.follower import Follower
from ferrum_rpc.engine.ranks.setup import Setup
from ferrum_rpc.errors import DeviceLost, InvalidRequest, StepFailed
from ferrum_rpc.models import decoder
from ferrum_rpc.models.triton_lora import BoundStep, TritonLoras
from tests.support.adapters import make_adapter
from tests.support.checkpoints import make_checkpoint, make_model
from tests.support.fake_async_device import ILLEGAL_ACCESS
from tests.support.fake_nccl import use_fake_nccl
from tests.support.fixtures import PlannedTorch
from tests.support.ranks import World, texts_of
from tests.support.rerun import Rerun

CUTS = {"tensor": (2, 1), "pipeline": (1, 2), "both": (2, 2)}
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels take no tensors of a CPU")
SEQUENCES = 4
ONE_AT_A_TIME = threading.RLock()


class Interpreted(TritonPagedAttention):
    """Triton's interpreter is one for a process."""

    def warm_up(self) -> None:
        with ONE_AT_A_TIME:
            super().warm_up()

    def write(self, *arguments: Any) -> None:
        with ONE_AT_A_TIME:
            super().write(*arguments)

    def attend(self, *arguments: Any) -> torch.Tensor:
        with ONE_AT_A_TIME:
            return super().attend(*arguments)


class Captures:
    """What all ranks record, in the place of CUDA's. The ``fails``-th raises."""

    def __init__(self) -> None:
        self.made: list[Rerun] = []
        self.fails: int | None = None

    def __call__(self, device: torch.device) -> Rerun:
        self.made.append(Rerun(ValueError("no") if len(self.made) + 1 == self.fails else None, nth=2))
        return self.made[-1]


@pytest.fixture(autouse=True)
def logs() -> Iterator[Any]:
    with structlog.testing.capture_logs() as logs:
        yield logs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=2)


@pytest.fixture
def captures(monkeypatch) -> Captures:
    found = Captures()
    monkeypatch.setattr(select, "CudaCapture", found)
    monkeypatch.setattr(Setup, "recordable", True)
    monkeypatch.setattr(choose, "select_backend", lambda *_: ("planned", "asked for here", PlannedTorch))
    return found


def settings_of(checkpoint: Path, cut: tuple[int, int] = (1, 1), **others: Any) -> ModelSettings:
    tensor, pipeline = cut
    return ModelSettings(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        block_size=4,
        kv_blocks=40,
        max_context=64,
        max_sequences=SEQUENCES,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        **others,
    )


@pytest.mark.parametrize(
    ("cut", "backend", "steps"),
    [
        *((cut, PlannedTorch, 12) for cut in CUTS.values()),
        pytest.param(CUTS["tensor"], Interpreted, 4, marks=INTERPRETED),
    ],
    ids=[*CUTS, "tensor, kernels"],
)
def test_replayed_on_ranks_tokens_are_those_of_one(*, checkpoint, cut, backend, steps, captures, monkeypatch):
    expected = texts_of(build_runner(settings_of(checkpoint)), steps)
    monkeypatch.setattr(choose, "select_backend", lambda *_: ("planned", "asked for here", backend))
    with closing(World(settings_of(checkpoint, cut))) as world:
        chosen = dict(world.runner.device.choices)
        assert texts_of(world.runner, steps) == expected
    assert chosen[f"cuda_graphs={len(buckets(SEQUENCES))}"] and "within a step" in chosen["overlap=off"]
    assert world.runner.depth == cut[1]
    assert [each.recordings for each in captures.made] == [len(buckets(SEQUENCES))] * cut[0] * cut[1]
    assert [each.replays for each in captures.made] == [steps - 1] * cut[0] * cut[1]


@INTERPRETED
@pytest.mark.parametrize("cut", [CUTS["tensor"], CUTS["pipeline"]], ids=["tensor", "pipeline"])
def test_steps_with_adapters_are_replayed_on_ranks_too(checkpoint, cut, captures, monkeypatch, tmp_path):
    """By the kernels, loaded after the recordings; one rank computes them by torch. A stage may have nothing of one."""
    model, steps = make_model("qwen3", num_hidden_layers=2), 4
    make_adapter(tmp_path / "all", model, r=3, size=2.0)
    make_adapter(tmp_path / "late", model, r=5, targets=("k_proj", "down_proj"), layers_to_transform=[1], size=2.0)
    adapted: dict[str, Any] = {"adapter_dir": tmp_path, "max_adapter_rank": 5}

    def texts(runner: TorchRunner) -> list[list[list[int]]]:
        for number, name in enumerate(("all", "late"), 1):
            runner.open_adapter(number, name)
            while runner.read_adapter(number) is None:
                pass
        return [
            texts_of(runner, steps, 10 * n, adapters=each) for n, each in enumerate(((1, 0, 2), (0, 2, 0), (0, 0, 0)))
        ]

    expected = texts(build_runner(settings_of(checkpoint, **adapted)))
    assert len({str(each) for each in expected}) == 3

    def add(self: BoundStep, slot: int, x: torch.Tensor, y: torch.Tensor) -> None:
        with ONE_AT_A_TIME:
            alone(self, slot, x, y)

    alone = BoundStep.add
    monkeypatch.setattr(BoundStep, "add", add)
    monkeypatch.setattr(decoder, "select_loras", lambda *of, max_rank: ("", TritonLoras(*of, max_rank=max_rank)))
    with closing(World(settings_of(checkpoint, cut, **adapted))) as world:
        assert texts(world.runner) == expected
    assert [each.recordings for each in captures.made] == [2 * len(buckets(SEQUENCES))] * 2
    assert [each.replays for each in captures.made] == [3 * (steps - 1)] * 2


class Failing:
    """A stage of a rank's steps that fails where it is told to."""

    def __init__(self, error: Exception) -> None:
        self.error, self.on = error, False

    def __call__(self, name: str) -> None:
        if self.on and name == "forward":
            raise self.error

    def world(self, settings: ModelSettings, victim: int) -> World:
        return World(settings, *([self] if victim == 0 else [None, {victim: self}]))

    def fail(self, runner: TorchRunner, wanted: type[Exception] = StepFailed, match: str = "") -> None:
        """A step that does not end."""
        self.on = True
        with pytest.raises(wanted, match=match):
            texts_of(runner, 1, first=10)


@pytest.mark.parametrize(
    ("cut", "victim", "nccl"),
    [
        *((CUTS[cut], victim, False) for cut in ("tensor", "pipeline") for victim in (0, 1)),
        *((cut, 1, True) for cut in CUTS.values()),
    ],
    ids=str,
)
def test_after_a_failed_step_all_ranks_record_anew(*, checkpoint, cut, victim, nccl, captures, monkeypatch):
    """By NCCL rows go by one group and what is told of them by another; both are made anew."""
    if nccl:
        use_fake_nccl(monkeypatch)
        monkeypatch.setattr(placing, "choose_transport", lambda *_, **__: ("nccl", "gloo", "asked for here"))
    failing, count = Failing(ValueError("forward")), cut[0] * cut[1]
    expected = texts_of(build_runner(settings_of(checkpoint)), 5)
    with closing(failing.world(settings_of(checkpoint, cut), victim)) as world:
        assert not nccl or dict(world.runner.device.choices)["rank_transport=nccl"] == "asked for here"
        assert texts_of(world.runner, 5) == expected
        failing.fail(world.runner)
        failing.on = False
        world.runner.check()
        assert texts_of(world.runner, 5, first=20) == expected
        groups = [each.groups for each in world.followers if each.groups is not None]
        assert len(groups) == count - 1
        kinds = {type(group) for each in groups for group in each.each()}
    if nccl:
        assert kinds == ({NcclGroup, GlooGroup} if cut[0] > 1 else {NcclGroup})
    old, new = captures.made[:count], captures.made[count:]
    assert [each.replays for each in (*old, *new)] == [4] * 2 * count
    assert [each.recordings for each in new] == [len(buckets(SEQUENCES))] * count


@pytest.mark.parametrize(("cut", "victim"), [((2, 1), 0), ((1, 2), 1)], ids=["tensor", "pipeline"])
def test_what_a_device_did_after_its_group_was_given_up_counts_for_nothing(
    checkpoint, cut, victim, captures, monkeypatch
):
    """Nothing raises there until the device was waited for; by the rank that has the rows."""
    expected = texts_of(build_runner(settings_of(checkpoint)), 5)
    with closing(World(settings_of(checkpoint, cut))) as world:
        assert texts_of(world.runner, 3) == [text[:-2] for text in expected]
        groups = [world.ranks.groups, world.followers[0].groups]

        def check() -> None:
            groups[victim].abort()
            raise GroupAborted("given up")

        with monkeypatch.context() as patch, pytest.raises(StepFailed):
            patch.setattr(groups[victim], "check", check)
            texts_of(world.runner, 1, first=10)
        world.runner.check()
        assert texts_of(world.runner, 5, first=20) == expected


@pytest.mark.parametrize("which", [1, 2])
def test_a_rank_that_cannot_record_ends_the_start(checkpoint, which, captures):
    """Rank 0 or another, after one recording of each."""
    captures.fails = which
    with pytest.raises(InvalidRequest, match=r"could not be captured \(ValueError: no\).*--cuda-graphs off") as refusal:
        World(settings_of(checkpoint, CUTS["tensor"]))
    assert refusal.value.field == "cuda_graphs"


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("cut", [CUTS["tensor"], CUTS["pipeline"]], ids=["tensor", "pipeline"])
def test_the_first_steps_run_on_all_ranks_before_anything_is_recorded(checkpoint, cut, graphs, captures, monkeypatch):
    """Also where nothing is recorded: what they compile is needed all the same."""
    ran: list[tuple[StagedCompute, int]] = []
    run = StagedCompute.run

    def seen(self: StagedCompute, packed: Any, *others: Any, **options: Any) -> torch.Tensor:
        ran.append((self, len(packed)))
        return run(self, packed, *others, **options)

    def record(*of: Any) -> None:
        assert len(ran) >= 2 * len(DECODES)
        recorded(*of)

    recorded = build.RankedCompute.record
    monkeypatch.setattr(StagedCompute, "run", seen)
    monkeypatch.setattr(build.RankedCompute, "record", record)
    with closing(World(settings_of(checkpoint, cut, cuda_graphs=graphs))):
        computes = {each for each, _ in ran}
        assert len(computes) == 2
        for compute in computes:
            assert [tokens for each, tokens in ran if each is compute] == [64, *DECODES]
    assert bool(captures.made) is (graphs == "auto")


def test_steps_that_verify_drafts_are_recorded_on_all_ranks_on_request(checkpoint, captures):
    with closing(World(settings_of(checkpoint, CUTS["tensor"], verify_tokens=3))) as world:
        [reason] = [why for name, why in world.runner.device.choices if name.startswith("cuda_graphs=")]
    assert f"verify steps of up to 3 tokens for each of {SEQUENCES}" in reason
    assert [each.recordings for each in captures.made] == [3 * len(buckets(SEQUENCES))] * 2


def test_graphs_are_not_recorded_where_nobody_wants_them(checkpoint, captures):
    with closing(World(settings_of(checkpoint, CUTS["tensor"], cuda_graphs="off"))) as world:
        assert dict(world.runner.device.choices)["cuda_graphs=off"] == "requested"
    assert captures.made == []


@pytest.fixture
def quiet_followers(monkeypatch) -> None:
    """Of a lost device a rank's process would end: its thread does."""
    run = Follower.run

    def run_quietly(follower: Follower) -> None:
        with suppress(torch.AcceleratorError):
            run(follower)

    monkeypatch.setattr(Follower, "run", run_quietly)


@pytest.mark.usefixtures("captures", "quiet_followers")
def test_a_rank_whose_device_is_lost_ends(checkpoint):
    failing = Failing(torch.AcceleratorError("an illegal memory access"))
    world = failing.world(settings_of(checkpoint, CUTS["tensor"]), 1)
    texts_of(world.runner, 2)
    failing.fail(world.runner, DeviceLost, "thread 1")
    world.runner.close()


@pytest.mark.usefixtures("captures", "quiet_followers")
@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_device_of_a_rank_decides_what_a_failed_step_was(checkpoint, victim, dies, monkeypatch):
    """Triton's error has no class of its own. Each rank looks at its device when it restarts."""
    failing = Failing(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))

    def synchronize() -> None:
        of_rank_0 = threading.current_thread() is threading.main_thread()
        if failing.on and dies and of_rank_0 == (victim == 0):
            raise torch.AcceleratorError(ILLEGAL_ACCESS)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    world = failing.world(settings_of(checkpoint, CUTS["tensor"]), victim)
    texts_of(world.runner, 2)
    failing.fail(world.runner, DeviceLost if dies else StepFailed)
    world.runner.close()
