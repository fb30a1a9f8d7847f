"""Peers are driven by lines of JSON: one that fails, ends or cannot be started is named, and never stops the others."""

import asyncio
import io
import json
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks import peers
from benchmarks.cases import QUICK_CELLS, SHAPES, write_checkpoint
from benchmarks.compare import Unsupported
from benchmarks.engines.grpc import INT4, INT8
from benchmarks.engines.peers import lines
from benchmarks.engines.peers.generating import Generating
from benchmarks.engines.peers.gguf_file import write
from benchmarks.engines.peers.hf import Transformers
from benchmarks.engines.process import REFERENCE, PeerFailed, PeerKind, PeerProcess
from benchmarks.machine import ROOT
from ferrum_rpc.engine.assembly.loading import read_spec
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.tools.running import Scripted


class Engine:
    """A peer without a model."""

    def open(self, model, threads, options):
        return {"name": model, "threads": threads, "options": options}

    def prepare(self, prompts, room):
        self.prompts = prompts

    def decode(self, tokens, lead_in):
        return [0.5] * (len(tokens) - lead_in), [len(self.prompts)]

    def prefill(self, prompts, lead_in):
        raise lines.Unsupported("no prefill")


def answers(*jobs):
    out = io.StringIO()
    lines.serve(Engine(), io.StringIO("".join(json.dumps(job) + "\n" for job in jobs)), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_every_job_has_one_answer():
    found = answers(
        {"do": "open", "model": "m", "threads": 2, "options": {"a": 1}},
        {"do": "prepare", "prompts": [[1], [2]], "room": 4},
        {"do": "decode", "tokens": [[1, 2]] * 5, "lead_in": 2},
        {"do": "prefill", "prompts": [[1]], "lead_in": 1},
        {"do": "dance"},
        {"do": "decode", "tokens": [[1, 2]] * 3, "lead_in": 2},
    )
    assert found[0] == {"ok": {"name": "m", "threads": 2, "options": {"a": 1}}}
    assert found[1] == {"ok": {}}
    assert found[2] == {"ok": {"step_s": [0.5] * 3, "last": [2]}}
    assert found[3] == {"unsupported": "no prefill"}
    assert "dance" in found[4]["error"]
    assert found[5]["ok"]["step_s"] == [0.5]


NARROW = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 32}
NARROW |= {"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
NARROW |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "max_position_embeddings": 256}
HYBRID = SHAPES["qwen3.5-0.8b"] | NARROW
"""A layer with attention, and three recurrent ones."""


