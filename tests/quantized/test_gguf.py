"""GGUF files: every type of tensor, every key of the metadata, and headers that lie."""

from __future__ import annotations

import copy
import os
import random
import struct
import sys
import time

import numpy as np
import pytest
import torch

from ferrum_rpc.building import model_folder
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.assembly.loading import load_model, read_spec, stored_parts
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.shard import WHOLE
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.checkpoint import Checkpoint
from ferrum_rpc.weights.gguf.integers import FORMATS, KNOWN, integers_of
from tests.quantized.gguf_files import gguf_bytes, read_gguf, text, write_model
from tests.quantized.make import SAMPLES, SHAPE, TOKENS
from tests.support.checkpoints import make_model
from tests.support.harness import Executor, error, reference_logits

gguf = pytest.importorskip("gguf")

CPU = torch.device("cpu")
KINDS = gguf.GGMLQuantizationType
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FILE = SAMPLES / "gguf-q8_0" / "model.gguf"


def test_a_factor_that_is_not_finite_is_refused(tmp_path):
    """Of Q4_K, whose scales are bytes."""
    metadata, tensors, data = read_gguf(SAMPLES / "gguf-q4_k_m" / "model.gguf")
    changed = bytearray(data)
    first = next(offset for _, _, kind, offset in tensors if kind == KINDS.Q4_K)
    changed[first : first + 2] = b"\x00\x7c"
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata, tensors, bytes(changed)))
    for dtype in ("auto", "float32"):
        with pytest.raises(InvalidRequest, match="NaN or infinit"):
            choose(ModelSettings(str(tmp_path), device="cpu", dtype=dtype, kv_blocks=4)).load()


# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 2}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_a_plain_file_is_the_model_that_it_was_made_of(tmp_path, family, changes):
    model = make_model(family, **SHAPE | changes)
    write_model(tmp_path / "model.gguf", model, KINDS.F32)
    ours = load_model(tmp_path, torch.float32, CPU)
    assert error(Executor(ours).run(TOKENS, [5, 3]), reference_logits(model, TOKENS, torch.float64)) < 5e-6
    assert ours.info("x").eos_token_ids == (2,)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4"])
def test_integers_stay_as_they_are_stored(tmp_path, kind):
    """With the rows of query and key in llama.cpp's order, and scales of either sign."""
    model = make_model("llama", **SHAPE | {"num_key_value_heads": 2})
    write_model(tmp_path / "model.gguf", model, KINDS[kind])
    checkpoint = Checkpoint.open(tmp_path)
    spec = read_spec(checkpoint)
    held = stored_parts(checkpoint, spec, WHOLE)
    assert {each.rpartition("layers.0.")[2] for each in held} == {
        *(f"{matrix.role}.weight" for matrix in spec.layers[0].matrices()),
        "embedding",
    }
    names = [name for name, place in layout(spec).items() if place.parameter in held]
    floats = dict(checkpoint.tensors(names, torch.float32))
    for name, matrix in checkpoint.weights(names, torch.float32, names):
        assert isinstance(matrix, Integers) and (kind != "Q4_0" or (matrix.scales < 0).any())
        assert torch.equal(matrix.floats(), floats[name])


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_integers_of_every_type_are_those_of_the_package(kind):
    """Whatever the bytes. Q6_K's scales are rounded when they are packed; types of other bits are quantized again."""
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    blocks = np.random.default_rng(7).integers(0, 256, (6, 8 * size), np.uint8)
    for first in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q6_K": (208,), "Q3_K": (108,), "IQ4_XS": (0,)}.get(
        kind, (0, 2)
    ):
        blocks.reshape(6, 8, size)[..., first + 1] &= 0x3F  # factors from 0 to 2
    decoded = torch.from_numpy(gguf.quants.dequantize(blocks, KINDS[kind])).float()
    if not decoded.isfinite().all():  # bytes of numbers
        blocks = gguf.quants.quantize(np.random.default_rng(7).normal(size=(6, 256)).astype(np.float32), KINDS[kind])
        decoded = torch.from_numpy(gguf.quants.dequantize(blocks, KINDS[kind])).float()
    made = integers_of(kind, torch.from_numpy(blocks), lambda first, last: decoded[first:last])
    assert made.bits == FORMATS[kind].bits and made.group == FORMATS[kind].group
    assert (made.factors is not None) == FORMATS[kind].factored
    if kind in KNOWN:
        torch.testing.assert_close(made.floats(), decoded, rtol=2e-7, atol=2e-7 * float(decoded.abs().max()))
    else:
        assert error(made.floats(), decoded.double()) < 0.006


