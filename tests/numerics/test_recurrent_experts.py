"""Experts beside recurrent layers (Qwen3-Next, Qwen3.5): what their rows do not depend on, checkpoints, configurations.

`test_whole_models` compares such models with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.engine.assembly.loading import load_model, read_spec, with_single_experts
from ferrum_rpc.engine.assembly.source import checkpoint_fingerprint
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.expert_rows import ExpertRows
from ferrum_rpc.models.fused_ops import TorchFusedOps
from ferrum_rpc.models.layout import layout, parameter_count
from ferrum_rpc.models.parts.dense import Dense
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.parts.recurrent import Recurrent
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.numerics.whole_models import SHAPES, SPLITS, TOKENS, model, with_images
from tests.support.checkpoints import make_checkpoint, make_model, rewrite
from tests.support.harness import CPU, Executor, Oracle, native, rounded_model, worst

NEXT, MOE = "qwen3_next", "qwen3_5_moe"
SHAPE = SHAPES[MOE]


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("experts", [5, 64])
def test_the_answers_of_experts_have_the_same_bits_alone(experts, kind):
    """Of numbers of rows and of channels that fill vectors, and that do not."""
    hidden, inner, generator = 43, 7, torch.Generator().manual_seed(0)
    spec = ModelSpec.from_config(make_model(NEXT).config.to_dict() | {"architectures": ["Qwen3NextForCausalLM"]})
    part = next(layer.mlp for layer in spec.layers if isinstance(layer.mlp, Experts))
    ops = TorchFusedOps(spec.layers[0], kind)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(kind) / 4

    def product(*shape: int) -> Any:
        """Of each row by itself; scores are float32."""
        weight, made = draw(*shape).double(), torch.float32 if shape[0] == experts + 1 else kind
        return lambda rows: torch.stack([(weight @ row.double()).to(made) for row in rows])

    router = product(experts + 1, hidden)
    products = [[product(*shape) for _ in range(experts)] for shape in ((2 * inner, hidden), (hidden, inner))]
    made: Any = ExpertRows(part, router, None, *products)
    rows, shared = draw(61, hidden), draw(61, hidden)
    together, pairs = made.add(rows, shared, ops), zip(rows[:, None], shared[:, None], strict=True)
    assert torch.equal(together, torch.cat([made.add(*each, ops) for each in pairs]))
    gates = router(rows)[:, -1:].double().sigmoid()
    without = made.add(rows, torch.zeros_like(shared), ops)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[kind]
    assert torch.allclose(together.double(), without.double() + shared.double() * gates, rtol=tolerance, atol=tolerance)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def joined(tensors: dict[str, torch.Tensor]) -> None:
    """With the experts of a layer in two tensors, as transformers holds them and as Qwen3.5 is published."""
    modules = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    for module in modules:
        count = sum(name.startswith(f"{module}.experts.") and name.endswith("up_proj.weight") for name in tensors)
        gates, ups, downs = (
            [tensors.pop(f"{module}.experts.{each}.{kind}_proj.weight") for each in range(count)]
            for kind in ("gate", "up", "down")
        )
        both = [torch.cat(each) for each in zip(gates, ups, strict=True)]
        tensors[f"{module}.experts.gate_up_proj"], tensors[f"{module}.experts.down_proj"] = map(
            torch.stack, (both, downs)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [NEXT, MOE])
def test_a_checkpoint_is_loaded_with_its_experts_apart_or_in_one_tensor(family, dtype, tmp_path):
    """And layers that draft tokens are left out, whose experts are in one tensor too."""
    folder = make_checkpoint(tmp_path, family, dtype=dtype, **SHAPE)
    rows = Executor(load_model(folder, dtype, CPU)).run(TOKENS, SPLITS[1])
    if dtype == torch.float32:
        assert worst(rows, Oracle(rounded_model(family, dtype, **SHAPE), tokens=TOKENS).logits) <= 1e-5
    apart = fingerprint(folder)
    rewrite(folder, joined)
    rewrite(folder, lambda tensors: tensors.update({"mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 6, 3)}))
    assert not any("experts.0" in name for name in Checkpoint.open(folder).entries)
    assert torch.equal(Executor(load_model(folder, dtype, CPU)).run(TOKENS, SPLITS[1]), rows)
    assert fingerprint(folder) == apart


def fingerprint(folder: Path) -> bytes:
    checkpoint = with_single_experts(Checkpoint.open(folder))
    return checkpoint_fingerprint(checkpoint, layout(read_spec(checkpoint)), torch.float32, "none")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda whole: whole[:-1], "missing .*experts.7.gate_proj.weight"),
        (lambda whole: torch.cat((whole, whole)), "unexpected .*experts.8.gate_proj.weight"),
        (lambda whole: whole.mT.contiguous(), r"misshapen .*experts.0.gate_proj.weight \[48, 64\], exp"),
        (lambda whole: whole[:, :-1].contiguous(), "unexpected .*experts.gate_up_proj"),
        (lambda whole: whole.flatten(0, 1), "unexpected .*experts.gate_up_proj"),
        (lambda whole: torch.zeros(5000, 2, 1), "unexpected .*experts.gate_up_proj"),
    ],
)
def test_experts_in_one_tensor_that_do_not_fit_are_refused(change, said, tmp_path):
    folder = make_checkpoint(tmp_path, MOE, **SHAPE | {"hidden_size": 96})
    rewrite(folder, joined)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    rewrite(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(InvalidRequest, match=said):
        load_model(folder, torch.float32, CPU)


def test_experts_that_are_there_twice_are_refused(tmp_path):
    folder = make_checkpoint(tmp_path, MOE, **SHAPE)
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(8, 64, 32)}))
    with pytest.raises(InvalidRequest, match=f"1 unexpected .*{name}"):
        load_model(folder, torch.float32, CPU)


@pytest.mark.parametrize(("family", "name"), [("qwen3_5", "Qwen3_5"), (MOE, "Qwen3_5Moe")])
def test_the_text_part_of_a_model_with_images_is_the_decoder(family, name, tmp_path):
    """And layers that draft tokens are left out."""
    with_images(tmp_path, make_model(family, **SHAPES[family]), name)
    oracle = Oracle(rounded_model(family, torch.float32, **SHAPES[family]), tokens=TOKENS)
    for change in (lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(3)}), joined):
        rewrite(tmp_path, change)
        decoder = load_model(tmp_path, torch.float32, CPU)
        assert decoder.spec.architecture == f"{name}ForConditionalGeneration"
        assert worst(Executor(decoder).run(TOKENS, SPLITS[0]), oracle.logits) <= 1e-5


def test_integers_whose_rows_take_turns_are_those_of_the_numbers():
    """A quantized checkpoint of Qwen3-Next has groups, scales and zero points of such rows."""
    spec = native(model(case="Next")).spec
    placements = layout(spec)
    generator = torch.Generator().manual_seed(0)
    found = [name for name, placement in placements.items() if placement.turns]
    assert {name.rpartition("in_proj_")[2] for name in found} == {"qkvz.weight", "ba.weight"}
    for name in found:
        rows, width = placements[name].shape
        numbers, zeros = (
            torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            for shape in ((rows, width), (rows, width // 32))
        )
        stored = Integers(8, numbers, torch.rand((rows, width // 32), generator=generator), zeros)
        assert torch.equal(placements[name].of_integers(stored, 16).floats(), placements[name].of(stored.floats()))


# --- configurations ---------------------------------------------------------------------------------------------------

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": {
        **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936},
        **{"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [], "num_hidden_layers": 48},
        **{"num_experts": 512, "num_experts_per_tok": 10, "intermediate_size": 5120, "partial_rotary_factor": 0.25},
        **{"rope_scaling": None, "rope_theta": 10000000, "use_sliding_window": False, "output_router_logits": False},
        **{"bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16"},
    },
    "Qwen3.5-35B-A3B": {
        **{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "vision_config": {}},
        **{"image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053},
        **{"vision_end_token_id": 248054, "tie_word_embeddings": False},
        "text_config": {
            **{"model_type": "qwen3_5_moe_text", "vocab_size": 248320, "attn_output_gate": True},
            **{"num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8, "mlp_only_layers": []},
            **{"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
            "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
            | {"partial_rotary_factor": 0.25, "rope_theta": 10000000},
        },
    },
}
"""What decides in the configurations that Qwen publishes."""
BOTH = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu"}
BOTH |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "rms_norm_eps": 1e-06}
BOTH |= {"linear_num_value_heads": 32, "linear_value_head_dim": 128, "moe_intermediate_size": 512}
BOTH |= {"shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001, "full_attention_interval": 4}
BOTH |= {"attention_bias": False, "max_position_embeddings": 262144}
BILLIONS = {"Qwen3-Next-80B-A3B": 79.7, "Qwen3.5-35B-A3B": 34.7}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(name):
    data = PUBLISHED[name]
    data = data | {"text_config": data["text_config"] | BOTH} if "text_config" in data else data | BOTH
    spec = ModelSpec.from_config(data)
    assert parameter_count(spec) / 1e9 == pytest.approx(BILLIONS[name], abs=0.05)
    assert spec.recurrent_shapes == (RecurrentShape(16, 32, 128, 128, 4),) * (len(spec.layers) * 3 // 4)
    assert all(isinstance(layer.mlp, Experts) and layer.mlp.routing.normed for layer in spec.layers)
    assert spec.attention.gated and spec.attention.rotary_dim == 64 and spec.ropes[0].theta == 1e7 and spec.norm.offset


def test_dense_layers_and_those_with_experts_are_where_the_configuration_says():
    config = make_model(NEXT, num_hidden_layers=6).config.to_dict() | {"architectures": ["Qwen3NextForCausalLM"]}
    spec = ModelSpec.from_config(config | {"decoder_sparse_step": 3, "mlp_only_layers": [2, -1, 9]})
    assert [isinstance(layer.mlp, Dense) for layer in spec.layers] == [True] * 5 + [False]
    assert [isinstance(layer.mixer, Recurrent) for layer in spec.layers] == [True, False] * 3
    without = {name: value for name, value in config.items() if name != "intermediate_size"}
    assert all(isinstance(layer.mlp, Experts) for layer in ModelSpec.from_config(without).layers)
    dense = ModelSpec.from_config(without | {"num_experts": 0}).layers[0].mlp
    assert isinstance(dense, Dense) and dense.inner == 5632
