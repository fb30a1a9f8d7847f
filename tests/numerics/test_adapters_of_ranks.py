"""Adapters of a model that is cut among ranks against transformers with the adapters merged: the bounds of one rank."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrum_rpc.models import decoder
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.layers import PlainLayers
from ferrum_rpc.models.shard import Shard
from tests.adapters import make_adapter, merge
from tests.numerics.harness import error, reference_logits, rounded_model, worst
from tests.numerics.test_parity import TOKENS
from tests.numerics.test_ranked_parity import TWO, on_ranks

FOUR = Shard(0, 4)
"""Of which two have the same KV head."""

BOTH = Shard(0, 2, 0, 2)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all, an odd rank": ("qwen3", {"r": 3}),
    "key, of the last layer": ("qwen3", {"targets": ("k_proj",), "layers_to_transform": [1]}),
    "q, k and v in one, down": ("phi3", {"targets": ("qkv_proj", "down_proj"), "r": 8, "use_rslora": True}),
    "gate and up in one": ("glm4", {"targets": ("q_proj", "k_proj", "gate_up_proj")}),
    "biases, no gate": ("starcoder2", {"targets": ("v_proj", "o_proj", "c_fc", "c_proj")}),
    "pairs that turn": ("cohere2", {"targets": ("q_proj", "k_proj", "o_proj", "up_proj")}),
}


@pytest.mark.parametrize(("case", "cut"), [*product(CASES, (FOUR, BOTH))], ids=str)
def test_float32_is_the_model_with_merged_weights(case: str, cut: Shard, tmp_path: Path) -> None:
    family, options = CASES[case]
    reference = rounded_model(family, torch.float32, vocab_size=500)
    folder = make_adapter(tmp_path / "one", reference, **options)
    ours, without = (on_ranks(reference, cut, adapters=each) for each in (tmp_path, None))
    truth = reference_logits(merge(reference, folder), TOKENS, torch.float64)
    assert worst(ours, truth) <= 2e-5 and error(without, truth) > 0.01


@pytest.mark.parametrize(("family", "cut"), [("qwen3", TWO), ("qwen3", FOUR), ("cohere2", BOTH)], ids=str)
def test_bfloat16_errs_at_most_twice_as_much_as_transformers(family: str, cut: Shard, tmp_path: Path) -> None:
    reference = rounded_model(family, torch.bfloat16, vocab_size=500)
    folder = make_adapter(tmp_path / "one", reference, r=16, dtype=torch.bfloat16)
    ours = on_ranks(reference, cut, torch.bfloat16, tmp_path)
    truth = reference_logits(merge(reference, folder), TOKENS, torch.float64)
    assert error(ours, truth) <= 2 * error(reference_logits(reference, TOKENS, torch.bfloat16), truth)


def test_layers_in_one_call_have_the_bits_of_layers_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What adapters add comes before the sum over the ranks, wherever layers are computed."""
    reference = rounded_model("qwen3", torch.bfloat16)
    make_adapter(tmp_path / "one", reference, r=8, dtype=torch.bfloat16)
    whole = on_ranks(reference, TWO, torch.bfloat16, tmp_path)
    monkeypatch.setattr(Decoder, "native", False)
    assert torch.equal(on_ranks(reference, TWO, torch.bfloat16, tmp_path), whole)
    monkeypatch.setattr(decoder, "assemble", PlainLayers)
    assert torch.equal(on_ranks(reference, TWO, torch.bfloat16, tmp_path), whole)
