"""Layers of a model may differ: each computes what it computes in a model of its own, or in transformers."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.backend import select_backend
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.models.families import FAMILIES
from ferrum_rpc.models.footprint import DecoderBuild, weight_bytes
from ferrum_rpc.models.identity import IdentityConfig, IdentityModel
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.parts.layer import LayerSpec, Norm
from ferrum_rpc.models.shard import WHOLE, Shard
from tests.adapters import make_adapter, merge
from tests.checkpoints import make_model
from tests.numerics.harness import CPU, Executor, convert, error, native, native_or_skip, reference_logits, worst
from tests.numerics.test_parity import SPLITS, TOKENS
from tests.numerics.test_ranked_parity import on_ranks

SHAPES = ((4, 4, 8), (8, 2, 16), (6, 1, 32), (4, 4, 8))
"""Heads, kv heads and head dimension of each layer."""

STEPS = [{0: 70, 1: 3, 2: 40}, {0: 1}, {1: 40, 0: 1, 2: 5}, {0: 1, 1: 1, 2: 1}]
"""Tokens of each sequence: short spans, long ones, and both in one step."""


class Joined(IdentityModel):
    """One layer of every shape; its hidden rows are theirs side by side."""

    def __init__(self, shapes):
        self.parts = [
            IdentityModel(
                IdentityConfig(layers=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim, positional=True), CPU
            )
            for heads, kv_heads, head_dim in shapes
        ]
        self.dtype, self.device = torch.float32, CPU
        self.attention_specs = tuple(part.attention_specs[0] for part in self.parts)

    def forward(self, inputs, attend):
        def of(layer):
            return lambda _, *qkv: attend(layer, *qkv)

        return torch.cat([part.forward(inputs, of(layer)) for layer, part in enumerate(self.parts)], dim=-1)


def rows(model, backend):
    """Hidden rows of every span of `STEPS`."""
    executor = Executor(model)
    factory = select_backend(CPU, model.attention_specs, model.dtype, backend)[2]
    executor.compute = Compute(model, factory(model.attention_specs, executor.store.keys, executor.store.values))
    tokens, used, found = np.random.default_rng(5).integers(0, 256, size=(3, 200)), [0, 0, 0], []
    for step in STEPS:
        spans = {each: tokens[each, used[each] : used[each] + count] for each, count in step.items()}
        found += executor.step(spans, logits=False).values()
        for each, count in step.items():
            used[each] += count
    return torch.cat(found)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_each_layer_gives_the_bits_that_it_gives_alone(backend):
    expected = [rows(Joined([shape]), backend) for shape in SHAPES]
    assert torch.equal(rows(Joined(SHAPES), backend), torch.cat(expected, dim=-1))


# --- a family whose layers differ -------------------------------------------------------------------------------------

ODD = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 320}
"""Of every second layer, which has a window, no rotation, another activation and `SCALE` besides."""

SCALE = 0.3
"""Of attention's scores."""

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "head_dim": 32}
SHAPE |= {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9}


@pytest.fixture(autouse=True)
def family(monkeypatch):
    """SmolLM3 with such layers."""

    def vary(config, index, layer):
        if not index % 2:
            return layer
        heads, kv_heads = ODD["num_attention_heads"], ODD["num_key_value_heads"]
        mixer = replace(layer.mixer, heads=heads, kv_heads=kv_heads, scale=SCALE)
        return replace(layer, mixer=mixer, mlp=replace(layer.mlp, inner=ODD["intermediate_size"], activation="relu"))

    name = "SmolLM3ForCausalLM"
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], vary=vary))


def differing(dtype: torch.dtype, **overrides: Any) -> Any:
    """Such a model of transformers, whose weights are exact in ``dtype``."""
    model = make_model("smollm3", **SHAPE, **overrides)
    config, generator = copy.deepcopy(model.config), torch.Generator().manual_seed(3)
    for name, value in ODD.items():
        setattr(config, name, value)
    for index, layer in enumerate(model.model.layers):
        if index % 2:
            layer.self_attn, layer.mlp = type(layer.self_attn)(config, index), type(layer.mlp)(config)
            layer.self_attn.scaling, layer.mlp.act_fn = SCALE, torch.nn.ReLU()
            for weight in (*layer.self_attn.parameters(), *layer.mlp.parameters()):
                noise = torch.randn(weight.shape, generator=generator)
                weight.data.copy_(noise / weight.shape[1] ** 0.5)
    return convert(convert(model.eval(), dtype), torch.float64)


