"""gpt-oss with its experts in MXFP4, as it is published, beside what transformers makes of the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.assembly.loading import read_spec, stored_parts, with_single_experts
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.native_linear import PairFactory, StoredFactory
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.stored_integers import Code, Integers
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.numerics.test_hf_families import feed, plain_logits, settings
from tests.numerics.test_whole_models import median
from tests.quantized.make import edit_config, edit_tensors, read_config
from tests.support.harness import error, made_or_skip
from tests.support.hf_families import make_family_checkpoint

EXPERTS = "model.layers.0.mlp.experts."
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(blocks, scales)`` of experts [experts, k, n], each number the nearest."""
    parts = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (torch.floor(torch.log2(parts.abs().amax(-1))) - 2).clamp(-127, 127)
    nearest = (parts[..., None] / torch.exp2(exponents)[..., None, None] - NUMBERS).abs().argmin(-1).to(torch.uint8)
    return nearest[..., ::2] | nearest[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


@pytest.fixture
def folder(tmp_path) -> Path:
    made = make_family_checkpoint(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=96, dtype=torch.bfloat16)

    def change(tensors):
        for name in [each for each in tensors if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            blocks, scales = packed(tensors.pop(name))
            scales[0, 0, 0], blocks[0, 0, 0] = 131, torch.arange(0, 256, 17)  # every number
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales

    edit_tensors(made, change)
    edit_config(made, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return made


def test_experts_are_those_of_transformers(folder):
    tensors = load_file(folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.encodings == ("mxfp4",) and checkpoint.dtype == torch.bfloat16
    for matrix in ("gate_up_proj", "down_proj"):
        name = EXPERTS + matrix
        theirs = convert_moe_packed_tensors(*(tensors[f"{name}_{part}"] for part in ("blocks", "scales")))
        for dtype in (torch.float32, torch.bfloat16):
            [(_, made)] = checkpoint.tensors((name,), dtype)
            assert made.dtype == dtype and torch.equal(made, theirs.to(dtype))


def test_each_expert_is_one_of_them(folder):
    """Natively each has a matrix of its own, which is multiplied from the left."""
    checkpoint, whole = with_single_experts(Checkpoint.open(folder)), Checkpoint.open(folder)
    assert (checkpoint.nbytes, checkpoint.numbers, checkpoint.encodings) == (whole.nbytes, whole.numbers, ("mxfp4",))
    for matrix in ("gate_up_proj", "down_proj"):
        [(_, joined)] = whole.tensors((EXPERTS + matrix,))
        names = [f"{EXPERTS}{expert}.{matrix}.weight" for expert in range(len(joined))]
        found = dict(checkpoint.tensors(names))
        assert all(torch.equal(found[name], own.T) for name, own in zip(names, joined, strict=True))


def test_experts_are_multiplied_as_they_are_stored(folder):
    """In the bytes of the file. What differs from the dequantized model is that rows are rounded to 8 bits, and the
    numbers between layers to bfloat16: in the median row, because a rounded row may be sent to another expert."""
    made_or_skip(PairFactory)
    checkpoint = with_single_experts(Checkpoint.open(folder))
    held = stored_parts(checkpoint, read_spec(checkpoint), WHOLE)
    of_experts = [part for parts in held.values() for part in parts]
    names = [name for part in of_experts for name in part.names]
    assert len(names) == 2 * 4 * 2 and all(name.startswith("model.layers.") for name in names)
    on_disk = sum(checkpoint.entries[name].nbytes for name in names)
    rows, width = {192: 64, 64: 96}, 17 / 32
    assert on_disk == sum(part.rows * rows[part.rows] * width for part in of_experts)
    assert on_disk == sum(StoredFactory.nbytes(part.rows, rows[part.rows], part.form) for part in of_experts)
    runner, plain = (build_runner(settings(folder, model_backend="native", dtype=each)) for each in ("auto", "float32"))
    chosen = dict(runner.device.choices)
    assert "16 of " in chosen["quantize=stored"] and runner.info.weight_dtype == "mxfp4"
    assert median(feed(runner), feed(plain).double()) < 0.03


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_holds_its_part_of_experts(folder, ranks):
    """Also where it cuts blocks in two."""
    checkpoint = with_single_experts(Checkpoint.open(folder))
    spec = read_spec(checkpoint)
    for rank in range(ranks):
        shard = Shard.at(rank, ranks, 1)
        places = layout(spec, shard)
        parts = [part for each in stored_parts(checkpoint, spec, shard).values() for part in each]
        names = {name: part.form.group for part in parts for name in part.names}
        assert set(names.values()) == ({32} if ranks == 1 else {32, 16})
        floats = dict(checkpoint.tensors(names))
        for name, found in checkpoint.weights(names, torch.float32, names):
            assert isinstance(found, Integers) and found.code is Code.MXFP4
            assert torch.equal(places[name].of_integers(found, names[name]).floats(), places[name].of(floats[name]))


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_logits_are_those_of_transformers_reading_the_same_folder(folder, backend):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    runner = build_runner(settings(folder, model_backend=backend))
    assert "mxfp4" in " ".join(name for name, _ in runner.device.choices)
    assert error(feed(runner), plain_logits(theirs.float().eval()).double()) <= 1e-5


def pop(part: str):
    return lambda tensors: tensors.pop(EXPERTS + part)


def replaced(part: str, tensor: torch.Tensor):
    return lambda tensors: tensors.update({EXPERTS + part: tensor})


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (pop("down_proj_scales"), InvalidRequest, "down_proj_scales is missing"),
        (pop("down_proj_blocks"), ExecutorError, "weights|4 missing .*down_proj.*1 unexpected .*down_proj_scales"),
        (replaced("down_proj_blocks", torch.zeros(4, 64, 3, 8).byte()), InvalidRequest, "expected experts, rows"),
        (replaced("down_proj_blocks", torch.zeros(4, 64, 0, 16).byte()), InvalidRequest, "expected experts, rows"),
        (replaced("down_proj_blocks", torch.zeros(4, 32, 3, 16).byte()), InvalidRequest, r"expected \[4, 32, 3\]"),
        (replaced("down_proj_scales", torch.zeros(4, 64, 3)), InvalidRequest, "float32, expected uint8"),
        (replaced("down_proj", torch.zeros(4, 96, 64)), InvalidRequest, "down_proj must not be there together"),
        (replaced("down_proj_scales", torch.full((4, 64, 3), 255).byte()), InvalidRequest, "holds NaN or infinity"),
    ],
)
def test_parts_that_do_not_fit_are_refused(folder, change, kind, match):
    edit_tensors(folder, change)
    for backend in ("native", "hf"):
        with pytest.raises(kind, match=match):
            build_runner(settings(folder, model_backend=backend))


def test_a_key_that_is_not_known_is_refused(folder):
    edit_config(folder, quantization_config=read_config(folder)["quantization_config"] | {"block_size": 16})
    with pytest.raises(NotSupported, match="block_size"):
        choose(settings(folder))
