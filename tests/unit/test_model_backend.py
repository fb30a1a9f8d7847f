"""Who runs a model folder, how it is chosen, and what is refused before and while weights are read."""

from __future__ import annotations

import random
import re
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.client import Capability, ExecutorClient, FullLogits
from ferrum_rpc.client.transfer import read_layout
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly import hf_source
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.assembly.size import LargestStep, make_plan
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.hf.describe import HfSpec, _is_window, describe
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.support.checkpoints import configure, rewrite
from tests.support.hf_families import make_family, make_family_checkpoint
from tests.support.inside import module_of
from tests.support.listed_kv_heads import LISTED, make_deci
from tests.support.serving import serve_model
from tests.support.wiring import pb


@pytest.fixture(scope="module")
def native_folder(checkpoint_of):
    return checkpoint_of()


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    """Of a family that the native decoder will hardly ever have."""
    return make_family_checkpoint(tmp_path_factory.mktemp("other"), "gpt_neox")


@pytest.fixture
def folder(other_folder, tmp_path):
    """A copy to be changed."""
    return shutil.copytree(other_folder, tmp_path, dirs_exist_ok=True)


def settings(folder: Path, **options: Any) -> ModelSettings:
    return ModelSettings(str(folder), **{"device": "cpu", "kv_blocks": 16, "block_size": 4} | options)


@pytest.fixture
def run(command):
    """`plan` or `doctor` of a folder: the exit status, the output and the errors."""
    return lambda name, folder, *flags: command(name, folder, "--device", "cpu", "--kv-blocks", "16", *flags)


def reason(folder: Path, choice: str, **options: Any) -> str:
    return dict(choose(settings(folder, **options)).reasons)[choice]


def test_what_the_native_decoder_serves_it_serves(native_folder):
    assert reason(native_folder, "model=native")
    assert reason(native_folder, "model=native", model_backend="native") == "requested"
    assert reason(native_folder, "model=hf", model_backend="hf") == "requested"


def test_what_it_does_not_serve_transformers_runs_and_the_reason_is_told(other_folder):
    why = reason(other_folder, "model=hf")
    assert why.startswith("native: architectures: 'GPTNeoXForCausalLM' is not supported")
    with pytest.raises(NotSupported, match="'GPTNeoXForCausalLM' is not supported"):
        choose(settings(other_folder, model_backend="native"))
    runner = build_runner(settings(other_folder))
    assert (runner.info.architecture, runner.info.folder) == ("GPTNeoXForCausalLM", str(other_folder))
    assert "differ by" in dict(runner.device.choices)["parity"]
    assert runner.device.exact_span_tokens == 0


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_code_of_a_checkpoint_is_ignored_and_that_is_told(native_folder, tmp_path, backend):
    shutil.copytree(native_folder, tmp_path, dirs_exist_ok=True)
    configure(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (tmp_path / "modeling.py").write_text("raise AssertionError")
    assert reason(tmp_path, "auto_map=ignored", model_backend=backend) == "code that a checkpoint brings is never run"


def test_without_transformers_the_error_says_what_to_install(other_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NotSupported, match=r"is not supported; .*; nor through .*pip install '\.\[hf\]'"):
        choose(settings(other_folder))
    with pytest.raises(NotSupported, match=r"^transformers is not installed"):
        choose(settings(other_folder, model_backend="hf"))


def test_what_neither_serves_has_both_reasons(folder):
    configure(folder, model_type="mamba", architectures=["MambaForCausalLM"])
    both = r"'MambaForCausalLM' is not supported.*keeps a state in addition to keys"
    with pytest.raises(NotSupported, match=both) as caught:
        choose(settings(folder))
    assert caught.value.field == "architectures"


@pytest.mark.parametrize("name", ["plan", "doctor"])
def test_models_with_a_state_are_refused_by_name(name, run, tmp_path):
    state = "it keeps a state in addition to keys and values"
    make_family_checkpoint(tmp_path, "jamba", attn_layer_period=2, attn_layer_offset=1)
    ours = "architectures: 'JambaForCausalLM' is not supported"
    for backend, said in (("auto", f"^{ours}.*; nor through transformers: .*{state}"), ("native", ours), ("hf", state)):
        for serve in (choose, build_runner):
            with pytest.raises(NotSupported, match=said):
                serve(settings(tmp_path, model_backend=backend))
    status, _, errors = run(name, tmp_path)
    assert status == 1 and ours in errors


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"pipeline_parallel": 2}, "in stages of a pipeline"),
        ({"tensor_parallel": 2, "device": "cuda"}, "by several ranks on cuda"),
    ],
)
def test_what_is_missing_for_states_is_refused_by_name(options, what, checkpoint_of):
    asked = replace(settings(checkpoint_of("qwen3_5")), **options)
    with pytest.raises(NotSupported, match=f"^Qwen3_5ForCausalLM has recurrent layers, and is not served {what} yet"):
        choose(asked, elsewhere=asked.device == "cuda")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"kv_dtype": "int8"}, "with a cache in int8"),
        ({"tensor_parallel": 2, "device": "cuda"}, "by several ranks on cuda"),
    ],
)
def test_what_is_missing_for_latents_is_refused_by_name_or_left_to_transformers(options, what, checkpoint_of):
    said = f"DeepseekV3ForCausalLM has latent attention, and is not served {what} yet"
    asked = replace(settings(checkpoint_of("deepseek_v3")), **options)
    with pytest.raises(NotSupported, match=f"^{said}"):
        choose(replace(asked, model_backend="native"), elsewhere=asked.device == "cuda")
    if "int8" in what:
        assert dict(choose(asked).reasons)["model=hf"] == f"native: {said}"


