"""Model folders: complete ones stream, broken ones are refused with a reason, and nothing outside is read."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.loading import choose_dtype, load_model, read_spec
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.native_linear import PairFactory
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.support.checkpoints import configure, loading_peaks, make_checkpoint, rewrite
from tests.support.harness import made_or_skip

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("single"), "qwen3", dtype=torch.bfloat16, intermediate_size=128)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("sharded"), "llama", shards=4)


@pytest.fixture
def copy(sharded, tmp_path):
    return shutil.copytree(sharded, tmp_path / "copy")


@pytest.fixture
def folder(single, tmp_path):
    """A copy of the one file, to be changed."""
    return shutil.copytree(single, tmp_path / "folder")


def refused(path, match, error=InvalidRequest):
    with pytest.raises(error, match=match) as caught:
        Checkpoint.open(path)
    assert str(path) not in caught.value.message
    return caught.value.message


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


# --- what is right ---------------------------------------------------------------------------------------------------


def test_one_file_streams_every_tensor(single):
    checkpoint = Checkpoint.open(single)
    expected = load_file(single / "model.safetensors")
    streamed = {name: tensor.clone() for name, tensor in checkpoint.tensors()}
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(streamed[name], expected[name]) for name in expected)
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())


def test_numbers_that_json_does_not_have_are_read_as_transformers_tags_them(copy):
    tags = {each: {"__float__": each} for each in ("Infinity", "-Infinity", "NaN")}
    kept = {"other": {"__float__": "infinity"}, "more": {"__float__": "NaN", "x": 1}, "number": {"__float__": 1.0}}
    configure(copy, range=[0.0, tags["Infinity"]], **{"in": tags}, **kept)
    found = Checkpoint.open(copy).config
    theirs = PreTrainedConfig._dict_from_json_file(copy / "config.json")
    assert found["range"] == [0.0, float("inf")] and found["in"]["-Infinity"] == float("-inf")
    assert str(found) == str(theirs)  # NaN is not equal to itself


def test_shards_stream_file_by_file(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) >= 3
    expected = {name: tensor for file in files for name, tensor in load_file(file).items()}
    checkpoint = Checkpoint.open(sharded)
    order = []
    for name, tensor in checkpoint.tensors():
        assert torch.equal(tensor, expected.pop(name))
        order.append(checkpoint.entries[name].file.name)
    assert not expected
    assert order == sorted(order)


def test_tensors_can_be_picked(single):
    names = ["model.norm.weight", "lm_head.weight"]
    assert sorted(name for name, _ in Checkpoint.open(single).tensors(names)) == sorted(names)
    with pytest.raises(KeyError):
        list(Checkpoint.open(single).tensors(["nonesuch"]))


def test_odd_tensors(tmp_path):
    """Scalars, empty tensors, integers, and data that an older writer did not align."""
    (tmp_path / "config.json").write_text("{}")
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "ids": torch.arange(5), "z": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip() + b" "
    header += b" " * ((length + 1) % 2 or 1)
    for shifted in (content, len(header).to_bytes(8, "little") + header + content[8 + length :]):
        (tmp_path / "model.safetensors").write_bytes(shifted)
        found = {name: tensor.clone() for name, tensor in Checkpoint.open(tmp_path).tensors()}
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    save_file({"empty": torch.zeros(0)}, tmp_path / "model.safetensors")
    assert [tensor.shape for _, tensor in Checkpoint.open(tmp_path).tensors()] == [(0,)]


def test_a_snapshot_of_the_hugging_face_cache_may_link_to_its_blobs(single, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(single.iterdir())):
        shutil.copy(file, blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    assert Checkpoint.open(snapshot).nbytes == Checkpoint.open(single).nbytes


# --- what is wrong ---------------------------------------------------------------------------------------------------


def test_no_such_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere.*does not exist")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "neither a folder nor a GGUF file")
    refused(tmp_path, "config.json is missing")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "neither model.safetensors nor")
    refused("a\0b", "does not exist")


@contextmanager
def as_somebody_else():
    """Root may read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("closed", ["above/model", "above", "above/model/config.json", "above/model/model.safetensors"])
