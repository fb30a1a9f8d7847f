"""`ferrum-rpc doctor` says whether a model is served, how, and right; the reference is transformers itself."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest
import torch

from ferrum_rpc import doctor, plan
from ferrum_rpc.engine.assembly import parity
from tests.support.checkpoints import configure, make_checkpoint, rewrite

RIGHT = parity.Parity(64, "bfloat16", parity.Error(0.009, 0.06), parity.Error(0.01, 0.03), 1.0)


@pytest.fixture
def run(command):
    """The doctor, or another command, on a CPU with a small cache."""

    def run(*arguments: object, name: str = "doctor", blocks: int = 16) -> tuple[int, str, str]:
        return command(name, *arguments, "--kv-blocks", blocks, "--device", "cpu")

    return run


@pytest.fixture
def facts(run):
    """Its exit status, and what it says for programs."""

    def facts(*arguments: object) -> tuple[int, Any]:
        status, out, _ = run(*arguments, "--json")
        return status, json.loads(out)

    return facts


@pytest.fixture(scope="module")
def folder(checkpoint_of):
    return checkpoint_of(dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_computed_right(folder, dtype, facts):
    status, found = facts(folder, "--dtype", dtype)
    assert status == doctor.EXIT_SERVES and found["parity"]["holds"] and found["plan"]["fits"]
    assert found["parity"]["rows"] == parity.TOKENS and f"dtype={dtype}" in found["choices"]
    assert (found["parity"]["theirs"] is None) == (dtype == "float32")
    if dtype == "float32":
        assert found["parity"]["error"]["largest"] < 1e-4
    serve = f"ferrum-rpc serve {folder} --device cpu --dtype {dtype} --kv-blocks 16"
    assert found["verdict"] == f"it can be served: {serve}"


@pytest.mark.parametrize("context", ["512", "128"])
def test_a_rotation_that_is_frozen_for_a_context_is_compared_with_the_same(checkpoint_of, context, facts):
    """The long factors of a server of 512 tokens, the short ones of one of 128, whatever the rows are."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + 2 * each for each in range(8)]}
    fields = {"rope_parameters": rope, "original_max_position_embeddings": 128}
    status, found = facts(checkpoint_of("phi3", **fields), "--max-context", context)
    assert status == doctor.EXIT_SERVES and "rope=longrope" in found["choices"]
    assert found["parity"]["error"]["largest"] < 1e-4


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", ["doctor", "plan"])
def test_lines_fit_the_terminal(folder, monkeypatch, width, run, name):
    monkeypatch.setattr({"doctor": doctor, "plan": plan}[name], "columns", lambda _: width)
    monkeypatch.setattr(parity, "compare", lambda _: RIGHT)
    lines = run(folder, name=name)[1].splitlines()
    assert max(len(line) for line in lines if str(folder) not in line) <= width
    assert name == "plan" or lines[-1].startswith("it can be served: ferrum-rpc serve "), "a line to be copied"


def test_what_is_to_be_rounded_is_compared_without_that(folder, run):
    status, out, _ = run(folder, "--dtype", "float32", "--kv-dtype", "int8")
    assert status == doctor.EXIT_SERVES and " in int8: " in out and "without quantizing, 64 rows" in out


def test_a_model_that_is_computed_wrong_is_not_to_be_served(folder, monkeypatch, run):
    reference = parity.reference
    monkeypatch.setattr(parity, "reference", lambda *given: reference(*given).roll(1, 0))
    status, out, _ = run(folder, "--dtype", "float32")
    assert status == doctor.EXIT_WRONG
    assert "its results are wrong: do not serve it" in out and "the error is" in out


@pytest.mark.parametrize(
    ("error", "holds"),
    [
        ((0.009, 0.06), True),  # the largest of thousands: rounding alone does that
        ((0.021, 0.06), False),
        ((0.009, 0.16), False),  # few logits, but wrong
        ((float("nan"), float("nan")), False),
    ],
)
def test_an_error_is_judged_by_that_of_transformers(error, holds):
    theirs = parity.Error(0.01, 0.03)
    assert parity.Parity(64, "bfloat16", parity.Error(*error), theirs, 1.0).holds == holds


def test_what_cannot_be_compared_says_why(folder, monkeypatch, facts):
    status, found = facts("identity")
    assert status == doctor.EXIT_SERVES and found["compared"] == "not compared: the identity model has no weights"
    monkeypatch.setattr(parity, "reference", lambda *_: (_ for _ in ()).throw(OSError("no such\nthing")))
    status, found = facts(folder)
    assert status == doctor.EXIT_SERVES and found["compared"] == "not compared: OSError: no such"
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    assert "transformers is not installed" in facts(folder)[1]["compared"]


def test_an_index_without_metadata_is_compared_too(tmp_path, facts):
    """We do not need them, and transformers does."""
    sharded = make_checkpoint(tmp_path, shards=3)
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    status, found = facts(sharded, "--dtype", "float32")
    assert status == doctor.EXIT_SERVES and found["parity"]["error"]["largest"] < 1e-4


def test_stops_that_are_no_tokens_are_told(checkpoint_of, monkeypatch, facts):
    monkeypatch.setattr(parity, "compare", lambda _: RIGHT)
    _, found = facts(checkpoint_of(eos_token_id=[2, 300]))
    assert found["choices"]["eos_token_id=300"].startswith("not among the model's 300 tokens")


@pytest.mark.parametrize("name", ["plan", "doctor"])
@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["identity", "--adapter-dir", "none"], "must be a folder, not /.*/none"), ([""], "no model is named")],
)
def test_what_is_not_there_is_named(arguments, error, run, name):
    status, _, err = run(*arguments, name=name)
    assert status == 1 and re.search(error, err)


def test_a_model_that_does_not_fit_or_is_refused(folder, tmp_path, run):
    status, out, _ = run(folder, blocks=1 << 40)
    assert status == doctor.EXIT_TOO_LARGE and "do not fit" in out
    configure(shutil.copytree(folder, tmp_path / "odd"), hidden_act="nothing")
    status, _, err = run(tmp_path / "odd")
    assert status == doctor.EXIT_WRONG and "ferrum-rpc doctor: " in err


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_weights_that_serve_refuses_are_refused(folder, tmp_path, name, run):
    broken = shutil.copytree(folder, tmp_path / "broken")
    rewrite(broken, lambda tensors: tensors[name].view(-1)[0].fill_(1e6))  # too large for float16
    status, _, err = run(broken, "--dtype", "float16")
    assert status == doctor.EXIT_WRONG
    assert f"{name} holds NaN or infinity, or numbers that float16 cannot hold" in err