def test_a_model_of_the_same_family_without_a_state_is_served_as_before(tmp_path):
    make_family_checkpoint(tmp_path, "qwen3_5_text")
    reasons = dict(choose(settings(tmp_path)).reasons)
    assert reasons["model=hf"] == "native: layer_types: a model without linear attention is not supported"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"hidden_act": "swoosh"}, "hidden_act 'swoosh' is not supported; .* nor through .* has no 'swoosh'"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures: .* not supported.* nor .* a language"),
        ({"surprise": 3}, "surprise: 3 is not known here"),  # and transformers would not look at it
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"architectures": "gone", "model_type": "gone"}, "architectures is missing"),
    ],
)
def test_a_wrong_configuration_of_a_native_family_keeps_its_error(native_folder, tmp_path, changes, error):
    shutil.copytree(native_folder, tmp_path, dirs_exist_ok=True)
    configure(tmp_path, **changes)
    with pytest.raises((InvalidRequest, NotSupported), match=f"^{error}"):
        choose(settings(tmp_path))


@pytest.mark.parametrize(
    ("changes", "kind", "error"),
    [
        ({"model_type": "gone"}, InvalidRequest, "model_type"),
        ({"model_type": "unheard_of", "auto_map": {"AutoConfig": "x.Y"}}, NotSupported, "code .* is never run"),
        ({"model_type": "t5"}, NotSupported, "is not a decoder"),
        ({"quantization_config": {"quant_method": "hqq"}}, NotSupported, "quant_method: 'hqq' is not supported"),
        ({"num_hidden_layers": 10**9}, InvalidRequest, "num_hidden_layers is 1000000000, more than 4096"),
        ({"hidden_act": "swoosh"}, InvalidRequest, r"^hidden_act: transformers [\d.]+ has no 'swoosh'$"),
        ({"architectures": ["GPTNeoXForQuestionAnswering"]}, NotSupported, "language model; .* GPTNeoXForCausalLM is"),
        ({"architectures": ["GPTNeoXModel"]}, NotSupported, "'GPTNeoXModel' is not a language model"),
        ({"num_attention_heads": 5}, InvalidRequest, "transformers refuses it: .* not divisible"),
        ({"hidden_size": "wide"}, InvalidRequest, "transformers refuses it"),
        ({"layer_norm_eps": {"__float__": "Infinity"}}, InvalidRequest, "^layer_norm_eps is inf"),
        ({"some_limit": [{"__float__": "NaN"}]}, InvalidRequest, "^some_limit is nan"),
        ({"num_hidden_layers": 3}, InvalidRequest, r"12 missing \(gpt_neox.layers.2.attention"),
        ({"hidden_size": 1 << 20}, InvalidRequest, r"misshapen \(gpt_neox"),
    ],
)
def test_a_configuration_that_is_wrong_is_refused_before_anything_is_allocated(folder, changes, kind, error):
    configure(folder, **changes)
    with pytest.raises(kind, match=error):
        choose(settings(folder, model_backend="hf"))