def test_float32_is_the_oracle_to_2e_5():
    reference = differing(torch.float32)
    truth, decoder = reference_logits(reference, TOKENS, torch.float64), native(reference)
    assert {(layer.mixer.heads, layer.mixer.window, layer.rope) for layer in decoder.spec.layers} == {
        (4, None, 0),
        (2, 9, None),
    }
    for split in SPLITS:
        assert worst(Executor(decoder).run(TOKENS, split), truth) <= 2e-5


@pytest.mark.parametrize("whole", [Shard(0, 2), Shard(0, 1, 0, 2), Shard(0, 2, 0, 2)], ids=["2", "2 stages", "2 x 2"])
def test_any_cut_is_the_oracle_to_2e_5_with_an_adapter(whole, tmp_path):
    reference = differing(torch.float32, vocab_size=500)
    folder = make_adapter(tmp_path / "one", reference, r=3)
    ours = on_ranks(reference, whole, adapters=tmp_path)
    assert worst(ours, reference_logits(merge(reference, folder), TOKENS, torch.float64)) <= 2e-5


@pytest.mark.parametrize("linear", ["native", "plain"])
def test_bfloat16_errs_at_most_twice_as_much_as_transformers_and_layers_in_c_have_the_same_bits(linear):
    reference = differing(torch.bfloat16)
    truth = reference_logits(reference, TOKENS, torch.float64)
    decoder = native_or_skip(reference, torch.bfloat16, linear)
    for split in SPLITS:
        ours = Executor(decoder).run(TOKENS, split)
        assert error(ours, truth) <= 2 * error(reference_logits(reference, TOKENS, torch.bfloat16), truth)
        executor = Executor(decoder)
        executor.compute._native = None
        assert torch.equal(executor.run(TOKENS, split), ours)


def test_the_plan_counts_each_layer():
    reference = differing(torch.float32)
    spec = native(reference).spec
    build = DecoderBuild(spec, spec, WHOLE, torch.float32, PlainLinear, None)
    assert weight_bytes(build) == 4 * sum(each.numel() for each in reference.parameters())


SAME = {
    "norm": Norm(eps=0.5),
    "residual": 0.5,
    "mixer.hidden": 64,
    "mixer.head_dim": 16,
    "mixer.rotary_dim": 16,
    "mlp.hidden": 64,
}
"""Fields that must be the same in all layers, and another value of each."""

MAY_DIFFER = {
    *("norm_names", "rope", "parallel"),
    *(f"mixer.{name}" for name in ("heads", "kv_heads", "scale", "names", "window", "softcap", "pairs")),
    *(f"mixer.{name}" for name in ("bias", "output_bias", "qk_norm")),
    *(f"mlp.{name}" for name in ("inner", "activation", "names", "down", "gated", "bias")),
}
"""All others: each is read of the layer itself."""


def changed(layer: LayerSpec, field: str, value: object) -> LayerSpec:
    part, _, name = field.rpartition(".")
    return replace(layer, **({part: replace(getattr(layer, part), **{name: value})} if part else {name: value}))


@pytest.mark.parametrize("index", [0, 2, 3])
@pytest.mark.parametrize("field", SAME)
def test_layers_that_differ_in_what_must_be_the_same_are_refused(monkeypatch, field, index):
    def vary(config, at, layer):
        return changed(layer, field, SAME[field]) if at == index else layer

    name = "SmolLM3ForCausalLM"
    reference = make_model("smollm3", **SHAPE)
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], vary=vary))
    with pytest.raises(ValueError, match=f"{field} must be the same in all layers"):
        native(reference)


@pytest.mark.parametrize("eps, residual", [(0.5, 1.0), (1e-6, 0.3)])
def test_the_residual_and_the_norm_of_all_layers_are_the_oracle(monkeypatch, eps, residual):
    """So are those behind the last layer."""
    reference = make_model("granite", num_hidden_layers=3, rms_norm_eps=eps, residual_multiplier=residual)
    truth = reference_logits(reference, TOKENS, torch.float64)
    assert worst(Executor(native(reference)).run(TOKENS, [40]), truth) <= 2e-5


def test_every_field_of_a_layer_may_differ_or_is_refused():
    layer = native(differing(torch.float32)).spec.layers[0]
    known = {field.name for field in fields(layer)} - {"mixer", "mlp"}
    known |= {f"{part}.{field.name}" for part in ("mixer", "mlp") for field in fields(getattr(layer, part))}
    assert known == MAY_DIFFER | SAME.keys()
