"""Adapters beside the weights against transformers with the adapters merged into them, alone and in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.models.lora import Loras
from tests.adapters import make_adapter, merge
from tests.numerics.harness import Executor, error, native, reference_logits, rounded_model, worst

TOKENS = np.random.default_rng(7).integers(0, 300, size=40)
SPLITS = ([40], [1] * 40, [13, 9, 1, 17])

CASES: dict[str, dict[str, Any]] = {
    "all, rank 4": {},
    "rank 8, alpha 3": {"r": 8, "lora_alpha": 3},
    "rank 16, rsLoRA": {"r": 16, "use_rslora": True},
    "query and value": {"targets": ("q_proj", "v_proj")},
    "key, an odd rank": {"targets": ("k_proj",), "r": 3},
    "the MLP": {"targets": ("up_proj", "down_proj")},
    "ranks and alphas by module": {
        "ranks": {"q_proj": 2, "down_proj": 7},
        "alpha_pattern": {"v_proj": 1, "gate_proj": 16},
    },
    "one layer": {"layers_to_transform": [1]},
}


def load(folder: Path, loras: Loras, max_rank: int = 64) -> list[bytes]:
    """Load the adapters in ``folder`` by their names' order, with the numbers from 1 on. Returns their fingerprints."""
    adapters, found = Adapters(folder, loras, bytes(32), max_rank, 1 << 30), []
    for number, each in enumerate(sorted(folder.iterdir()), 1):
        facts = adapters.open(number, each.name)
        pieces = 0
        while (fingerprint := adapters.read(number)) is None:
            pieces += 1
        assert pieces == facts.pieces
        found.append(fingerprint)
    return found


@pytest.mark.parametrize("case", CASES)
def test_float32_is_the_model_with_merged_weights(case: str, tmp_path: Path) -> None:
    reference = rounded_model("qwen3", torch.float32)
    folder = make_adapter(tmp_path / "a" / "one", reference, **CASES[case])
    decoder = native(reference)
    plain = reference_logits(reference, TOKENS, torch.float64)
    truth = reference_logits(merge(reference, folder), TOKENS, torch.float64)
    assert error(plain, truth) > 0.01
    _, loras = decoder.take_adapters()
    load(tmp_path / "a", loras)
    for split in SPLITS:
        executor = Executor(decoder, loras=loras)
        executor.adapters[0] = 1
        assert worst(executor.run(TOKENS, split), truth) <= 2e-5
    assert worst(Executor(decoder, loras=loras).run(TOKENS, [40]), plain) <= 2e-5