@pytest.mark.parametrize("kind", [each.name for each in KINDS])
def test_every_type_is_decoded_as_the_package_does_or_refused_by_name(tmp_path, kind):
    per_block, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    blocks = np.random.default_rng(5).integers(0, 128, (8, 2 * size), np.uint8)
    metadata = minimal()
    tensors = [("output.weight", [2 * per_block, 8], int(KINDS[kind]), 0)]
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(metadata, tensors, blocks.tobytes()))
    try:
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(blocks, KINDS[kind])
    except NotImplementedError:
        if kind == "F64":
            with np.errstate(all="ignore"):
                expected = blocks.view(np.float64).astype(np.float32)
        else:
            with pytest.raises(NotSupported, match=f"'output.weight' is {kind}"):
                Checkpoint.open(tmp_path / "x.gguf")
            return
    made = dict(Checkpoint.open(tmp_path / "x.gguf").tensors())["lm_head.weight"].float()
    np.testing.assert_array_equal(made.numpy(), expected)


@pytest.mark.parametrize("original", [64, 8192])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_found_in_its_factors(tmp_path, factor, original):
    rope = LLAMA3 | {"factor": factor, "original_max_position_embeddings": original, "rope_theta": 500000.0}
    model = make_model("llama", **SHAPE, rope_parameters=rope, max_position_embeddings=4096)
    plain = 1 / 500000.0 ** (torch.arange(0, 32, 2).double() / 32)
    factors = (plain / model.model.rotary_emb.inv_freq.double()).float()
    write_model(tmp_path / "model.gguf", model, KINDS.F32)
    add_factors(tmp_path / "model.gguf", factors)
    spec = read_spec(Checkpoint.open(tmp_path)).ropes[0]
    assert (spec.kind, spec.original_context) == ("llama3", original)
    assert (spec.low_freq_factor, spec.high_freq_factor) == (1, 4) and abs(spec.factor - factor) < 1e-3
    add_factors(tmp_path / "model.gguf", factors.flip(0))
    with pytest.raises(NotSupported, match="not those of a Llama 3 scaling"):
        Checkpoint.open(tmp_path)
    add_factors(tmp_path / "model.gguf", torch.ones(16))
    assert read_spec(Checkpoint.open(tmp_path)).ropes[0].kind == "default"


def add_factors(file, factors):
    """With `rope_freqs.weight`, in the place of one that is there."""
    metadata, tensors, data = read_gguf(file)
    data += bytes(-len(data) % 32)
    tensors = [each for each in tensors if each[0] != "rope_freqs.weight"]
    tensors.append(["rope_freqs.weight", [len(factors)], 0, len(data)])
    file.write_bytes(gguf_bytes(metadata, tensors, data + factors.numpy().tobytes()))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"llama.rope.scaling.type": "none"}, "default"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, "linear"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
                "llama.rope.scaling.finetuned": True,
            },
            "yarn",
        ),
    ],
)
def test_scalings_are_read(tmp_path, changes, kind):
    write_model(tmp_path / "model.gguf", make_model("llama", **SHAPE), KINDS.F32, changes)
    assert read_spec(Checkpoint.open(tmp_path)).ropes[0].kind == kind


def test_a_file_is_served_by_its_path_and_a_folder_by_its_one_file(tmp_path):
    file = tmp_path / "model.GGUF"
    file.write_bytes(FILE.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')  # as hubs keep one beside
    assert model_folder(str(file)) == str(file) and model_folder(str(tmp_path)) == str(tmp_path)
    settings = ModelSettings(str(file), device="cpu", dtype="float32", kv_blocks=8)
    info = build_runner(settings).info
    assert (info.name, info.folder) == ("model.GGUF", str(tmp_path))
    assert info.fingerprint == build_runner(ModelSettings(str(tmp_path), dtype="float32", kv_blocks=8)).info.fingerprint
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert build_runner(settings).info.fingerprint != info.fingerprint
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"has 2 GGUF files .*name one of them"):
        Checkpoint.open(tmp_path)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(NotSupported, match=r"pip install '\.\[gguf\]' in a checkout"):
        Checkpoint.open(FILE)