def test_what_may_not_be_read_is_not_called_missing(closed, single):
    with TemporaryDirectory() as name:
        top = Path(name)
        folder = Path(shutil.copytree(single, top / "above" / "model"))
        for each in (top, top / "above", folder, *folder.iterdir()):
            each.chmod(0o755)
        with as_somebody_else():
            Checkpoint.open(folder)
        (top / closed).chmod(0)
        try:
            with as_somebody_else(), pytest.raises(InvalidRequest, match="Permission denied") as caught:
                Checkpoint.open(folder)
        finally:
            (top / closed).chmod(0o755)
        assert str(top / closed) in caught.value.message
        assert "missing" not in caught.value.message and "exist" not in caught.value.message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_not_opened(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04.")
    assert "save_pretrained" in refused(tmp_path, name, NotSupported)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b'{"a": NaN}', b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5]
)
def test_broken_json_is_named(copy, content):
    for name in ("config.json", "generation_config.json", INDEX):
        folder = shutil.copytree(copy, copy.parent / f"broken-{name}", dirs_exist_ok=True)
        (folder / name).write_bytes(content)
        refused(folder, f"^{name}: not ")


@pytest.mark.parametrize(
    "shard",
    [
        *("../evil.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ".", "", "a\\b.safetensors"),
        *("a\0.safetensors", "C:x.safetensors", ".hidden.safetensors", "model.bin", 7, None, ["model.safetensors"]),
        pytest.param("9" * 5000 + ".safetensors", id="too long for a file system"),
    ],
)
def test_an_index_cannot_name_a_path(copy, shard):
    edit_index(copy, lambda index: index["weight_map"].update({"lm_head.weight": shard}))
    refused(copy, "lm_head.weight.*is not the name of a safetensors file")


def test_an_index_must_be_true(copy):
    original = json.loads((copy / INDEX).read_text())["weight_map"]
    edit_index(copy, lambda index: index["weight_map"].update({"phantom": original["lm_head.weight"]}))
    refused(copy, "'phantom' is not in")
    edit_index(copy, lambda index: index.update(weight_map=original | {"lm_head.weight": "gone.safetensors"}))
    refused(copy, "shard 'gone.safetensors' is missing")
    name, other = "model.norm.weight", original["lm_head.weight"]
    assert original[name] != other and list(original.values()).count(original[name]) > 1
    edit_index(copy, lambda index: index.update(weight_map=original | {name: other}))
    refused(copy, f"'{name}' is in another shard")
    for broken in ({}, None, []):
        edit_index(copy, lambda index, broken=broken: index.update(weight_map=broken))
        refused(copy, "weight_map is missing or empty")


def test_shards_without_an_index_are_named(copy):
    (copy / INDEX).unlink()
    first = sorted(copy.glob("*.safetensors"))[0].name
    refused(copy, rf"nor {INDEX}, only \d+ other safetensors files \({first}, .*would say what is in")


def test_a_tensor_in_two_shards_is_refused(copy):
    first, second = sorted(copy.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    refused(copy, f"{name}' is in {first.name} and in {second.name}")


def test_links_must_stay_inside(copy, tmp_path):
    shard = sorted(copy.glob("*.safetensors"))[0]
    outside = tmp_path / "outside.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)
    refused(copy, f"{shard.name}: is a link that leads out")
    shard.unlink()
    for nowhere in (shard.name, "nowhere"):
        shard.symlink_to(nowhere)
        refused(copy, f"^{shard.name}: is a link that leads nowhere")
        shard.unlink()
    inside = copy / "renamed.safetensors"
    shutil.copy(outside, inside)
    shard.symlink_to(inside.name)
    Checkpoint.open(copy)
    (copy / "config.json").unlink()
    (copy / "config.json").symlink_to("/etc/hostname")
    refused(copy, "config.json: is a link that leads out")


def test_what_is_not_a_file_does_not_hang_the_start(copy):
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.unlink()
    os.mkfifo(shard)
    refused(copy, "not a regular file")
    shard.unlink()
    shard.mkdir()
    refused(copy, f"^{shard.name}: ")
    (copy / "config.json").unlink()
    (copy / "config.json").mkdir()
    refused(copy, "config.json: not a regular file")


def test_truncation_is_seen_before_anything_is_read(folder):
    content = (folder / "model.safetensors").read_bytes()
    for size in (0, 3, 8, 100, 2000, len(content) // 2, len(content) - 1):
        (folder / "model.safetensors").write_bytes(content[:size])
        refused(folder, "^model.safetensors: ")
    (folder / "model.safetensors").write_bytes(content + b"\0")
    refused(folder, "^model.safetensors: .*not fully covered")


def write_safetensors(path, header, data):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(data))


def floats(count, first=0, **changes):
    return {"dtype": "F32", "shape": [count], "data_offsets": [first, first + 4 * count]} | changes


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": floats(1), "b": floats(1, 8)}, 12),
        ({"a": floats(2), "b": floats(2, 4)}, 12),
        ({"a": floats(3, data_offsets=[0, 8])}, 8),
        ({"a": floats(1, data_offsets=[4, 0])}, 4),
        ({"a": floats(1, dtype="Q7")}, 4),
        ({"a": floats(1, dtype="C64", data_offsets=[0, 8])}, 8),
        ({"a": floats(1, shape=[-1])}, 4),
        ({"a": floats(1, shape=[1] * 9)}, 4),
        ({"a": floats(1, shape=[2**62, 16])}, 4),
        ({"a": floats(0, shape=[0, 2**63])}, 0),
        ({"a": []}, 0),
        (b"[" * 10**5, 0),
        (b'{"a": NaN}', 0),
        (b'{"\xff": {}}', 0),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_mapped(tmp_path, header, data):
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors", header, data)
    refused(tmp_path, "^model.safetensors: ")


@pytest.mark.parametrize("after", [floats(2), floats(1, dtype="I32"), None])
def test_a_file_that_is_replaced_between_two_looks_is_refused(tmp_path, after):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a": floats(1)}, 4)
    checkpoint = Checkpoint.open(tmp_path)
    header = {"b": floats(1)} if after is None else {"a": after}
    write_safetensors(file, header, next(iter(header.values()))["data_offsets"][1])
    with pytest.raises(InvalidRequest, match=r"^model.safetensors: tensor 'a' "):
        list(checkpoint.tensors())


# --- loading ---------------------------------------------------------------------------------------------------------


def test_a_model_loads_and_reports_progress(sharded):
    seen = []
    model = load_model(sharded, torch.float32, CPU, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == Checkpoint.open(sharded).nbytes
    assert model.info("x").architecture == "LlamaForCausalLM"
    assert len(model.attention_specs) == 2


def test_generation_config_knows_more_stops(copy):
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert load_model(copy, torch.float32, CPU).info("x").eos_token_ids == (2, 9)
    (copy / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(InvalidRequest, match=r"generation_config.json.eos_token_id"):
        load_model(copy, torch.float32, CPU)


def test_everything_that_does_not_fit_is_in_one_error(folder):

    def change(tensors):
        del tensors["model.layers.0.self_attn.q_norm.weight"], tensors["lm_head.weight"]
        tensors["model.norm.weight"] = torch.zeros(65)
        for number in range(10):
            tensors[f"extra.{number}"] = torch.zeros(1)

    rewrite(folder, change)
    with pytest.raises(InvalidRequest, match="does not fit Qwen3ForCausalLM") as caught:
        load_model(folder, torch.float32, CPU)
    message = caught.value.message
    assert "2 missing (" in message and "lm_head.weight" in message and "q_norm" in message
    assert "10 unexpected (" in message and message.count("extra.") == 8 and "..." in message
    assert "1 misshapen (model.norm.weight [65], expected [64])" in message
    assert str(folder) not in message


def test_rotary_buffers_are_ignored(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert load_model(folder, torch.float32, CPU).logits(torch.randn(1, 64)).abs().sum() > 0


def test_a_head_beside_tied_embeddings_counts_as_in_transformers(tmp_path):
    """A copy of the embedding is one; another matrix is the head, whatever the flag says."""
    import transformers

    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    hidden = torch.randn(3, 64)
    tied = load_model(folder, torch.float32, CPU).logits(hidden)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert read_spec(Checkpoint.open(folder)).tied_embeddings
    assert torch.equal(load_model(folder, torch.float32, CPU).logits(hidden), tied)

    head = embedding.flip(0)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    model = load_model(folder, torch.float32, CPU)
    stored = load_file(folder / "model.safetensors").values()
    assert model.info("x").parameters == sum(tensor.numel() for tensor in stored)
    torch.testing.assert_close(model.logits(hidden), hidden @ head.T)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(reference.lm_head.weight, head)

    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(299, 64)}))
    with pytest.raises(InvalidRequest, match=r"lm_head.weight \[299, 64\], expected \[300, 64\]"):
        load_model(folder, torch.float32, CPU)


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that anything made or looked at."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.nbytes = max(self.nbytes, each.nbytes)
        return result


@pytest.mark.parametrize(
    "giant",
    [
        {"intermediate_size": 3_000_000},
        {"intermediate_size": 300_000_000},
        {"num_attention_heads": 3_000_000, "num_key_value_heads": 1_000_000, "head_dim": 64},
        {"num_attention_heads": 10**9, "num_key_value_heads": 10**9, "head_dim": 64},
        {"head_dim": 4096, "num_key_value_heads": 4},
        {"hidden_size": 2**30},
        {"vocab_size": 2**31 - 1},
        {"vocab_size": 10**12},
        {"max_position_embeddings": 10**12},
        {"num_hidden_layers": 4096},
        {"num_hidden_layers": 10**9},
    ],
    ids=str,
)
def test_sizes_that_are_not_those_of_the_tensors_cost_nothing(folder, giant):
    configure(folder, **giant)
    with Largest() as seen, pytest.raises(InvalidRequest):
        build_runner(ModelSettings(str(folder), device="cpu", dtype="bfloat16"))
    assert seen.nbytes < 100_000


@pytest.mark.parametrize(
    ("value", "stored", "quantize"),
    [
        *(("nan", torch.bfloat16, "none"), ("-inf", torch.bfloat16, "int8")),
        *(("inf", torch.float32, "int8"), ("nan", torch.float32, "none")),
    ],
)
def test_a_weight_that_is_not_finite_is_named(folder, stored, value, quantize):
    names = ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight")
    good = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    config = ModelSettings(str(folder), device="cpu", dtype="bfloat16", kv_blocks=4, quantize=quantize)
    for name in names:
        bad = good[name].clone()
        bad.view(-1)[7] = float(value)
        save_file(good | {name: bad}, folder / "model.safetensors")
        with pytest.raises(InvalidRequest, match=f"^{name} holds NaN or infinity") as caught:
            build_runner(config)
        assert caught.value.field == "model"


def test_a_weight_that_the_dtype_cannot_hold_is_named_and_large_ones_are_not(folder):
    rewrite(folder, lambda tensors: tensors["model.embed_tokens.weight"].fill_(60_000.0))
    assert load_model(folder, torch.float16, CPU).info("x").weight_dtype == "float16"  # though their sum is infinite
    rewrite(folder, lambda tensors: tensors["model.embed_tokens.weight"].fill_(70_000.0))
    with pytest.raises(InvalidRequest, match=r"^model.embed_tokens.weight .* that float16 cannot hold"):
        load_model(folder, torch.float16, CPU)


def test_integers_and_eight_bit_floats_are_no_weights(folder):
    for dtype in (torch.int32, torch.float8_e4m3fn):
        rewrite(folder, lambda tensors, dtype=dtype: tensors.update({"model.norm.weight": torch.ones(64).to(dtype)}))
        with pytest.raises(NotSupported, match=r"model.norm.weight torch"):
            load_model(folder, torch.float32, CPU)


def test_memory_peaks_near_one_copy_of_the_weights_and_pages_that_were_read_do_not_add_to_it(tmp_path):
    """Of 160 MB of weights, streamed from one file, packed on the way; and of a tied embedding, read last, as in GPTQ
    checkpoints: it is held twice, and was there four times."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "vocab_size": 1000}
    one = make_checkpoint(tmp_path / "one", "llama", **sizes)
    size = Checkpoint.open(one).nbytes
    assert size > 130e6
    tied = make_checkpoint(tmp_path / "tied", "llama", vocab_size=60_000, hidden_size=512, tie_word_embeddings=True)
    name, embedding = "model.embed_tokens.weight", 60_000 * 512 * 2
    rewrite(tied, lambda tensors: tensors.update({name: tensors[name].half()}))
    assert [*Checkpoint.open(tied).entries][-1] == name
    peaks = loading_peaks(one, "float32", tied, "bfloat16")
    assert 0.9 * size < peaks[0] < 1.7 * size  # two copies would be 2
    assert 1.9 * embedding < peaks[1] < 2.6 * embedding


def test_a_requested_dtype_is_taken_and_automatic_ones_have_reasons(monkeypatch):
    for name in ("bfloat16", "float16", "float32", "float64"):
        assert choose_dtype(name, torch.float32, CPU) == (getattr(torch, name), "requested")
    for stored in (torch.float32, torch.float16, torch.float64):
        dtype, reason = choose_dtype("auto", stored, CPU)
        assert dtype == torch.float32 and str(stored).removeprefix("torch.") in reason
    monkeypatch.setattr("ferrum_rpc.native.cpu.bfloat16", lambda: "amx_bf16")
    chosen = choose_dtype("auto", torch.bfloat16, CPU)
    assert chosen == (torch.bfloat16, "the checkpoint is bfloat16 and the CPU has amx_bf16")
    monkeypatch.setattr("ferrum_rpc.native.cpu.bfloat16", lambda: None)
    assert choose_dtype("auto", torch.bfloat16, CPU)[0] == torch.float32
    ours = made_or_skip(PairFactory)
    chosen = choose_dtype("auto", torch.bfloat16, CPU, lambda _: ours)
    assert chosen == (torch.bfloat16, f"the checkpoint is bfloat16 and our kernels multiply it in {ours.isa}")
    with pytest.raises(InvalidRequest, match="int4"):
        choose_dtype("int4", torch.float32, CPU)
