"""What a model with latent attention and experts is said to take is what it then takes.

A step is an estimate: how many rows one expert has is not known before, and the plan says all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, RowDType, Span, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import choose
from tests.support.checkpoints import make_checkpoint
from tests.unit.test_plan import of_torch, planned, settings

SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "kv_lora_rank": 96,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 2048,
}
KINDS = ["bfloat16", "float32", "int8"]


EXPERTS = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "hidden_size": 768, "num_hidden_layers": 2}
"""Of a model whose largest moment is that of its experts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("latent"), "deepseek_v3", dtype=torch.bfloat16, **SHAPE)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_cache_take_what_was_planned(folder, kind):
    config = settings(folder, kind)
    plan, parts = planned(config), choose(config)
    left, _ = of_torch(parts.load)
    assert abs(left - plan.weights_bytes) <= 0.001 * left
    runner = build_runner(config)
    assert plan.kv_bytes == sum(buffer.nbytes for buffer in runner.store.buffers)
    assert plan.kv_bytes_per_token == runner.info.kv_bytes_per_token == 3 * 128 * (4 if kind == "float32" else 2)
    assert (runner.info.kv_heads, runner.info.head_dim) == (1, 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[1000, 1000], [512, 512], [24]], ids=str)
def test_a_step_takes_no_more_than_the_estimate(folder, kind, steps):
    check_step(settings(folder, kind, max_context=max(32, sum(steps))), steps)


def test_nor_does_one_of_many_experts(tmp_path):
    folder = make_checkpoint(tmp_path, "deepseek_v3", dtype=torch.bfloat16, **SHAPE | EXPERTS)
    check_step(settings(folder, max_context=600), [600])


def check_step(config: ModelSettings, steps: list[int]) -> None:
    output = OutputSpec(Positions.LAST, FullLogits(RowDType.F32))
    prompt = np.random.default_rng(0).integers(1, 900, size=sum(steps)).astype(np.int32)

    def run(runner: Any) -> None:
        with runner.context():
            at = 0
            for count in steps:
                runner.forward(Step((Span(1, prompt[at : at + count], at, output, create=not at),)))
                at += count

    runner = build_runner(config)
    left, most = of_torch(lambda: run(runner))
    plan = planned(config, max(steps))
    assert plan.estimated
    assert 0.1 * plan.activations_bytes < most - left <= plan.activations_bytes
