"""Whole models with latent attention and experts (DeepSeek V2 and V3) against transformers, and what their rows do not
depend on.

In float32 each logit is within 1e-5 of the oracle's, by their spread, for sequences that are fed whole, in chunks, side
by side, by single tokens, and with rejected drafts. In bfloat16 the median row errs at most twice as much as that of
transformers: rounding sends a row to another expert now and then, in either implementation, and such a row is far off.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.latent import EXPANDED_BYTES, LatentPagedAttention
from ferrum_rpc.core import AttentionSpec, LatentShape
from ferrum_rpc.engine.assembly.choose import cache_layers
from ferrum_rpc.engine.assembly.loading import load_model
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import UnknownKey
from ferrum_rpc.models.expert_rows import ExpertRouter, route
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.latent_rows import LatentLifts
from ferrum_rpc.models.layout import held_parts, layout, parameter_count
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.native_linear import ByteFactory, NibbleFactory, PairFactory
from ferrum_rpc.models.parts.experts import Routing
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.stored_integers import IntegerFormat
from tests.numerics.ranks import BOTH, FOUR, TWO, on_ranks
from tests.numerics.test_recurrent_models import native_of
from tests.support.adapters import load_adapters, make_adapter, merge
from tests.support.checkpoints import CLASSES, config_class, make_checkpoint, make_model, rewrite
from tests.support.harness import (
    CPU,
    Executor,
    Oracle,
    error,
    made_or_skip,
    native,
    reference_logits,
    rounded_model,
    worst,
)
from tests.support.harness import TOKENS as RANK_TOKENS

TOKENS = np.random.default_rng(5).integers(0, 300, size=84)
SPLITS = ([84], [1] * 7 + [40, 1, 3, 33], [32, 5, 1, 1, 13, 32])
"""`TOKENS` in one chunk, in chunks and steps, and in steps alone."""

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_slow": 2.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "queries of the hidden row": ("deepseek_v2", {}),
    "V2, groups": (
        "deepseek_v2",
        {
            "q_lora_rank": 48,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.6},
        },
    ),
    "V3": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "V3, halves, no norm": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 1, "n_group": 1}
        | {"topk_group": 1, "rms_norm_eps": 1e-2},
    ),
    "dense, wide values": ("deepseek_v3", {"first_k_dense_replace": 3, "v_head_dim": 56, "tie_word_embeddings": True}),
}
EVERY = pytest.mark.parametrize("case", CASES)


ROUND = {"q_lora_rank": 64, "v_head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 128}
"""Sizes that can be quantized."""


def model(case: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    family, options = CASES[case]
    return rounded_model(family, dtype, **options | overrides)


def with_rejected_drafts(executor: Executor) -> torch.Tensor:
    """All logits of `TOKENS` in sequence 0, beside a sequence in chunks: of each step of five behind the first all or
    some of the tokens are others, which are cut off again."""
    rows, at, others = [executor.step({0: TOKENS[:40], 1: TOKENS[20:60]})[0]], 40, TOKENS[::-1]
    for kept in (0, 2, 5, 1, 4, 3, 5, 0):
        drafts = [*TOKENS[at : at + kept], *others[kept:5]]
        step = {1: TOKENS[at : at + 33], 0: drafts} if kept == 2 else {0: drafts}
        rows.append(executor.step(step)[0][:kept])
        executor.truncate(0, at + kept)
        at += kept
    rows.append(executor.step({1: TOKENS[:2], 0: TOKENS[at:]})[0])
    return torch.cat(rows)


def median(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """`error` of the median row."""
    return float((actual.double() - expected).square().mean(-1).sqrt().median() / expected.std())


@EVERY
def test_float32_is_the_oracle_to_1e_5(case):
    reference = model(case)
    oracle, decoder = Oracle(reference, tokens=TOKENS), native(reference)
    for split in SPLITS:
        assert worst(Executor(decoder).run(TOKENS, split), oracle.logits) <= 1e-5
    assert worst(with_rejected_drafts(Executor(decoder)), oracle.logits) <= 1e-5


@pytest.mark.parametrize("linear", ["native", "plain"])
@EVERY
def test_bfloat16_errs_at_most_twice_as_much_as_transformers(case, linear):
    reference = model(case, torch.bfloat16)
    decoder = native_of(reference, PairFactory) if linear == "native" else native(reference, torch.bfloat16, "plain")
    oracle = Oracle(reference, tokens=TOKENS)
    theirs = median(reference_logits(reference, TOKENS, torch.bfloat16), oracle.logits)
    for split in SPLITS:
        assert median(Executor(decoder).run(TOKENS, split), oracle.logits) <= 2 * theirs
    assert median(with_rejected_drafts(Executor(decoder)), oracle.logits) <= 2 * theirs


def test_float16_errs_at_most_twice_as_much_as_transformers():
    reference = model("V3", torch.float16)
    oracle = Oracle(reference, tokens=TOKENS)
    theirs = median(reference_logits(reference, TOKENS, torch.float16), oracle.logits)
    ours = Executor(native(reference, torch.float16)).run(TOKENS, SPLITS[1])
    assert median(ours, oracle.logits) <= 2 * theirs


def test_quantized_products_are_near_what_they_quantize():
    """What lifts latents, and what scores experts, is not quantized."""
    reference = model("V3", torch.bfloat16, **ROUND)
    oracle = Oracle(reference, tokens=TOKENS)
    for factory, bound in ((ByteFactory, 0.1), (NibbleFactory, 0.5)):
        assert median(Executor(native_of(reference, factory)).run(TOKENS, SPLITS[1]), oracle.logits) <= bound


# --- bits -------------------------------------------------------------------------------------------------------------


def exact(factory: Any) -> Any:
    decoder = native_of(model("V3", torch.bfloat16, **ROUND), factory)
    if select_fused_ops(decoder.spec, torch.bfloat16, CPU)[1].name != "native":
        pytest.skip("no kernel of ours runs here")
    return decoder


def test_a_truncation_leaves_the_bits_of_never_having_fed_it():
    decoder = exact(PairFactory)
    plain = Executor(decoder)
    assert plain.compute.exact_span_tokens == 32
    plain.step({0: TOKENS[:40], 1: TOKENS[20:60]})
    assert torch.equal(
        with_rejected_drafts(Executor(decoder))[40:], torch.cat([plain.step({0: [each]})[0] for each in TOKENS[40:]])
    )


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [6, 64])
def test_a_row_is_routed_alike_alone_and_beside_others(scores, experts):
    """Of numbers of experts that fill vectors, and that do not."""
    generator = torch.Generator().manual_seed(0)
    logits, choice = torch.randn((701, experts), generator=generator), torch.randn(experts, generator=generator)
    routing = Routing(scores, 3, 2, 1, biased=True, normed=True, scale=1.7)
    together, singly = route(logits, routing, choice), [route(row[None], routing, choice) for row in logits]
    for index, found in enumerate(together):
        assert torch.equal(found, torch.cat([each[index] for each in singly]))
    assert (together[0].diff(dim=1) > 0).all()


@pytest.mark.parametrize("factory", [PairFactory, lambda: PlainLinear])
def test_scores_of_experts_are_not_rounded(factory):
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(shape, generator=generator).bfloat16() for shape in ((24, 128), (9, 128)))
    expected = rows.double() @ weight.double().T
    assert worst(ExpertRouter(weight, made_or_skip(factory))(rows), expected) <= 1e-6


# --- the rest of a model ----------------------------------------------------------------------------------------------


def test_a_token_takes_one_row_of_a_layer():
    spec = AttentionSpec(16, 1, 576, 0.1, latent=LatentShape(512, 64, 128, 128))
    [cache] = cache_layers([spec], torch.bfloat16, "auto")
    assert cache.slot_bytes == 1152
    executor = Executor(native(model("V3")))
    assert isinstance(executor.backend, LatentPagedAttention)
    assert [each.shape for each in executor.store.buffers] == [(3, 1, 128, 4, 1, 48)]


@EVERY
def test_heads_are_expanded_some_at_a_time(case, monkeypatch):
    """And a span in tiles."""
    reference = model(case)
    tokens = np.random.default_rng(1).integers(0, 300, size=330)
    decoder, oracle = native(reference), Oracle(reference, tokens=tokens)
    monkeypatch.setattr("ferrum_rpc.attention.latent.EXPANDED_BYTES", EXPANDED_BYTES >> 8)
    expand, together = LatentLifts.expand, set()

    def counted(lifts: LatentLifts, rows: torch.Tensor, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        together.add((len(rows), len(keys)))
        expand(lifts, rows, first, keys, values)

    monkeypatch.setattr(LatentLifts, "expand", counted)
    ours = Executor(decoder).run(tokens, [40, 290])
    assert worst(ours, oracle.logits) <= 1e-5
    assert together == {(40, 4), (330, 1)}


ADAPTED = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj")


def test_adapters_are_merged_weights(tmp_path):
    reference = model("V3")
    folder, plain = make_adapter(tmp_path / "one", reference, targets=ADAPTED, r=3), Oracle(reference, tokens=TOKENS)
    decoder = native(reference)
    merged = Oracle(merge(reference, folder), tokens=TOKENS)
    assert error(plain.logits, merged.logits) > 0.01
    _, loras = decoder.take_adapters(64)
    load_adapters(tmp_path, loras)
    ours = Executor(decoder, loras=loras, adapters={0: 1}).run(TOKENS, SPLITS[1])
    assert worst(ours, merged.logits) <= 1e-5


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_checkpoint_is_loaded_by_the_names_of_transformers(family, tmp_path):
    """And layers that draft tokens are left out."""
    folder = make_checkpoint(tmp_path, family)
    more = {"model.layers.3.eh_proj.weight": torch.zeros(3)} if family == "deepseek_v3" else {}
    rewrite(folder, lambda tensors: tensors.update(more))
    oracle = Oracle(rounded_model(family, torch.float32), tokens=TOKENS)
    assert worst(Executor(load_model(folder, torch.float32, CPU)).run(TOKENS, SPLITS[1]), oracle.logits) <= 1e-5


@pytest.mark.parametrize(
    ("family", "change", "kind", "said"),
    [
        ("deepseek_v2", {"num_key_value_heads": 2}, NotSupported, "num_key_value_heads 2 is not"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, NotSupported, "topk_method 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnknownKey, "norm_topk_prob: True is not supported"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, UnknownKey, "scoring_func: 'sigmoid' is not supported"),
        ("deepseek_v2", {"attention_bias": True}, UnknownKey, "attention_bias: True is not supported"),
        ("deepseek_v2", {"n_group": None, "topk_method": "group_limited_greedy"}, InvalidRequest, "n_group is missing"),
        ("deepseek_v2", {"num_experts_per_tok": None}, InvalidRequest, "num_experts_per_tok is missing"),
        ("deepseek_v3", {"n_group": 3}, InvalidRequest, "n_routed_experts 8 must be a multiple of n_group 3"),
        ("deepseek_v3", {"topk_group": 5}, InvalidRequest, "topk_group 5 exceeds n_group 4"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, InvalidRequest, "num_experts_per_tok 5 exceeds the 4 experts"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 8}, InvalidRequest, "a group must have two experts"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, InvalidRequest, "qk_rope_head_dim 7: it must be even"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(family, change, kind, said):
    config = make_model(family).config.to_dict()
    architecture = {"architectures": [f"{CLASSES[family]}ForCausalLM"]}
    ModelSpec.from_config(config | architecture)
    with pytest.raises(kind, match=said) as caught:
        ModelSpec.from_config(config | architecture | change)
    assert isinstance(caught.value, ExecutorError) and caught.value.field in change


YARN_BY_40 = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "V2-Lite": {
        **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None},
        **{"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False},
        **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "vocab_size": 102400},
        **{
            "aux_loss_alpha": 0.001,
            "seq_aux": True,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "bos_token_id": 100000,
        },
        "rope_scaling": YARN_BY_40 | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "V3": {
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 1536},
        **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True},
        **{"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "vocab_size": 129280},
        **{"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-06, "bos_token_id": 0, "ep_size": 1},
        "rope_scaling": YARN_BY_40 | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
"""What decides in the configurations that DeepSeek publishes."""
SHARED = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1}
SHARED |= {"max_position_embeddings": 163840, "rope_theta": 10000, "attention_bias": False, "hidden_act": "silu"}
BILLIONS = {"V2-Lite": 15.7, "V3": 671.0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(name):
    spec = ModelSpec.from_config(PUBLISHED[name] | SHARED)
    assert parameter_count(spec) / 1e9 == pytest.approx(BILLIONS[name], abs=0.05)
    caches = cache_layers(spec.attention_specs, torch.bfloat16, "auto")
    assert sum(each.slot_bytes for each in caches) == 1152 * len(spec.layers)
    mscale = 0.1 * PUBLISHED[name]["rope_scaling"]["mscale_all_dim"] * math.log(40) + 1
    assert spec.attention_specs[0].scale == pytest.approx(192**-0.5 * mscale**2)
    assert spec.ropes[0].attention_factor == 1.0


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_an_absent_field_has_the_default_of_transformers(family):
    data = config_class(family)(num_experts_per_tok=6 if family == "deepseek_v2" else 8).to_dict()
    data |= {"architectures": [f"{CLASSES[family]}ForCausalLM"]}
    expected = ModelSpec.from_config(data)
    absent = {"num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size"}
    absent |= {"max_position_embeddings", "architectures", *(("num_experts_per_tok",) if "v2" in family else ())}
    for name in data.keys() - absent - {"bos_token_id", "eos_token_id"}:
        assert ModelSpec.from_config({key: value for key, value in data.items() if key != name}) == expected, name


def test_what_lifts_latents_and_what_scores_experts_is_never_held_as_integers():
    placements = layout(native(model("V3")).spec)
    form = IntegerFormat(8, 64)
    held = held_parts(placements, dict.fromkeys(placements, form))
    left = {each.parameter for each in placements.values() if len(each.shape) == 2} - held.keys()
    assert {name.split(".")[2] for name in left if name.startswith("layers.")} == {"lifts", "router"}
    assert "layers.1.7.down.weight" in held


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [TWO, FOUR, BOTH], ids=["2", "4", "2 x 2"])
@EVERY
def test_ranks_share_heads_and_experts(case, whole):
    reference = model(case, vocab_size=500)
    assert worst(on_ranks(reference, whole), Oracle(reference).logits) <= 1e-5


def test_ranks_share_heads_and_experts_in_bfloat16():
    reference = model("V3", torch.bfloat16, vocab_size=500)
    oracle = Oracle(reference)
    theirs = median(reference_logits(reference, RANK_TOKENS, torch.bfloat16), oracle.logits)
    ours = on_ranks(reference, TWO, torch.bfloat16, linear=partial(made_or_skip, PairFactory))
    assert median(ours, oracle.logits) <= 2 * theirs


@pytest.mark.parametrize("case", ["queries of the hidden row", "V3"])
def test_ranks_share_adapters(case, tmp_path):
    reference = model(case, vocab_size=500)
    targets = ADAPTED if case == "V3" else ("q_proj", *ADAPTED[2:])
    folder = make_adapter(tmp_path / "one", reference, targets=targets, r=3)
    ours, plain = on_ranks(reference, TWO, adapters=tmp_path), Oracle(reference)
    merged = Oracle(merge(reference, folder))
    assert error(plain.logits, merged.logits) > 0.01
    assert worst(ours, merged.logits) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads 3 must be a multiple of it"),
        ({"moe_intermediate_size": 33}, "moe_intermediate_size 33 must be a multiple of it"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(changes, words):
    with pytest.raises(NotSupported, match=f"tensor_parallel 2: {words}; of this model it can be 1") as caught:
        Shard(0, 2).of(native(model("V3", **changes)).spec)
    assert caught.value.field == "tensor_parallel"
