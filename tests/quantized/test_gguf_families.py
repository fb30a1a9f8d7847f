"""GGUF files of every family that llama.cpp's converter wrote, beside transformers with the model that was converted.

`tests.quantized.makers.gguf_families` made them and says how.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.assembly.loading import read_spec, stored_parts
from ferrum_rpc.engine.assembly.size import LargestStep, make_plan
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.native_linear import PairFactory
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.shard import WHOLE
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.quantized.gguf_files import gguf_bytes, read_gguf
from tests.quantized.test_samples import logits
from tests.support.harness import error, made_or_skip

gguf = pytest.importorskip("gguf")

FOLDER = Path(__file__).parent / "families"
NAMES = sorted(each.stem for each in FOLDER.glob("*.gguf"))
TOKENS = np.random.default_rng(5).integers(0, 32, 40).astype(np.int32)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_model_that_was_converted(name):
    expected = load_file(FOLDER / f"{name}.safetensors")["logits"].double()
    assert error(logits(FOLDER / f"{name}.gguf", TOKENS), expected) < 5e-6


@pytest.mark.parametrize("name", ["gemma3", "glm4", "qwen3moe"])
def test_transformers_gets_the_same_model(name):
    expected = load_file(FOLDER / f"{name}.safetensors")["logits"].double()
    assert error(logits(FOLDER / f"{name}.gguf", TOKENS, model_backend="hf"), expected) < 5e-6


def spec(tmp_path: Path, name: str, changes: dict) -> ModelSpec:
    """Of a sample with other metadata; None takes one out."""
    metadata, tensors, data = read_gguf(FOLDER / f"{name}.gguf")
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata, tensors, data))
    return read_spec(Checkpoint.open(tmp_path))


def windows(model: ModelSpec) -> tuple[int | None, ...]:
    return tuple(each.window for each in model.attention_specs)


PATTERN, WINDOW = "attention.sliding_window_pattern", "attention.sliding_window"


def test_what_a_file_leaves_out_is_what_llama_cpp_takes(tmp_path):
    gemma2 = spec(tmp_path, "gemma2", {f"gemma2.{WINDOW}": None, "gemma2.attn_logit_softcapping": None})
    assert windows(gemma2) == (4096, None) and gemma2.attention_specs[0].softcap == 50.0
    gemma3 = spec(tmp_path, "gemma3", {"gemma3.rope.freq_base_swa": None})
    assert [rope.theta for rope in gemma3.ropes] == [5e5, 1e4]
    assert windows(spec(tmp_path, "gemma3", {f"gemma3.{WINDOW}": None})) == (None,) * 6
    granite = spec(
        tmp_path, "granite", {f"granite.{key}": None for key in ("attention.scale", "residual_scale", "logit_scale")}
    )
    layer = granite.layers[0]
    assert (layer.mixer.scale, layer.residual, granite.scales.logits) == (0.25, 1.0, 1.0)


def test_what_newer_files_say_of_windows_is_read(tmp_path):
    listed = [True, False, True, True, True, False]
    expected = tuple(4 if each else None for each in listed)
    assert windows(spec(tmp_path, "gemma3", {f"gemma3.{PATTERN}": listed})) == expected
    assert windows(spec(tmp_path, "gemma3", {f"gemma3.{PATTERN}": 2})) == (4, None) * 3
    assert windows(spec(tmp_path, "phi3", {f"phi3.{WINDOW}": 9})) == (9, 9)
    wide = spec(tmp_path, "phi3-longrope", {"phi3.context_length": 16})
    assert wide.layers[0].mixer.rotary_dim == 8 and not wide.ropes[0].long


@pytest.mark.parametrize(
    ("name", "changes", "kind", "match"),
    [
        ("gemma3", {f"gemma3.{PATTERN}": [True]}, InvalidRequest, "has 1 entries for 6 layers"),
        ("gemma3", {f"gemma3.{PATTERN}": "all"}, InvalidRequest, "must be an integer"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, NotSupported, "attn_logit_softcapping"),
        ("gemma2", {"gemma2.rope.freq_base_swa": 7.0}, NotSupported, "freq_base_swa"),
        ("phi3", {"phi3.rope.scaling.type": "yarn", "phi3.rope.scaling.factor": 2.0}, InvalidRequest, "short_factor"),
        ("phi3", {"phi3.rope.dimension_count": 7}, InvalidRequest, "cannot be rotated in pairs"),
        ("granite", {"granite.rope.scaling.finetuned": False}, NotSupported, "without rotary embeddings"),
        ("granite", {"granite.deepstack_mapping": [0, 1]}, NotSupported, "deepstack_mapping"),
        ("olmo2", {f"olmo2.{WINDOW}": 4}, NotSupported, "sliding_window"),
        ("qwen35", {"qwen35.ssm.inner_size": 63}, InvalidRequest, "inner_size: 63 must be a multiple of the 2 value"),
        ("qwen35", {"qwen35.attention.recurrent_layers": [True]}, InvalidRequest, "has 1 entries for 4 layers"),
        (
            "qwen35",
            {"qwen35.ssm.group_count": 1},
            InvalidRequest,
            r"tensor 'blk\.0\.\S+': \[.*\] for 2 value heads and 1",
        ),
        ("qwen35", {"qwen35.nextn_predict_layers": 4}, InvalidRequest, "nextn_predict_layers"),
        ("glm4", {"glm4.rope.dimension_sections": [1, 1, 2, 0]}, NotSupported, "dimension_sections"),
        ("cohere2", {"cohere2.logit_scale": None}, InvalidRequest, "logit_scale is missing"),
        ("qwen3moe", {"qwen3moe.expert_count": 3}, InvalidRequest, r"_exps\.weight': \[4, 32, 32\] for 3 experts"),
        ("qwen3moe", {"qwen3moe.expert_count": 4097}, InvalidRequest, "expert_count"),
        ("qwen3moe", {"qwen3moe.expert_used_count": 5}, InvalidRequest, "num_experts_per_tok 5 exceeds"),
        ("qwen3moe", {"qwen3moe.expert_shared_feed_forward_length": 32}, NotSupported, "expert_shared_feed_forward"),
        ("gpt-oss", {"gpt-oss.expert_feed_forward_length": None}, InvalidRequest, "expert_feed_forward_length"),
        ("starcoder2", {"starcoder2.attention.layer_norm_epsilon": None}, InvalidRequest, "layer_norm_epsilon"),
    ],
    ids=str,
)
def test_what_an_architecture_cannot_have_is_refused(tmp_path, name, changes, kind, match):
    with pytest.raises(kind, match=match):
        spec(tmp_path, name, changes)


@pytest.mark.parametrize("name", ["qwen35-tiled", "qwen35moe", "gpt-oss"])
def test_a_quantized_file_is_the_plain_one_with_its_numbers(tmp_path, name):
    """Value heads in another order: whole blocks of columns are moved. Experts: each is a part of a tensor."""
    metadata, tensors, _ = read_gguf(FOLDER / f"{name}.gguf")
    reader = gguf.GGUFReader(FOLDER / f"{name}.gguf")
    for folder, quantized in (("plain", False), ("quantized", True)):
        made, content = [], b""
        for (tensor, shape, kind, _), each in zip(tensors, reader.tensors, strict=True):
            numbers, of = each.data, gguf.GGMLQuantizationType(kind)
            if len(shape) > 1 and shape[0] % 32 == 0 and not tensor.endswith(".bias"):
                blocks = gguf.quants.quantize(numbers.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
                of = gguf.GGMLQuantizationType.Q8_0 if quantized else gguf.GGMLQuantizationType.F32
                numbers = blocks if quantized else gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            made.append((tensor, shape, int(of), len(content)))
            content += numbers.tobytes() + bytes(-numbers.nbytes % 32)
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.gguf").write_bytes(gguf_bytes(metadata, made, content))
    plain, quantized = (Checkpoint.open(tmp_path / each) for each in ("plain", "quantized"))
    assert sum(each.encoding is not None for each in quantized.entries.values()) > 20
    held, (layer, *_) = stored_parts(quantized, read_spec(quantized), WHOLE), read_spec(quantized).layers
    for role in ("gate_up", "down"):
        named = [f"layers.0.{each}.{role}.weight" for each in range(4)] if isinstance(layer.mlp, Experts) else []
        assert held.keys() >= {*named}
    expected = dict(plain.tensors(plain.entries, torch.float32))
    for own, numbers in quantized.tensors(quantized.entries, torch.float32):
        assert torch.equal(numbers, expected[own]), own
    expected = logits(tmp_path / "plain", TOKENS)
    assert error(logits(tmp_path / "quantized", TOKENS), expected) < 5e-3
    made_or_skip(PairFactory)
    plan = make_plan(choose(ModelSettings(str(tmp_path / "quantized"), device="cpu")), LargestStep(64, 4), 1 << 30)
    assert sum(each.nbytes for each in quantized.entries.values()) < plan.weights_bytes
    assert error(logits(tmp_path / "quantized", TOKENS, dtype="auto"), expected) < 0.1, "as it is stored"


def test_a_row_that_llama_cpps_own_programs_write_as_a_list_is_a_matrix(tmp_path):
    metadata, tensors, data = read_gguf(FOLDER / "qwen35moe.gguf")
    changed = [[name, shape[:1] if "gate_inp_shexp" in name else shape, *more] for name, shape, *more in tensors]
    assert changed != tensors
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata, changed, data))
    assert torch.equal(logits(tmp_path / "model.gguf", TOKENS), logits(FOLDER / "qwen35moe.gguf", TOKENS))


# --- recurrent layers -------------------------------------------------------------------------------------------------


def test_layers_that_draft_tokens_are_not_read(tmp_path):
    metadata, tensors, data = read_gguf(FOLDER / "qwen35.gguf")
    drafts = [["blk.4.nextn.eh_proj.weight", [4, 4], 0, len(data)], ["blk.4.attn_q.weight", [4, 4], 0, len(data) + 64]]
    changed = metadata | {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(changed, [*tensors, *drafts], data + bytes(128)))
    assert torch.equal(logits(tmp_path / "model.gguf", TOKENS), logits(FOLDER / "qwen35.gguf", TOKENS))


def test_which_layers_are_recurrent_is_read(tmp_path):
    def kinds(changes: dict) -> list[bool]:
        metadata, tensors, data = read_gguf(FOLDER / "qwen35.gguf")
        kept = {key: value for key, value in (metadata | changes).items() if value is not None}
        (tmp_path / "model.gguf").write_bytes(gguf_bytes(kept, tensors, data))
        return [each == "linear_attention" for each in Checkpoint.open(tmp_path).config["layer_types"]]

    listed, every = "qwen35.attention.recurrent_layers", "qwen35.full_attention_interval"
    assert kinds({}) == [True, False, True, False]
    assert kinds({listed: [False, True, True, True, False]}) == [False, True, True, True]
    assert kinds({listed: None, every: 3}) == [True, True, False, True]
    assert kinds({listed: None, every: None}) == [True, True, True, False]


# --- files in parts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path) -> list[Path]:
    """A sample in several parts, by the writer of the package."""
    reader = gguf.GGUFReader(FOLDER / "phi3-longrope.gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "phi3", split_max_tensors=7)
    for key, each in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, each.contents(), each.types[0], each.types[1] if len(each.types) > 1 else None)
    for each in reader.tensors:
        writer.add_tensor(each.name, each.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sorted(tmp_path.iterdir())
    assert len(found) == 3 and found[0].name == "model-00001-of-00003.gguf"
    return found


def test_a_file_in_parts_is_the_file(parts):
    expected = logits(FOLDER / "phi3-longrope.gguf", TOKENS)
    for given in (parts[0], parts[2], parts[0].parent):
        assert torch.equal(logits(given, TOKENS), expected)


def test_parts_in_a_cache_of_links_are_found(parts, tmp_path):
    links = tmp_path / "snapshot"
    links.mkdir()
    for index, part in enumerate(parts):
        blob = part.rename(tmp_path / f"blob{index}")
        (links / part.name).symlink_to(blob)
    assert len(Checkpoint.open(links / parts[0].name).entries) == len(
        Checkpoint.open(FOLDER / "phi3-longrope.gguf").entries
    )


def test_parts_that_do_not_belong_together_are_refused(parts, tmp_path):
    def refused(match: str) -> None:
        with pytest.raises(InvalidRequest, match=match):
            Checkpoint.open(tmp_path / parts[0].name)

    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    refused("split.no 2 and split.count 3 are not those of part 2 of 3")
    parts[1].unlink()
    refused("is one of 3 parts, and model-00002-of-00003.gguf is missing")
    parts[1].symlink_to("/etc/hostname")
    refused("leads out of its folder")
    parts[1].unlink()
    parts[1].write_bytes(second)
    (tmp_path / "model-00004-of-00004.gguf").write_bytes(second)
    with pytest.raises(InvalidRequest, match="has 4 GGUF files"):
        Checkpoint.open(tmp_path)
    (tmp_path / "alone.gguf").write_bytes(second)
    with pytest.raises(InvalidRequest, match=r"is one of 3 parts by split\.count"):
        Checkpoint.open(tmp_path / "alone.gguf")


def test_a_tensor_that_two_parts_have_is_refused(tmp_path):
    metadata, tensors, data = read_gguf(FOLDER / "granite.gguf")
    for index in range(2):
        told = {"split.no": index, "split.count": 2, "split.tensors.count": 2 * len(tensors)}
        file = tmp_path / f"model-{index + 1:05d}-of-00002.gguf"
        file.write_bytes(gguf_bytes((metadata if not index else {}) | told, tensors, data))
    with pytest.raises(InvalidRequest, match="is in two of the parts"):
        Checkpoint.open(tmp_path)
