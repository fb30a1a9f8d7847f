"""What `ferrum-rpc plan` says is what a server then takes; and what it says where a model does not fit."""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from ferrum_rpc import cli
from ferrum_rpc.attention.recurrent import STEP_TOKENS
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, RowDType, Span, Step
from ferrum_rpc.engine.assembly import build
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.assembly.plan import MemoryPlan
from ferrum_rpc.engine.assembly.size import CPU_MOST, PROCESS_BYTES, LargestStep, make_plan
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.base import ONE_CALL_TOKENS
from ferrum_rpc.models.linear import PackedLinear, PlainLinear
from ferrum_rpc.models.native_linear import ByteFactory, NibbleFactory, PairFactory
from ferrum_rpc.native import cpu
from ferrum_rpc.usage import ISA_VARIABLE
from tests.quantized.gguf_files import write_model
from tests.support.checkpoints import configure, make_checkpoint, make_model
from tests.support.harness import made_or_skip
from tests.support.hf_families import make_family_checkpoint

SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
TOKENS = 1024
CONTEXT = 2048
DTYPES = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "int8 cache": {"dtype": "float32", "kv_dtype": "int8"},
    "stored": {},
}
BLOCKS = CONTEXT // 16


@cache
def set_imports_aside() -> None:
    """The collector never looks at them again, which takes it 0.4 s each time."""
    gc.collect()
    gc.freeze()


def collect() -> None:
    set_imports_aside()
    gc.collect()