FEW = {"vocab_size_per_layer_input": 50}
HALF = {"quant_method": "compressed-tensors", "format": "int-quantized"}
ODD: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "fewer KV heads than latents": ("deepseek_v2", {"num_key_value_heads": 2}, {}, "DeepseekV2.* be run .* must match"),
    "the same of MiniCPM": ("minicpm3", {"num_key_value_heads": 2}, {}, "MiniCPM3.* cannot be run"),
    "values wider than keys": ("minicpm3", {"v_head_dim": 24}, {}, "keys and values .* wide"),
    "more experts than there are": ("olmoe", {"num_experts_per_tok": 8}, {}, "k not in range"),
    "the same of Qwen3": ("qwen3_moe", {"num_experts_per_tok": 8}, {}, "num_experts_per_tok 8 exceeds num_experts 4"),
    "experts of an odd width": ("qwen2_moe", {"moe_intermediate_size": 3}, {}, ""),
    "the same of gpt-oss": ("gpt_oss", {"intermediate_size": 3}, {}, ""),
    "a table of fewer rows than tokens": ("gemma4_text", FEW, {}, "128 tokens.* in .*per_layer, which has 50 rows"),
    "a table that is not asked for the others": ("gemma3n_text", FEW, {}, ""),
    "odd heads": ("gpt_oss", {"head_dim": 6}, {}, ""),
    "KV heads that do not divide": ("qwen3", {}, {"num_key_value_heads": 3}, "must be a multiple"),
    "an odd head": ("qwen3", {}, {"head_dim": 7}, "head_dim"),
    "a rotation that nobody has": ("olmo", {}, {"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
    "a rotation of a length": ("olmo", {}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ""),
    "a rotation that lacks a list": ("olmo", {}, {"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
    "layers of another kind": ("olmo3", {}, {"layer_types": ["full_attention", "linear_attention"]}, "linear_att"),
    "too few layers listed": ("olmo3", {}, {"layer_types": ["full_attention"]}, "num_hidden_layers"),
    "no context": ("olmo", {}, {"max_position_embeddings": 0}, "max_position_embeddings"),
    "an unknown quantization": ("qwen3", {}, {"quantization_config": {"quant_method": "hqq"}}, "quant_method: 'hqq'"),
    "half a quantization": ("qwen3", {}, {"quantization_config": HALF}, "config_groups"),
}


EXAMINED = ("values wider than keys", "odd heads", "KV heads that do not divide", "half a quantization")
"""One of each kind: a doctor takes most of a second, and refuses what a plan refuses."""


@pytest.mark.parametrize("case", ODD)
def test_what_serve_refuses_plan_and_doctor_refuse_in_the_same_words(case, run, tmp_path):
    family, options, changes, match = ODD[case]
    make_family_checkpoint(tmp_path, family, **options)
    configure(tmp_path, **changes)
    said, codes = set(), set()
    for name in ("plan", "doctor") if case in EXAMINED else ("plan",):
        status, _, errors = run(name, tmp_path, "--block-size", "4")
        codes.add(status)
        said.add(errors.strip().rpartition(f"ferrum-rpc {name}: ")[2])
    try:
        build_runner(settings(tmp_path))
    except (InvalidRequest, NotSupported) as refusal:
        assert codes == {1} and said == {f"{refusal.reason}: {refusal.message}"}
        assert match and re.search(match, refusal.message)
    else:
        assert codes == {0} and not match


def test_plan_and_doctor_leave_folders_for_caches_to_serve(native_folder, run, tmp_path):
    for name in ("plan", "doctor"):
        assert run(name, native_folder, "--kv-tier-dir", tmp_path / "tier")[0] == 0
        assert not (tmp_path / "tier").exists()


@pytest.mark.parametrize("wrong", ["missing", "unexpected", "misshapen"])
def test_tensors_that_do_not_fit_are_refused_by_name_from_the_headers(folder, wrong):
    name = "gpt_neox.layers.1.attention.dense." + ("extra" if wrong == "unexpected" else "weight")
    if wrong == "missing":
        rewrite(folder, lambda tensors: tensors.pop(name))
    else:
        rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(InvalidRequest, match=rf"1 {wrong} \({name}"):
        choose(settings(folder))


@pytest.mark.parametrize("wrong", ["missing", "misshapen"])
def test_experts_that_do_not_fit_are_refused_from_the_headers(tmp_path, wrong):
    checkpoint = Checkpoint.open(make_family_checkpoint(tmp_path, "mixtral"))
    entries = dict(checkpoint.entries)
    name = next(each for each in entries if ".experts.2." in each)
    entries[name] = replace(entries[name], shape=(3, 3))
    if wrong == "missing":
        del entries[name]
    with pytest.raises(InvalidRequest, match="do not fit MixtralForCausalLM"):
        hf_source.describe_checkpoint(replace(checkpoint, entries=entries))


@pytest.mark.parametrize("wrong", ["not finite", "too large for it"])
def test_numbers_that_are_none_are_refused_by_name(folder, wrong):
    name = "gpt_neox.layers.1.attention.dense.weight"
    value, dtype = (float("nan"), "float32") if wrong == "not finite" else (1e38, "float16")
    rewrite(folder, lambda tensors: tensors[name][1, 2].fill_(value))
    with pytest.raises(InvalidRequest, match=name):
        build_runner(settings(folder, dtype=dtype))


def test_weights_are_not_rounded(other_folder):
    with pytest.raises(NotSupported, match="which transformers runs, cannot be quantized"):
        choose(settings(other_folder, quantize="int8"))


@pytest.mark.parametrize("what", ["scale", "window"])
def test_a_family_that_a_description_gets_wrong_does_not_start(other_folder, monkeypatch, what):
    def misread(data: Any) -> HfSpec:
        spec = describe(data)
        wrong = {"scale": 2.0} if what == "scale" else {"window": 3}
        return replace(spec, layers=tuple(replace(each, **wrong) for each in spec.layers))

    monkeypatch.setattr(hf_source, "describe", misread)
    with pytest.raises(NotSupported, match="over a paged cache its logits of 12 tokens differ"):
        build_runner(settings(other_folder))


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"dtype": "float16"}], ids=str)
def test_other_types_start_too(tmp_path, options):
    folder = make_family_checkpoint(tmp_path, "mixtral")
    runner = build_runner(settings(folder, model_backend="hf", **options))
    assert "parity" in dict(runner.device.choices)


