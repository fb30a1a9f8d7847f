"""Adapters of a model that ranks share: the texts of one rank, and a load that fails on any rank leaves nothing."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, Greedy, OutputSpec, Positions, PrefixUse, Span, SpanResult, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.ranks.follower import Follower
from ferrum_rpc.errors import AdapterUnknown, DeviceLost, InvalidRequest, NotSupported, SequencesExhausted, StepFailed
from tests.support.adapters import make_adapter
from tests.support.checkpoints import make_checkpoint, make_model
from tests.support.fake_async_device import ILLEGAL_ACCESS
from tests.support.inside import adapters_of
from tests.support.ranks import World
from tests.support.rows import answered, copy_sequence, tokens_of
from tests.unit.test_runner_transactions import Saboteur

FAMILY = {"num_hidden_layers": 4, "vocab_size": 500}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 3},
    "late": {"targets": ("k_proj", "down_proj"), "r": 8, "layers_to_transform": [3]},
}
CUTS = {"2": (2, 1), "4, two of which have a KV head": (4, 1), "2 stages": (1, 2), "2 x 2": (2, 2)}
PROMPT = list(range(20, 43))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_checkpoint(folder / "model", "qwen3", **FAMILY)
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        make_adapter(folder / "adapters" / name, make_model("qwen3", **FAMILY), seed=seed, **options)
    return folder


def settings_of(folder: Path, cut: tuple[int, int] = (1, 1), **others: Any) -> ModelSettings:
    settings = ModelSettings(str(folder / "model"), device="cpu", dtype="float32", block_size=4, kv_blocks=200)
    tensor, pipeline = cut
    settings = replace(settings, adapter_dir=folder / "adapters", max_adapter_rank=16, **others)
    return replace(settings, tensor_parallel=tensor, pipeline_parallel=pipeline)


def load(runner: TorchRunner, number: int, name: str) -> bytes:
    """As the service floor does. Returns the fingerprint."""
    try:
        runner.open_adapter(number, name)
        while (fingerprint := runner.read_adapter(number)) is None:
            pass
    except BaseException:
        runner.drop_adapter(number)
        raise
    return fingerprint


def span(
    sequence: int, tokens: Sequence[int], start: int = 0, adapter: int = 0, prefix: PrefixUse | None = None
) -> Span:
    tokens_ = np.array(tokens, np.int32)
    output = OutputSpec(Positions.LAST, Greedy())
    return Span(sequence, tokens_, start, output, create=start == 0, prefix=prefix, adapter=adapter)


def run(runner: TorchRunner, *spans: Span) -> list[SpanResult]:
    results = []
    for outcome in runner.forward(Step(spans)).outcomes:
        assert isinstance(outcome, SpanResult), outcome
        results.append(outcome)
    return results


def texts(runner: TorchRunner, adapters: dict[int, int], tokens: int, first: int = 0) -> list[list[int]]:
    """What sequences with these adapters become, all in one step each time."""
    found: dict[int, list[int]] = {each: [] for each in adapters}
    fed = {each: PROMPT[each % 7 :] for each in adapters}
    lengths = dict.fromkeys(adapters, 0)
    for _ in range(tokens):
        results = run(runner, *(span(first + each, fed[each], lengths[each], adapters[each]) for each in adapters))
        for each, result in zip(adapters, results, strict=True):
            lengths[each] = result.length
            fed[each] = tokens_of(result.rows)
            found[each] += fed[each]
    runner.release([first + each for each in adapters])
    return list(found.values())


# --- the same as one ------------------------------------------------------------------------------------------------


def played(runner: TorchRunner) -> dict[str, Any]:
    """Texts without adapters, and of mixed ones: of some and of none in one step, when one has come again, and behind
    cached prefixes, which are of one adapter each."""
    mixed, cached = {1: 1, 2: 0, 3: 2, 4: 1, 5: 1, 6: 0}, []
    with torch.inference_mode():
        plain = texts(runner, dict.fromkeys(mixed, 0), 8)
        fingerprints = [load(runner, number, name) for number, name in enumerate(ADAPTERS, 1)]
        together = texts(runner, mixed, 8)
        runner.drop_adapter(1)
        assert load(runner, 3, "all") == fingerprints[0]
        again = {each: 3 if number == 1 else number for each, number in mixed.items()}
        assert texts(runner, again, 8) == together != plain
        uses = [(0, PrefixUse())]
        for number, name, fingerprint in zip((3, 2), ADAPTERS, fingerprints, strict=True):
            uses.append((number, PrefixUse(adapter=name, fingerprint=fingerprint)))
        for sequence, (number, use) in enumerate(uses * 2, 30):
            [result] = run(runner, span(sequence, PROMPT, 0, number, use))
            cached.append((result.cached_tokens, tokens_of(result.rows)))
            runner.release([sequence])
        assert [tokens for tokens, _ in cached] == [0, 0, 0, 20, 20, 20] and cached[0][1] == cached[3][1]
        runner.check()
    return {"plain": plain, "fingerprints": fingerprints, "together": together, "cached": cached}


@pytest.fixture(scope="module")
def of_one_rank(folder):
    return played(build_runner(settings_of(folder)))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_texts_of_mixed_adapters_are_those_of_one_rank(folder, cut, of_one_rank):
    with closing(World(settings_of(folder, cut))) as world:
        assert played(world.runner) == of_one_rank


def test_sequences_with_an_adapter_move_between_one_rank_and_several(folder: Path) -> None:
    with closing(World(settings_of(folder, (2, 1)))) as world, torch.inference_mode():
        one, ours = build_runner(settings_of(folder)), world.runner
        assert load(one, 1, "all") == load(ours, 2, "all")  # what an import is compared with
        full = OutputSpec(Positions.LAST, FullLogits())
        for source, target, numbers in ((one, ours, (1, 2)), (ours, one, (2, 1))):
            run(source, span(1, PROMPT, 0, numbers[0]))
            copy_sequence(source, 1, target, 2)
            rows = []
            for sequence, runner, number in ((1, source, numbers[0]), (2, target, numbers[1])):
                [columns] = answered(runner, span(sequence, [5], len(PROMPT), number)._replace(output=full))
                rows.append(columns["logits"])
                runner.release([sequence])
            assert np.abs(rows[0] - rows[1]).max() < 1e-4


def test_a_rank_keeps_its_part_only(folder: Path) -> None:
    whole = build_runner(settings_of(folder)).open_adapter(1, "all")
    for cut in ((2, 1), (1, 2)):
        with closing(World(settings_of(folder, cut))) as world, torch.inference_mode():
            part = world.runner.open_adapter(1, "all")
            assert (part.rank, part.pieces) == (whole.rank, whole.pieces)
            assert 0.5 * whole.nbytes <= part.nbytes < 0.8 * whole.nbytes
            limited = replace(settings_of(folder, cut), adapter_memory=part.nbytes)
        with closing(World(limited)) as world, torch.inference_mode():
            load(world.runner, 1, "all")
            with pytest.raises(SequencesExhausted):
                load(world.runner, 2, "late")


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_leaves_adapters_as_they_were(folder: Path) -> None:
    saboteur, mixed = Saboteur(), {1: 1, 2: 0, 3: 1}
    with closing(World(settings_of(folder, (2, 2)), stages={1: saboteur})) as world, torch.inference_mode():
        runner = world.runner
        load(runner, 1, "all")
        expected = texts(runner, mixed, 4)
        saboteur.arm("forward")
        with pytest.raises(StepFailed):
            runner.forward(Step((span(9, PROMPT, 0, 1),)))
        assert texts(runner, mixed, 4) == expected


def test_an_adapter_is_loaded_while_a_step_fails(folder: Path) -> None:
    """On another rank: the failure is not known here yet."""
    begun, failures = threading.Event(), [RuntimeError("a device")]

    def stage(name: str) -> None:
        if name == "select" and failures:
            assert begun.wait(10)
            raise failures.pop()

    with closing(World(settings_of(folder, (1, 2)), stages={1: stage})) as world, torch.inference_mode():
        pending = world.runner.begin(Step((span(9, PROMPT),)))
        begun.set()
        load(world.runner, 1, "all")
        with pytest.raises(StepFailed):
            world.runner.finish(pending)
        assert texts(world.runner, {1: 1}, 4) != texts(world.runner, {1: 0}, 4)


def another(**options: Any) -> Callable[[Path], object]:
    """Another adapter in the place of one."""

    def replaced(one: Path) -> None:
        shutil.rmtree(one)
        make_adapter(one, make_model("qwen3", **FAMILY), **options)

    return replaced


TENSORS, NOT_THE_SAME = "adapter_model.safetensors", "files are not those of rank 0"
ELSEWHERE = {
    "no such folder": (shutil.rmtree, AdapterUnknown, "has no folder 'all'"),
    "pickled": (lambda one: (one / TENSORS).rename(one / "adapter_model.bin"), NotSupported, "pickled"),
    "a broken header": (lambda one: (one / TENSORS).write_bytes(b"\0" * 40), InvalidRequest, "safetensors"),
    "other numbers": (another(seed=9, **ADAPTERS["all"]), InvalidRequest, NOT_THE_SAME),
    "fewer layers": (another(r=3, layers_to_transform=[0, 1, 2]), InvalidRequest, NOT_THE_SAME),
    "fewer tensors": (another(r=3, targets=("q_proj",)), InvalidRequest, NOT_THE_SAME),
}


def nothing_is_left(world: World, number: int) -> None:
    for part in (world.runner, *(each.phase for each in world.followers)):
        each = adapters_of(part)
        assert not each.held_bytes and not each.loras
        with pytest.raises(KeyError):  # nor is it being read
            each.read(number)


@pytest.mark.parametrize("cut", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
def test_a_load_that_one_rank_refuses_is_refused(folder: Path, cut: tuple[int, int], tmp_path: Path) -> None:
    """With that rank's reason, and its name; then all are as before."""
    saboteur = Saboteur()
    with closing(World(settings_of(folder, cut), stages={1: saboteur})) as world, torch.inference_mode():
        theirs = adapters_of(world.followers[0].phase)
        expected = texts(world.runner, {1: 0}, 4)
        for number, (change, error, words) in enumerate(ELSEWHERE.values(), 1):
            there = tmp_path / str(number)
            shutil.copytree(folder / "adapters", there)
            change(there / "all")
            theirs.root = there
            with pytest.raises(error, match=f"rank 1 on thread 1: .*{words}"):
                load(world.runner, number, "all")
            nothing_is_left(world, number)
        theirs.root = folder / "adapters"
        for failure, words in ((OSError(errno.EIO, "Input/output error"), "Input/output"), (MemoryError(), "Memory")):
            saboteur.arm("adapter", 2, failure)
            with pytest.raises(StepFailed, match=f"rank 1 on thread 1: .*{words}"):
                load(world.runner, 20, "all")
            nothing_is_left(world, 20)
        theirs.max_bytes = 100
        with pytest.raises(SequencesExhausted, match="rank 1 on thread 1") as refusal:
            load(world.runner, 21, "all")
        assert refusal.value.number("adapter_memory") == 100
        nothing_is_left(world, 21)
        theirs.max_bytes = 1 << 20
        assert texts(world.runner, {1: 0}, 4) == expected
        load(world.runner, 22, "all")
        assert texts(world.runner, {1: 22}, 4) != expected


