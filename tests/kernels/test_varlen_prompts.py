"""Whole prompts go to another kernel, and only they: what it gets, what the plan leaves to ours, and who chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention import backend, triton_paged, varlen_prompts
from ferrum_rpc.attention.backend import select_backend
from ferrum_rpc.attention.eight_bits import FP8
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.staging import Layout, Staging
from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.attention.varlen_prompts import VarlenAttention, check_prompts, select_prompts
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.selection import Choice, Unsuited
from tests.kernels.test_triton_fused_ops import decoder
from tests.support.cases import TOLERANCE, dense, paged_step
from tests.support.fixtures import PagedModel

SPEC = AttentionSpec(4, 2, 16, 0.25)
BF16 = torch.bfloat16
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Torch:
    """torch's function, by its definition, with what it was called with."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.calls, self.heads = factor, [], []

    def __call__(self, out, query, key, value, ends, key_ends, longest, key_longest, **options):  # noqa: PLR0917
        assert ends is key_ends and longest == key_longest and ends.dtype == torch.int32
        ends = ends.tolist()
        assert max(last - first for first, last in pairwise(ends)) == longest
        behind, ahead = options["window_size"]
        assert ahead == 0 and options["enable_gqa"] == (query.shape[1] != key.shape[1])
        spec = AttentionSpec(*(each.shape[1] for each in (query, key)), query.shape[2], options["scale"])
        spec = replace(spec, window=None if behind < 0 else behind + 1)
        for first, last in pairwise(ends):
            rows = slice(first, last)
            out[rows] = self.factor * dense(spec, query[rows].cpu(), key[rows].cpu(), value[rows].cpu()).to(out)
        self.calls.append(ends)
        self.heads.append((key.clone(), value.clone()))


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(triton_paged, "PROMPT_TOKENS", 8)


@pytest.mark.parametrize("window", [None, 9])
def test_neighbouring_prompts_are_one_call_and_other_spans_stay(device, window):
    spans = [(0, 8), (0, 20), (37, 1), (0, 7), (0, 30), (16, 12), (3, 8)]
    step = paged_step(replace(SPEC, window=window), spans, device=device)
    function = Torch()
    ours = TritonPagedAttention(
        [step.spec], [step.keys], [step.values], processors=1, prompts=VarlenAttention(function)
    )
    capacity, sections = ours.draft(step.geometry)
    assert sum(each.items for [*launches] in capacity.launches.values() for each in launches) == 4
    layout = Layout(tuple((np.int32, size) for size in capacity.sizes))
    staging = Staging(device)
    plan = ours.bind(capacity, staging.open(layout))
    staging.send(layout, sections)
    slots = torch.from_numpy(step.geometry.slots).to(device)
    new = [each.flatten(0, 1)[slots] for each in (step.keys, step.values)]
    assert step.error(ours.attend_new(0, step.query, *new, plan)) <= TOLERANCE[torch.float32]
    assert function.calls == [[0, 8, 28], [0, 30]]
    assert step.error(ours.attend(0, step.query, ours.plan(step.geometry))) <= TOLERANCE[torch.float32]
    assert len(function.calls) == 2, "a plan for `attend` has no prompts"


def test_a_decoder_gives_prompts_the_keys_that_it_has_rotated(device):
    model, function = decoder(device), Torch()
    ours = PagedModel(partial(TritonPagedAttention, processors=1), device, model)
    others = partial(TritonPagedAttention, processors=1, prompts=VarlenAttention(function))
    theirs = PagedModel(others, device, model)
    step = [(0, list(range(3, 11))), (1, [9])]
    torch.testing.assert_close(theirs.step(*step), ours.step(*step), rtol=0, atol=0.05)
    assert function.calls == [[0, 8]] * len(model.attention_specs)
    slots = torch.tensor([48, 49, 50, 51, 44, 45, 46, 47], device=device)  # blocks 12 and 11
    for (key, value), *cached in zip(function.heads, theirs.store.keys, theirs.store.values, strict=True):
        assert torch.equal(key, cached[0].flatten(0, 1)[slots])
        assert torch.equal(value, cached[1].flatten(0, 1)[slots])


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, window=40), replace(SPEC, heads=2), replace(SPEC, head_dim=24)])
def test_a_function_that_computes_right_is_taken(device, spec):
    check_prompts(VarlenAttention(Torch()), device, [spec], BF16)


