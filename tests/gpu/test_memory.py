"""The cache takes what a GPU has left, and the largest step still fits. Fills the device: run it last and alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import OutputSpec, Positions, Sample, Span, SpanResult, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.size import CUDA_RESERVE, LargestStep
from tests.support.checkpoints import make_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LARGEST = LargestStep()
SHAPE = {"vocab_size": 131_072, "hidden_size": 1024, "intermediate_size": 8192, "max_position_embeddings": 8192}


def test_the_largest_step_fits_beside_a_cache_of_all_that_is_left(tmp_path):
    """A full step, and all rows that are sampled at once, by top-p; then the same again."""
    folder = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, **SHAPE)
    config = ModelSettings(str(folder), device="cuda", dtype="bfloat16", max_sequences=1 << 20)
    runner = build_runner(config, largest=LARGEST)
    _, total = torch.cuda.mem_get_info()
    cache = sum(buffer.nbytes for buffer in runner.store.buffers)
    assert total / 2 < cache < total - CUDA_RESERVE
    [reason] = [why for name, why in runner.device.choices if name.startswith("kv_blocks=")]
    assert "(measured)" in reason
    each = LARGEST.tokens // LARGEST.sequences
    output = OutputSpec(Positions.LAST, Sample(top_p=0.9, seed=1))
    spans = tuple(Span(s, np.full(each, 5, np.int32), 0, output, create=True) for s in range(LARGEST.sequences))
    with runner.context():
        for _ in range(2):
            outcomes = runner.forward(Step(spans)).outcomes
            assert all(isinstance(outcome, SpanResult) for outcome in outcomes), outcomes[0]
            runner.release(range(LARGEST.sequences))
