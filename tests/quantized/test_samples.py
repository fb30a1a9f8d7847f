"""Checkpoints that the libraries of their formats wrote: read as another reader reads them.

`tests.quantized.make` made the samples and says how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
from ferrum_rpc.engine.assembly.loading import load_model, read_spec, stored_parts
from ferrum_rpc.engine.assembly.parity import compare
from ferrum_rpc.models.layout import HeldPart, layout
from ferrum_rpc.models.native_linear import PairFactory
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.checkpoint import Checkpoint
from tests.quantized.make import ROWS, SAMPLES, TOKENS
from tests.support.harness import Executor, error, made_or_skip
from tests.support.rows import answered

CPU = torch.device("cpu")
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


AS_STORED = sorted(
    each
    for each in NAMES
    if each.startswith(("awq", "ct-w", "gguf", "gptq")) and (find_spec("gguf") or not each.startswith("gguf"))
)
"""Integers of 4 to 8 bits, and MXFP4; others are kinds of floats."""

CHANGED = dict.fromkeys(("gguf-q4_k_m", "gguf-q5_1"), 0.006)
"""By how much of themselves: numbers of 5 bits become others of 8."""


def integers_and_floats(checkpoint: Checkpoint) -> dict[str, tuple[torch.Tensor | Integers, torch.Tensor]]:
    names = [name for name, entry in checkpoint.entries.items() if entry.encoding is not None]
    floats = dict(checkpoint.tensors(names, torch.float32))
    return {name: (held, floats[name]) for name, held in checkpoint.weights(names, torch.float32, names)}


@pytest.mark.parametrize("kind", AS_STORED)
def test_integers_are_multiplied_as_they_are_stored(kind):
    """What differs from the dequantized model then is that rows are rounded to 8 bits, and the numbers between layers
    to bfloat16: 1.5 % at most here."""
    made_or_skip(PairFactory)
    checkpoint = Checkpoint.open(SAMPLES / kind)
    for held, floats in integers_and_floats(checkpoint).values():
        assert isinstance(held, Integers)
        assert error(held.floats(), floats.double()) <= CHANGED.get(kind, 0)
    config = ModelSettings(str(SAMPLES / kind), device="cpu", kv_blocks=16)
    runner = build_runner(config)
    chosen = dict(runner.device.choices)
    assert chosen["quantize=stored"].startswith("7 of 7 matrices of layers as they are stored")
    assert runner.info.weight_dtype == ",".join(checkpoint.encodings).lower()
    assert error(logits(SAMPLES / kind, dtype="auto"), expected(kind)) < 0.02
    assert "quantize=stored" not in dict(build_runner(replace(config, quantize="none")).device.choices)


@pytest.mark.parametrize("kind", AS_STORED)
def test_a_rank_holds_its_part_of_integers(kind):
    checkpoint = Checkpoint.open(SAMPLES / kind)
    spec, found = read_spec(checkpoint), integers_and_floats(checkpoint)
    for ranks in (1, 2):
        for rank in range(ranks):
            shard = Shard.at(rank, ranks, 1)
            places, held = layout(spec, shard), stored_parts(checkpoint, spec, shard)
            parts = [part for each in held.values() for part in each if part.form is not None]
            assert parts
            for part in parts:
                for name in part.names:
                    integers, floats = found[name]
                    mine = places[name].of_integers(integers, part.form.group)
                    expected = places[name].of(floats)
                    assert not expected.numel() or error(mine.floats(), expected.double()) <= CHANGED.get(kind, 0)


@pytest.mark.skipif(not find_spec("gguf"), reason="no gguf")
def test_parts_of_a_product_have_the_bits_of_the_whole():
    """Each with its share of the biases."""
    checkpoint, linear = Checkpoint.open(SAMPLES / "gguf-q5_1"), made_or_skip(PairFactory)
    spec = read_spec(checkpoint)
    held, places = stored_parts(checkpoint, spec, WHOLE), layout(spec)
    apart = {
        key: tuple(HeldPart((name,), places[name].rows, part.form) for part in parts for name in part.names)
        for key, parts in held.items()
    }
    assert sum(map(len, apart.values())) > sum(map(len, held.values()))
    load = partial(load_model, checkpoint, torch.bfloat16, CPU, spec=spec, linear=linear)
    whole, split = (Executor(load(held=each)).run(TOKENS, [5, 3]) for each in (held, apart))
    assert torch.equal(whole, split)


@pytest.mark.parametrize("kind", ["gptq-4", "bnb-nf4-nested"])
def test_transformers_gets_the_same_numbers(kind):
    assert error(logits(SAMPLES / kind, model_backend="hf"), expected(kind)) < 5e-6


@pytest.mark.parametrize("kind", ["gptq-4", KINDS[NAMES.index("gguf-q4_k_m")]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_doctor_compares_what_the_weights_were_made_of(kind, dtype):
    parity = compare(ModelSettings(str(SAMPLES / kind), device="cpu", dtype=dtype))
    assert parity.holds and (parity.theirs is None) == (dtype == "float32")
    assert dtype != "float32" or parity.error.largest < 1e-4