def test_all_of_its_weights_and_its_cache_are_planned(other_folder, run):
    parts = choose(settings(other_folder))
    plan = make_plan(parts, LargestStep(64, 4), 1 << 30)
    model = build_runner(settings(other_folder)).model
    held = {id(each): each.nbytes for each in [*module_of(model).parameters(), *module_of(model).buffers()]}
    assert plan.weights_bytes == sum(held.values())
    assert plan.architecture == "GPTNeoXForCausalLM"
    assert plan.activations_bytes > 0
    assert plan.fits
    status, out, _ = run("plan", other_folder)
    assert status == 0 and "GPTNeoXForCausalLM, float32" in out


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text (shared K and V)"])
def test_layers_that_share_keys_and_values_keep_none(tmp_path, family):
    runner = build_runner(settings(make_family_checkpoint(tmp_path, family)))
    assert "2 of 4 layers attend over" in dict(runner.device.choices)["shared_kv=stored once"]
    keys = runner.store.keys
    assert [keys[2].data_ptr(), keys[3].data_ptr()] == [keys[0].data_ptr(), keys[1].data_ptr()]
    held = sum(each.nbytes for each in runner.store.buffers)
    assert held == (runner.kv.total_blocks + 1) * 4 * runner.info.kv_bytes_per_token


GLOBAL = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_attention_heads": 4, "num_hidden_layers": 4}
GLOBAL |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 24}
"""Of a Gemma 4 whose layers without a window have fewer and wider heads: 1 of 24, and 2 of 8."""


