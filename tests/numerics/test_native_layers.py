"""Layers that run in C, many of them in one call, attention included: the same bits as layers called one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.layers import PlainLayers
from ferrum_rpc.models.native_linear import ByteFactory, PairFactory
from tests.checkpoints import FAMILIES
from tests.numerics.harness import CPU, Executor, native, rounded_model

BF16 = torch.bfloat16
LAYERS = 5
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": LAYERS, "head_dim": 32}
SIGHTS = {
    "all": [(None, None)] * LAYERS,
    "windows": [(None, None), (9, None), (50, None), (9, None), (None, None)],
    "soft caps": [(None, 2.0), (None, None), (40, 3.0), (None, 1.0), (7, None)],
}
"""Window and soft cap of every layer."""

TOKENS = np.random.default_rng(5).integers(0, 300, size=(6, 200))
STEPS = [{0: 70, 1: 3, 2: 130}, {0: 1}, {1: 40, 0: 1, 3: 33, 2: 5}, {0: 1, 1: 1, 2: 1, 3: 1}, {4: 64, 5: 90}, {5: 32}]
"""Tokens of each sequence: short spans, long ones, and both in one step."""


def decoder(factory=PairFactory, dtype=BF16, family="qwen3", **overrides):
    """A decoder whose products are ours, or why there is none: a compiler or an instruction."""
    try:
        linear = factory()
    except OSError as error:
        pytest.skip(str(error))
    reference = rounded_model(family, dtype, **(SHAPE | overrides))
    made = Decoder(native(reference, dtype, "plain").spec, dtype, CPU, linear)
    for name in made.expected_tensors():
        made.load(name, reference.state_dict()[name])
    if not made.native:
        pytest.skip("norms, rotation and gate are not ours here")
    return made


def plain(model):
    """The same layers, every product and operation called by itself."""
    return PlainLayers(model._loaded.layers._layers)


def by_callbacks(model, kv_dtype="auto"):
    """An executor that calls back in every layer, whatever could run in C."""
    executor = Executor(model, kv_dtype=kv_dtype)
    executor.compute._native = None
    return executor


def run(executor):
    """Everything that a run leaves: hidden rows of every step, and the cache without the null block."""
    used, found = dict.fromkeys(range(len(TOKENS)), 0), []
    for step in STEPS:
        spans = {each: TOKENS[each, used[each] : used[each] + count] for each, count in step.items()}
        found += executor.step(spans, logits=False).values()
        used |= {each: used[each] + count for each, count in step.items()}
    cached = torch.stack([torch.stack(each) for each in zip(executor.store.keys, executor.store.values, strict=True)])
    return [*found, cached[:, :, 1:].nan_to_num(0.0)]


def callbacks(executor):
    """Grows with every layer that calls back for its attention."""
    attend, called = executor.backend.attend, []

    def counted(layer, *arguments):
        called.append(layer)
        return attend(layer, *arguments)

    executor.backend.attend = counted
    return called


@pytest.mark.parametrize("sights", SIGHTS)
@pytest.mark.parametrize(("factory", "kv_dtype"), [(PairFactory, "auto"), (ByteFactory, "auto"), (PairFactory, "int8")])
def test_layers_in_one_call_give_the_bits_of_layers_one_by_one(factory, kv_dtype, sights):
    model = decoder(factory)
    model.attention_specs = tuple(
        dataclasses.replace(spec, window=window, softcap=softcap)
        for spec, (window, softcap) in zip(model.attention_specs, SIGHTS[sights], strict=True)
    )
    expected, threads = run(by_callbacks(model, kv_dtype)), torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            executor = Executor(model, kv_dtype=kv_dtype)
            called = callbacks(executor)
            for ours, theirs in zip(run(executor), expected, strict=True):
                assert torch.equal(ours, theirs)
            assert not called
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if each not in {"llama", "mistral", "ministral", "qwen2"}]
)
def test_every_family_runs_in_one_call(family):
    model = decoder(family=family, num_hidden_layers=3)
    expected, executor = run(by_callbacks(model)), Executor(model)
    called = callbacks(executor)
    found = run(executor)
    assert not called
    model._loaded = dataclasses.replace(model._loaded, layers=plain(model))
    for ours, theirs, apart in zip(found, expected, run(by_callbacks(model)), strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, apart)


def test_spans_that_no_kernel_takes_are_called_back():
    """Heads of 8 channels are too narrow for the kernel of long spans."""
    executor = Executor(decoder(head_dim=8))
    called = callbacks(executor)
    executor.step({0: TOKENS[0, :33]})
    assert called == list(range(LAYERS))
    executor.step({0: TOKENS[0, 33:40]})
    assert called == list(range(LAYERS))


@pytest.mark.parametrize("what", ["float32", "plain products", "attention of torch"])
def test_what_is_not_ours_throughout_is_called_back(what):
    if what == "attention of torch":
        executor = Executor(decoder())
        backend = TorchPagedAttention(executor.model.attention_specs, executor.store.keys, executor.store.values)
        executor.compute, executor.backend = Compute(executor.model, backend), backend
    else:
        dtype, linear = (torch.float32, "auto") if what == "float32" else (BF16, "plain")
        executor = Executor(native(rounded_model("qwen3", dtype, **SHAPE), dtype, linear))
    called = callbacks(executor)
    executor.step({0: TOKENS[0, :7]})
    assert called == list(range(LAYERS))


def test_no_memory_for_buffers_is_said(monkeypatch):
    model = decoder()
    monkeypatch.setattr(model._loaded.layers._library, "ferrum_layers_run", lambda *_: -1)
    with pytest.raises(MemoryError, match="layer"):
        Executor(model).step({0: TOKENS[0, :3]})


def test_a_model_without_weights_is_not_native():
    spec = native(rounded_model("qwen3", BF16), BF16, "plain").spec
    assert not Decoder(spec, BF16, CPU).native
