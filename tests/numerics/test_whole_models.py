"""Whole models with recurrent layers (Qwen3.5, Qwen3-Next), with latent attention (DeepSeek V2 and V3) and with experts
(also Qwen3 and gpt-oss) against transformers: fed whole, in chunks, side by side, by single tokens, with rejected
drafts, and over ranks.

In float32 the root mean square of the error is at most 3e-6 of the logits' spread, and with experts each logit is
within 1e-5. In 16 bits the error is at most twice that of transformers; with experts, of the median row: rounding sends
a row to another expert now and then, in either implementation, and such a row is far off.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ferrum_rpc.engine.assembly.loading import load_model
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.models.config_keys import UnknownKey
from ferrum_rpc.models.expert_rows import ExpertRouter
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.native_linear import ByteFactory, NibbleFactory, PairFactory
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec
from tests.numerics.ranks import BOTH, FOUR, TWO, on_ranks
from tests.numerics.whole_models import (
    CASES,
    EXPERTS,
    LATENT,
    RECURRENT,
    ROUND,
    SHAPES,
    SPLITS,
    TOKENS,
    exact,
    model,
    native_of,
    with_rejected_drafts,
)
from tests.support.adapters import load_adapters, make_adapter, merge
from tests.support.checkpoints import CLASSES, config_class, make_checkpoint, make_model, rewrite
from tests.support.harness import CPU, Executor, Oracle, error, made_or_skip, native, reference_logits, worst
from tests.support.harness import TOKENS as RANK_TOKENS

ONE_OF_EACH = ("Qwen3.5", "Next", "3.5 MoE", "V2", "V3", "Qwen3 MoE", "gpt-oss")


def is_oracle(case: str, ours: torch.Tensor, truth: torch.Tensor) -> bool:
    return error(ours, truth) <= 3e-6 and (case in RECURRENT or worst(ours, truth) <= 1e-5)


def fed_in_every_way(decoder: Any) -> list[torch.Tensor]:
    runs = [Executor(decoder).run(TOKENS, split) for split in SPLITS]
    return [*runs, with_rejected_drafts(Executor(decoder))]


def median(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """`error` of the median row."""
    return float((actual.double() - expected).square().mean(-1).sqrt().median() / expected.std())


def distance(case: str) -> Any:
    """What is compared in 16 bits."""
    return error if case in RECURRENT else median


class Rounded:
    """What models of a case in 16 bits are held to."""

    def __init__(self, case: str, reference: Any, dtype: torch.dtype, tokens: Any = TOKENS) -> None:
        self.distance, self.truth = distance(case), reference_logits(reference, tokens, torch.float64)
        self.theirs = self.distance(reference_logits(reference, tokens, dtype), self.truth)

    def check(self, ours: torch.Tensor) -> None:
        assert self.distance(ours, self.truth) <= 2 * self.theirs


@pytest.mark.parametrize("case", CASES)
def test_float32_is_the_oracle(case):
    reference = model(case=case)
    oracle = Oracle(reference, tokens=TOKENS)
    for ours in fed_in_every_way(native(reference, linear="plain")):
        assert is_oracle(case, ours, oracle.logits)


@pytest.mark.parametrize(
    ("case", "linear"), [*((case, "native") for case in CASES), *((case, "plain") for case in ONE_OF_EACH)]
)
def test_bfloat16_errs_at_most_twice_as_much_as_transformers(case, linear):
    reference = model(torch.bfloat16, case)
    decoder = native_of(reference, PairFactory) if linear == "native" else native(reference, torch.bfloat16, "plain")
    rounded = Rounded(case, reference, torch.bfloat16)
    for ours in fed_in_every_way(decoder):
        rounded.check(ours)


@pytest.mark.parametrize("case", ["Qwen3.5", "V3", "gpt-oss"])
def test_float16_errs_at_most_twice_as_much_as_transformers(case):
    reference = model(torch.float16, case)
    ours = Executor(native(reference, torch.float16)).run(TOKENS, SPLITS[1])
    Rounded(case, reference, torch.float16).check(ours)


@pytest.mark.parametrize("case", ["Qwen3.5", "Next", "3.5 MoE", "V3", "Qwen3 MoE", "gpt-oss"])
def test_quantized_products_are_near_what_they_quantize(case):
    """What scores experts, what lifts latents, and the gate of the part that computes every row, are not quantized."""
    reference = model(torch.bfloat16, case, **ROUND[CASES[case][0]])
    truth = Oracle(reference, tokens=TOKENS).logits
    for factory, bound in ((ByteFactory, 0.1), (NibbleFactory, 0.6)):
        ours = Executor(native_of(reference, factory)).run(TOKENS, SPLITS[1])
        assert distance(case)(ours, truth) <= bound


@pytest.mark.parametrize("factory", [PairFactory, ByteFactory, lambda: PlainLinear])
@pytest.mark.parametrize("experts", [9, 24])
def test_scores_of_experts_and_the_gate_are_not_rounded(factory, experts):
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(shape, generator=generator).bfloat16() for shape in ((experts, 128), (7, 128)))
    assert worst(ExpertRouter(weight, made_or_skip(factory))(rows), rows.double() @ weight.double().T) <= 1e-6


@pytest.mark.parametrize(
    ("case", "factory"),
    [
        *((case, each) for case in ("Qwen3.5", "Next") for each in (PairFactory, ByteFactory, NibbleFactory)),
        *((case, PairFactory) for case in ("V3", "Qwen3 MoE", "gpt-oss")),
    ],
)
def test_a_truncation_within_the_last_step_leaves_the_bits_of_never_having_fed_it(case, factory):
    decoder = exact(factory, case)
    plain = Executor(decoder)
    assert plain.compute.exact_span_tokens == 32
    plain.step({0: TOKENS[:40], 1: TOKENS[20:60]})
    assert torch.equal(
        with_rejected_drafts(Executor(decoder))[40:], torch.cat([plain.step({0: [each]})[0] for each in TOKENS[40:]])
    )


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in ("Qwen3.5", "V2", "V3", "Qwen3 MoE", *list(EXPERTS)[2:])),
        *((case, torch.bfloat16) for case in ("Qwen3.5", "gpt-oss")),
    ],
    ids=str,
)
def test_a_checkpoint_is_loaded_by_the_names_of_transformers(case, dtype, tmp_path):
    """And layers that draft tokens are left out."""
    family, options = CASES[case]
    folder = make_checkpoint(tmp_path, family, dtype=dtype, **SHAPES[family] | options)
    if case == "V3":
        rewrite(folder, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(3)}))
    ours, reference = Executor(load_model(folder, dtype, CPU)).run(TOKENS, SPLITS[1]), model(dtype, case)
    if dtype == torch.float32:
        assert is_oracle(case, ours, Oracle(reference, tokens=TOKENS).logits)
    else:
        Rounded(case, reference, dtype).check(ours)


# --- adapters ---------------------------------------------------------------------------------------------------------

OF_LATENTS = ("kv_a_proj_with_mqa", "o_proj", "up_proj")
ADAPTED = {
    "Qwen3.5": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "o_proj", "down_proj"),
    "Next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj", "down_proj"),
    "3.5 MoE": ("in_proj_qkv", "in_proj_a", "q_proj", "gate_proj", "down_proj"),
    "V2": ("q_proj", *OF_LATENTS),
    "V3": ("q_a_proj", "q_b_proj", *OF_LATENTS),
    "Qwen3 MoE": ("q_proj", "v_proj", "o_proj"),
    "gpt-oss": ("q_proj", "k_proj", "o_proj"),
}


@pytest.mark.parametrize(
    ("case", "ranks"),
    [*((case, False) for case in ONE_OF_EACH), *((case, True) for case in ("Qwen3.5", "V2", "V3", "gpt-oss"))],
)
def test_adapters_are_merged_weights(case, ranks, tmp_path):
    reference, tokens = model(case=case, vocab_size=500), RANK_TOKENS if ranks else TOKENS
    folder = make_adapter(tmp_path / "one", reference, targets=ADAPTED[case], r=3)
    plain, decoder = Oracle(reference, tokens=tokens), native(reference)
    if ranks:
        ours = on_ranks(reference, TWO, adapters=tmp_path)
    else:
        _, loras = decoder.take_adapters(64)
        load_adapters(tmp_path, loras)
        ours = Executor(decoder, loras=loras, adapters={0: 1}).run(TOKENS, SPLITS[1])
    merged = Oracle(merge(reference, folder), tokens=tokens)
    assert error(plain.logits, merged.logits) > 0.01
    assert error(ours, merged.logits) <= 3e-6


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "whole"),
    [
        *((case, FOUR) for case in (*RECURRENT, *LATENT, *EXPERTS)),
        *((case, TWO) for case in ("Qwen3.5", "Qwen3.5, one key head, attention first", "V2", "V3")),
        *((case, BOTH) for case in ("V2, groups", "V3, halves, no norm", "V3, dense, wide values", *EXPERTS)),
    ],
    ids=str,
)
def test_ranks_share_heads_and_experts(case, whole):
    """Also where several have the same key head."""
    reference = model(case=case, vocab_size=500)
    assert is_oracle(case, on_ranks(reference, whole), Oracle(reference).logits)


@pytest.mark.parametrize(("case", "sizes"), [("Qwen3.5", ROUND["qwen3_5"]), ("V3", {}), ("gpt-oss", {})])
def test_ranks_share_heads_and_experts_in_bfloat16(case, sizes):
    reference = model(torch.bfloat16, case, vocab_size=500, **sizes)
    ours = on_ranks(reference, TWO, torch.bfloat16, linear=partial(made_or_skip, PairFactory))
    Rounded(case, reference, torch.bfloat16, RANK_TOKENS).check(ours)


@pytest.mark.parametrize(
    ("case", "changes", "ranks", "words"),
    [
        ("Qwen3.5", {}, 3, "linear_num_value_heads 4 must be a multiple of it; of this model it can be 1, 2, 4$"),
        (
            "Qwen3.5",
            {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
            2,
            "linear_num_key_heads 3 must be a multiple of it, or the other way round; of this model it can be 1$",
        ),
        ("Qwen3.5", {"linear_num_value_heads": 8}, 8, "num_attention_heads 4 must be a multiple of it; .* 1, 2, 4$"),
        (
            "V3",
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            2,
            "num_attention_heads 3 must be a multiple of it; of this model it can be 1",
        ),
        (
            "V3",
            {"moe_intermediate_size": 33},
            2,
            "its experts' 33 channels must be a multiple of it; of this model it can be 1",
        ),
        ("Qwen3 MoE", {"moe_intermediate_size": 33}, 2, "its experts' 33 channels must be a multiple of it; .* be 1"),
        ("gpt-oss", {"intermediate_size": 50}, 4, "its experts' 50 channels must be a multiple of it; .* be 1, 2"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(case, changes, ranks, words):
    with pytest.raises(NotSupported, match=f"tensor_parallel {ranks}: {words}") as caught:
        Shard(0, ranks).of(native(model(case=case, vocab_size=500, **changes)).spec)
    assert caught.value.field == "tensor_parallel"


# --- configurations ---------------------------------------------------------------------------------------------------

NEXT, MOE, V2, V3 = "qwen3_next", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"
QWEN3, OSS = "qwen3_moe", "gpt_oss"
REFUSED: list[tuple[str, dict[str, Any], type[ExecutorError], str]] = [
    (NEXT, {"num_experts_per_tok": 9}, InvalidRequest, "num_experts_per_tok 9 exceeds num_experts 8"),
    (NEXT, {"num_experts": 5000}, InvalidRequest, "num_experts must be within 0 .. 4096"),
    (NEXT, {"decoder_sparse_step": 0}, InvalidRequest, "decoder_sparse_step must be within"),
    (NEXT, {"mlp_only_layers": "all"}, InvalidRequest, "mlp_only_layers must be a list"),
    (NEXT, {"shared_expert_intermediate_size": 0}, InvalidRequest, "shared_expert_intermediate_size must be"),
    (NEXT, {"hidden_act": "gelu"}, NotSupported, "hidden_act must be silu"),
    (NEXT, {"attn_output_gate": True}, NotSupported, "attn_output_gate: True is not known here"),
    (NEXT, {"routed_scaling_factor": 2.0}, NotSupported, "routed_scaling_factor: 2.0 is not known here"),
    (NEXT, {"layer_types": ["linear_attention"] * 2}, NotSupported, "layer_types: a model without full attention"),
    (MOE, {"num_experts": 0}, InvalidRequest, "num_experts must be within 1 .. 4096"),
    (MOE, {"norm_topk_prob": False}, NotSupported, "norm_topk_prob: False is not supported"),
    (MOE, {"mlp_only_layers": [1]}, NotSupported, r"mlp_only_layers: \[1\] is not supported"),
    (MOE, {"decoder_sparse_step": 2}, NotSupported, "decoder_sparse_step: 2 is not supported"),
    (MOE, {"attn_output_gate": False}, NotSupported, "attn_output_gate: False is not supported"),
    (MOE, {"n_group": 2}, NotSupported, "n_group: 2 is not known here"),
    (V2, {"num_key_value_heads": 2}, NotSupported, "num_key_value_heads 2 is not"),
    (V2, {"topk_method": "noaux_tc"}, NotSupported, "topk_method 'noaux_tc'"),
    (V2, {"norm_topk_prob": True}, UnknownKey, "norm_topk_prob: True is not supported"),
    (V2, {"scoring_func": "sigmoid"}, UnknownKey, "scoring_func: 'sigmoid' is not supported"),
    (V2, {"attention_bias": True}, UnknownKey, "attention_bias: True is not supported"),
    (V2, {"n_group": None, "topk_method": "group_limited_greedy"}, InvalidRequest, "n_group is missing"),
    (V2, {"num_experts_per_tok": None}, InvalidRequest, "num_experts_per_tok is missing"),
    (V3, {"n_group": 3}, InvalidRequest, "n_routed_experts 8 must be a multiple of n_group 3"),
    (V3, {"topk_group": 5}, InvalidRequest, "topk_group 5 exceeds n_group 4"),
    (V3, {"num_experts_per_tok": 5}, InvalidRequest, "num_experts_per_tok 5 exceeds the 4 experts"),
    (V3, {"n_group": 8, "topk_group": 8}, InvalidRequest, "a group must have two experts"),
    (V3, {"qk_rope_head_dim": 7}, InvalidRequest, "qk_rope_head_dim 7: it must be even"),
    (QWEN3, {"num_experts_per_tok": 9}, InvalidRequest, "num_experts_per_tok 9 exceeds num_experts 8"),
    (QWEN3, {"num_experts": 7}, InvalidRequest, "num_experts 7 and num_local_experts 8 differ"),
    (QWEN3, {"decoder_sparse_step": 0}, InvalidRequest, "decoder_sparse_step must be within"),
    (QWEN3, {"shared_expert_intermediate_size": 64}, NotSupported, "shared_expert_intermediate_size: 64 is not known"),
    (QWEN3, {"layer_types": ["sliding_attention"] * 2}, NotSupported, "layer_types: this architecture has layers of"),
    (OSS, {"num_experts_per_tok": 9}, InvalidRequest, "num_experts_per_tok 9 exceeds num_experts 8"),
    (OSS, {"num_local_experts": 5000}, InvalidRequest, "num_local_experts must be within 1 .. 4096"),
    (OSS, {"swiglu_limit": 0.0}, InvalidRequest, "swiglu_limit must be a finite number greater than 0"),
    (OSS, {"swiglu_alpha": "much"}, InvalidRequest, "swiglu_alpha must be a number"),
    (OSS, {"hidden_act": "gelu"}, NotSupported, "hidden_act must be silu, not gelu"),
    (
        OSS,
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
        InvalidRequest,
        "layer_types has sliding",
    ),
    (OSS, {"moe_intermediate_size": 64}, NotSupported, "moe_intermediate_size: 64 is not known here"),
]


@pytest.mark.parametrize("family", [NEXT, MOE, V2, V3, QWEN3, OSS])
def test_a_configuration_that_cannot_be_served_is_refused_by_name(family):
    config = make_model(family).config.to_dict() | {"architectures": [f"{CLASSES[family]}ForCausalLM"]}
    ModelSpec.from_config(config)
    for change, kind, said in [rest for each, *rest in REFUSED if each == family]:
        with pytest.raises(kind, match=said) as caught:
            ModelSpec.from_config(config | change)
        assert caught.value.field in change, said


REQUIRED = {"num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings"}
REQUIRED |= {"architectures"}
NO_DEFAULT = {V2: {"intermediate_size", "num_experts_per_tok"}, V3: {"intermediate_size"}}
CHOSEN = {V2: {"num_experts_per_tok": 6}, V3: {"num_experts_per_tok": 8}}
"""Of a class of transformers that has another default."""


@pytest.mark.parametrize("family", [NEXT, MOE, V2, V3, QWEN3, OSS])
def test_an_absent_field_has_the_default_of_transformers(family):
    data = config_class(family)(**CHOSEN.get(family, {})).to_dict()
    data |= {"architectures": [f"{CLASSES[family]}ForCausalLM"]}
    expected = ModelSpec.from_config(data)
    for name in data.keys() - REQUIRED - NO_DEFAULT.get(family, set()) - {"bos_token_id", "eos_token_id"}:
        assert ModelSpec.from_config({key: value for key, value in data.items() if key != name}) == expected, name
