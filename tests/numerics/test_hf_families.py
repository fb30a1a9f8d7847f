"""Every family that transformers runs for us, through our runner, against transformers alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, Span, Step
from ferrum_rpc.engine.build import build_runner
from ferrum_rpc.engine.runner import TorchRunner
from ferrum_rpc.errors import NotSupported
from ferrum_rpc.models.hf.describe import describe
from tests.numerics.harness import error
from tests.numerics.hf_families import FAMILIES, TINY, UNSAFE, make_family

TOKENS = np.random.default_rng(3).integers(3, TINY["vocab_size"], size=(3, 20)).astype(np.int32)
STEPS = (
    {0: 20},  # whole
    {1: 9},  # in pieces, beside others
    {1: 5, 2: 8},
    {1: 6, 2: 1},
    {2: 1},
    {2: 10},
)
ALL = OutputSpec(Positions.ALL, FullLogits())


def feed(runner: TorchRunner) -> torch.Tensor:
    """float32 [3, 20, vocab]: the logits of `TOKENS`, whole, in pieces and by single tokens."""
    done, rows = dict.fromkeys(range(len(TOKENS)), 0), {sequence: [] for sequence in range(len(TOKENS))}
    with runner.context():
        for counts in STEPS:
            spans = []
            for sequence, count in counts.items():
                start = done[sequence]
                spans.append(Span(sequence, TOKENS[sequence, start : start + count], start, ALL, create=not start))
                done[sequence] += count
            for span, outcome in zip(spans, runner.forward(Step(tuple(spans))).outcomes, strict=True):
                block = outcome.rows.block["logits"][outcome.rows.first :][: outcome.rows.count]
                rows[span.sequence].append(torch.from_numpy(block.copy()))
    runner.check()
    return torch.stack([torch.cat(rows[sequence]) for sequence in range(len(TOKENS))])


def settings(folder, **options) -> ModelSettings:
    options = {"device": "cpu", "block_size": 4, "kv_blocks": 64, "model_backend": "hf", "dtype": "float32"} | options
    return ModelSettings(str(folder), **options)


def plain_logits(model) -> torch.Tensor:
    """float32 [3, 20, vocab] of transformers, of each sequence alone."""
    with torch.inference_mode():
        return torch.cat([model(input_ids=torch.from_numpy(each)[None].long()).logits.float() for each in TOKENS])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_over_our_cache_is_transformers_alone(family, tmp_path):
    model = make_family(family)
    model.save_pretrained(tmp_path)
    runner = build_runner(settings(tmp_path))
    truth = plain_logits(model)
    assert error(feed(runner), truth.double()) <= 1e-5
    assert runner.info.parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("family", UNSAFE)
def test_a_family_that_would_be_wrong_is_refused(family):
    overrides, why = UNSAFE[family]
    with pytest.raises(NotSupported, match=why):
        describe({**TINY, **overrides, "model_type": family})