class Mallinfo(ctypes.Structure):
    """glibc's; ``uordblks`` and ``hblkhd`` are the bytes in use."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks top"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def allocated() -> int:
    """Bytes that this process has of malloc, the C kernels' buffers among them."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this libc does not tell what is allocated")
    libc.mallinfo2.restype = Mallinfo
    collect()
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def of_torch(work: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of torch's tensors that ``work`` leaves, and the most that it had at a time."""
    collect()  # what an earlier test left must not be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        held = work()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    del held
    return now, most


@pytest.fixture(scope="module")
def folder(checkpoint_of):
    """Tied embeddings, normed heads."""
    return checkpoint_of(dtype=torch.bfloat16, tie_word_embeddings=True, **SHAPE)


def settings(folder: Path, kind: str = "bfloat16", **others: Any) -> ModelSettings:
    if kind in {"int8", "int4"}:
        made_or_skip(ByteFactory)
    return ModelSettings(str(folder), device="cpu", **{"kv_blocks": BLOCKS, **DTYPES[kind], **others})


def planned(config: ModelSettings, tokens: int = TOKENS, memory: int = 1 << 30) -> MemoryPlan:
    return make_plan(choose(config), LargestStep(tokens, 1), memory)


# --- what it says is what there is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: PlainLinear, lambda: PackedLinear, PairFactory, ByteFactory, NibbleFactory])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_says_what_it_will_hold(make, dtype):
    factory = made_or_skip(make)
    for n, k in ((300, 64), (17, 128), (1010, 192), (64, 64)):
        weight, bias = torch.ones((n, k), dtype=dtype), torch.ones(n, dtype=dtype)
        if isinstance(factory, PairFactory):
            weight = weight.bfloat16()
        members = gc.get_referents(factory(weight, bias))
        held = [each for each in tree_leaves(members) if isinstance(each, torch.Tensor)]
        found = sum(int(torch.ops.mkldnn._nbytes(each)) if each.is_mkldnn else each.nbytes for each in held)
        assert factory.nbytes(n, k, dtype, bias=True) == found, (n, k)


def test_on_a_cpu_that_does_not_multiply_bfloat16_our_kernels_do(folder, monkeypatch):
    """In vectors, or in portable C if the weights are quantized: nothing else multiplies bytes."""
    made_or_skip(ByteFactory)
    monkeypatch.setattr(cpu, "bfloat16", lambda: None)

    def dtypes():
        plain, rounded = (choose(ModelSettings(str(folder), device="cpu", quantize=each)) for each in ("none", "int8"))
        through = choose(ModelSettings(str(folder), device="cpu", model_backend="hf"))
        return plain, rounded, through

    monkeypatch.setenv("FERRUM_ISA", "portable")
    assert [each.facts.dtype for each in dtypes()] == [torch.float32, torch.bfloat16, torch.float32]
    assert "quantized weights" in dict(dtypes()[1].reasons)["dtype=bfloat16"]
    monkeypatch.setenv("FERRUM_ISA", "avx2")
    if made_or_skip(PairFactory).isa == "AVX2":
        assert [each.facts.dtype for each in dtypes()] == [torch.bfloat16, torch.bfloat16, torch.float32]
        assert "our kernels multiply it in AVX2" in dict(dtypes()[0].reasons)["dtype=bfloat16"]
    with pytest.raises(InvalidRequest, match="add --dtype bfloat16"):
        choose(ModelSettings(str(folder), device="cpu", quantize="int8", dtype="float32"))


def in_q8_0(path: Path) -> Path:
    """A model of that shape in a file of GGUF, whose tied table is among the matrices that stay as they are stored."""
    gguf, _ = pytest.importorskip("gguf"), made_or_skip(PairFactory)
    model = make_model("qwen3", tie_word_embeddings=True, **SHAPE)
    write_model(path / "model.gguf", model, gguf.GGMLQuantizationType.Q8_0)
    return path


@pytest.mark.parametrize("kind", DTYPES)
def test_weights_and_cache_take_what_was_planned(folder, kind, tmp_path):
    config = settings(in_q8_0(tmp_path) if kind == "stored" else folder, kind)
    plan, parts = planned(config), choose(config)
    left, _ = of_torch(parts.load)
    assert abs(left - plan.weights_bytes) <= 0.03 * left
    runner = build_runner(config)
    assert plan.kv_bytes == sum(buffer.nbytes for buffer in runner.store.buffers)
    layers, heads, numbers = 2, 2, {"float32": 64 * 4, "int8 cache": 64 + 4}.get(kind, 64 * 2)
    assert plan.kv_bytes_per_token == runner.info.kv_bytes_per_token == layers * 2 * heads * numbers
    assert (plan.kv_blocks, plan.max_context) == (runner.kv.total_blocks, runner.info.max_context)


@pytest.mark.parametrize(
    ("family", "kind", "attention", "isa"),
    [
        *(("qwen3", kind, "auto", None) for kind in DTYPES),
        *(("qwen3", kind, "auto", "avx2") for kind in ("bfloat16", "int8", "int4", "stored")),
        *(("qwen3", kind, "torch", None) for kind in ("bfloat16", "int8")),
        *(("glm4", "float32", "torch", None), ("gemma2", "float32", "auto", None)),
        *(("gemma3", "bfloat16", "auto", isa) for isa in (None, "avx2")),
        *(("qwen3_5", kind, "auto", None) for kind in ("bfloat16", "float32")),
    ],
)
def test_a_step_takes_what_was_planned(checkpoint_of, tmp_path, monkeypatch, family, kind, attention, isa):  # noqa: PLR0917
    """A prompt of the longest length in two steps of the largest size, by engines that are new: their buffers grow.
    Among the families are scores that are written out, two rotations, windows, norms behind each half of a layer."""
    if isa is not None:
        monkeypatch.setenv(ISA_VARIABLE, isa)
    context, tokens = 1024, 512
    folder = in_q8_0(tmp_path) if kind == "stored" else checkpoint_of(family, dtype=torch.bfloat16, **SHAPE)
    config = settings(folder, kind, attention=attention, max_context=context)
    output = OutputSpec(Positions.LAST, FullLogits(RowDType.F32))
    prompt = np.random.default_rng(0).integers(1, 900, size=context).astype(np.int32)

    def steps(runner: Any) -> None:
        with runner.context():
            runner.forward(Step((Span(1, prompt[:tokens], 0, output, create=True),)))
            runner.forward(Step((Span(1, prompt[tokens:], tokens, output),)))
            if family == "qwen3_5":  # and of spans that are fed token by token, in one call
                each, count = STEP_TOKENS, ONE_CALL_TOKENS // STEP_TOKENS
                made = [Span(2 + n, prompt[:each], 0, OutputSpec(Positions.NONE), create=True) for n in range(count)]
                runner.forward(Step(tuple(made)))

    runner = build_runner(config)
    left, most = of_torch(lambda: steps(runner))
    plan = planned(config, tokens).activations_bytes

    def fits():
        """What is allocated besides is what the kernels keep, and what threads of other tests allocate."""
        runner, before = build_runner(config), allocated()
        steps(runner)
        taken = most - left + allocated() - before
        print(plan, most, left, allocated() - before)
        return abs(plan - taken) <= 0.03 * taken

    assert any(fits() for _ in range(3))


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral"])
def test_a_step_of_transformers_takes_no_more_than_the_estimate(family, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 1000, "max_position_embeddings": CONTEXT}
    config = settings(make_family_checkpoint(tmp_path, family, **sizes), "float32", model_backend="hf")
    runner = build_runner(config)
    span = Span(1, np.arange(TOKENS, dtype=np.int32) % 900, 0, OutputSpec(Positions.LAST), create=True)
    with runner.context():
        left, most = of_torch(lambda: runner.forward(Step((span,))))
    plan = planned(config)
    assert plan.estimated
    assert 0.3 * plan.activations_bytes < most - left <= plan.activations_bytes


def test_a_server_gives_its_cache_the_share_that_was_planned(folder, monkeypatch):
    config, free = settings(folder, kv_blocks=None, max_sequences=1 << 20), 300 << 20
    plan = planned(config, memory=free)
    monkeypatch.setattr(build, "free_memory", lambda device: free - plan.weights_bytes)
    runner = build_runner(config)
    assert runner.kv.total_blocks == plan.kv_blocks == (free - plan.weights_bytes) // 4 // (16 * 1024)
    assert dict(runner.device.choices)[f"kv_blocks={plan.kv_blocks} (75 MiB)"] == plan.reason
    assert planned(config, memory=1 << 40).kv_bytes <= CPU_MOST + 16 * 1024


# --- what a server says before it loads -------------------------------------------------------------------------------


def test_a_server_tells_its_plan_before_it_loads(folder, logs):
    config = settings(folder)
    build_runner(config, lambda done, total: logs.append({"event": "read"}), largest=LargestStep())
    assert [each["event"] for each in logs][:2] == ["memory_planned", "read"]
    plan = planned(config)
    assert logs[0]["weights_bytes"] == plan.weights_bytes and logs[0]["kv_bytes"] == plan.kv_bytes
    assert logs[0]["activations_bytes"] > 0


@pytest.mark.parametrize("free", [1000, 2_100_000])
def test_weights_that_do_not_fit_are_refused_before_they_are_read(folder, monkeypatch, logs, free):
    """With two million bytes the weights fit and nothing else does: a warning."""
    monkeypatch.setattr(build, "free_memory", lambda device: free)
    if free == 1000:
        read = Mock()
        with pytest.raises(InvalidRequest, match=r"weights, .* do not fit 0\.00 MiB; nor would a smaller"):
            build_runner(settings(folder), read, largest=LargestStep())
        read.assert_not_called()
    else:
        build_runner(settings(folder), largest=LargestStep())
        assert [each["event"] for each in logs][:2] == ["memory_planned", "memory_plan_tight"]


def test_memory_that_is_not_known_refuses_nothing(folder, monkeypatch):
    monkeypatch.setattr(build, "free_memory", lambda device: 0)
    assert build_runner(settings(folder), largest=LargestStep()).kv.total_blocks == BLOCKS


# --- what would fit ---------------------------------------------------------------------------------------------------


def test_what_fits_to_the_byte_fits(folder):
    total = planned(settings(folder)).total_bytes
    assert planned(settings(folder), memory=total).fits
    assert not planned(settings(folder), memory=total - 1).fits


def test_a_cache_that_is_too_large_is_told_one_that_fits(folder):
    config = settings(folder)
    whole = planned(config)
    memory = whole.total_bytes - 100 * 16 * 1024
    plan = planned(config, memory=memory)
    blocks = BLOCKS - 100
    assert plan.alternative == f"--kv-blocks {blocks} --max-context {blocks * 16}"
    assert plan.advice.endswith(f"{plan.alternative} would fit")
    assert planned(replace(config, kv_blocks=blocks), memory=memory).fits


def test_a_step_that_is_too_large_is_told_one_that_fits(folder):
    config = settings(folder, kv_blocks=64)
    memory = planned(config, tokens=512).total_bytes
    assert planned(config, tokens=1024, memory=memory).alternative == "--max-batch-tokens 512"


def test_weights_that_are_too_large_are_told_smaller_ones(folder):
    made_or_skip(ByteFactory)
    wide = settings(folder, "float32", kv_blocks=16)
    narrow, rounded, least = (
        planned(settings(folder, kind, kv_blocks=16), tokens=16) for kind in ("bfloat16", "int8", "int4")
    )
    assert planned(wide, tokens=16, memory=narrow.total_bytes).alternative == "--dtype bfloat16"
    told = planned(settings(folder, kv_blocks=16), tokens=16, memory=rounded.total_bytes)
    assert told.alternative == "--quantize int8"
    told = planned(settings(folder, kv_blocks=16), tokens=16, memory=least.total_bytes)
    assert told.alternative == "--quantize int4"
    assert planned(wide, tokens=16, memory=rounded.total_bytes).alternative == "--dtype bfloat16 --quantize int8"


def test_a_context_that_does_not_fit_the_cache_is_told(folder):
    plan = planned(settings(folder, kv_blocks=64))
    assert plan.fits and plan.full_sequences == 0.5
    assert plan.advice.endswith("it would with --max-context 1024, or 1.00 MiB more of cache")
    assert planned(settings(folder, kv_blocks=64, max_context=1024)).advice == ""


def test_a_sequence_needs_the_blocks_of_its_window_and_of_a_step(tmp_path):
    folder = make_checkpoint(tmp_path, "mistral", sliding_window=10)
    plan = planned(settings(folder, kv_blocks=8, block_size=16), tokens=16)
    assert plan.sequence_blocks == (10 - 1 + 32 + 16 + 14) // 16 + 1 < plan.max_context // 16
    assert plan.full_sequences > 1 and plan.advice == ""


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(command):
    """`ferrum-rpc plan`."""
    return partial(command, "plan")


def test_it_takes_every_setting_of_serve():
    _, commands = cli.build_parser()
    assert set(commands["serve"].flags()) | {"--memory", "--json"} == set(commands["plan"].flags())


def test_programs_get_every_number(folder, plan):
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--kv-blocks", 64, "--max-batch-tokens", 512, "--json")
    status, out, _ = plan(folder, "--memory", "64MiB", *flags)
    facts = json.loads(out)
    assert status == 0 and facts["fits"] is True
    texts = "architecture device dtype quantize kv_dtype reason alternative advice"
    sizes = "memory weights adapters activations sampling reserve kv state slots total all"
    counts = "ranks step_tokens kv_bytes_per_token block_size kv_blocks kv_tokens max_context "
    counts += "state_slots sequence_blocks"
    assert {name: type(value) for name, value in facts.items()} == {
        **dict.fromkeys(texts.split(), str),
        **dict.fromkeys([*(f"{each}_bytes" for each in sizes.split()), *counts.split()], int),
        **{"full_sequences": float, "fits": bool, "estimated": bool, "others": dict},
    }
    expected = {"memory_bytes": 64 << 20, "kv_blocks": 64, "kv_tokens": 1024, "step_tokens": 512, "device": "cpu"}
    assert expected.items() <= facts.items()


def test_a_rank_is_planned_where_several_share_the_model(folder, plan):
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--kv-blocks", 64, "--json")
    one, two = (json.loads(plan(folder, *flags, *more)[1]) for more in ((), ("--tensor-parallel", "2")))
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["kv_bytes_per_token"] == 2 * two["kv_bytes_per_token"]
    assert one["weights_bytes"] / 2 <= two["weights_bytes"] < 0.6 * one["weights_bytes"]
    assert one["others"]["ranks"] == 0 and one["all_bytes"] == one["total_bytes"]
    assert two["others"]["ranks"] == 1 and two["all_bytes"] == 2 * two["total_bytes"] + PROCESS_BYTES


@pytest.mark.parametrize("asked", ["plan", "doctor"])
def test_ranks_that_cannot_be_are_refused_as_serve_does(asked, folder, command, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    status, _, said = command(asked, folder, "--tensor-parallel", "2")
    assert status == 1 and "WORLD_SIZE is 3" in said


@pytest.mark.parametrize(
    "cut", [{"tensor_parallel": 4}, {"pipeline_parallel": 2}, {"tensor_parallel": 2, "pipeline_parallel": 2}]
)
def test_all_ranks_of_this_machine_are_planned(folder, cut):
    """Stages differ: the last has the head."""
    config = settings(folder, **cut)
    plan = planned(config)
    each = [choose(config, rank=rank).source.weight_bytes() for rank in range(config.ranks)]
    assert plan.weights_bytes == each[0]
    assert sum(each[1:]) <= plan.others.weights_bytes < 1.02 * sum(each[1:]), "the vocabulary's last part is smaller"
    if config.tensor_parallel == 1:
        whole = planned(settings(folder)).weights_bytes
        source = choose(config).source
        table = source.packed * 2 * source.spec.vocab_size * source.spec.hidden_size  # which a tied head is, alone
        assert plan.weights_bytes + plan.others.weights_bytes == whole + table, "each weight is in one stage"
    assert plan.fits and planned(config, memory=plan.all_bytes).fits
    tight = planned(config, memory=plan.all_bytes - 1)
    assert not tight.fits and tight.total_bytes < tight.memory_bytes
    assert f"with the other {config.ranks - 1} rank" in tight.advice
    one = make_plan(choose(config), LargestStep(TOKENS, 1), plan.total_bytes, here=1)
    assert one.fits and one.all_bytes == one.total_bytes


def test_a_cache_without_a_size_is_shared_out(folder):
    """As `serve` does, of what all ranks leave."""
    config = settings(folder, tensor_parallel=2, kv_blocks=None, max_sequences=1 << 20)
    plan = planned(config, memory=2 << 30)
    left = (plan.memory_bytes - 2 * plan.weights_bytes - PROCESS_BYTES) // 2
    assert plan.kv_blocks == left // 4 // (plan.block_size * plan.kv_bytes_per_token)


@pytest.mark.parametrize(
    ("variables", "refused"),
    [({}, True), ({"WORLD_SIZE": "2"}, False), ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, True)],
    ids=["started", "elsewhere", "torchrun"],
)
def test_ranks_that_do_not_fit_are_not_started(folder, variables, refused, monkeypatch):
    """The weights of all on this machine, as far as it is known who is here."""
    of_rank_0 = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if variables else {}
    for name, value in {**of_rank_0, **variables}.items():
        monkeypatch.setenv(name, value)
    config = settings(folder, tensor_parallel=2)
    weights = planned(config).weights_bytes
    monkeypatch.setattr(build, "free_memory", lambda device: 2 * weights - 1)
    monkeypatch.setattr(build, "build_shared", lambda *_, **__: "started")
    if refused:
        with pytest.raises(InvalidRequest, match="with the other 1 rank here"):
            build_runner(config, largest=LargestStep(TOKENS, 1))
    else:
        assert build_runner(config, largest=LargestStep(TOKENS, 1)) == "started"


def test_people_get_a_table_and_what_would_fit(folder, plan):
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--memory", "16MiB")
    status, out, _ = plan(folder, *flags, "--kv-memory", "1MiB")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[:4]] == ["memory", "weights", "activations", "kv"]
    assert "(bfloat16)" in out
    assert "(int8)" in plan(folder, *flags, "--kv-memory", "1MiB", "--kv-dtype", "int8")[1]
    status, out, _ = plan(folder, *flags, "--kv-memory", "1KiB", "--max-batch-tokens", 16)
    last = "kv memory of 1024 bytes holds no block of 16384 bytes; raise --kv-memory"
    assert (status, out.splitlines()[-1]) == (2, last)
    assert "does not fit" not in out
    assert plan(folder, "--kv-memory", "many")[:2] == (2, ""), "a wrong flag prints nothing"
    status, out, _ = plan(folder, *flags, "--kv-memory", "16MiB", "--max-batch-tokens", 1024)
    assert status == 2
    assert "it does not fit" in out and "--kv-blocks" in out.splitlines()[-1] and out.endswith("would fit\n")


