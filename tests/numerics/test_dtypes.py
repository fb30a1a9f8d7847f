"""Checkpoints of every plain type, computed in every type: each weight is rounded once, from what is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ferrum_rpc.engine.assembly.loading import load_model
from tests.checkpoints import make_checkpoint, make_model
from tests.numerics.harness import CPU, Executor, error, reference_logits

NAMES = ("float32", "bfloat16", "float16")
SHAPE = {"vocab_size": 64, "num_hidden_layers": 1}
TOKENS = np.arange(3, 15)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint of each type, and float64 logits of exactly its weights."""
    made = {}
    for name in NAMES:
        folder = make_checkpoint(tmp_path_factory.mktemp(name), "qwen3", dtype=getattr(torch, name), **SHAPE)
        exact = make_model("qwen3", **SHAPE)
        exact.load_state_dict({key: each.float() for key, each in load_file(folder / "model.safetensors").items()})
        made[name] = folder, exact, reference_logits(exact, TOKENS, torch.float64)
    return made


@pytest.mark.parametrize("computed", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_every_type_of_source_is_computed_in_every_type(stored, source, computed):
    folder, exact, expected = stored[source]
    dtype = getattr(torch, computed)
    model = load_model(folder, dtype, CPU)
    assert model.dtype == dtype
    differs = error(Executor(model).run(TOKENS, [len(TOKENS)]), expected)
    assert differs < (2e-5 if dtype == torch.float32 else 2 * error(reference_logits(exact, TOKENS, dtype), expected))
