"""Models with recurrent states, with a cache of latents, and with experts, on a CUDA device: right rows, whatever
happens between.

The histories of `tests.unit.test_runner_states` run here over the kernel, graphs and copies of the device.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, Span
from ferrum_rpc.engine import feeding, states
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import NotSupported
from tests.support.checkpoints import EXPERTS, RECURRENT, RECURRENT_SHAPE, make_checkpoint, make_model
from tests.support.harness import reference_logits
from tests.support.histories import run_histories
from tests.support.rows import answered
from tests.support.state_world import EVERY, FAMILIES, PIECE
from tests.unit.test_runner_states import StateHistories

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ALL = OutputSpec(Positions.ALL, FullLogits())
TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 256, 180)]
SPLITS = (0, 50, 51, 52, 57, 89, 160, 180)
"""Chunks, single tokens, and a few tokens that are computed one by one."""


def of(family: str) -> dict[str, Any]:
    """What is said of a model. All experts compute every row, for rounding may send one to another expert."""
    shape = dict(RECURRENT_SHAPE) if family in RECURRENT else {}
    return shape | ({"num_experts_per_tok": 8} if family in {"qwen3_next", "qwen3_5_moe", *EXPERTS} else {})


def distances(found: np.ndarray, expected: np.ndarray) -> Any:
    """Of each row, the root mean square of the error, of the spread of all."""
    return np.sqrt(np.mean((found - expected) ** 2, 1)) / expected.std()


def rows(runner: TorchRunner, sequence: int, tokens: list[int], start: int) -> np.ndarray:
    span = Span(sequence, np.array(tokens, np.int32), start, ALL, create=start == 0)
    [columns] = answered(runner, span)
    return columns["logits"].astype(np.float64)


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*RECURRENT, "deepseek_v2", "deepseek_v3", *EXPERTS])
def test_families_on_the_device_against_float64(tmp_path, family, dtype, graphs):
    path = make_checkpoint(tmp_path / family, family, dtype=dtype, **of(family))
    reference = make_model(family, **of(family)).to(dtype)
    expected = reference_logits(reference, TOKENS, torch.float64).numpy()
    own = distances(reference_logits(reference, TOKENS, dtype).numpy(), expected)
    name = str(dtype).removeprefix("torch.")
    options = {"kv_blocks": 128, "block_size": 4, "max_sequences": 4, "cuda_graphs": graphs}
    runner = build_runner(ModelSettings(str(path), device="cuda", dtype=name, **options))
    chosen = [choice for choice, _ in runner.device.choices]
    assert "model=native" in chosen
    if family in RECURRENT:
        assert "recurrence=triton" in chosen, runner.device.choices
    if family in EXPERTS:
        assert "cuda_graphs=off" in chosen, runner.device.choices
    found = np.concatenate([rows(runner, 1, TOKENS[a:b], a) for a, b in itertools.pairwise(SPLITS)])
    bound = 2e-5 if dtype is torch.float32 else 2 * np.median(own)  # rounding may send a row to other experts
    assert np.median(distances(found, expected)) <= bound
    for at in (
        (178, 175, 170) if dtype is torch.float32 else ()
    ):  # within the last step, and deeper: tokens are fed again
        runner.truncate(1, at)
        again = rows(runner, 1, TOKENS[at : at + 2], at)
        assert distances(again, expected[at : at + 2]).max() <= 1e-4
    runner.check()
    runner.close()


@pytest.mark.parametrize(
    ("options", "histories"), [({}, 8), ({"family": "qwen3_next"}, 3)], ids=["qwen3_5", "qwen3_next"]
)
def test_any_history_has_right_rows_on_the_device(options, histories, tmp_path, monkeypatch):
    monkeypatch.setattr(states, "CHECKPOINT_TOKENS", EVERY)
    monkeypatch.setattr(feeding, "PIECE_TOKENS", PIECE)
    family = options.get("family", "qwen3_5")
    monkeypatch.setattr(StateHistories, "folder", make_checkpoint(tmp_path, family, **FAMILIES[family]))
    for name, value in {**options, "device": "cuda"}.items():
        monkeypatch.setattr(StateHistories, name, value)
    run_histories(StateHistories, histories, [Phase.generate])  # a smaller example would take minutes here


def test_several_ranks_on_gpus_are_refused_by_name(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3_5", **RECURRENT_SHAPE)
    with pytest.raises(NotSupported, match="by several ranks on cuda"):
        build_runner(ModelSettings(str(path), device="cuda", tensor_parallel=2))


def test_decodes_of_many_sequences_are_replayed_and_equal_those_of_one(tmp_path):
    """A sequence among others has the rows of the sequence alone, up to the rounding of products."""
    path = make_checkpoint(tmp_path, "qwen3_5", **RECURRENT_SHAPE)
    config = ModelSettings(str(path), device="cuda", dtype="float32", kv_blocks=512, block_size=4, max_sequences=32)
    runner = build_runner(config)
    alone = [rows(runner, 1, TOKENS[:40], 0), *(rows(runner, 1, [TOKENS[at]], at) for at in range(40, 60))]
    many = range(10, 30)
    steps = [[Span(s, np.array(TOKENS[:40], np.int32), 0, ALL, create=True) for s in many]]
    steps += [[Span(s, np.array([TOKENS[at]], np.int32), at, ALL) for s in many] for at in range(40, 60)]
    for wanted, spans in zip(alone, steps, strict=True):
        for columns in answered(runner, *spans):
            assert np.abs(columns["logits"] - wanted).max() <= 1e-4 * wanted.std()
    assert runner.compute.graphs.recorded
    runner.close()