@pytest.mark.parametrize("shape", [SHAPES["tiny"], HYBRID], ids=["tiny", "hybrid"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_every_round_of_transformers_begins_where_the_prompts_ended(tmp_path, monkeypatch, cache, shape):
    import torch

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # of the roll-back nothing is compiled
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # this process is not the peer's
    peer, cell = Transformers(), QUICK_CELLS[2]
    with torch.no_grad():
        peer.open(str(write_checkpoint(tmp_path / "tiny", shape, "float32")), 1, {"cache": cache})
        prompts, fed = cell.prompts(512).tolist(), cell.fed(512, 4).tolist()
        peer.prepare(prompts, 8)
        step_s, first = peer.decode(fed, 2)
        assert len(step_s) == 4
        assert peer.decode(fed, 2)[1] == first
        whole = torch.tensor([[*prompt, *(each[row] for each in fed)] for row, prompt in enumerate(prompts)])
        assert peer._model(input_ids=whole).logits[:, -1].argmax(-1).tolist() == first


def test_a_file_for_llama_cpp_has_the_recurrent_layers_as_its_converter_writes_them(tmp_path):
    gguf = pytest.importorskip("gguf")
    folder, file = write_checkpoint(tmp_path, HYBRID), tmp_path / "model.gguf"
    write(folder, file, "bf16")
    reader = gguf.GGUFReader(file)
    tensors = {each.name: each for each in reader.tensors}
    theirs = load_file(folder / "model.safetensors")
    assert len(tensors) == len(theirs)
    assert np.allclose(tensors["blk.0.ssm_a"].data, -np.exp(1.0))
    assert (tensors["blk.0.ssm_dt.bias"].data == 1).all() and (tensors["blk.0.ssm_norm.weight"].data == 1).all()
    for name in ("blk.3.attn_q_norm", "blk.3.attn_norm", "blk.0.post_attention_norm", "output_norm"):
        assert (tensors[f"{name}.weight"].data == 2).all(), "the checkpoint has them less one"
    taps = theirs["model.layers.0.linear_attn.conv1d.weight"].float().numpy()[:, 0]
    assert np.array_equal(tensors["blk.0.ssm_conv1d.weight"].data, taps)
    assert (tensors["blk.1.ssm_alpha.weight"].shape == [64, 2]).all()
    fields = {key: each.contents() for key, each in reader.fields.items() if key.startswith("qwen35.")}
    expected = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 2}
    expected |= {"ssm.inner_size": 32, "full_attention_interval": 4, "rope.dimension_count": 8, "rope.freq_base": 1e7}
    assert {key: fields[f"qwen35.{key}"] for key in expected} == expected
    with pytest.raises(ValueError, match="as many key heads as value heads"):
        write(write_checkpoint(tmp_path / "shared", HYBRID | {"linear_num_value_heads": 4}), file, "bf16")


def test_a_file_for_llama_cpp_has_all_experts_of_a_layer_in_one_tensor(tmp_path):
    gguf = pytest.importorskip("gguf")
    shape = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 12, "num_hidden_layers": 1}
    folder = write_checkpoint(tmp_path / "model", SHAPES["qwen3-30b-a3b-3"] | shape | {"vocab_size": 64})
    write(folder, file := tmp_path / "model.gguf", "bf16")
    shapes = {each.name: each.shape.tolist() for each in gguf.GGUFReader(file).tensors}
    assert shapes["blk.0.ffn_down_exps.weight"] == [32, 64, 12]
    written, theirs = Checkpoint.open(file), Checkpoint.open(folder)
    assert read_spec(written).layers[0].mlp == read_spec(theirs).layers[0].mlp
    expected = dict(theirs.tensors())
    assert written.entries.keys() == expected.keys()
    for name, tensor in written.tensors():  # in the order of the experts' numbers, not of their names
        assert tensor.float().equal(expected[name].float()), name


def test_another_shape_is_a_run_of_its_own_without_targets(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "Client", SimpleNamespace(open=lambda *_: nullcontext(Scripted(REFERENCE))))
    monkeypatch.setattr(peers, "PeerProcess", SimpleNamespace(open=lambda kind, *_: nullcontext(Scripted(kind.name))))
    monkeypatch.setattr(peers.Contest, "folder", "nowhere")
    monkeypatch.setattr(peers, "QUICK_CELLS", [replace(QUICK_CELLS[0], target=5.0, goal=6.0)])
    arguments = ["--quick", "--out", str(tmp_path / "peers.json"), "--peers", peers.EAGER.name]
    for shape, variant, aims in (("qwen3.5-0.8b", "qwen3.5-0.8b-bf16", (None, None)), ("tiny", "bf16", (5.0, 6.0))):
        options = peers.BENCHMARK.parse([*arguments, "--model", shape])
        found = asyncio.run(peers.run(options)).values
        assert options.variant == found["variant"] == variant
        assert found["settings"]["model"].startswith(f"{shape}: ")
        assert [(each["target"], each["goal"]) for each in found["cells"]] == [aims]
    assert peers.BENCHMARK.parse([]).model == "qwen3-0.6b" and peers.BENCHMARK.parse(["--quick"]).model == "tiny"


async def test_a_peer_that_ends_is_an_error_with_its_last_words():
    kind = PeerKind("gone", "no_such_script")
    with pytest.raises(PeerFailed, match="No module named"):
        async with PeerProcess.open(kind, "model", 1, 512):
            raise AssertionError("it was never there")


