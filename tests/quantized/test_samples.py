"""Checkpoints that the libraries of their formats wrote: read as another reader reads them.

`tests.quantized.make` made the samples and says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, Span
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.loading import read_spec
from ferrum_rpc.engine.assembly.parity import compare
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.quantized.make import ROWS, SAMPLES, TOKENS
from tests.support.harness import error
from tests.support.rows import answered

NAMES = sorted(each.name for each in SAMPLES.iterdir())
KINDS = [
    pytest.param(name, marks=pytest.mark.skipif(name.startswith("gguf") and not find_spec("gguf"), reason="no gguf"))
    for name in NAMES
]


def logits(path: Path, tokens: Sequence[int] = TOKENS, **options: Any) -> torch.Tensor:
    """float32 [T, vocab], fed in two pieces."""
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 16, "model_backend": "native"} | options
    runner, rows = build_runner(ModelSettings(str(path), **options)), []
    for start, end in ((0, 5), (5, len(tokens))):
        part = np.array(tokens[start:end], np.int32)
        [columns] = answered(runner, Span(1, part, start, OutputSpec(Positions.ALL, FullLogits()), create=not start))
        rows.append(torch.from_numpy(columns["logits"]))
    return torch.cat(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_those_of_another_reader(kind):
    oracle = load_file(SAMPLES / kind / "oracle.safetensors")
    del oracle["logits"]
    checkpoint = Checkpoint.open(SAMPLES / kind)
    read_spec(checkpoint)
    assert len(oracle) >= 7
    for name, matrix in checkpoint.tensors(oracle, torch.float32):
        assert checkpoint.entries[name].encoding is not None
        assert matrix.dtype == torch.float32
        rows = matrix[torch.tensor(ROWS) % len(matrix)]
        torch.testing.assert_close(rows, oracle[name], rtol=2e-7, atol=0)


def expected(kind: str) -> torch.Tensor:
    return load_file(SAMPLES / kind / "oracle.safetensors")["logits"].double()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantized_model(kind):
    assert error(logits(SAMPLES / kind), expected(kind)) < 5e-6


@pytest.mark.parametrize("kind", ["gptq-4", "bnb-nf4-nested"])
def test_transformers_gets_the_same_numbers(kind):
    assert error(logits(SAMPLES / kind, model_backend="hf"), expected(kind)) < 5e-6


@pytest.mark.parametrize("kind", ["gptq-4", KINDS[NAMES.index("gguf-q4_k_m")]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_doctor_compares_what_the_weights_were_made_of(kind, dtype):
    parity = compare(ModelSettings(str(SAMPLES / kind), device="cpu", dtype=dtype))
    assert parity.holds and (parity.theirs is None) == (dtype == "float32")
    assert dtype != "float32" or parity.error.largest < 1e-4