def test_a_gpu_need_not_be_here(folder, plan, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, error = plan(folder, "--device", "cuda")
    assert status == 1 and "--memory 80GiB" in error
    status, out, _ = plan(folder, "--device", "cuda", "--memory", "80GiB", "--json")
    facts = json.loads(out)
    assert (status, facts["device"], facts["dtype"]) == (0, "cuda", "bfloat16")
    parts = ("weights_bytes", "activations_bytes", "sampling_bytes", "reserve_bytes", "kv_bytes")
    assert all(facts[each] > 0 for each in parts) and facts["total_bytes"] == sum(facts[each] for each in parts)
    table = plan(folder, "--device", "cuda", "--memory", "80GiB")[1].splitlines()
    assert {"sampling", "reserve"} <= {line.split()[0] for line in table}
    assert facts["weights_bytes"] < planned(settings(folder)).weights_bytes  # a tied head is the embedding there
    status, out, _ = plan(folder, "--device", "cuda", "--memory", "80GiB", "--json", "--kv-dtype", "fp8")
    exact, rounded = facts["kv_bytes_per_token"], json.loads(out)["kv_bytes_per_token"]
    assert status == 0 and rounded / exact == (64 + 4) / (2 * 64)
    status, _, error = plan(folder, "--device", "cuda", "--memory", "80GiB", "--quantize", "int8")
    assert status == 1 and "not on cuda" in error


def test_the_identity_model_has_a_cache_alone(plan):
    status, out, _ = plan("identity", "--memory", "1GiB", "--device", "cpu", "--json")
    facts = json.loads(out)
    assert (status, facts["weights_bytes"], facts["kv_bytes_per_token"]) == (0, 0, 512)


@pytest.mark.parametrize("broken", ["gone", "config that lies"])
def test_what_cannot_be_served_is_told_in_a_line(folder, tmp_path, plan, broken):
    path = tmp_path / "model"
    if broken == "config that lies":
        shutil.copytree(folder, path)
        configure(path, intermediate_size=1 << 40)
    status, out, error = plan(path, "--device", "cpu", "--memory", "1GiB")
    assert (status, out) == (1, "")
    assert error.startswith("ferrum-rpc plan: ") and error.count("\n") == 1


@pytest.mark.parametrize("memory", ["many", "-1GiB", "0"])
def test_a_memory_that_is_none_is_refused(folder, plan, memory):
    status, _, error = plan(folder, f"--memory={memory}")
    assert status == 2 and error.startswith("ferrum-rpc plan: memory: ")
