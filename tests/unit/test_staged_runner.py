"""A runner that stages and replays its steps is the plain one: same rows, same books, same cache after a failure."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, Greedy, OutputKind, OutputSpec, Positions, Span, TopTokens
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.cuda.graphs import Capture
from ferrum_rpc.engine.cuda.select import select_compute, select_depth
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import DeviceLost, StepFailed
from ferrum_rpc.models.identity import IdentityModel
from tests.support.fixtures import PlannedTorch
from tests.support.rerun import Rerun
from tests.support.rows import answered

CONFIG = ModelSettings(
    path="identity",
    device="cpu",
    attention="torch",
    block_size=4,
    kv_blocks=80,
    identity_vocab_size=64,
    identity_max_context=64,
)


SELECT: Any = {"graphs": "auto", "max_sequences": 4, "blocks_per_sequence": 16, "block_size": 4}


def replaying(capture: Capture, stage: Any = lambda _: None, **select: Any) -> Any:
    """The runner of `CONFIG` with what a CUDA device would get, and the choice of it."""
    plain = build_runner(CONFIG)
    with plain.context():
        attention = PlannedTorch(plain.model.attention_specs, plain.store.keys, plain.store.values)
        choice, compute = select_compute(plain.model, attention, capture=capture, **{**SELECT, **select})
    given: Any = {"info": plain.info, "device": plain.device, "stage": stage, "compute": compute}
    runner: Any = TorchRunner(plain.model, plain.kv, plain.store, attention, **given)
    runner.choice = choice
    return runner


def run(runner: TorchRunner, *spans: tuple[int, list[int], int], kind: OutputKind | None = None) -> list[Any]:
    """Length and rows of ``(sequence, tokens, start)`` each."""
    output = OutputSpec(Positions.ALL, kind or FullLogits())
    rows = answered(runner, *(Span(s, np.array(t, np.int32), at, output, create=at == 0) for s, t, at in spans))
    runner.check()
    return [[runner.kv.length(s), *each.values()] for (s, _, _), each in zip(spans, rows, strict=True)]


def same(one: list[Any], other: list[Any]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", [FullLogits(), Greedy(), Greedy(logprob=True), TopTokens(3)])
def test_prefill_decode_verify_and_rollback_answer_the_same(kind: OutputKind) -> None:
    capture = Rerun()
    staged, plain = replaying(capture, verify_tokens=3), build_runner(CONFIG)
    recordings = capture.recordings
    steps: list[list[tuple[int, list[int], int]]] = [[(s, [s + 1] * (5 + s), 0) for s in range(3)]]
    steps += [[(s, [9], 5 + s) for s in range(3)], [(1, [3], 7)], [(0, [3], 6), (2, [4], 8)]]
    steps += [[(s, [7, at, 8], 5) for s in range(3)] for at in range(4)]  # each verify takes back the one before
    for step in steps:
        same(run(staged, *step, kind=kind), run(plain, *step, kind=kind))
    assert capture.replays >= 5
    assert capture.recordings == recordings, "nothing is captured within a step of a caller"


def test_a_verify_that_nobody_requested_runs_eagerly_however_often_it_comes() -> None:
    capture = Rerun()
    staged, plain = replaying(capture), build_runner(CONFIG)
    recordings = capture.recordings
    for step in [[(1, [1, 2, 3, 4, 5, 6, 7, 8, 9], 0)], *([(1, [7, at, 8], 5)] for at in range(6))]:
        same(run(staged, *step), run(plain, *step))
    assert (capture.recordings, capture.replays) == (recordings, 0)


@pytest.mark.parametrize("stage", ["select", "commit"])
def test_a_step_that_fails_after_its_replay_leaves_no_trace(stage: str) -> None:
    armed = False

    def fail(name: str) -> None:
        if armed and name == stage:
            raise ValueError(name)

    capture = Rerun()
    staged, plain = replaying(capture, fail), build_runner(CONFIG)
    for runner in (staged, plain):
        run(runner, (1, [1, 2, 3, 4, 5, 6], 0), (2, [9, 8, 7], 0))
    replays, armed = capture.replays, True
    for spans in ([(1, [5], 6), (2, [5], 3)], [(1, [5], 2), (2, [5], 1)]):  # beyond the end, and over what is there
        with pytest.raises(StepFailed):
            run(staged, *spans)
    armed = False
    assert capture.replays == replays + 2
    step = [(1, [11], 6), (2, [12], 3)]
    same(run(staged, *step), run(plain, *step))


def test_a_replay_that_loses_the_device_is_the_device_lost() -> None:
    def record(run: Any) -> tuple[Any, torch.Tensor]:
        return Mock(side_effect=torch.AcceleratorError("an illegal memory access")), run()

    runner = replaying(record)
    run(runner, (1, [1, 2], 0))
    with pytest.raises(DeviceLost):
        run(runner, (1, [3], 2))


def test_the_choice_says_what_was_recorded_and_what_was_not(logs: list[Any]) -> None:
    runner = replaying(Rerun())
    assert runner.choice == ("cuda_graphs=3", "decode steps of up to 4 sequences are one launch")
    runner = replaying(Rerun(), graphs="off")
    assert runner.choice == ("cuda_graphs=off", "requested") and runner.compute.graphs is None
    assert not logs
    runner = replaying(Rerun(ValueError("no"), nth=3))
    assert runner.choice == (
        "cuda_graphs=2",
        "decode steps of up to 4 sequences are one launch; no more were captured: ValueError: no",
    )
    runner = replaying(Rerun(ValueError("no")))
    assert runner.choice == ("cuda_graphs=off", "capture failed: ValueError: no")
    runner = replaying(Rerun(), verify_tokens=3)
    assert runner.choice == (
        "cuda_graphs=9",
        "decode steps of up to 4 sequences, and verify steps of up to 3 tokens for each of 4 are one launch",
    )
    assert [each["event"] for each in logs] == ["graph_capture_failed"] * 2
    assert all(each["action"] and each["sequences"] for each in logs)


def test_steps_overlap_where_nothing_in_them_waits_and_nobody_said_no() -> None:
    plain: Any = build_runner(CONFIG).compute
    plain.late = True
    (name, reason), depth = select_depth(plain, "auto")
    assert (name, depth) == ("overlap=2", 2) and reason
    assert select_depth(plain, "off") == (("overlap=off", "requested"), 1)
    plain.late = False
    (name, reason), depth = select_depth(plain, "auto")
    assert (name, depth) == ("overlap=off", 1) and plain.attention.name in reason


def test_nothing_is_recorded_of_layers_that_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdentityModel, "waits", True)
    capture = Mock(wraps=Rerun())
    assert replaying(capture).choice == ("cuda_graphs=off", "its layers may wait for the device")
    assert not capture.mock_calls


def test_a_backend_without_reserved_plans_has_no_graphs() -> None:
    plain = build_runner(CONFIG)
    with plain.context():
        (name, reason), compute = select_compute(plain.model, plain.attention, capture=Rerun(), **SELECT)
    assert name == "cuda_graphs=off" and plain.attention.name in reason
    assert type(plain.compute) is type(compute) and plain.depth == 1
    assert not any("graphs" in name for name, _ in plain.device.choices)
