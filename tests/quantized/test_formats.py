"""Quantized checkpoints that are broken, of a variant that is not read, or too large for what they say."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, Span
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.assembly.loading import load_model
from ferrum_rpc.engine.assembly.size import LargestStep, make_plan
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.native_linear import PairFactory
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.quantized.make import SAMPLES, edit_config, edit_tensors, read_config
from tests.quantized.makers.fp8 import round_in_blocks
from tests.support.checkpoints import loading_peak, make_checkpoint
from tests.support.harness import error, made_or_skip
from tests.support.rows import answered

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj."


@pytest.fixture
def copy(tmp_path):
    def copied(kind: str) -> Path:
        return Path(shutil.copytree(SAMPLES / kind, tmp_path / kind))

    return copied


def edit_section(folder: Path, **changes: object) -> None:
    section = read_config(folder)["quantization_config"]
    edit_config(folder, quantization_config=section | changes)


# --- variants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("gptq-4", {"quant_method": "hqq"}, "quantization_config"),
        ("gptq-4", {"quant_method": None}, "quantization_config"),
        ("gptq-4", {"bits": 3}, "bits"),
        ("gptq-4", {"group_size": 0}, "group_size"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq-4", {"format": "gptq_v2"}, "checkpoint_format"),
        ("gptq-4", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq-4", {"dynamic": {"+:.*q_proj.*": {"bits": 8}}}, "dynamic"),
        ("gptq-4", {"rotation": "hadamard"}, "rotation"),
        ("awq-4", {"bits": 8}, "bits"),
        ("awq-4", {"version": "gemv"}, "version"),
        ("awq-4", {"zero_point": False}, "zero_point"),
        ("ct-w8a8", {"format": "nvfp4-pack-quantized"}, "format"),
        ("ct-w8a8", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ("ct-w8a8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format"),
        ("fp8-block", {"fmt": "e5m2"}, "fmt"),
        ("fp8-block", {"weight_block_size": 128}, "weight_block_size"),
        ("bnb-nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
    ],
    ids=str,
)
def test_a_variant_that_is_not_read_is_named_before_a_weight_is_read(copy, kind, change, field):
    folder = copy(kind)
    edit_section(folder, **change)
    with pytest.raises(NotSupported) as caught:
        Checkpoint.open(folder)
    assert field in caught.value.message and field in caught.value.field


@pytest.mark.parametrize(
    ("weights", "field"),
    [
        ({"num_bits": 3}, "num_bits"),
        ({"num_bits": 6, "type": "float"}, "num_bits"),
        ({"num_bits": 4, "type": "float"}, "group_size"),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}, "group_size"),
        ({"strategy": "tensor_group"}, "strategy"),
        ({"dynamic": True}, "dynamic"),
        ({"actorder": "random"}, "actorder"),
        ({"rounding": "stochastic"}, "rounding"),
    ],
    ids=str,
)
def test_a_way_of_rounding_that_is_not_read_is_named(copy, weights, field):
    folder = copy("ct-w8a8")
    section = read_config(folder)["quantization_config"]
    section["config_groups"]["group_0"]["weights"] |= weights
    edit_config(folder, quantization_config=section)
    with pytest.raises(NotSupported, match=field):
        Checkpoint.open(folder)


def test_modules_that_are_left_out_are_read_as_they_are(copy):
    """The tensors tell which matrices are quantized: here one is not."""
    folder = copy("gptq-4")
    plain = dict(Checkpoint.open(folder).tensors([Q + "weight"]))[Q + "weight"].clone()

    def change(tensors):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[Q + part]
        tensors[Q + "weight"] = plain

    edit_tensors(folder, change)
    edit_section(folder, dynamic={"-:.*q_proj.*": {}})
    before, after = (load_model(each, torch.float32, CPU) for each in (SAMPLES / "gptq-4", folder))
    hidden = torch.randn(3, 64)
    assert torch.equal(before.logits(hidden), after.logits(hidden))


def test_a_bias_of_zeros_that_a_writer_added_is_left_out_and_another_is_not(copy):
    folder = copy("gptq-4")
    edit_tensors(folder, replaced("bias", torch.zeros(64, dtype=torch.float16)))
    hidden = torch.randn(3, 64)
    before, after = (load_model(each, torch.float32, CPU) for each in (SAMPLES / "gptq-4", folder))
    assert torch.equal(before.logits(hidden), after.logits(hidden))
    edit_tensors(folder, replaced("bias", torch.ones(64, dtype=torch.float16)))
    with pytest.raises(InvalidRequest, match=r"1 unexpected .*q_proj.bias"):
        load_model(folder, torch.float32, CPU)


# --- what is broken ---------------------------------------------------------------------------------------------------


def replaced(part, tensor):
    return lambda tensors: tensors.update({Q + part: tensor})


BROKEN = {
    "a part is missing": ("gptq-4", lambda tensors: tensors.pop(Q + "scales"), "q_proj: scales is missing"),
    "no index of groups": ("gptq-4", lambda tensors: tensors.pop(Q + "g_idx"), "g_idx is missing"),
    "a part of another type": ("gptq-4", replaced("qweight", torch.zeros(8, 64)), "qweight is float32, expected int32"),
    "a part of another shape": ("gptq-4", replaced("qzeros", torch.zeros(2, 7).int()), r"qzeros .* expected \[2, 8\]"),
    "no matrix": ("gptq-4", replaced("qweight", torch.zeros(8).int()), "must be a matrix"),
    "nothing": ("gptq-4", replaced("qweight", torch.zeros(0, 64).int()), "must be a matrix"),
    "two weights": ("gptq-4", replaced("weight", torch.zeros(64, 64)), "must not be there together"),
    "a part alone": ("gptq-4", lambda tensors: tensors.pop(Q + "qweight"), "unexpected .*q_proj"),
    "another width": ("gptq-4", replaced("qweight", torch.zeros(4, 64).int()), "scales has the shape"),
    "awq, another shape": ("awq-4", replaced("scales", torch.zeros(2, 60).half()), r"expected \[2, 64\]"),
    "packed, another shape": ("ct-w4a16", replaced("weight_shape", torch.tensor([64, 640])), "weight_shape is"),
    "packed, a shape of three": ("ct-w4a16", replaced("weight_shape", torch.ones(3).long()), r"expected \[2\]"),
    "packed, a shape without end": ("ct-w4a16", replaced("weight_shape", torch.tensor([64, 2**62])), "weight_shape is"),
    "packed, other groups": ("ct-w4a16", replaced("weight_scale", torch.ones(64, 3)), "fits no group"),
    "packed, no scale": ("ct-w4a16", lambda tensors: tensors.pop(Q + "weight_scale"), "weight_scale is missing"),
    "asymmetric, other zeros": (
        "ct-w4a16-asymmetric",
        replaced("weight_zero_point", torch.zeros(7, 4).int()),
        r"expected \[8, 4\]",
    ),
    "mxfp4, no scale": ("ct-w4a16-mxfp4", lambda tensors: tensors.pop(Q + "weight_scale"), "weight_scale is missing"),
    "mxfp4, other scales": (
        "ct-w4a16-mxfp4",
        replaced("weight_scale", torch.zeros(64, 4).byte()),
        r"expected \[64, 2\]",
    ),
    "mxfp4, scales of another type": (
        "ct-w4a16-mxfp4",
        replaced("weight_scale", torch.ones(64, 2)),
        "float32, expected uint8",
    ),
    "mxfp4, half a group": (
        "ct-w4a16-mxfp4",
        replaced("weight_packed", torch.zeros(64, 24).byte()),
        "expected a multiple of 16",
    ),
    "mxfp4, another scheme": (
        "ct-w8a8",
        replaced("weight_packed", torch.zeros(64, 32).byte()),
        "weight_packed uint8 .* fits no group",
    ),
    "int8, other scales": ("ct-w8a8", replaced("weight_scale", torch.ones(32, 1)), "fits no group"),
    "int8, no scale": ("ct-w8a8", lambda tensors: tensors.pop(Q + "weight_scale"), "of an unsupported type"),
    "fp8, other blocks": ("fp8-block", replaced("weight_scale_inv", torch.ones(2, 2)), r"expected \[4, 2\]"),
    "fp8, no scale": ("fp8-block", lambda tensors: tensors.pop(Q + "weight_scale_inv"), "weight_scale_inv is missing"),
    "nf4, too few": ("bnb-nf4", replaced("weight", torch.zeros(2047, 1).byte()), r"expected \[2048, 1\]"),
    "nf4, no scales": ("bnb-nf4", lambda tensors: tensors.pop(Q + "weight.absmax"), "weight.absmax is missing"),
    "nf4, fewer codes": ("bnb-nf4", replaced("weight.quant_map", torch.zeros(8)), r"expected \[16\]"),
    "int8, scales": ("bnb-int8", replaced("SCB", torch.ones(63)), r"expected \[64\]"),
    "int8, of a GPU": ("bnb-int8", replaced("weight_format", torch.tensor(2).byte()), "row by row"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_parts_that_do_not_fit_are_named(copy, case):
    kind, change, match = BROKEN[case]
    folder = copy(kind)
    edit_tensors(folder, change)
    with pytest.raises((InvalidRequest, NotSupported), match=match):
        load_model(folder, torch.float32, CPU)


@pytest.mark.parametrize("state", ["{}", "[]", "{", '{"shape": [64, 64]}', '{"shape": [0, 64], "blocksize": 64}',
                                   '{"shape": [64, 64], "blocksize": 0}', '{"shape": [1e9, 64], "blocksize": 64}',
                                   '{"shape": [99999999999, 64], "blocksize": 64}', '{"blocksize": 64, "shape": [[]]}',
                                   '{"shape": [64, 64], "blocksize": 64, "twist": 1}', "[" * 4000, "\xff"])  # fmt: skip
def test_a_state_that_lies_is_refused(copy, state):
    folder = copy("bnb-nf4")
    content = torch.tensor(list(state.encode("latin-1")), dtype=torch.uint8)
    edit_tensors(folder, replaced("weight.quant_state.bitsandbytes__nf4", content))
    with pytest.raises((InvalidRequest, NotSupported), match="q_proj"):
        Checkpoint.open(folder)


def expanded(folder: Path) -> Decoder:
    return load_model(folder, torch.float32, CPU)


def as_stored(folder: Path) -> Decoder:
    made_or_skip(PairFactory)
    model, reasons = choose(ModelSettings(str(folder), device="cpu", kv_blocks=4)).load()
    assert isinstance(model, Decoder) and dict(reasons)["quantize=stored"]
    return model


def row(folder: Path, tokens: int = 5, **options: Any) -> torch.Tensor:
    runner = build_runner(ModelSettings(str(folder), device="cpu", kv_blocks=16, **options))
    [columns] = answered(
        runner, Span(1, np.arange(tokens, dtype=np.int32), 0, OutputSpec(Positions.LAST, FullLogits()), create=True)
    )
    return torch.from_numpy(columns["logits"])


@pytest.mark.parametrize("load", [expanded, as_stored])
@pytest.mark.parametrize(("index", "group"), [(-1, -1), (5, 2), (63, 2**30)])
def test_an_index_of_a_group_that_is_not_there_is_refused(copy, index, group, load):
    folder = copy("gptq-4")

    def change(tensors):
        tensors[Q + "g_idx"][index] = group

    edit_tensors(folder, change)
    with pytest.raises(InvalidRequest, match="g_idx names group"):
        load(folder)


def test_groups_of_unlike_size_are_expanded(copy):
    folder = copy("gptq-4")

    def change(tensors):
        index = tensors[Q + "g_idx"]
        index[index.argmax()] = index.min()

    edit_tensors(folder, change)
    assert as_stored(folder).as_stored == 6
    assert error(row(folder), row(folder, dtype="float32").double()) < 0.02


def test_an_index_that_its_configuration_denies_is_honoured(copy):
    """Its matrices are expanded: those that are multiplied as they are stored are joined and cut as if none had one."""
    folder = copy("gptq-4")
    edit_section(folder, desc_act=False)

    def change(tensors):
        tensors[Q + "g_idx"] = torch.arange(len(tensors[Q + "g_idx"])).div(32, rounding_mode="floor").int()

    edit_tensors(folder, change)
    assert error(row(folder), row(folder, dtype="float32").double()) < 0.02


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        *((expanded, kind) for kind in ("gptq-4", "ct-w8a8", "bnb-nf4-nested", "fp8-block")),
        *((as_stored, kind) for kind in ("gptq-4", "ct-w8a8", "ct-w4a16-mxfp4")),  # the others are floats
    ],
)
def test_a_scale_that_is_not_finite_is_refused(copy, kind, load):
    folder = copy(kind)

    def change(tensors):
        name = next(each for each in tensors if "scale" in each or each.endswith("nested_absmax"))
        tensors[name].view(-1)[0] = 255 if tensors[name].dtype == torch.uint8 else float("nan")  # of exponents too

    edit_tensors(folder, change)
    with pytest.raises(InvalidRequest, match="NaN or infinit"):
        load(folder)


def test_mutated_tensors_end_in_typed_errors_or_are_multiplied(copy):
    """Parts of integers: other bytes, extreme values, other shapes and dtypes, missing and exchanged ones."""
    made_or_skip(PairFactory)
    rng = random.Random(int(os.environ.get("FERRUM_FUZZ_SEED", "20261127")))
    kinds = ("gptq-4", "gptq-8", "awq-4", "ct-w4a16", "ct-w8a8-asymmetric", "ct-w4a16-mxfp4")
    folders = [copy(kind) for kind in kinds]
    originals = [load_file(folder / "model.safetensors") for folder in folders]
    survived = 0
    for number in range(rounds := int(os.environ.get("FERRUM_FUZZ_ROUNDS", "150"))):
        which = rng.randrange(len(folders))
        tensors = {name: each.clone() for name, each in originals[which].items()}
        for _ in range(rng.choice((1, 1, 2))):
            mutate(rng, tensors)
        save_file(tensors, folders[which] / "model.safetensors", {"format": "pt"})
        try:
            row(folders[which], rng.choice((1, 5)))
            survived += 1
        except (InvalidRequest, NotSupported) as refusal:
            assert refusal.message and str(folders[which]) not in refusal.message
        except BaseException as wrong:
            raise AssertionError(f"round {number} ({kinds[which]}) raised {wrong!r}") from wrong
    assert 0 < survived < rounds


def mutate(rng: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    parts = sorted(name for name in tensors if name.rpartition(".")[0] + "." in Q or "_proj" in name)
    name, other = rng.choice(parts), rng.choice(parts)
    tensor = tensors[name]
    extreme = [0, -1, 6e4, 1e-8, math.nan, math.inf] if tensor.is_floating_point() else [0, -1, 1, 2**31 - 1, -(2**31)]
    match rng.randrange(7):
        case 0:
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            first = rng.randrange(max(1, len(flat)))  # an earlier change may have taken all
            part = flat[first : first + rng.choice((1, 8, len(flat)))]
            part.copy_(torch.tensor([*rng.randbytes(len(part))], dtype=torch.uint8))
            tensors[name] = flat.view(tensor.dtype).view(tensor.shape)
        case 1:
            tensors[name] = torch.full_like(tensor.double(), rng.choice(extreme)).to(tensor.dtype)
        case 2:
            tensors[name] = tensor.T.contiguous() if tensor.dim() == 2 else tensor[None].contiguous()
        case 3:
            tensors[name] = tensor[: rng.randrange(len(tensor) + 1)].contiguous()
        case 4:
            tensors[name] = tensor.to(rng.choice((torch.int32, torch.int64, torch.float32, torch.float16, torch.uint8)))
        case 5:
            del tensors[name]
        case _:
            tensors[name], tensors[other] = tensors[other].clone(), tensor.clone()


# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matrices_are_made_in_the_dtype_that_is_asked_for_rounded_once(dtype):
    checkpoint = Checkpoint.open(SAMPLES / "ct-w4a16")
    exact = dict(checkpoint.tensors([Q + "weight"]))[Q + "weight"]
    made = dict(checkpoint.tensors([Q + "weight"], getattr(torch, dtype)))[Q + "weight"]
    assert torch.equal(made, exact.to(getattr(torch, dtype)))


def test_a_dtype_is_chosen_by_what_is_not_quantized():
    assert Checkpoint.open(SAMPLES / "gptq-4").dtype == torch.bfloat16
    assert Checkpoint.open(SAMPLES / "awq-4").dtype == torch.float16
    assert Checkpoint.open(SAMPLES / "ct-w8a8").dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("gptq-4", ("qweight", "qzeros", "scales")),
        ("ct-w4a16-asymmetric", ("weight_packed", "weight_scale", "weight_zero_point")),
        ("bnb-nf4-nested", ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax")),
    ],
)
def test_a_fingerprint_knows_every_part(copy, kind, parts):
    folder = copy(kind)
    settings = ModelSettings(str(folder), device="cpu", dtype="float32", kv_blocks=8)
    seen = {build_runner(settings).info.fingerprint}
    for part in parts:

        def flip(tensors, part=part):
            tensors[Q + part].view(torch.uint8).view(-1)[0] ^= 1

        edit_tensors(folder, flip)
        seen.add(build_runner(settings).info.fingerprint)
        edit_tensors(folder, flip)
    assert len(seen) == 1 + len(parts)


def test_a_plan_counts_weights_as_they_are_held():
    settings = ModelSettings(str(SAMPLES / "gptq-4"), device="cpu", dtype="float32", kv_blocks=4)
    plan = make_plan(choose(settings), LargestStep(64, 4), 1 << 30)
    held = sum(math.prod(entry.shape) * 4 for entry in Checkpoint.open(SAMPLES / "gptq-4").entries.values())
    assert held <= plan.weights_bytes <= 1.5 * held  # a tied head is held twice


@pytest.mark.parametrize(("kind", "told"), [("gptq-4", "gptq"), ("ct-fp8-block", "compressed-tensors")])
def test_the_log_says_how_weights_are_stored(kind, told):
    parts = choose(ModelSettings(str(SAMPLES / kind), device="cpu", dtype="float32", kv_blocks=4))
    assert f"weights={told}" in dict(parts.reasons)


def test_parts_may_lie_in_several_files(copy):
    """As where a shard ends between a matrix and its scales."""
    folder = copy("fp8-block")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "oracle.safetensors").unlink()
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        shards["b.safetensors" if name.endswith("scale_inv") else "a.safetensors"][name] = tensor
    for name, content in shards.items():
        save_file(content, folder / name, {"format": "pt"})
    where = {name: shard for shard, content in shards.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    one, other = (load_model(each, torch.float32, CPU) for each in (SAMPLES / "fp8-block", folder))
    hidden = torch.randn(2, 64)
    assert torch.equal(one.logits(hidden), other.logits(hidden))


def test_memory_peaks_near_one_copy_of_the_weights(tmp_path):
    """In a fresh process: 36 MB of fp8 become 140 MB of float32, a matrix at a time."""
    folder = make_checkpoint(
        tmp_path, "llama", hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, vocab_size=300
    )
    size = Checkpoint.open(folder).nbytes
    round_in_blocks(folder, 128, 128)
    stored = Checkpoint.open(folder).nbytes
    assert 0.24 * size < stored < 0.3 * size and size > 120e6
    assert 0.9 * size < loading_peak(folder) < 1.7 * size + stored  # 1.7: as without rounding