SHARED = "gemma4_text (shared K and V)"
UNLIKE: dict[str, tuple[str, Callable[[], Any], int, int]] = {
    "gemma4_text": ("hf", lambda: make_family("gemma4_text", **GLOBAL), 2 * 2 * (2 * 8 + 1 * 24) * 4, 4),
    "deci": ("native", make_deci, 2 * sum(LISTED) * 16 * 4, 4),
    SHARED: ("hf", lambda: make_family(SHARED), 2 * (2 * 8 + 2 * 16) * 4, 2),
    "gemma3n_text": ("hf", lambda: make_family("gemma3n_text"), 2 * 2 * (2 * 8) * 4, 0),
}
"""Models whose layers do not keep the same: the backend, what makes one of transformers, bytes of a token in float32,
and the layers that a layout lists."""


@pytest.mark.parametrize("family", UNLIKE)
async def test_layers_of_unlike_widths_are_shared_cut_parked_and_moved(run, tmp_path, family):
    """With the rows of transformers wherever the sequence is, and nothing of it computed twice."""
    (backend, make, token_bytes, listed), folder = UNLIKE[family], tmp_path / "model"
    model = make()
    model.save_pretrained(folder)
    status, out, _ = run("plan", folder, "--dtype", "float32")
    assert status == 0 and f"{token_bytes:,} bytes" in out
    config = settings(folder, dtype="float32", kv_blocks=40)
    prompt, file = [*range(5, 40)], tmp_path / "file"
    with torch.inference_mode():
        truth = model(input_ids=torch.tensor([[*prompt, 7]])).logits[0, -1].numpy()

    async def rows(sequence: Any) -> np.ndarray[Any, Any]:
        """Of one more token, which is taken back."""
        found = (await sequence.decode(7, FullLogits())).logits
        await sequence.truncate(len(prompt))
        return found

    def right(found: np.ndarray[Any, Any]) -> bool:
        return bool(np.abs(found - truth).max() / truth.std() < 1e-5)

    here = replace(config, kv_tier_dir=tmp_path / "tier")
    async with serve_model(here, park_dir=tmp_path / "parked") as served, ExecutorClient(served.target) as client:
        info = await client.info()
        assert f"model={backend}" in dict(info.device.choices)
        assert info.model.kv_bytes_per_token == token_bytes
        assert {Capability.KV_TRANSFER, Capability.PARK} <= info.capabilities
        assert Capability.KV_TRANSPORT_NIXL not in info.capabilities
        sequence, other = client.sequence(), client.sequence()
        await sequence.prefill(prompt)
        again = await other.prefill(prompt)
        assert again.cached_tokens == 32
        assert right(await rows(sequence)) and right(await rows(other))
        [forked] = await sequence.fork()
        await sequence.truncate(21)
        await sequence.prefill(prompt[21:])
        assert right(await rows(forked)) and right(await rows(sequence))
        await sequence.export_to(file)
        told = [*(await served.executor.GetInfo(pb.GetInfoRequest())).kv_cache.tensors]
        assert told == [*read_layout(file).tensors] and sum(each.layers for each in told) == 2 * listed
        await other.park()
        assert right(await rows(other))
        async with serve_model(config) as second, ExecutorClient(second.target) as there:
            direct, brought = there.sequence(), there.sequence()
            await forked.move_to(direct)
            assert right(await rows(direct))
            await brought.import_from(file)  # of which this server has most blocks already
            assert right(await rows(brought))
            assert second.server.state.engine.counters.tokens == 2  # those of `rows`


