"""Long greedy texts by speculation, in float32: every token is that of single decodes, however good the drafts are."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Accept, Greedy, OutputSpec, Positions, Span, SpanResult, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from tests.checkpoints import make_checkpoint

TEXTS, LENGTH, DRAFTED = 20, 500, 5
"""Ten thousand positions of each kind of draft."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=2048)
    return build_runner(ModelSettings(str(folder), device="cpu", dtype="float32", kv_blocks=1024))


def step(runner: TorchRunner, feeds: dict[int, list[int]], output: OutputSpec) -> dict[int, tuple[int, list[int]]]:
    """The length and the tokens of each text."""
    spans = []
    for text, tokens in feeds.items():
        known = text in runner.kv._sequences
        start = runner.kv.length(text) if known else 0
        spans.append(Span(text, np.array(tokens, np.int32), start, output, not known))
    with runner.context():
        outcomes = runner.forward(Step(tuple(spans))).outcomes
    found = {}
    for text, outcome in zip(feeds, outcomes, strict=True):
        assert isinstance(outcome, SpanResult) and outcome.rows is not None
        rows = outcome.rows.detached().block["token_ids"]
        found[text] = outcome.length, rows.tolist()
    return found


@pytest.fixture(scope="module")
def plain(runner: TorchRunner) -> list[list[int]]:
    output = OutputSpec(Positions.LAST, Greedy())
    texts = [[5 + each] for each in range(TEXTS)]
    while len(texts[0]) <= LENGTH:
        for each, (_, chosen) in step(runner, {n: text[-1:] for n, text in enumerate(texts)}, output).items():
            texts[each] += chosen
    runner.release(range(TEXTS))
    return texts


@pytest.mark.parametrize("share", [1.0, 0.0, 0.6], ids=["good", "bad", "mixed"])
def test_a_long_text_is_that_of_single_decodes(runner: TorchRunner, plain: list[list[int]], share: float) -> None:
    dice, vocabulary, steps = random.Random(1), runner.info.vocab_size, 0
    texts = [text[:1] for text in plain]
    output = OutputSpec(Positions.ALL, Accept())
    while unfinished := [n for n in range(TEXTS) if len(texts[n]) <= LENGTH]:
        feeds = {}
        for each in unfinished:
            at = len(texts[each])
            right = [dice.random() < share for _ in range(DRAFTED)]
            following = plain[each][at : at + DRAFTED]
            draft = [t if good else (t + 1) % vocabulary for t, good in zip(following, right, strict=False)]
            feeds[each] = [texts[each][-1], *draft]
        for each, (length, chosen) in step(runner, feeds, output).items():
            texts[each] += chosen
            assert length == len(texts[each]) - 1
            begin = len(texts[each]) - len(chosen)
            expected = plain[each][begin : begin + len(chosen)]
            assert chosen[: len(expected)] == expected
        steps += 1
    runner.check()
    runner.release(range(TEXTS))
    assert runner.cache_state().free_blocks == runner.kv.total_blocks
    assert steps == {1.0: -(-LENGTH // (DRAFTED + 1)), 0.0: LENGTH}.get(share, steps)
