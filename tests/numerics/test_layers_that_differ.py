"""Layers of a model may differ: each computes what it computes in a model of its own, or in transformers."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.models.families import FAMILIES
from ferrum_rpc.models.footprint import DecoderBuild, weight_bytes
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.parts.layer import LayerSpec, Norm
from ferrum_rpc.models.shard import WHOLE, Shard
from tests.numerics.ranks import BOTH, TWO, on_ranks
from tests.support.adapters import make_adapter, merge
from tests.support.checkpoints import make_model
from tests.support.harness import SPLITS, TOKENS, Executor, Oracle, convert, native, native_or_skip

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
    oracle, decoder = Oracle(reference), native(reference)
    assert {(layer.mixer.heads, layer.mixer.window, layer.rope) for layer in decoder.spec.layers} == {
        (4, None, 0),
        (2, 9, None),
    }
    for split in SPLITS:
        oracle.check(Executor(decoder).run(TOKENS, split))


@pytest.mark.parametrize("whole", [TWO, Shard(0, 1, 0, 2), BOTH], ids=["2", "2 stages", "2 x 2"])
def test_any_cut_is_the_oracle_to_2e_5_with_an_adapter(whole, tmp_path):
    reference = differing(torch.float32, vocab_size=500)
    folder = make_adapter(tmp_path / "one", reference, r=3)
    ours = on_ranks(reference, whole, adapters=tmp_path)
    Oracle(merge(reference, folder)).check(ours)


@pytest.mark.parametrize("linear", ["native", "plain"])
def test_bfloat16_errs_at_most_twice_as_much_as_transformers_and_layers_in_c_have_the_same_bits(linear):
    reference = differing(torch.bfloat16)
    oracle, decoder = Oracle(reference, torch.bfloat16), native_or_skip(reference, torch.bfloat16, linear)
    for split in SPLITS:
        ours = Executor(decoder).run(TOKENS, split)
        oracle.check(ours)
        assert torch.equal(Executor(decoder, native=False).run(TOKENS, split), ours)


def test_the_plan_counts_each_layer():
    reference = differing(torch.float32)
    spec = native(reference).spec
    build = DecoderBuild(spec, spec, WHOLE, torch.float32, PlainLinear, PlainLinear, None)
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
    *(f"mixer.{name}" for name in ("bias", "output_bias", "qk_norm", "gated")),
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


def test_every_field_of_a_layer_may_differ_or_is_refused():
    layer = native(differing(torch.float32)).spec.layers[0]
    known = {field.name for field in fields(layer)} - {"mixer", "mlp"}
    known |= {f"{part}.{field.name}" for part in ("mixer", "mlp") for field in fields(getattr(layer, part))}
    assert known == MAY_DIFFER | SAME.keys()


@pytest.mark.parametrize("index", [0, 1, 4])
@pytest.mark.parametrize("field", ["shape", "hidden"])
def test_recurrent_layers_that_differ_are_refused(monkeypatch, field, index):
    def vary(config, at, layer):
        other = RecurrentShape(1, 1, 8, 8) if field == "shape" else 128
        return replace(layer, mixer=replace(layer.mixer, **{field: other})) if at == index else layer

    name = "Qwen3_5ForCausalLM"
    reference = make_model("qwen3_5", num_hidden_layers=5, full_attention_interval=4)
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], vary=vary))
    with pytest.raises(ValueError, match=f"mixer.{field} must be the same in all layers"):
        native(reference)