def test_a_load_that_kills_the_device_of_a_rank_ends_the_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its error: the load is not called a failed one that changed nothing."""
    saboteur, run = Saboteur(), Follower.run

    def run_quietly(follower: Follower) -> None:
        with suppress(torch.AcceleratorError):  # its process would end
            run(follower)

    def synchronize() -> None:
        raise torch.AcceleratorError(ILLEGAL_ACCESS)

    monkeypatch.setattr(Follower, "run", run_quietly)
    world = World(settings_of(folder, (2, 1)), stages={1: saboteur})
    saboteur.arm("adapter", 1, RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with torch.inference_mode(), pytest.raises(DeviceLost, match="thread 1"):
        load(world.runner, 1, "all")
    world.runner.close()


def test_what_this_rank_refuses_comes_first(folder: Path, tmp_path: Path) -> None:
    """And the others do not wait for what is to come."""
    adapters = tmp_path / "adapters"
    make_adapter(adapters / "bad", make_model("qwen3", **FAMILY), size=float("inf"))
    shutil.copytree(folder / "adapters" / "all", adapters / "all")
    with closing(World(replace(settings_of(folder, (2, 1)), adapter_dir=adapters))) as world, torch.inference_mode():
        with pytest.raises(InvalidRequest, match=r"^(?!rank).*NaN"):
            load(world.runner, 1, "bad")
        nothing_is_left(world, 1)
        with pytest.raises(AdapterUnknown, match=r"^the executor's"):
            load(world.runner, 2, "nowhere")
        load(world.runner, 3, "all")
