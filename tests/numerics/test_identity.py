"""The identity model against its formula in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.identity import IdentityConfig, IdentityModel
from tests.support.harness import CPU, Executor
from tests.support.identity_oracle import identity_logits

CONFIGS = {
    "default": IdentityConfig(),
    "grouped, positional": IdentityConfig(heads=8, kv_heads=2, positional=True),
    "vocabulary smaller than the channels": IdentityConfig(vocab_size=10),
    "one head": IdentityConfig(heads=1, kv_heads=1, layers=1, vocab_size=7),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_formula_whole_chunked_and_decoded(name):
    config = CONFIGS[name]
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, size=50)
    expected = identity_logits(tokens, config=config)
    model = IdentityModel(config, CPU)
    for split in ([50], [1] * 50, [20, 1, 29]):
        ours = Executor(model, block_size=16).run(tokens, split).numpy()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_facts():
    model = IdentityModel(IdentityConfig(), CPU)
    info = model.info("test")
    assert (info.vocab_size, info.layers, info.heads, info.kv_heads, info.head_dim) == (256, 2, 4, 4, 8)
    assert model.logits(torch.zeros(0, 32)).shape == (0, 256)
    with pytest.raises(InvalidRequest, match="kv_heads"):
        IdentityConfig(heads=4, kv_heads=3)
