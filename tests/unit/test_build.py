"""What is built from a description, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from ferrum_rpc import building
from ferrum_rpc.building import model_folder
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import NO_KERNELS, FullLogits, OutputSpec, Positions, Pressure, RowDType, Span, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import NO_MORE, choose
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.native_linear import ByteFactory, PairFactory
from ferrum_rpc.native import library
from ferrum_rpc.serve import _action, _banner
from tests.support.harness import made_or_skip

PRESSURE = Pressure(8, 8, 16, 0, 0, 0)
STATE = SimpleNamespace(handles=SimpleNamespace(instance_id="1"), pressure=lambda: PRESSURE)
SERVER: Any = SimpleNamespace(target="here", state=STATE)


def logits(runner, tokens):
    """float32 [vocab] of the last token."""
    span = Span(1, tokens, 0, OutputSpec(Positions.LAST, FullLogits(RowDType.F32)), create=True)
    with runner.context():
        [outcome] = runner.forward(Step((span,))).outcomes
        runner.release([1])
    return torch.from_numpy(outcome.rows.block["logits"][outcome.rows.first].copy())


def error_of(rounded, plain):
    """Of the logits, in their standard deviations."""
    tokens = np.arange(5, 45, dtype=np.int32)
    exact = logits(plain, tokens)
    return (logits(rounded, tokens) - exact).square().mean().sqrt() / exact.std()


@pytest.fixture
def folder(checkpoint_of):
    """Of widths that our kernels multiply."""
    return checkpoint_of(hidden_size=128, intermediate_size=256)


def test_eight_bit_weights_are_told_with_their_error_and_stay_near(folder):
    made_or_skip(ByteFactory)
    config = ModelSettings(str(folder), dtype="bfloat16", kv_blocks=8)
    plain, rounded = build_runner(config), build_runner(replace(config, quantize="int8"))
    told = dict(rounded.device.choices)["quantize=int8"]
    assert 0.002 < float(told.split("by ")[1].split("%")[0]) / 100 < 0.01
    assert (plain.info.weight_dtype, rounded.info.weight_dtype) == ("bfloat16", "int8")
    assert rounded.info.kv_dtype == "bfloat16"
    assert 0 < error_of(rounded, plain) < 0.05


@pytest.mark.parametrize("attention", ["native", "torch"])
def test_an_eight_bit_cache_is_told_with_its_error_and_stays_near(folder, attention):
    config = ModelSettings(str(folder), dtype="float32", attention=attention, kv_memory=1 << 20)
    try:
        plain = build_runner(config)
    except InvalidRequest as reason:
        pytest.skip(str(reason))
    rounded = build_runner(replace(config, kv_dtype="int8"))
    told = dict(rounded.device.choices)["kv_dtype=int8"]
    errors = [float(each.split("%")[0]) for each in told.split("by ")[1:]]
    assert len(errors) == 2 and all(0.2 < each < 1 for each in errors) and "16 tokens" in told
    info = rounded.info
    assert (info.kv_dtype, info.weight_dtype) == ("int8", "float32")
    assert info.kv_bytes_per_token == info.layers * 2 * info.kv_heads * (info.head_dim + 4)
    assert rounded.kv.total_blocks > 3 * plain.kv.total_blocks
    [buffer] = rounded.store.buffers
    assert buffer.nbytes == (rounded.kv.total_blocks + 1) * 16 * info.kv_bytes_per_token
    assert 0 < error_of(rounded, plain) < 0.02


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"kv_dtype": "fp8"}, "use int8"),
        ({"kv_dtype": "int8", "identity_head_dim": 6}, "multiple of 4"),
        ({"kv_dtype": "int8", "attention": "triton"}, "not available"),
        ({"quantize": "int8"}, "no weights"),
    ],
    ids=str,
)
def test_rounding_that_is_not_there_is_refused(config, why):
    with pytest.raises(InvalidRequest, match=why):
        build_runner(ModelSettings("identity", device="cpu", kv_blocks=8, **config))


@pytest.mark.parametrize(("kv_dtype", "why"), [("int8", "needs a CPU, .* use fp8"), ("fp8", "capability 8.9, not 8.6")])
def test_an_eight_bit_cache_is_not_for_every_gpu(monkeypatch, kv_dtype, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(InvalidRequest, match=why) as refused:
        build_runner(ModelSettings("identity", device="cuda", kv_dtype=kv_dtype))
    assert refused.value.field == "kv_dtype"


def test_products_on_a_gpu_are_summed_in_float32(monkeypatch, folder):
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    switches = ["allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32"]
    before = [getattr(products, each) for each in switches], convolutions.allow_tf32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = ModelSettings(str(folder), device="cuda")
    try:
        for each in switches:
            setattr(products, each, True)
        convolutions.allow_tf32 = True
        assert "products=float32 sums" not in dict(choose(config, elsewhere=True).reasons)
        assert products.allow_tf32
        chosen = choose(config)
        assert [getattr(products, each) for each in switches] == [False] * 3 and not convolutions.allow_tf32
    finally:
        for each, value in zip(switches, before[0], strict=True):
            setattr(products, each, value)
        convolutions.allow_tf32 = before[1]
    assert "bfloat16" in dict(chosen.reasons)["products=float32 sums"]


@pytest.mark.parametrize("kv_blocks", [1, 3])
def test_an_eight_bit_cache_of_few_slots_has_an_error_too(kv_blocks):
    runner, told = choices(kv_blocks=kv_blocks, kv_dtype="int8")
    assert f"{4 * kv_blocks} tokens" in told["kv_dtype=int8"]
    runner.check()


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_an_answer_depends_on_neither_neighbours_nor_threads(folder, quantize):
    """The whole model, bit for bit, where its kernels are ours."""
    for make in (ByteFactory, PairFactory):
        made_or_skip(make)
    runner = build_runner(ModelSettings(str(folder), dtype="bfloat16", kv_blocks=64, quantize=quantize))
    if not {"rows=native", "attention=native"} <= {choice for choice, _ in runner.device.choices}:
        pytest.skip("not all kernels are native here")
    output = OutputSpec(Positions.ALL, FullLogits(RowDType.F32))
    rng, threads = np.random.default_rng(0), torch.get_num_threads()
    prompts = [rng.integers(1, 250, size=count).astype(np.int32) for count in (1, 2, 7, 33, 60, 5, 90)]

    def run(members, count):
        torch.set_num_threads(count)
        spans = [Span(each, prompts[each], 0, output, create=True) for each in members]
        with runner.context():
            outcomes = runner.forward(Step(tuple(spans))).outcomes
            nexts = [Span(each, np.array([9], np.int32), len(prompts[each]), output) for each in members]
            outcomes += runner.forward(Step(tuple(nexts))).outcomes
            runner.release(list(members))
        found = [each.rows.block["logits"][each.rows.first : each.rows.first + each.rows.count] for each in outcomes]
        return {each: np.concatenate(found[index :: len(members)]) for index, each in enumerate(members)}

    try:
        together = run(range(7), 2)
        for each in range(7):
            assert (run([each], 1)[each] == together[each]).all()
    finally:
        torch.set_num_threads(threads)


def choices(**config):
    """What was chosen and why, of an identity model: 512 bytes a token."""
    runner = build_runner(ModelSettings("identity", device="cpu", block_size=4, **config))
    return runner, dict(runner.device.choices)


def test_a_size_that_is_lowered_says_what_it_became_and_one_that_is_honoured_that_it_was():
    identity = {"identity_layers": 2, "identity_kv_heads": 4, "identity_head_dim": 8, "identity_max_context": 64}
    runner, told = choices(**identity, max_context=1000, kv_memory=64 << 20, max_sequences=2)
    assert runner.info.max_context == 64
    assert told["max_context=64"] == f"1000 requested, {NO_MORE}"
    assert told["kv_blocks=32 (64 KiB)"] == "64 MiB requested; 2 sequences of 64 tokens need no more"
    _, told = choices(**identity, max_context=32, kv_memory=1 << 20, max_sequences=1000)
    assert told["max_context=32"] == "requested" and told["kv_blocks=512 (1024 KiB)"] == "requested"


def test_a_model_tells_its_folder_and_a_built_in_one_tells_none(folder):
    assert build_runner(ModelSettings(str(folder), kv_blocks=8)).info.folder == str(folder)
    assert build_runner(ModelSettings(str(folder), name="demo", kv_blocks=8)).info.folder == ""
    assert build_runner(ModelSettings("identity", kv_blocks=8)).info.folder == ""


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("no/such/model", "model folder {here}/no/such/model: No such file or directory"),
        ("demmo", "model folder {here}/demmo: No such file or directory (did you mean 'demo'?)"),
        ("empty", "model folder {here}/empty has neither config.json nor a GGUF file"),
        ("file", "model folder {here}/file: Not a directory; name its folder"),
    ],
)
def test_a_path_without_a_model_is_told_whole(tmp_path, monkeypatch, model, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest) as caught:
        model_folder(model)
    assert caught.value.message == says.format(here=tmp_path)


def test_a_demo_model_that_is_not_installed_names_its_package(monkeypatch):
    monkeypatch.setattr(building, "DEMO_PACKAGE", "no_such_package")
    says = "demo is in the package ferrum-rpc-demo, which is not installed .*make setup"
    with pytest.raises(InvalidRequest, match=says):
        model_folder("demo")


def test_built_in_models_have_folders_and_the_identity_model_needs_none():
    assert model_folder("identity") == "identity"
    for model in ("demo", "demo-draft"):
        assert Path(model_folder(model)).name == model


@pytest.mark.parametrize("package", ["no_such_package", "email"], ids=["no package", "built without a compiler"])
def test_a_start_without_kernels_says_so_once_aloud_and_what_to_do(monkeypatch, package):
    monkeypatch.setattr(library, "PACKAGE", package)
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    runner, told = choices()
    assert "not installed: install ferrum-rpc-kernels where a C compiler is" in told[NO_KERNELS]
    assert "several times as long" in told[NO_KERNELS] and "exact_span_tokens is 0" in told[NO_KERNELS]
    assert runner.device.exact_span_tokens == 0
    with capture_logs() as logs:
        _banner(SERVER, runner)
    [warning] = [each for each in logs if each["log_level"] == "warning"]
    assert (warning["event"], warning["choice"]) == ("backend_selected", NO_KERNELS)


def test_a_start_with_kernels_warns_of_nothing():
    made_or_skip(library.load)
    runner, told = choices()
    assert NO_KERNELS not in told
    with capture_logs() as logs:
        _banner(SERVER, runner)
    assert {each["log_level"] for each in logs} == {"info"}


def test_a_machine_that_is_used_as_a_lesser_one_is_told(monkeypatch):
    monkeypatch.setenv("FERRUM_ISA", "avx2")
    assert "FERRUM_ISA" in choices()[1]["isa=avx2"]


def test_what_is_wrong_with_a_model_is_not_called_a_setting() -> None:
    assert "of the model" in _action(InvalidRequest("model.safetensors: truncated", field="model.safetensors"))
    for error in (InvalidRequest("too small", field="kv_memory"), OSError("the port is taken")):
        assert "change the setting" in _action(error)
