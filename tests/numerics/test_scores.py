"""Scores of a prompt and log-probabilities beside tokens against log_softmax of transformers' logits, in whatever
pieces the prompt is fed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Greedy, NextToken, OutputSpec, Positions, RowLogprobs, Span
from ferrum_rpc.engine.assembly.build import build_runner
from tests.support.checkpoints import make_checkpoint
from tests.support.harness import reference_logits, rounded_model
from tests.support.rows import answered

TOKENS = np.random.default_rng(3).integers(0, 300, size=40).astype(np.int32)
CHUNKS = (40, 1, 3, 7)
BESIDE = RowLogprobs(5, (7, 7, 299))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def case(request, tmp_path_factory):
    """The runner of a checkpoint, transformers' log-probabilities in float64, and how far they are from its own in the
    checkpoint's type."""
    dtype = request.param
    folder = make_checkpoint(tmp_path_factory.mktemp("scores"), "qwen3", dtype=dtype)
    reference = rounded_model("qwen3", dtype)
    truth, theirs = (
        reference_logits(reference, TOKENS, each).log_softmax(-1).numpy() for each in (torch.float64, dtype)
    )
    name = str(dtype).removeprefix("torch.")
    runner = build_runner(ModelSettings(path=str(folder), device="cpu", dtype=name, kv_blocks=64, block_size=8))
    return runner, truth, max(2e-5, 3 * np.abs(truth - theirs).max())


def fed(runner, chunk, kind_of, sequence=0):
    """The columns of the rows of `TOKENS`, fed in chunks; ``kind_of(end)`` is what the chunk up to ``end`` wants."""
    found = []
    for start in range(0, len(TOKENS), chunk):
        part = TOKENS[start : start + chunk]
        spec = OutputSpec(Positions.ALL, kind_of(start + len(part)))
        found += filter(None, answered(runner, Span(sequence, part, start, spec, start == 0)))
    with runner.context():
        runner.release([sequence])
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def check(found, truth, tolerance):
    expected = np.take_along_axis(truth, found["token_ids"].astype(np.int64)[:, None], -1)[:, 0]
    np.testing.assert_allclose(found["logprobs"], expected, atol=tolerance)
    best = np.take_along_axis(truth, found["top_token_ids"].astype(np.int64), -1)
    np.testing.assert_allclose(found["top_logprobs"], best, atol=tolerance)
    np.testing.assert_allclose(found["top_logprobs"], -np.sort(-truth, axis=-1)[:, :5], atol=tolerance)
    np.testing.assert_allclose(found["selected_logprobs"], truth[:, list(BESIDE.token_ids)], atol=tolerance)
    order = zip(-found["top_logprobs"], found["top_token_ids"].astype(np.int64), strict=True)
    assert all(one < other for row in order for one, other in pairwise(zip(*row, strict=True)))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_scores_are_transformers_whole_and_in_chunks(case, chunk):
    runner, truth, tolerance = case
    following = [*TOKENS.tolist(), 17]
    found = fed(runner, chunk, lambda end: NextToken(0, following[end], BESIDE))
    assert found["token_ids"].tolist() == following[1:]
    check(found, truth, tolerance)
    tail = fed(runner, chunk, lambda end: NextToken(29, following[end] if end < len(TOKENS) else None, BESIDE))
    assert tail["token_ids"].tolist() == following[30:-1]
    check(tail, truth[29:-1], tolerance)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_what_stands_beside_a_greedy_token_is_transformers(case, chunk):
    runner, truth, tolerance = case
    found = fed(runner, chunk, lambda end: Greedy(True, BESIDE))
    check(found, truth, tolerance)
    assert found["token_ids"].tolist() == found["top_token_ids"][:, 0].tolist()
    assert found["logprobs"].tolist() == found["top_logprobs"][:, 0].tolist()