def test_a_wrong_function_is_refused(device):
    for wrong in (Torch(factor=1.2), Torch(factor=float("nan")), lambda out, *_, **__: None):
        with pytest.raises(Unsuited, match="differ from float32"):
            check_prompts(VarlenAttention(wrong), device, [SPEC], BF16)


@pytest.fixture
def machine(monkeypatch):
    """A GPU of compute capability 9.0 that is a CPU: its torch and its wheels."""
    found = SimpleNamespace(torch=Torch(), wheels={}, wheel=None, capability=(9, 0))
    attention = SimpleNamespace(
        activate_flash_attention_impl=lambda name: setattr(found, "wheel", name),
        restore_flash_attention_impl=lambda: setattr(found, "wheel", None),
    )

    def import_module(name):
        return SimpleNamespace(varlen_attn_out=call) if name.endswith("varlen") and found.torch else attention

    def call(*arguments, **options):
        return (found.wheels[found.wheel] if found.wheel else found.torch)(*arguments, **options)

    modules = {name: module for name, (module, _) in varlen_prompts.WHEELS.items()}
    monkeypatch.setattr(varlen_prompts, "import_module", import_module)
    monkeypatch.setattr(
        varlen_prompts, "find_spec", lambda name: next((1 for each in found.wheels if modules[each] == name), None)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found.capability)
    check = varlen_prompts.check_prompts
    monkeypatch.setattr(
        varlen_prompts, "check_prompts", lambda made, device, specs, dtype: check(made, CPU, specs, dtype)
    )
    return found


def test_the_best_implementation_that_is_installed_and_right_is_activated(machine):
    def select():
        return select_prompts(GPU, [SPEC], BF16, BF16)

    name, reason, made = select()
    assert (name, machine.wheel) == ("FA2", None) and isinstance(made, VarlenAttention)
    assert "FA3: flash_attn_interface is not installed" in reason
    machine.wheels = {"FA4": Torch(), "FA3": Torch()}
    assert (select().name, machine.wheel) == ("FA3", "FA3")
    machine.capability, machine.wheel = (10, 0), None
    name, reason, _ = select()
    assert (name, machine.wheel) == ("FA4", "FA4") and "FA3: not for compute capability 10" in reason
    machine.wheels["FA4"] = Torch(factor=1.2)
    name, reason, _ = select()
    assert (name, machine.wheel) == ("FA2", None) and "FA4: small prompts differ" in reason
    machine.torch = None  # as in torch 2.11
    name, reason, made = select()
    assert (name, made) == ("ours", None) and f"torch {torch.__version__} has no varlen_attn_out" in reason


@pytest.mark.parametrize(
    ("device", "spec", "dtype", "cached", "why"),
    [
        (CPU, SPEC, BF16, BF16, "needs CUDA, not cpu"),
        (GPU, SPEC, BF16, FP8, "8-bit cache"),
        (GPU, SPEC, torch.float32, torch.float32, "float32"),
        (GPU, replace(SPEC, softcap=5.0), BF16, BF16, "soft caps"),
        (GPU, replace(SPEC, sinks=True), BF16, BF16, "sinks"),
    ],
)
def test_what_needs_our_kernel_stays_with_it(device, spec, dtype, cached, why):
    name, reason, made = select_prompts(device, [SPEC, spec], dtype, cached)
    assert (name, made) == ("ours", None) and why in reason


def test_the_choice_of_attention_has_its_reason_and_one_that_is_requested_computes_every_span(device, monkeypatch):
    made = VarlenAttention(Torch())
    monkeypatch.setattr(backend, "select_prompts", lambda *_: Choice("FA9", "it was here", made))
    monkeypatch.setattr(backend.triton_probe, "probe", lambda *_: TritonPagedAttention)
    name, reason, factory = select_backend(GPU, [SPEC], BF16)
    assert name == backend.TRITON and reason.endswith("; whole prompts by FA9 (it was here)")
    layer = torch.zeros(2, 16, 2, 16, device=device)
    prompt = BatchGeometry.build(16, [0], [8], [np.ones(1, np.int32)])
    assert len(factory([SPEC], [layer], [layer]).draft(prompt)[0].prompts) == 1
    assert select_backend(GPU, [SPEC], BF16, backend.TRITON) == (backend.TRITON, "requested", TritonPagedAttention)
