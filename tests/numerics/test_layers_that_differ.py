"""Layers of a model may differ: each computes what it computes in a model of its own, or in transformers.

Those of DeciLM are among them, whose configuration lists the KV heads of each layer."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.families import FAMILIES
from ferrum_rpc.models.footprint import DecoderBuild, weight_bytes
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.parts.layer import LayerSpec, Norm
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec
from tests.numerics.ranks import BOTH, FOUR, TWO, on_ranks
from tests.support.adapters import make_adapter, merge
from tests.support.checkpoints import make_model
from tests.support.harness import SPLITS, TOKENS, Executor, Oracle, convert, native, native_or_skip, worst
from tests.support.listed_kv_heads import FIELD, LISTED, make_deci

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


def deci(dtype: torch.dtype, **overrides: Any) -> Any:
    """The same, whose layers differ in their KV heads."""
    return convert(convert(make_deci(**overrides), dtype), torch.float64)


EACH = pytest.mark.parametrize("make", [differing, deci])

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
"""A scaling of longer sequences than the model's context."""


@pytest.mark.parametrize(
    ("make", "changes", "layers"),
    [
        (differing, {}, [(4, 2, None, 0), (2, 1, 9, None)] * 2),
        *((deci, changes, [(4, heads, None, 0) for heads in LISTED]) for changes in ({}, {"rope_parameters": DYNAMIC})),
    ],
    ids=["heads and all", "KV heads", "KV heads, dynamic"],
)
def test_float32_is_the_oracle_to_1e_5(make, changes, layers):
    reference = make(torch.float32, **changes)
    oracle, decoder = Oracle(reference), native(reference)
    found = [(each.mixer.heads, each.mixer.kv_heads, each.mixer.window, each.rope) for each in decoder.spec.layers]
    assert found == layers
    for split in SPLITS:
        assert worst(Executor(decoder).run(TOKENS, split), oracle.logits) <= 1e-5


@pytest.mark.parametrize(
    ("make", "whole"),
    [*product((differing, deci), (TWO, Shard(0, 1, 0, 2), BOTH)), (deci, FOUR)],
    ids=lambda each: each.__name__ if callable(each) else f"{each.ranks} x {each.stages}",
)
def test_any_cut_is_the_oracle_to_2e_5_with_an_adapter(make, whole, tmp_path):
    """A rank has some of the KV heads of one layer, and shares that of another with its neighbours."""
    reference = make(torch.float32, vocab_size=500)
    folder = make_adapter(tmp_path / "one", reference, r=3)
    ours = on_ranks(reference, whole, adapters=tmp_path)
    Oracle(merge(reference, folder)).check(ours)


@EACH
@pytest.mark.parametrize("linear", ["native", "plain"])
def test_bfloat16_errs_at_most_twice_as_much_as_transformers_and_layers_in_c_have_the_same_bits(make, linear):
    reference = make(torch.bfloat16)
    oracle, decoder = Oracle(reference, torch.bfloat16), native_or_skip(reference, torch.bfloat16, linear)
    for split in SPLITS:
        ours = Executor(decoder).run(TOKENS, split)
        oracle.check(ours)
        assert torch.equal(Executor(decoder, native=False).run(TOKENS, split), ours)


@EACH
def test_the_plan_counts_each_layer(make):
    reference = make(torch.float32)
    spec = native(reference).spec
    build = DecoderBuild(spec, spec, WHOLE, torch.float32, PlainLinear, PlainLinear, None)
    assert weight_bytes(build) == 4 * sum(each.numel() for each in reference.parameters())


def test_the_cache_holds_what_each_layer_keeps():
    store = Executor(native(deci(torch.float32)), blocks=8, block_size=4).store
    assert store.block_bytes == 4 * sum(2 * heads * 16 * 4 for heads in LISTED) < 4 * len(LISTED) * 2 * 4 * 16 * 4


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
    *(f"mixer.{name}" for name in ("bias", "output_bias", "qk_norm", "gated", "sinks")),
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


# --- lists of KV heads ------------------------------------------------------------------------------------------------


def config(**changes: Any) -> dict[str, Any]:
    found = make_deci().config.to_dict() | {"architectures": ["DeciLMForCausalLM"]} | changes
    return {name: value for name, value in found.items() if value != "gone"}


@pytest.mark.parametrize(
    ("changes", "error", "field", "said"),
    [
        ({FIELD: "gone"}, InvalidRequest, FIELD, "is missing; it must have one for each of 4 layers"),
        ({FIELD: [4, 2, 1]}, InvalidRequest, FIELD, "has 3 entries"),
        ({FIELD: [4, 2, 1, 3]}, InvalidRequest, FIELD, "must be a multiple of 3, which layer 3 has"),
        ({FIELD: [4, 0, 1, 2]}, InvalidRequest, FIELD, "multiple of 0, which layer 1 has"),
        ({FIELD: [4, 2, 1, -4]}, InvalidRequest, FIELD, "multiple of -4"),
        ({FIELD: [4, 2, 1, "4"]}, InvalidRequest, FIELD, "whole numbers"),
        ({FIELD: 4}, InvalidRequest, FIELD, "whole numbers"),
        ({"block_configs": [{}] * 4}, NotSupported, "block_configs", "is not known here"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, InvalidRequest, "rope_parameters.factor", "is missing"),
        ({"rope_parameters": {"rope_type": "longrope"}}, NotSupported, "rope_parameters.rope_type", "dynamic"),
    ],
)
def test_a_list_that_cannot_be_served_is_refused_by_name(changes, error, field, said):
    with pytest.raises(error, match=said) as refused:
        ModelSpec.from_config(config(**changes))
    assert refused.value.field == field


def test_a_number_of_ranks_must_suit_every_layer():
    changes = {"num_attention_heads": 12, "hidden_size": 192, "vocab_size": 384, FIELD: [12, 3, 6, 3]}
    spec = ModelSpec.from_config(config(**changes))
    with pytest.raises(NotSupported, match=r"num_key_value_heads 3 must be a multiple of it.*it can be 1, 3, 6$"):
        Shard(0, 2).of(spec)
    assert [each.kv_heads for each in Shard(0, 3).of(spec).attention_specs] == [4, 1, 2, 1]
    assert [each.kv_heads for each in Shard(0, 6).of(spec).attention_specs] == [2, 1, 1, 1]
