"""A model whose layers have different numbers of KV heads: the rows of transformers, and a cache that is no larger than
what its layers keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.footprint import DecoderBuild, weight_bytes
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec
from tests.numerics.ranks import BOTH, FOUR, TWO, on_ranks
from tests.support.adapters import make_adapter, merge
from tests.support.harness import SPLITS, TOKENS, Executor, Oracle, convert, native, native_or_skip
from tests.support.listed_kv_heads import FIELD, LISTED, make_deci

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


def deci(dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Such a model of transformers, whose weights are exact in ``dtype``."""
    return convert(convert(make_deci(**overrides), dtype), torch.float64)


def config(**changes: Any) -> dict[str, Any]:
    found = make_deci().config.to_dict() | {"architectures": ["DeciLMForCausalLM"]} | changes
    return {name: value for name, value in found.items() if value != "gone"}


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": DYNAMIC}], ids=["plain", "dynamic"])
def test_float32_is_the_oracle(changes):
    """Also with a scaling of longer sequences than the model's context."""
    reference = deci(**changes)
    oracle, decoder = Oracle(reference), native(reference)
    assert [(each.kv_heads, each.head_dim) for each in decoder.attention_specs] == [(heads, 16) for heads in LISTED]
    for split in SPLITS:
        ours = Executor(decoder).run(TOKENS, split)
        assert (ours.double() - oracle.logits).abs().max() / oracle.logits.std() <= 1e-5


@pytest.mark.parametrize("whole", [TWO, FOUR, Shard(0, 1, 0, 2), BOTH], ids=["2", "4", "2 stages", "2 x 2"])
def test_any_cut_is_the_oracle_with_an_adapter(whole, tmp_path):
    """A rank has some of the KV heads of one layer, and shares that of another with its neighbours."""
    reference = deci(vocab_size=500)
    folder = make_adapter(tmp_path / "one", reference, r=3)
    ours = on_ranks(reference, whole, adapters=tmp_path)
    Oracle(merge(reference, folder)).check(ours)


@pytest.mark.parametrize("linear", ["native", "plain"])
def test_bfloat16_errs_at_most_twice_as_much_as_transformers_and_layers_in_c_have_the_same_bits(linear):
    reference = deci(torch.bfloat16)
    oracle, decoder = Oracle(reference, torch.bfloat16), native_or_skip(reference, torch.bfloat16, linear)
    for split in SPLITS:
        ours = Executor(decoder).run(TOKENS, split)
        oracle.check(ours)
        assert torch.equal(Executor(decoder, native=False).run(TOKENS, split), ours)


def test_the_cache_and_the_weights_are_those_of_the_layers():
    reference = deci()
    decoder = native(reference)
    store = Executor(decoder, blocks=8, block_size=4).store
    assert store.block_bytes == 4 * sum(2 * heads * 16 * 4 for heads in LISTED) < 4 * len(LISTED) * 2 * 4 * 16 * 4
    build = DecoderBuild(decoder.spec, decoder.spec, WHOLE, torch.float32, PlainLinear, PlainLinear, None)
    assert weight_bytes(build) == 4 * sum(each.numel() for each in reference.parameters())


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
def test_what_cannot_be_served_is_refused_by_name(changes, error, field, said):
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