def test_a_peer_that_does_not_start_is_left_out_and_the_file_says_why(tmp_path, forked_servers, monkeypatch):
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers, "install", lambda name: ("a==1", "no compiler") if name == "llama_cpp" else None)
    out = tmp_path / "peers.json"
    names = ["OpenVINO GenAI bf16", "llama.cpp bf16"]
    options = peers.BENCHMARK.parse(["--quick", "--out", str(out), "--peers", *names])
    asyncio.run(peers.run(options))
    result = json.loads(out.read_text(encoding="utf-8"))
    assert "No such file" in result["left_out"][names[0]]
    assert result["left_out"][names[1]] == "not installed: a==1: no compiler"
    assert result["cells"] == [] and f"{names[1]} was left out: not installed: a==1: no compiler" in result["notes"]


@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize(("peer", "rival"), [("llama.cpp Q8_0", INT8), ("OpenVINO GenAI int4", INT4)])
def test_a_peer_of_fewer_bits_is_measured_against_ours_of_as_many(tmp_path, monkeypatch, offered, peer, rival):
    @asynccontextmanager
    async def quantized(name, *_):
        if not offered:
            raise Unsupported("no products of bytes")
        yield Scripted(name)

    monkeypatch.setattr(peers, "Client", SimpleNamespace(open=lambda *_: nullcontext(Scripted(REFERENCE))))
    monkeypatch.setattr(peers, "open_quantized", quantized)
    monkeypatch.setattr(peers, "PeerProcess", SimpleNamespace(open=lambda kind, *_: nullcontext(Scripted(kind.name))))
    names = [peers.EAGER.name, peer]
    options = peers.BENCHMARK.parse(["--quick", "--out", str(tmp_path / "peers.json"), "--peers", *names])
    monkeypatch.setattr(peers, "install", lambda name: None)
    result = asyncio.run(peers.run(options)).values
    ours = {name: {each["reference"] for each in result["cells"] if name in each["sides"]} for name in names}
    assert ours == {names[0]: {REFERENCE}, names[1]: {rival if offered else REFERENCE}}
    assert (rival in result["sides"]) is offered and (rival in result["left_out"]) is not offered
    alone = [peers.BENCHMARK.parse(["--peers", name]).variant for name in names]
    assert (result["variant"], *alone) == ("", "bf16", "int4" if rival == INT4 else "int8")


def test_a_requirement_that_does_not_install_costs_its_peer_only(tmp_path, monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command)
        broken = "llama-cpp-python" in command
        return SimpleNamespace(returncode=int(broken), stderr="building\nno compiler\n" if broken else "")

    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers, "subprocess", SimpleNamespace(run=run))
    requirement, reason = peers.install("llama_cpp")
    assert asked[0][1:] == ["-m", "venv", str(tmp_path / "llama_cpp")]
    assert requirement.startswith("install --no-binary llama-cpp-python") and reason == "no compiler"
    for name in {each.environment for each in peers.PEERS} - {"", "llama_cpp"}:
        assert peers.install(name) is None
    assert any("-r" in command and (peers.ROOT / command[-2]).is_file() for command in asked)


class Scheduler(Generating):
    """An engine that prefills one request in a step and decodes the others meanwhile."""

    def begin(self, prompts, tokens):
        self.most, self.given, self.waiting = tokens, [0] * len(prompts), list(range(len(prompts)))

    def step(self):
        if self.waiting:
            self.waiting.pop(0)
        running = [index not in self.waiting for index in range(len(self.given))]
        self.given = [given + runs for given, runs in zip(self.given, running, strict=True)]
        assert max(self.given) <= self.most, "more tokens than were asked for"
        return [[7] * runs for runs in running]

    def end(self):
        self.ended = self.given


def test_steps_of_a_peer_with_its_own_tokens_begin_when_every_sequence_has_one():
    peer = Scheduler()
    peer.prepare([[1, 2]] * 3, room=5)
    step_s, last = peer.decode([[0] * 3] * 5, lead_in=2)
    assert len(step_s) == 3 and last == [] and peer.ended == [8, 7, 6]
    step_s, last = peer.prefill([[1, 2], [3, 4]], lead_in=1)
    assert len(step_s) == 1 and last == [7] and peer.ended == [1]


def test_every_peer_has_its_script():
    folder = ROOT / "benchmarks" / "engines" / "peers"
    assert {each.script for each in peers.PEERS} <= {file.stem for file in folder.glob("*.py")}
