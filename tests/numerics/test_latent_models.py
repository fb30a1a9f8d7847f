"""Whole models with latent attention and experts (DeepSeek V2 and V3) against transformers, and what their rows do not
depend on.

In float32 each logit is within 1e-5 of the oracle's, by their spread, for sequences that are fed whole, in chunks, side
by side, by single tokens, and with rejected drafts. In bfloat16 the median row errs at most twice as much as that of
transformers: rounding sends a row to another expert now and then, in either implementation, and such a row is far off.
"""

from __future__ import annotations

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
from ferrum_rpc.models.expert_rows import route
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.native_linear import ByteFactory, NibbleFactory, PairFactory
from ferrum_rpc.models.parts.experts import Routing
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec
from tests.numerics.test_recurrent_models import native_of
from tests.support.adapters import load_adapters, make_adapter, merge
from tests.support.checkpoints import make_checkpoint, make_model, rewrite
from tests.support.harness import CPU, Executor, Oracle, error, native, reference_logits, rounded_model, worst

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
    sizes = {"q_lora_rank": 64, "v_head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 128}
    reference = model("V3", torch.bfloat16, **sizes)
    oracle = Oracle(reference, tokens=TOKENS)
    for factory, bound in ((ByteFactory, 0.1), (NibbleFactory, 0.5)):
        assert median(Executor(native_of(reference, factory)).run(TOKENS, SPLITS[1]), oracle.logits) <= bound


# --- bits -------------------------------------------------------------------------------------------------------------


def exact() -> Any:
    decoder = native_of(model("V3", torch.bfloat16), PairFactory)
    if select_fused_ops(decoder.spec, torch.bfloat16, CPU)[1].name != "native":
        pytest.skip("no kernel of ours runs here")
    return decoder


def test_a_truncation_leaves_the_bits_of_never_having_fed_it():
    decoder = exact()
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
    ours = Executor(decoder).run(tokens, [40, 290])
    assert worst(ours, oracle.logits) <= 1e-5


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
    architecture = {"architectures": [f"{'DeepseekV2' if family == 'deepseek_v2' else 'DeepseekV3'}ForCausalLM"]}
    ModelSpec.from_config(config | architecture)
    with pytest.raises(kind, match=said) as caught:
        ModelSpec.from_config(config | architecture | change)
    assert isinstance(caught.value, ExecutorError) and caught.value.field in change


def test_what_ranks_cannot_share_is_refused_by_name():
    with pytest.raises(NotSupported, match="latent attention cannot be shared yet; of this model it can be 1"):
        Shard(0, 2).of(native(model("V3")).spec)
