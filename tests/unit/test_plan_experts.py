"""What a model with experts, also with latent attention or recurrent layers, is said to take is what it then takes.

A step is an estimate: how many rows one expert has is not known before, and the plan says all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, RowDType, Span, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import choose
from tests.support.checkpoints import RECURRENT_SHAPE
from tests.unit.test_plan import of_torch, planned, settings

EITHER: dict[str, Any] = {
    "vocab_size": 1000,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 2048,
}
LATENTS = EITHER | {"hidden_size": 128, "kv_lora_rank": 96, "q_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 32}
STATES = RECURRENT_SHAPE | EITHER | {"shared_expert_intermediate_size": 192}
USUAL = EITHER | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
FAMILIES = {
    "deepseek_v3": LATENTS,
    "qwen3_next": STATES,
    "qwen3_5_moe": STATES,
    "qwen3_moe": USUAL,
    "gpt_oss": {name: value for name, value in USUAL.items() if name != "moe_intermediate_size"},
}
EXPERTS = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "hidden_size": 768, "num_hidden_layers": 2}
"""Of a model whose largest moment is that of its experts."""

KINDS = ["bfloat16", "float32", "int8"]
STEPS = [*((kind, [1000, 1000]) for kind in KINDS), ("bfloat16", [512, 24]), ("float32", [512, 24]), ("int8", [24])]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, checkpoint_of):
    return checkpoint_of(request.param, dtype=torch.bfloat16, **FAMILIES[request.param])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_cache_and_states_take_what_was_planned(folder, kind):
    config = settings(folder, kind, state_slots=5)
    plan, parts = planned(config), choose(config)
    left, _ = of_torch(parts.load)
    assert abs(left - plan.weights_bytes) <= 0.001 * left
    runner = build_runner(config)
    info, itemsize = runner.info, 4 if kind == "float32" else 2
    assert plan.kv_bytes == sum(buffer.nbytes for buffer in runner.store.buffers)
    assert info.parameters == sum(each.numel() for each in load_file(folder / "model.safetensors").values())
    assert plan.kv_bytes_per_token == info.kv_bytes_per_token
    if "deepseek" not in info.architecture.lower() and info.states is None:
        assert info.kv_bytes_per_token == 2 * 2 * 2 * 64 * itemsize
        return
    if info.states is None:
        assert info.kv_bytes_per_token == 3 * 128 * itemsize and (info.kv_heads, info.head_dim) == (1, 128)
        return
    assert info.kv_bytes_per_token == 2 * 2 * 64 * itemsize
    states = 2 * 4 * 32 * 32 * 4  # of two layers in float32; the rest is the journal
    assert states < plan.state_bytes == info.state_bytes < 6 * states
    assert plan.state_slots == runner.cache_state().total_slots == 5


@pytest.mark.parametrize(("kind", "steps"), STEPS, ids=str)
def test_a_step_takes_no_more_than_the_estimate(folder, kind, steps):
    check_step(settings(folder, kind, max_context=max(32, sum(steps))), steps)


def test_nor_does_one_of_many_experts(checkpoint_of):
    folder = checkpoint_of("deepseek_v3", dtype=torch.bfloat16, **LATENTS | EXPERTS)
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
    assert 0.08 * plan.activations_bytes < most - left <= plan.activations_bytes  # C's buffers are not torch's
