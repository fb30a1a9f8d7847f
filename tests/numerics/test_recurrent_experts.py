"""Whole models with recurrent layers and experts (Qwen3-Next, Qwen3.5) against transformers, and what their rows do not
depend on.

In float32 each logit is within 1e-5 of the oracle's, by their spread, for sequences that are fed whole, in chunks, side
by side, by single tokens, and with rejected drafts. In bfloat16 the median row errs at most twice as much as that of
transformers: rounding sends a row to another expert now and then, in either implementation, and such a row is far off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.engine.assembly.loading import load_model, read_spec, with_single_experts
from ferrum_rpc.engine.assembly.source import checkpoint_fingerprint
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.models.expert_rows import ExpertRouter, ExpertRows
from ferrum_rpc.models.fused_ops import TorchFusedOps
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.layout import layout, parameter_count
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.native_linear import ByteFactory, NibbleFactory, PairFactory
from ferrum_rpc.models.parts.dense import Dense
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.parts.recurrent import Recurrent
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.numerics.test_latent_models import median
from tests.numerics.test_recurrent_models import SECTIONS, SPLITS, TOKENS, YARN, native_of, with_rejected_drafts
from tests.support.adapters import load_adapters, make_adapter, merge
from tests.support.checkpoints import CLASSES, config_class, make_checkpoint, make_model, rewrite
from tests.support.harness import (
    CPU,
    Executor,
    Oracle,
    error,
    made_or_skip,
    native,
    reference_logits,
    rounded_model,
    worst,
)

NEXT, MOE = "qwen3_next", "qwen3_5_moe"
FAMILIES = pytest.mark.parametrize("family", [NEXT, MOE])

SHAPE = {"num_hidden_layers": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Next": (NEXT, {}),
    "Next, some layers dense": (NEXT, {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "Next, not normed, biases": (NEXT, {"norm_topk_prob": False, "attention_bias": True, "num_experts": 5}),
    "Next, one key head, attention first": (
        NEXT,
        {
            "linear_num_key_heads": 1,
            "linear_value_head_dim": 8,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "rope_parameters": YARN,
        },
    ),
    "Next, as many key heads": (NEXT, {"linear_num_key_heads": 4, "num_experts_per_tok": 1}),
    "Next, all dense": (NEXT, {"num_experts": 0}),
    "3.5": (MOE, {"tie_word_embeddings": True, "rope_parameters": SECTIONS}),
    "3.5, all experts, a wide part for every row": (
        MOE,
        {"num_experts_per_tok": 8, "shared_expert_intermediate_size": 96, "linear_conv_kernel_dim": 2},
    ),
}
EVERY = pytest.mark.parametrize("case", CASES)


def model(case: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    family, options = CASES[case]
    return rounded_model(family, dtype, **SHAPE | options | overrides)


@EVERY
def test_float32_is_the_oracle_to_1e_5(case):
    reference = model(case)
    oracle, decoder = Oracle(reference, tokens=TOKENS), native(reference)
    for split in SPLITS:
        assert worst(Executor(decoder).run(TOKENS, split), oracle.logits) <= 1e-5
    assert worst(with_rejected_drafts(Executor(decoder)), oracle.logits) <= 1e-5


@pytest.mark.parametrize("linear", ["native", "plain"])
@EVERY
def test_bfloat16_errs_at_most_twice_as_much_as_transformers(case, linear):
    reference = model(case, torch.bfloat16)
    decoder = native_of(reference, PairFactory) if linear == "native" else native(reference, torch.bfloat16, "plain")
    oracle = Oracle(reference, tokens=TOKENS)
    theirs = median(reference_logits(reference, TOKENS, torch.bfloat16), oracle.logits)
    for split in SPLITS:
        assert median(Executor(decoder).run(TOKENS, split), oracle.logits) <= 2 * theirs
    assert median(with_rejected_drafts(Executor(decoder)), oracle.logits) <= 2 * theirs


ROUND = {"head_dim": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
"""Sizes that can be quantized, and of which our kernels are."""


@FAMILIES
def test_quantized_products_are_near_what_they_quantize(family):
    """What scores experts, and the gate of the part that computes every row, are not quantized."""
    reference = rounded_model(family, torch.bfloat16, **SHAPE | ROUND)
    oracle = Oracle(reference, tokens=TOKENS)
    for factory, bound in ((ByteFactory, 0.1), (NibbleFactory, 0.6)):
        assert median(Executor(native_of(reference, factory)).run(TOKENS, SPLITS[1]), oracle.logits) <= bound


# --- bits -------------------------------------------------------------------------------------------------------------


def exact(factory: Any, family: str = NEXT) -> Any:
    decoder = native_of(rounded_model(family, torch.bfloat16, **SHAPE | ROUND), factory)
    if select_fused_ops(decoder.spec, torch.bfloat16, CPU)[1].name != "native":
        pytest.skip("no kernel of ours runs here")
    return decoder


@pytest.mark.parametrize("factory", [PairFactory, ByteFactory, NibbleFactory])
def test_a_truncation_within_the_last_step_leaves_the_bits_of_never_having_fed_it(factory):
    decoder = exact(factory)
    plain = Executor(decoder)
    assert plain.compute.exact_span_tokens == 32
    plain.step({0: TOKENS[:40], 1: TOKENS[20:60]})
    assert torch.equal(
        with_rejected_drafts(Executor(decoder))[40:], torch.cat([plain.step({0: [each]})[0] for each in TOKENS[40:]])
    )


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
@FAMILIES
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


def test_the_text_part_of_a_model_with_images_is_the_decoder(tmp_path):
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = make_model(MOE, **SHAPE)
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5MoeConfig(text_config=text.config.to_dict(), vision_config=vision | {"patch_size": 4})
    whole = Qwen3_5MoeForConditionalGeneration(config)
    whole.model.language_model, whole.lm_head = text.model, text.lm_head
    whole.save_pretrained(tmp_path)
    oracle = Oracle(rounded_model(MOE, torch.float32, **SHAPE), tokens=TOKENS)
    for change in (lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(3)}), joined):
        rewrite(tmp_path, change)
        decoder = load_model(tmp_path, torch.float32, CPU)
        assert decoder.spec.architecture == "Qwen3_5MoeForConditionalGeneration"
        assert worst(Executor(decoder).run(TOKENS, SPLITS[0]), oracle.logits) <= 1e-5


def test_integers_whose_rows_take_turns_are_those_of_the_numbers():
    """A quantized checkpoint of Qwen3-Next has groups, scales and zero points of such rows."""
    spec = native(model("Next")).spec
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


# --- the rest of a model ----------------------------------------------------------------------------------------------

ADAPTED = {
    NEXT: ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj", "down_proj"),
    MOE: ("in_proj_qkv", "in_proj_a", "q_proj", "gate_proj", "down_proj"),
}


@FAMILIES
def test_adapters_are_merged_weights(family, tmp_path):
    reference = rounded_model(family, torch.float32, **SHAPE)
    folder = make_adapter(tmp_path / "one", reference, targets=ADAPTED[family], r=3)
    plain, decoder = Oracle(reference, tokens=TOKENS), native(reference)
    merged = Oracle(merge(reference, folder), tokens=TOKENS)
    assert error(plain.logits, merged.logits) > 0.01
    _, loras = decoder.take_adapters(64)
    load_adapters(tmp_path, loras)
    ours = Executor(decoder, loras=loras, adapters={0: 1}).run(TOKENS, SPLITS[1])
    assert error(ours, merged.logits) <= 3e-6


@pytest.mark.parametrize("factory", [PairFactory, ByteFactory, lambda: PlainLinear])
def test_the_gate_is_not_rounded(factory):
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(shape, generator=generator).bfloat16() for shape in ((9, 128), (7, 128)))
    assert worst(ExpertRouter(weight, made_or_skip(factory))(rows), rows.double() @ weight.double().T) <= 1e-6


@pytest.mark.parametrize(
    ("family", "change", "kind", "said"),
    [
        (NEXT, {"num_experts_per_tok": 9}, InvalidRequest, "num_experts_per_tok 9 exceeds num_experts 8"),
        (NEXT, {"num_experts": 5000}, InvalidRequest, "num_experts must be within 0 .. 4096"),
        (NEXT, {"decoder_sparse_step": 0}, InvalidRequest, "decoder_sparse_step must be within"),
        (NEXT, {"mlp_only_layers": "all"}, InvalidRequest, "mlp_only_layers must be a list"),
        (NEXT, {"shared_expert_intermediate_size": 0}, InvalidRequest, "shared_expert_intermediate_size must be"),
        (NEXT, {"hidden_act": "gelu"}, NotSupported, "hidden_act must be silu"),
        (NEXT, {"attn_output_gate": True}, NotSupported, "attn_output_gate: True is not known here"),
        (NEXT, {"routed_scaling_factor": 2.0}, NotSupported, "routed_scaling_factor: 2.0 is not known here"),
        (NEXT, {"layer_types": ["linear_attention"] * 2}, NotSupported, "layer_types: a model without full attention"),
        (MOE, {"num_experts": 0}, InvalidRequest, "num_experts must be within 1 .. 4096"),
        (MOE, {"norm_topk_prob": False}, NotSupported, "norm_topk_prob: False is not supported"),
        (MOE, {"mlp_only_layers": [1]}, NotSupported, r"mlp_only_layers: \[1\] is not supported"),
        (MOE, {"decoder_sparse_step": 2}, NotSupported, "decoder_sparse_step: 2 is not supported"),
        (MOE, {"attn_output_gate": False}, NotSupported, "attn_output_gate: False is not supported"),
        (MOE, {"n_group": 2}, NotSupported, "n_group: 2 is not known here"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(family, change, kind, said):
    config = make_model(family).config.to_dict() | {"architectures": [f"{CLASSES[family]}ForCausalLM"]}
    ModelSpec.from_config(config)
    with pytest.raises(kind, match=said) as caught:
        ModelSpec.from_config(config | change)
    assert isinstance(caught.value, ExecutorError) and caught.value.field in change


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


@FAMILIES
def test_an_absent_field_has_the_default_of_transformers(family):
    data = config_class(family)().to_dict() | {"architectures": [f"{CLASSES[family]}ForCausalLM"]}
    expected = ModelSpec.from_config(data)
    required = {"num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings"}
    for name in data.keys() - required - {"architectures"}:
        assert ModelSpec.from_config({key: value for key, value in data.items() if key != name}) == expected, name


def test_dense_layers_and_those_with_experts_are_where_the_configuration_says():
    config = make_model(NEXT, num_hidden_layers=6).config.to_dict() | {"architectures": ["Qwen3NextForCausalLM"]}
    spec = ModelSpec.from_config(config | {"decoder_sparse_step": 3, "mlp_only_layers": [2, -1, 9]})
    assert [isinstance(layer.mlp, Dense) for layer in spec.layers] == [True] * 5 + [False]
    assert [isinstance(layer.mixer, Recurrent) for layer in spec.layers] == [True, False] * 3
    without = {name: value for name, value in config.items() if name != "intermediate_size"}
    assert all(isinstance(layer.mlp, Experts) for layer in ModelSpec.from_config(without).layers)
    dense = ModelSpec.from_config(without | {"num_experts": 0}).layers[0].mlp
    assert isinstance(dense, Dense) and dense.inner == 5632