async def test_a_cache_of_latents_is_shared_parked_and_moved(checkpoint_of, run, tmp_path):
    folder = checkpoint_of("deepseek_v2")
    assert f"{3 * 48 * 4} bytes" in run("plan", folder)[1]
    config = settings(folder, kv_tier_dir=tmp_path / "tier")
    prompt, file = [*range(5, 40)], tmp_path / "file"
    async with serve_model(config, park_dir=tmp_path / "parked") as served, ExecutorClient(served.target) as client:
        info = await client.info()
        assert (info.model.kv_bytes_per_token, info.model.kv_heads, info.model.head_dim) == (576, 1, 48)
        assert {Capability.KV_TRANSFER, Capability.PARK} <= info.capabilities
        assert Capability.KV_TRANSPORT_NIXL not in info.capabilities
        sequence, other = client.sequence(), client.sequence()
        first, again = await sequence.prefill(prompt), await other.prefill(prompt)
        assert again.cached_tokens == 32 and again.token == first.token
        await sequence.export_to(file)
        logits = (await sequence.decode(7, FullLogits())).logits
        await other.park()
        assert (await other.decode(7, FullLogits())).logits == pytest.approx(logits, abs=1e-4)
    async with serve_model(settings(folder)) as served, ExecutorClient(served.target) as client:
        moved = client.sequence()
        await moved.import_from(file)
        assert ((await moved.decode(7, FullLogits())).logits == logits).all()


async def test_a_hybrid_family_that_has_attention_alone_is_examined_and_served(run, tmp_path):
    folder = make_family_checkpoint(tmp_path, "granitemoehybrid")
    assert '"__float__": "Infinity"' in (folder / "config.json").read_text()
    status, out, _ = run("doctor", folder)
    assert status == 0 and "64 rows in float32" in out
    async with serve_model(settings(folder)) as served, ExecutorClient(served.target) as client:
        assert (await client.info()).model.architecture == "GraniteMoeHybridForCausalLM"
        assert not (await served.executor.GetInfo(pb.GetInfoRequest())).kv_cache.tensors
        sequence = client.sequence()
        await sequence.prefill([5, 6, 7, 8, 9])
        await sequence.decode(4)


def test_experts_are_joined_a_layer_at_a_time(tmp_path, monkeypatch):
    """Else all of them would be in memory twice."""
    folder = make_family_checkpoint(tmp_path, "mixtral", num_hidden_layers=6)
    alive, most = 0, 0
    read = hf_source.FileTensor.__getitem__

    def forget(count: int) -> None:
        nonlocal alive
        alive -= count

    def counted(stored: Any, index: Any) -> torch.Tensor:
        nonlocal alive, most
        tensor = read(stored, index)
        if ".experts." in stored.name:
            alive += tensor.nbytes
            most = max(most, alive)
            weakref.finalize(tensor, forget, tensor.nbytes)
        return tensor

    monkeypatch.setattr(hf_source.FileTensor, "__getitem__", counted)
    model = build_runner(settings(folder, model_backend="hf", dtype="float32")).model
    joined = sum(each.nbytes for name, each in module_of(model).named_parameters() if ".experts." in name)
    assert 0 < most <= joined / 6
    assert alive == 0


def test_a_model_of_any_size_is_described_without_memory_for_it():
    """Gemma 4 with its table for every layer, as it is published."""
    found = describe({"model_type": "gemma4_text", "vocab_size_per_layer_input": 262144})
    assert found.parameters > 5e9
    assert {each.head_dim for each in found.layers} == {256, 512}


VALUES = (None, 0, -1, 3, 10**9, 2**63, 1e308, 0.5, "", "x", [], [1], ["full_attention"], {}, {"a": 1}, True)
KEYS = ("text_config", "layer_types", "rope_scaling", "num_key_value_heads", "id2label", "is_decoder", "fusion_config")


def test_any_configuration_is_served_or_refused(other_folder):
    checkpoint, draw = Checkpoint.open(other_folder), random.Random(5)
    served = 0
    for _ in range(40):
        changes = {draw.choice([*checkpoint.config, *KEYS]): draw.choice(VALUES) for _ in range(draw.choice((1, 1, 2)))}
        try:
            hf_source.describe_checkpoint(replace(checkpoint, config=checkpoint.config | changes))
        except (InvalidRequest, NotSupported):
            continue
        served += 1
    assert 3 < served < 37


def test_the_rule_of_a_mask_is_known_for_what_it_is():
    from transformers import masking_utils

    rules = {
        "causal": masking_utils.causal_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(7),
        "chunks": masking_utils.chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int64)),
        "both ways": masking_utils.bidirectional_mask_function,
    }
    seen = {name: [each for each in (None, 6, 7, 8) if _is_window(rule, each, 64)] for name, rule in rules.items()}
    assert seen == {"causal": [None], "window": [7], "chunks": [], "both ways": []}
