"""Experts beside the usual attention (Qwen3, gpt-oss): bits, checkpoints, configurations.

`test_whole_models` compares such models with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ferrum_rpc.engine.assembly.loading import load_model, read_spec, with_single_experts
from ferrum_rpc.engine.assembly.source import checkpoint_fingerprint
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.expert_rows import ExpertRows
from ferrum_rpc.models.fused_ops import NativeFusedOps
from ferrum_rpc.models.layout import layout, parameter_count
from ferrum_rpc.models.parts.clamped import Clamped
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.numerics.whole_models import model
from tests.support.checkpoints import make_checkpoint, rewrite
from tests.support.harness import CPU, made_or_skip, native

# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["Qwen3 MoE", "gpt-oss"])
def test_the_answers_have_the_same_bits_alone(case, kind):
    spec, generator = native(model(case=case)).spec, torch.Generator().manual_seed(0)
    part, ops = spec.layers[0].mlp, made_or_skip(lambda: NativeFusedOps(spec.layers[0], kind))
    assert isinstance(part, Experts)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(kind) / 4

    def product(*shape: int) -> Any:
        """Of each row by itself; scores are float32."""
        weight, made = draw(*shape).double(), torch.float32 if shape[0] == part.count else kind
        return lambda rows: torch.stack([(weight @ row.double()).to(made) for row in rows])

    router = product(part.count, part.hidden)
    shapes = (2 * part.inner, part.hidden), (part.hidden, part.inner)
    made = ExpertRows(part, router, None, *([product(*shape) for _ in range(part.count)] for shape in shapes))
    rows = draw(61, part.hidden)
    assert torch.equal(made.add(rows, None, ops), torch.cat([made.add(row[None], None, ops) for row in rows]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_its_channels_of_gate_and_up_whose_rows_take_turns(ranks):
    """Numbers, biases and stored integers."""
    spec, generator = native(model(case="gpt-oss")).spec, torch.Generator().manual_seed(0)
    inner = spec.layers[0].mlp.inner
    name, own = "model.layers.1.mlp.experts.3.gate_up_proj.", inner // ranks
    weight, bias = torch.randn(2 * inner, 64, generator=generator), torch.randn(2 * inner, generator=generator)
    numbers = torch.randint(0, 16, (2 * inner, 64), generator=generator, dtype=torch.uint8)
    integers = Integers(4, numbers, torch.rand((2 * inner, 2), generator=generator))
    for rank in range(ranks):
        table, part = layout(spec, Shard(rank, ranks)), slice(rank * own, (rank + 1) * own)
        for stored, placement in ((weight, table[f"{name}weight"]), (bias, table[f"{name}bias"])):
            assert torch.equal(placement.of(stored), torch.cat((stored[::2][part], stored[1::2][part])))
        placement = table[f"{name}weight"]
        assert torch.equal(placement.of_integers(integers, 32).floats(), placement.of(integers.floats()))


def test_layers_with_experts_wait_for_the_device():
    assert native(model(case="gpt-oss")).waits and native(model(case="Next")).waits
    assert not native(model(case="Next, all dense")).waits


# --- checkpoints ------------------------------------------------------------------------------------------------------


def fingerprint(folder: Path) -> bytes:
    checkpoint = with_single_experts(Checkpoint.open(folder))
    return checkpoint_fingerprint(checkpoint, layout(read_spec(checkpoint)), torch.float32, "none")


EXPERTS = "model.layers.1.mlp.experts."


@pytest.mark.parametrize("name", [f"{EXPERTS}{each}" for each in ("gate_up_proj", "gate_up_proj_bias", "down_proj")])
def test_a_fingerprint_depends_on_the_numbers_of_each_expert(name, tmp_path):
    folder = make_checkpoint(tmp_path, "gpt_oss")
    before = fingerprint(folder)
    rewrite(folder, lambda tensors: tensors[name][7].mul_(2))
    assert fingerprint(folder) != before


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("gate_up_proj", lambda whole: whole[:-1], "missing .*experts.7.gate_up_proj.weight"),
        ("gate_up_proj", lambda whole: torch.cat((whole, whole)), "unexpected .*experts.8.gate_up_proj.weight"),
        ("gate_up_proj", lambda whole: whole.mT, r"misshapen .*experts.0.gate_up_proj.weight \[64, 192\], expected"),
        ("gate_up_proj", lambda whole: whole.flatten(0, 1), "unexpected .*experts.gate_up_proj"),
        ("gate_up_proj_bias", lambda whole: whole[:, :-1], r"misshapen .*experts.0.gate_up_proj.bias \[191\], exp"),
        ("gate_up_proj_bias", lambda whole: whole[0], "unexpected .*experts.gate_up_proj_bias"),
        ("down_proj", lambda whole: torch.zeros(5000, 2, 1), "unexpected .*experts.down_proj"),
        ("down_proj_bias", lambda whole: whole[:3], "missing .*experts.3.down_proj.bias"),
        ("1.down_proj.bias", lambda whole: torch.zeros(64), r"unexpected .*experts.down_proj_bias"),
    ],
)
def test_experts_of_gpt_oss_that_do_not_fit_are_refused(part, change, said, tmp_path):
    folder = make_checkpoint(tmp_path, "gpt_oss")
    name = EXPERTS + part
    rewrite(folder, lambda tensors: tensors.update({name: change(tensors.get(name)).contiguous()}))
    with pytest.raises(InvalidRequest, match=said):
        load_model(folder, torch.float32, CPU)


# --- configurations ---------------------------------------------------------------------------------------------------

OSS: dict[str, Any] = {
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "vocab_size": 201088},
    **{"experts_per_token": 4, "num_experts_per_tok": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880},
    **{"initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880, "eos_token_id": 200002},
    **{"max_position_embeddings": 131072, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128},
    **{"output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05, "router_aux_loss_coef": 0.9},
    **{"rope_theta": 150000, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True},
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    | {"rope_type": "yarn", "truncate": False},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
QWEN3: dict[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128},
    **{"decoder_sparse_step": 1, "hidden_act": "silu", "max_position_embeddings": 40960, "mlp_only_layers": []},
    **{"norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4},
    **{"output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0},
    **{"router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 151645, "bos_token_id": 151643},
}
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "gpt-oss-20b": (OSS | {"num_hidden_layers": 24, "num_local_experts": 32}, 20.9),
    "gpt-oss-120b": (OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 116.8),
    "Qwen3-30B-A3B": (
        QWEN3
        | {"hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "moe_intermediate_size": 768}
        | {"num_attention_heads": 32, "num_hidden_layers": 48},
        30.5,
    ),
    "Qwen3-235B-A22B": (
        QWEN3
        | {"hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94, "moe_intermediate_size": 1536}
        | {"num_attention_heads": 64, "num_hidden_layers": 94},
        235.1,
    ),
}
"""What decides in the configurations that are published, and the billions of weights."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(name):
    data, billions = PUBLISHED[name]
    spec = ModelSpec.from_config(data)
    assert parameter_count(spec) / 1e9 == pytest.approx(billions, abs=0.05)
    layers, [rope] = spec.layers, spec.ropes
    parts = {layer.mlp for layer in layers}
    assert all(isinstance(each, Experts) and each.routing.normed and not each.matrices() for each in parts)
    windows = [each.window for each in spec.attention_specs]
    if name.startswith("Qwen3"):
        assert windows == [None] * len(layers) and rope.theta == 1e6 and rope.kind == "default"
        return
    assert windows == [128, None] * (len(layers) // 2)
    assert all(each.sinks for each in spec.attention_specs)
    assert {each.activation for each in parts} == {Clamped(7.0, 1.702)}
    assert (rope.kind, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    assert ModelSpec.from_config({key: value for key, value in data.items() if key != "rope_scaling"}) == spec


def test_windows_of_qwen3_are_in_all_layers_if_they_are_used():
    data, _ = PUBLISHED["Qwen3-30B-A3B"]
    for used, window in ((True, 100), (False, None)):
        spec = ModelSpec.from_config(data | {"use_sliding_window": used, "sliding_window": 100})
        assert {each.window for each in spec.attention_specs} == {window}
