"""Peers are driven by lines of JSON: one that fails, ends or cannot be started is named, and never stops the others."""

import asyncio
import io
import json
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace

import pytest

from benchmarks import peers
from benchmarks.cases import QUICK_CELLS, SHAPES, write_checkpoint
from benchmarks.compare import Unsupported
from benchmarks.engines.grpc import INT4, INT8
from benchmarks.engines.peers import lines
from benchmarks.engines.peers.generating import Generating
from benchmarks.engines.peers.hf import Transformers
from benchmarks.engines.process import REFERENCE, PeerFailed, PeerKind, PeerProcess
from benchmarks.machine import ROOT
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


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_every_round_of_transformers_begins_where_the_prompts_ended(tmp_path, monkeypatch, cache):
    import torch

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # of the roll-back nothing is compiled
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # this process is not the peer's
    peer, cell = Transformers(), QUICK_CELLS[2]
    with torch.no_grad():
        peer.open(str(write_checkpoint(tmp_path / "tiny", SHAPES["tiny"], "float32")), 1, {"cache": cache})
        prompts, fed = cell.prompts(512).tolist(), cell.fed(512, 4).tolist()
        peer.prepare(prompts, 8)
        step_s, first = peer.decode(fed, 2)
        assert len(step_s) == 4
        assert peer.decode(fed, 2)[1] == first
        whole = torch.tensor([[*prompt, *(each[row] for each in fed)] for row, prompt in enumerate(prompts)])
        assert peer._model(input_ids=whole).logits[:, -1].argmax(-1).tolist() == first


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
    assert (result["variant"], *alone) == ("", "bf16", "int4" * (rival == INT4))


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
