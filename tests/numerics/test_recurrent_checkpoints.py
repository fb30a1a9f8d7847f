"""Checkpoints of models with recurrent layers (Qwen3.5): quantized ones, other dtypes, and what is left out or refused.

Published ones quantize the matrices of the MLP, often those of attention and of recurrent layers too, and never the two
small ones of these, which compute a number for each head. Their layers that draft tokens (``mtp``) stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrum_rpc.engine.assembly.loading import load_model, read_spec, stored_parts
from ferrum_rpc.engine.assembly.source import AS_STORED, DecoderCheckpoint
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.decoder import SINGLE, Decoder
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.linear import select_quantized
from ferrum_rpc.models.native_linear import PairFactory
from ferrum_rpc.models.shard import WHOLE
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.numerics.whole_models import SHAPES, TOKENS, model, with_images
from tests.support.checkpoints import configure, make_checkpoint, make_model, rewrite
from tests.support.harness import CPU, Executor, Oracle, error, made_or_skip

SHAPE = SHAPES["qwen3_5"]
SPLIT = [40, 1, 5, 38]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns stand in a word, lowest bits first."""

MLP = ("gate_proj", "up_proj", "down_proj")
LARGE = (*MLP, "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
ALL = (*LARGE, "in_proj_a", "in_proj_b")
MATRICES = 2 * (3 + 4) + 2 * (3 + 5)
"""Of two layers with attention and two recurrent ones."""

Parts = dict[str, torch.Tensor]


def words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [n, k * bits / 32] of [n, k], lowest bits first."""
    parts = numbers.to(torch.int64).view(len(numbers), -1, 32 // bits)
    made = sum(parts[..., column] << bits * place for place, column in enumerate(order or range(32 // bits)))
    return made.to(torch.int32)


def rounded(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [n, k] and their scales [n, groups], around half of the range."""
    groups, half = weight.float().view(len(weight), -1, GROUP), 1 << bits - 1
    scales = (groups.abs().amax(2) / (half - 1)).half()
    return (groups / scales[..., None]).round().clamp(-half, half - 1).view(weight.shape) + half, scales


def gptq(weight: torch.Tensor) -> Parts:
    numbers, scales = rounded(weight, 4)
    zeros = torch.full(scales.T.shape, 8 - 1)
    index = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return {"qweight": words(numbers, 4).T, "qzeros": words(zeros, 4), "scales": scales.T, "g_idx": index}


def awq(weight: torch.Tensor) -> Parts:
    numbers, scales = rounded(weight, 4)
    zeros = torch.full(scales.T.shape, 8)
    return {"qweight": words(numbers.T, 4, AWQ_ORDER), "qzeros": words(zeros, 4, AWQ_ORDER), "scales": scales.T}


def compressed(bits: int) -> Callable[[torch.Tensor], Parts]:
    def parts(weight: torch.Tensor) -> Parts:
        numbers, scales = rounded(weight, bits)
        shape = torch.tensor([*weight.shape])
        return {"weight_packed": words(numbers, bits), "weight_scale": scales, "weight_shape": shape}

    return parts


def of_groups(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    ignored = ["lm_head", "re:.*linear_attn.in_proj_a$", "re:.*mtp.*"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
GPTQ |= {"dynamic": {"-:.*attn.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}}}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
AWQ |= {"modules_to_not_convert": ["linear_attn.in_proj_a", "linear_attn.in_proj_b", "visual", "mtp"]}
STORED = {
    "GPTQ, the MLP alone": (GPTQ, gptq, MLP),
    "AWQ, large matrices": (AWQ, awq, LARGE),
    "W4A16, large matrices": (of_groups(4), compressed(4), LARGE),
    "W4A16, all matrices": (of_groups(4), compressed(4), ALL),
    "W8A16, all matrices": (of_groups(8), compressed(8), ALL),
}


def quantize(folder: Path, section: dict[str, Any], parts: Callable[[torch.Tensor], Parts], names: Any) -> int:
    """Store the matrices ``names`` of every layer so; how many these are."""
    count = 0

    def change(tensors: Parts) -> None:
        nonlocal count
        for name in [each for each in tensors if each.removesuffix(".weight").endswith(names) and "mtp" not in each]:
            module, count = name.removesuffix("weight"), count + 1
            found = parts(tensors.pop(name))
            tensors.update({module + role: each.contiguous() for role, each in found.items()})

    rewrite(folder, change)
    configure(folder, quantization_config=section)
    return count


def draft_tensors() -> Parts:
    """Some of the names of the layer that drafts tokens."""
    names = ("fc", "pre_fc_norm_hidden", "layers.0.mlp.down_proj", "layers.0.self_attn.q_proj")
    return {f"mtp.{each}.weight": torch.zeros(3, 3) for each in names}


@pytest.mark.parametrize("case", STORED)
def test_stored_integers_are_multiplied_as_they_are(case, tmp_path):
    """Their decoded numbers are a model of transformers to the last digits of float32. What is multiplied as it is
    stored differs from it by rows of 8 bits, and by numbers of bfloat16 between layers."""
    linear = made_or_skip(PairFactory)
    folder = make_checkpoint(tmp_path, "qwen3_5", dtype=torch.bfloat16, **SHAPE)
    rewrite(folder, lambda tensors: tensors.update(draft_tensors()))
    count = quantize(folder, *STORED[case])
    checkpoint = Checkpoint.open(folder)
    spec, reference = read_spec(checkpoint), model(torch.bfloat16)
    state, names = reference.state_dict(), [name for name, each in checkpoint.entries.items() if each.encoding]
    assert len(names) == count
    for name, matrix in checkpoint.tensors(names):
        assert 0 < error(matrix, state[name]) < 0.2
        state[name].copy_(matrix)
    oracle = Oracle(reference, tokens=TOKENS)
    expanded = load_model(checkpoint, torch.float32, CPU, spec=spec)
    assert error(Executor(expanded).run(TOKENS, SPLIT), oracle.logits) <= 3e-6
    held = stored_parts(checkpoint, spec, WHOLE)
    whole = spec, spec, WHOLE, torch.bfloat16, linear, linear, select_fused_ops(spec, torch.bfloat16, CPU)[1]
    decoder, reasons = DecoderCheckpoint(*whole, checkpoint, held=held, quantize=AS_STORED).load(CPU, None, SINGLE)
    assert isinstance(decoder, Decoder) and decoder.as_stored == count and expanded.as_stored == 0
    assert dict(reasons)["quantize=stored"].startswith(f"{count} of {MATRICES} matrices")
    assert error(Executor(decoder).run(TOKENS, SPLIT), oracle.logits) < 0.1


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_of_as_many_bits_stay_when_the_rest_is_quantized(bits, tmp_path):
    """As ``--quantize`` does."""
    made_or_skip(PairFactory)
    folder = make_checkpoint(tmp_path, "qwen3_5", dtype=torch.bfloat16, **SHAPE)
    count = quantize(folder, of_groups(bits), compressed(bits), LARGE)
    checkpoint = Checkpoint.open(folder)
    spec = read_spec(checkpoint)
    expanded = Executor(load_model(checkpoint, torch.float32, CPU, spec=spec)).run(TOKENS, SPLIT)
    for kind, left in (("int4", 4), ("int8", 8)):
        linear, head = select_quantized(CPU, torch.bfloat16, kind)
        held = stored_parts(checkpoint, spec, WHOLE, (linear.bits,))
        decoder = load_model(checkpoint, torch.bfloat16, CPU, spec=spec, linear=linear, head=head, held=held)
        assert decoder.as_stored == count * (bits == left)
        assert error(Executor(decoder).run(TOKENS, SPLIT), expanded.double()) < 0.5


@pytest.mark.parametrize("stored", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("computed", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_load_into_any(stored, computed, tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_5", dtype=stored, **SHAPE)
    oracle = Oracle(model(stored), computed, TOKENS)
    ours = Executor(load_model(folder, computed, CPU)).run(TOKENS, SPLIT)
    if computed == torch.float32:
        assert error(ours, oracle.logits) <= 3e-6
    else:
        oracle.check(ours)


@pytest.mark.parametrize("draft", ["mtp.fc.weight", "mtp.layers.0.linear_attn.A_log"])
def test_layers_that_draft_are_left_out(draft, tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_5", **SHAPE)
    before = Executor(load_model(folder, torch.float32, CPU)).run(TOKENS, SPLIT)
    rewrite(folder, lambda tensors: tensors.update({draft: torch.zeros(3)}))
    configure(folder, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    assert torch.equal(Executor(load_model(folder, torch.float32, CPU)).run(TOKENS, SPLIT), before)
    rewrite(folder, lambda tensors: tensors.update({"drafts.fc.weight": torch.zeros(3)}))
    with pytest.raises(InvalidRequest, match=r"1 unexpected .*drafts\.fc\.weight"):
        load_model(folder, torch.float32, CPU)


def test_other_families_have_no_layers_that_draft(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    rewrite(folder, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(3)}))
    with pytest.raises(InvalidRequest, match=r"1 unexpected .*mtp\.fc\.weight"):
        load_model(folder, torch.float32, CPU)


@pytest.mark.parametrize("name", ["conv1d.weight", "A_log", "dt_bias", "norm.weight", "in_proj_b.weight"])
def test_a_tensor_of_a_recurrent_layer_that_is_missing_or_of_another_shape_is_named(name, tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_5", **SHAPE)
    full = f"model.layers.0.linear_attn.{name}"
    odd = dict(Checkpoint.open(folder).tensors([full]))[full][:-1].clone()
    rewrite(folder, lambda tensors: tensors.update({full: odd}))
    with pytest.raises(InvalidRequest, match=rf"1 misshapen .*{name}") as caught:
        load_model(folder, torch.float32, CPU)
    assert str([*odd.shape]) in caught.value.message
    rewrite(folder, lambda tensors: tensors.pop(full))
    with pytest.raises(InvalidRequest, match=rf"1 missing .*{name}"):
        load_model(folder, torch.float32, CPU)


def test_integers_of_a_text_part_are_held_and_its_other_parts_left_out(tmp_path):
    """Of a model with images, whose layer that drafts is quantized too."""
    linear = made_or_skip(PairFactory)
    folder, text = tmp_path / "whole", make_model("qwen3_5", **SHAPE)
    with_images(folder, text)
    section, parts, names = STORED["W4A16, large matrices"]
    count = quantize(folder, section, parts, names)
    drafts = {f"mtp.fc.{role}": each for role, each in parts(torch.randn(4, 64)).items()}
    rewrite(folder, lambda tensors: tensors.update(drafts))
    checkpoint = Checkpoint.open(folder)
    spec = read_spec(checkpoint)
    held = stored_parts(checkpoint, spec, WHOLE)
    decoder = load_model(checkpoint, torch.bfloat16, CPU, spec=spec, linear=linear, held=held)
    assert decoder.as_stored == count
    expanded = Executor(load_model(checkpoint, torch.float32, CPU, spec=spec)).run(TOKENS, SPLIT)
    assert error(Executor(decoder).run(TOKENS, SPLIT), expanded.double()) < 0.1