def test_blocks_count_as_bfloat16_and_are_told_by_their_types():
    checkpoint = Checkpoint.open(SAMPLES / "gguf-q4_k_m")
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.encodings[0] == "Q4_K" and {*checkpoint.encodings} == {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        (
            {"general.architecture": "rwkv7"},
            NotSupported,
            "'rwkv7' is not supported in GGUF; supported: llama, qwen2, qwen3, qwen35, qwen3moe, qwen35moe",
        ),
        ({"general.architecture": None}, NotSupported, "general.architecture"),
        ({"general.architecture": 7}, InvalidRequest, "general.architecture must be a string"),
        ({"general.type": "adapter"}, NotSupported, "general.type: 'adapter'"),
        ({"split.count": 3}, InvalidRequest, "one of 3 parts by split.count"),
        ({"general.alignment": 0}, InvalidRequest, "general.alignment 0"),
        ({"llama.block_count": None}, InvalidRequest, "llama.block_count is missing"),
        ({"llama.block_count": "two"}, InvalidRequest, "llama.block_count must be an integer"),
        ({"llama.block_count": 2}, InvalidRequest, "missing"),
        ({"llama.attention.head_count_kv": [1, 1]}, InvalidRequest, "head_count_kv must be an integer"),
        ({"llama.attention.value_length": 16}, NotSupported, "16 values"),
        ({"llama.rope.dimension_count": 16}, NotSupported, "16 rotated channels"),
        ({"llama.expert_count": 8}, NotSupported, "llama.expert_count: 8"),
        ({"llama.attention.sliding_window": 512}, NotSupported, "sliding_window"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, NotSupported, "longrope"),
        ({"llama.rope.scaling.type": "yarn"}, InvalidRequest, "factor is missing"),
        ({"llama.surprise": True}, NotSupported, "llama.surprise"),
        ({"llama.vocab_size": 33}, InvalidRequest, "misshapen"),
    ],
    ids=str,
)
def test_metadata_that_cannot_be_honoured_are_named(tmp_path, changes, kind, match):
    write_model(tmp_path / "model.gguf", make_model("llama", **SHAPE), KINDS.F32, changes)
    with pytest.raises(kind, match=match) as caught:
        load_model(tmp_path, torch.float32, CPU)
    assert str(tmp_path) not in caught.value.message


def minimal() -> dict:
    numbers = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    epsilon = {"llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.vocab_size": 8}
    return {"general.architecture": "llama"} | {f"llama.{each}": 2 for each in numbers} | epsilon


