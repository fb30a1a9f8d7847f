"""The same promises on a CUDA device: the runner against float64, and failed steps without trace.

Needs torch with a CUDA device; skipped visibly elsewhere. Nothing here needs more than torch, transformers and the
server's own packages, so that it runs where only wheels can be carried: `make first-light`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import (
    LATE,
    PREFIX,
    FullLogits,
    Greedy,
    OutputKind,
    OutputSpec,
    Positions,
    Run,
    Sample,
    SelectedTokens,
    Span,
    SpanResult,
    Step,
    TopTokens,
)
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import FP8_CAPABILITY
from ferrum_rpc.engine.cuda.compute import StagedCompute
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.engine.step import Pending
from ferrum_rpc.errors import StepFailed
from ferrum_rpc.models.identity import IdentityConfig
from ferrum_rpc.sampling.masks import Masks, RowMask, forbid
from tests.support.checkpoints import FAMILIES, make_checkpoint, make_model
from tests.support.harness import reference_logits
from tests.support.identity_oracle import identity_logits
from tests.support.rows import answered

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ALL = OutputSpec(Positions.ALL, FullLogits())
TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 256, 90)]


def span(sequence: int, tokens: list[int], start: int) -> Span:
    return Span(sequence, np.array(tokens, dtype=np.int32), start, ALL, create=start == 0)


def rows(runner: TorchRunner, *spans: Span) -> list[np.ndarray]:
    return [columns["logits"] for columns in answered(runner, *spans)]


def test_identity_on_the_device_is_the_formula():
    runner = build_runner(ModelSettings(path="identity", device="cuda", kv_blocks=64, block_size=4))
    assert runner.device.kind == "cuda"
    [first] = rows(runner, span(1, TOKENS[:40], 0))
    [second] = rows(runner, span(1, TOKENS[40:], 40))
    expected = identity_logits(TOKENS, list(range(len(TOKENS))), IdentityConfig())
    assert np.abs(np.concatenate([first, second]) - expected).max() <= 2e-5 * expected.std()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_on_the_device_against_float64(tmp_path, family, dtype):
    window = {"sliding_window": 24} if family in {"mistral", "ministral"} else {}
    path = make_checkpoint(tmp_path / family, family, dtype=dtype, **window)
    reference = make_model(family, **window).to(dtype)
    expected = reference_logits(reference, TOKENS, torch.float64).numpy()
    own = np.sqrt(np.mean((reference_logits(reference, TOKENS, dtype).numpy() - expected) ** 2))
    name = str(dtype).removeprefix("torch.")
    runner = build_runner(ModelSettings(path=str(path), device="cuda", dtype=name, kv_blocks=64, block_size=4))
    chunks = [rows(runner, span(1, TOKENS[a:b], a))[0] for a, b in ((0, 33), (33, 34), (34, 90))]
    error = np.concatenate(chunks).astype(np.float64) - expected
    if dtype is torch.float32:
        assert np.abs(error).max() <= 2e-4 * expected.std()
        assert np.sqrt(np.mean(error**2)) <= 2e-5 * expected.std()
    else:
        assert np.sqrt(np.mean(error**2)) <= 2 * own
    mixed = rows(runner, span(2, TOKENS[:50], 0), span(1, TOKENS[:1], 90), span(3, TOKENS[:20], 0))
    assert [len(each) for each in mixed] == [50, 1, 20]


def test_a_failed_step_on_the_device_restores_what_it_overwrote():
    failing = False

    def stage(name: str) -> None:
        if failing and name == "commit":
            raise ValueError(name)

    runner = build_runner(ModelSettings(path="identity", device="cuda", kv_blocks=64, block_size=4), stage=stage)
    rows(runner, span(1, TOKENS[:30], 0), span(2, TOKENS[:30], 0))
    failing = True
    with pytest.raises(StepFailed):
        rows(runner, span(1, TOKENS[60:70], 20))
    failing = False
    runner.check()
    kept, twin = rows(runner, span(1, [7], 30), span(2, [7], 30))
    assert (kept == twin).all()


def test_greedy_on_the_device_takes_the_lowest_id_of_a_tie():
    runner = build_runner(ModelSettings(path="identity", device="cuda", kv_blocks=64))
    with runner.context():
        greedy = Span(1, np.array([5], dtype=np.int32), 0, OutputSpec(Positions.LAST, Greedy()), create=True)
        [outcome] = runner.forward(Step((greedy,))).outcomes
    assert isinstance(outcome, SpanResult) and outcome.rows is not None
    assert outcome.rows.block["token_ids"][0] == identity_logits([5], [0], IdentityConfig())[0].argmax()


def test_replayed_steps_answer_as_eager_ones(tmp_path):
    """Decode, verify and rollback of a decoder: its products round with the padded batch, hence a tolerance. No capture
    begins within a step, where torch would empty its caches and wait."""
    path = str(make_checkpoint(tmp_path / "qwen3", "qwen3"))
    replaying, eager = (
        build_runner(
            ModelSettings(
                path=path,
                device="cuda",
                dtype="float32",
                kv_blocks=64,
                block_size=4,
                max_sequences=8,
                cuda_graphs=way,
                verify_tokens=4,
            )
        )
        for way in ("auto", "off")
    )
    choices = [dict(runner.device.choices) for runner in (replaying, eager)]
    assert "cuda_graphs=16" in choices[0], choices[0]
    assert choices[1]["cuda_graphs=off"] == "requested"
    assert isinstance(replaying.compute, StagedCompute) and replaying.compute.graphs is not None
    captured = replaying.compute.graphs.recorded
    steps = [[span(s, TOKENS[: 20 + s], 0) for s in range(3)]]
    steps += [[span(s, [TOKENS[40]], 20 + s + at) for s in range(3)] for at in range(3)]
    steps += [[span(s, TOKENS[at : at + 4], 22) for s in range(3)] for at in range(5)]
    for step in steps:
        for mine, theirs in zip(rows(replaying, *step), rows(eager, *step), strict=True):
            assert np.abs(mine - theirs).max() <= 1e-4 * theirs.std()
    replaying.check()
    assert replaying.compute.graphs.recorded == captured


def test_a_cache_in_fp8_stays_near_and_is_replayed_as_it_is_run(tmp_path):
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("no fp8 on this device")
    path = str(make_checkpoint(tmp_path / "qwen3", "qwen3"))
    settings = ModelSettings(path=path, device="cuda", dtype="bfloat16", kv_blocks=64, block_size=4, max_sequences=8)
    exact = build_runner(settings)
    replaying, eager = (build_runner(replace(settings, kv_dtype="fp8", cuda_graphs=way)) for way in ("auto", "off"))
    choices = dict(replaying.device.choices)
    assert "kv_dtype=fp8" in choices and "attention=triton" in choices, choices
    assert replaying.info.kv_bytes_per_token < 0.8 * exact.info.kv_bytes_per_token
    steps = [[span(s, TOKENS[: 20 + s], 0) for s in range(3)]]
    steps += [[span(s, [TOKENS[40]], 20 + s + at) for s in range(3)] for at in range(3)]
    for step in steps:
        answers = [np.concatenate(rows(each, *step)) for each in (replaying, eager, exact)]
        near, most = ([np.sqrt(np.mean((answers[0] - other) ** 2)) for other in answers[1:]], answers[2].std())
        assert near[0] <= 0.03 * most and near[1] <= 0.06 * most, (near, most)
    replaying.check()


def test_a_failed_replay_restores_what_it_overwrote():
    failing = False

    def stage(name: str) -> None:
        if failing and name == "select":
            raise ValueError(name)

    runner = build_runner(ModelSettings(path="identity", device="cuda", kv_blocks=64, block_size=4), stage=stage)
    rows(runner, span(1, TOKENS[:30], 0), span(2, TOKENS[:30], 0))
    rows(runner, span(1, [3], 30), span(2, [3], 30))
    failing = True
    with pytest.raises(StepFailed):
        rows(runner, span(1, [9], 20), span(2, [9], 31))
    failing = False
    runner.check()
    kept, twin = rows(runner, span(1, [7], 31), span(2, [7], 31))
    assert (kept == twin).all()


@pytest.mark.parametrize("kind", [FullLogits(), Greedy(), Greedy(logprob=True), TopTokens(3), SelectedTokens((1, 5))])
def test_a_step_that_is_begun_behind_another_answers_as_if_it_were_alone(kind):
    config = ModelSettings(path="identity", device="cuda", kv_blocks=64, block_size=4)
    overlapped, alone = build_runner(config), build_runner(replace(config, overlap="off"))
    choices = [dict(runner.device.choices) for runner in (overlapped, alone)]
    assert "overlap=2" in choices[0] and choices[1]["overlap=off"] == "requested"
    assert (overlapped.depth, alone.depth) == (2, 1)
    output = OutputSpec(Positions.ALL, kind)
    fed = [(1, TOKENS[:30], 0), (2, TOKENS[30:47], 0), (1, TOKENS[50:52], 25), (2, TOKENS[60:61], 17), (1, [7], 27)]
    steps = [Step((span(*each)._replace(output=output),)) for each in fed]
    with overlapped.context():
        pending = [overlapped.begin(steps[0])]
        found = []
        for step in steps[1:]:
            pending.append(overlapped.begin(step))
            found.append(overlapped.finish(pending.pop(0)))
        found.append(overlapped.finish(pending.pop(0)))
        overlapped.check()
        expected = [alone.forward(step) for step in steps]
    for mine, theirs in zip(found, expected, strict=True):
        [one], [two] = mine.outcomes, theirs.outcomes
        assert isinstance(one, SpanResult) and isinstance(two, SpanResult) and one.length == two.length
        assert one.rows is not None and two.rows is not None
        for name, column in one.rows.block.columns.items():
            np.testing.assert_array_equal(column, two.rows.block[name])


def test_nothing_in_begin_waits_for_the_device():
    """Torch raises where the host would wait. Each step has rows of its own, an undo, and a copy of a shared block."""
    runner = build_runner(ModelSettings(path="identity", device="cuda", kv_blocks=64, block_size=4))
    rows(runner, span(1, TOKENS[:30], 0), span(2, TOKENS[:9], 0))
    kinds: list[OutputKind] = [Greedy(logprob=True), TopTokens(3), SelectedTokens((1, 5)), FullLogits()]
    for child, kind in enumerate(kinds, start=3):
        runner.fork(1, [child], None)
        spans = [
            span(s, TOKENS[:2], start)._replace(output=OutputSpec(Positions.ALL, kind))
            for s, start in ((1, 28), (2, 7), (child, 30))
        ]
        with runner.context():
            torch.cuda.set_sync_debug_mode("error")
            try:
                pending = runner.begin(Step(tuple(spans)))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert all(isinstance(each, SpanResult) for each in runner.finish(pending).outcomes)


@pytest.mark.parametrize("family", [None, "qwen3"])
def test_a_step_continues_runs_with_tokens_that_nobody_has_read(tmp_path, family):
    """Each is begun while the device has the one before, without waiting for it, and ends where a stop id says."""
    path = "identity" if family is None else str(make_checkpoint(tmp_path / family, family))
    config = ModelSettings(path=path, device="cuda", kv_blocks=64, block_size=4, dtype="float32")
    following, alone = build_runner(config), build_runner(replace(config, overlap="off"))
    assert following.follows and not alone.follows
    kinds: list[OutputKind] = [Greedy(), Sample(temperature=2.0, seed=3), Greedy(logprob=True), Greedy()]
    outputs = [OutputSpec(Positions.LAST, kind) for kind in kinds]
    first = [
        span(s, TOKENS[9 * s : 9 * s + 6 + s], 0)._replace(output=each, run=Run(14)) for s, each in enumerate(outputs)
    ]

    def behind(spans: list[Span]) -> list[Span]:
        return [Span(each.sequence, np.zeros(1, np.int32), each.end, each.output) for each in spans]

    def chosen(runner: TorchRunner, pending: Pending) -> list[int]:
        outcomes = [each for each in runner.finish(pending).outcomes if each is not LATE]
        assert all(isinstance(each, SpanResult) for each in outcomes)
        rows = [each.rows for each in outcomes if isinstance(each, SpanResult) and each.rows is not None]
        return [int(each.block["token_ids"][each.first]) for each in rows]

    def in_turn(last: int) -> list[list[int]]:
        """The last of them ends with that step."""
        spans, found = first, list[list[int]]()
        with alone.context():
            for at in range(12):
                found.append(chosen(alone, alone.begin(Step(tuple(spans)))))
                spans = behind(spans[: 3 if at >= last else 4])
                for each, token in zip(spans, found[-1], strict=False):
                    each.tokens[0] = token
            alone.end_hold(range(4))
            alone.release(range(4))
        return found

    tokens = [each[-1] for each in in_turn(last=99)]
    stop, last = tokens[5], tokens.index(tokens[5])
    expected = in_turn(last)
    with following.context():
        pending, spans, found = following.begin(Step(tuple(first))), first, list[list[int]]()
        for at in range(11):
            spans = behind(spans)
            torch.cuda.set_sync_debug_mode("error")
            try:
                more = following.begin(Step(tuple(spans), (), ((), (), (), (stop,))[: len(spans)]))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found.append(chosen(following, pending))
            pending, spans = more, spans[: 3 if at >= last else 4]
        found.append(chosen(following, pending))
        following.check()
    assert found == expected
    following.end_hold(range(4))
    following.release(range(4))
    assert following.cache_state().free_blocks == following.kv.total_blocks


def test_masks_on_the_device_are_those_of_the_host_and_nothing_waits():
    rng = np.random.default_rng(1)
    logits, contents = torch.randn(5, 1000), [np.packbits(rng.random(1024) < 0.3).tobytes() for _ in range(3)]
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        masks, rows_on = Masks(device), logits.clone().to(device)
        masks.change([], [])
        forbid(rows_on.clone(), [RowMask(0, torch.ones(1, 32, dtype=torch.int32, device=device))])  # makes constants
        torch.cuda.set_sync_debug_mode("error")
        try:
            masks.change([(bytes([number]) * 32, words) for number, words in enumerate(contents)], [])
            kind = Sample(row_masks=(bytes(32), b"", bytes([2]) * 32, bytes([1]) * 32, b""))
            forbid(rows_on, masks.of(kind, 0, 5))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(rows_on.cpu())
    assert torch.equal(*found) and torch.equal(found[0][1], logits[1])


def test_blocks_come_back_from_the_second_tier(tmp_path):
    """A prompt whose blocks had to give way is found in files, and answered as it was at first."""
    last = OutputSpec(Positions.LAST, FullLogits())
    prompt, other = np.array(TOKENS[:41], dtype=np.int32), np.array(TOKENS[41:85], dtype=np.int32)
    settings = ModelSettings(path="identity", device="cuda", kv_blocks=12, block_size=4, kv_tier_dir=tmp_path)
    runner, answers = build_runner(settings), []
    with runner.context():
        for number, tokens in enumerate((prompt, other, prompt), start=1):
            while runner.fetch_prefix(number, 0, tokens[:-1], PREFIX):
                pass
            [outcome] = runner.forward(Step((Span(number, tokens, 0, last, create=True, prefix=PREFIX),))).outcomes
            assert isinstance(outcome, SpanResult) and outcome.rows is not None
            answers.append((outcome.cached_tokens, outcome.rows.block["logits"][outcome.rows.first]))
            runner.release([number])
    assert [cached for cached, _ in answers] == [0, 0, 40]
    np.testing.assert_allclose(answers[0][1], answers[2][1], atol=1e-5)