def long(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


START = b"GGUF" + struct.pack("<I", 3)
LIES = {
    "nothing": (b"", "too short"),
    "another file": (b"\x7fELF" + bytes(60), "not a GGUF file"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
    "pairs without end": (START + long(0, 2**63) + bytes(60), "occurs twice|truncated"),
    "tensors without end": (START + long(2**64 - 1, 0) + bytes(90), "occurs twice|dimensions|truncated"),
    "a name without end": (START + long(0, 1, 2**63), "a name of"),
    "a value without end": (START + long(0, 1) + text("a") + struct.pack("<I", 8) + long(2**40), "truncated"),
    "an array without end": (START + long(0, 1) + text("a") + struct.pack("<II", 9, 4) + long(2**61), "truncated"),
    "texts without end": (START + long(0, 1) + text("a") + struct.pack("<II", 9, 8) + long(2**61), "truncated"),
    "arrays of arrays": (START + long(0, 1) + text("a") + struct.pack("<II", 9, 9) + long(2), "an array of the type 9"),
    "a type that is none": (START + long(0, 1) + text("a") + struct.pack("<I", 77) + bytes(90), "unknown type 77"),
    "a name that is no text": (START + long(0, 1, 2) + b"\xff\xfe" + bytes(90), "not UTF-8"),
    "no dimensions": (gguf_bytes(minimal(), [("a", [], 0, 0)]), "has 0 dimensions"),
    "many dimensions": (gguf_bytes(minimal(), [("a", [1] * 5, 0, 0)]), "has 5 dimensions"),
    "a size of none": (gguf_bytes(minimal(), [("a", [0, 4], 0, 0)]), "bad shape"),
    "sizes without end": (gguf_bytes(minimal(), [("a", [2**40, 2**40], 0, 0)]), "bad shape"),
    "a size that overflows": (gguf_bytes(minimal(), [("a", [2**63, 2], 0, 0)]), "bad shape"),
    "a tensor of a type that is none": (gguf_bytes(minimal(), [("a", [4], 999, 0)], bytes(64)), "type 999"),
    "half a block": (gguf_bytes(minimal(), [("a", [40, 2], 8, 0)], bytes(999)), "must be a multiple of 32"),
    "after the end": (gguf_bytes(minimal(), [("a", [4], 0, 64)], bytes(64)), "truncated"),
    "far after the end": (gguf_bytes(minimal(), [("a", [4], 0, 2**63)], bytes(64)), "truncated"),
    "too large": (gguf_bytes(minimal(), [("a", [2**30, 2**20], 0, 0)], bytes(64)), "truncated"),
    "twice": (gguf_bytes(minimal(), [("a", [4], 0, 0), ("a", [4], 0, 32)], bytes(64)), "occurs twice"),
    "one in the other": (gguf_bytes(minimal(), [("a", [9], 0, 0), ("b", [4], 0, 32)], bytes(64)), "overlap"),
    "a list in blocks": (gguf_bytes(minimal(), [("a", [64], 8, 0)], bytes(999)), "is for matrices"),
    "rows for no heads": (gguf_bytes(minimal(), [("blk.0.attn_q.weight", [4, 3], 0, 0)], bytes(64)), "for 2 heads"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_costs_nothing(tmp_path, lie):
    content, match = LIES[lie]
    (tmp_path / "model.gguf").write_bytes(content)
    began = time.monotonic()
    with pytest.raises((InvalidRequest, NotSupported), match=match) as caught:
        Checkpoint.open(tmp_path)
    assert time.monotonic() - began < 5
    assert len(caught.value.message) < 600 and str(tmp_path) not in caught.value.message


def test_what_is_not_a_file_does_not_hang_the_start(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        Checkpoint.open(tmp_path)


VALUES = [True, False, -1, 0, 1, 3, 2**31 - 1, 0.5, 1e30, float("nan"), float("inf")]
VALUES += ["", "yarn", "\0" * 9, [], [1, 2], [1.5]]


def test_mutated_files_end_in_typed_errors_or_load(tmp_path):
    """Of samples: keys, names, sizes, types and offsets changed, and bytes of the header."""
    rng = random.Random(int(os.environ.get("FERRUM_FUZZ_SEED", "20261123")))
    originals = []
    families = SAMPLES.parent / "families"
    samples = [SAMPLES / kind / "model.gguf" for kind in ("gguf-q8_0", "gguf-q4_k_m")]
    for file in (*samples, *(families / f"{each}.gguf" for each in ("gemma3", "phi3-longrope", "qwen3moe", "gpt-oss"))):
        metadata, tensors, data = read_gguf(file)
        content = file.read_bytes()
        originals.append((metadata, tensors, data, content, len(content) - len(data)))
    survived = 0
    for round_number in range(rounds := int(os.environ.get("FERRUM_FUZZ_ROUNDS", "400"))):
        metadata, tensors, data, content, start = copy.deepcopy(rng.choice(originals))
        if rng.random() < 0.4:
            changed = bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 4))):
                at = rng.randrange(start)
                changed[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(1, 9))
            content = bytes(changed)
        else:
            for _ in range(rng.choice((1, 1, 2))):
                mutate(rng, metadata, tensors)
            content = gguf_bytes(metadata, tensors, data)
        (tmp_path / "model.gguf").write_bytes(content)
        try:
            if round_number % 2:
                load_model(tmp_path, torch.float32, CPU, linear=PlainLinear)
            else:
                choose(ModelSettings(str(tmp_path), device="cpu", model_backend="native", kv_blocks=4)).load()
            survived += 1
        except (InvalidRequest, NotSupported) as refusal:
            assert refusal.message and len(refusal.message) < 6000 and str(tmp_path) not in refusal.message
        except BaseException as wrong:
            raise AssertionError(f"round {round_number} raised {wrong!r}") from wrong
    assert 0 < survived < rounds


def mutate(rng: random.Random, metadata: dict, tensors: list) -> None:
    key = rng.choice(list(metadata))
    tensor = rng.choice(tensors)
    kind = rng.randrange(8)
    if kind == 0:
        del metadata[key]
    elif kind == 1:
        metadata[key] = rng.choice(VALUES)
    elif kind == 2:
        metadata[rng.choice(("qwen3.x", "llama.rope.scaling.type", "x", "llama.vocab_size"))] = rng.choice(VALUES)
    elif kind == 3:
        tensor[0] = rng.choice(
            ("", "x", "output.weight", "rope_freqs.weight", "blk.0.attn_q.weight", "blk.9.attn_k.bias")
        )
    elif kind == 4:
        tensor[1] = rng.choice(([], [0], [1], [2**62], [2**63, 2], tensor[1][::-1], [*tensor[1], 1], [1] * 9))
    elif kind == 5:
        tensor[2] = rng.choice((0, 1, 2, 8, 12, 14, 24, 28, 30, 31, 39, 2**31))
    elif kind == 6:
        tensor[3] = rng.choice((0, 1, 32, 2**20, 2**62, 2**64 - 1))
    else:
        tensors.remove(tensor)
