"""What is built from a description, and what is told of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ferrum_rpc.core import FullLogits, OutputSpec, Positions, RowDType, Span, Step
from ferrum_rpc.engine.build import BuildConfig, build_runner
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.native_linear import ByteFactory, PairFactory
from tests.checkpoints import make_checkpoint


def logits(runner, tokens):
    """float32 [vocab] of the last token."""
    span = Span(1, tokens, 0, OutputSpec(Positions.LAST, FullLogits(RowDType.F32)), create=True)
    with runner.context():
        [outcome] = runner.forward(Step((span,))).outcomes
        runner.release([1])
    return torch.from_numpy(outcome.rows.block.logits[outcome.rows.first].copy())


def test_eight_bit_weights_are_told_with_their_error_and_stay_near(tmp_path):
    try:
        ByteFactory()
    except OSError as reason:
        pytest.skip(str(reason))
    folder = make_checkpoint(tmp_path, "qwen3", hidden_size=128, intermediate_size=256)
    config = BuildConfig(str(folder), dtype="bfloat16", kv_blocks=8)
    plain, rounded = build_runner(config), build_runner(replace(config, quantize="int8"))
    told = dict(rounded.device.choices)["quantize=int8"]
    assert 0.002 < float(told.split("by ")[1].split("%")[0]) / 100 < 0.01
    assert (plain.info.weight_dtype, rounded.info.weight_dtype, rounded.info.kv_dtype) == (
        "bfloat16",
        "int8",
        "bfloat16",
    )
    tokens = np.arange(5, 45, dtype=np.int32)
    exact, near = logits(plain, tokens), logits(rounded, tokens)
    assert 0 < (near - exact).square().mean().sqrt() / exact.std() < 0.05


@pytest.mark.parametrize(("quantize", "dtype", "says"), [("int4", "bfloat16", "int4"), ("int8", "float32", "float32")])
def test_rounding_that_is_not_there_is_refused(tmp_path, quantize, dtype, says):
    folder = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(InvalidRequest, match=says):
        build_runner(BuildConfig(str(folder), dtype=dtype, quantize=quantize))


def test_nothing_is_rounded_where_there_are_no_weights():
    with pytest.raises(InvalidRequest, match="no weights"):
        build_runner(BuildConfig("identity", quantize="int8"))


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_an_answer_depends_on_neither_neighbours_nor_threads(tmp_path, quantize):
    """The whole model, bit for bit, where its kernels are ours."""
    try:
        ByteFactory()
        PairFactory()
    except OSError as reason:
        pytest.skip(str(reason))
    folder = make_checkpoint(tmp_path, "qwen3", hidden_size=128, intermediate_size=256)
    runner = build_runner(BuildConfig(str(folder), dtype="bfloat16", kv_blocks=64, quantize=quantize))
    if not {"rows=native", "attention=native"} <= {choice for choice, _ in runner.device.choices}:
        pytest.skip("not all kernels are native here")
    output = OutputSpec(Positions.ALL, FullLogits(RowDType.F32))
    rng, threads = np.random.default_rng(0), torch.get_num_threads()
    prompts = [rng.integers(1, 250, size=count).astype(np.int32) for count in (1, 2, 7, 33, 60, 5, 90)]

    def run(members, count):
        torch.set_num_threads(count)
        spans = [Span(each, prompts[each], 0, output, create=True) for each in members]
        with runner.context():
            outcomes = runner.forward(Step(tuple(spans))).outcomes
            nexts = [Span(each, np.array([9], np.int32), len(prompts[each]), output) for each in members]
            outcomes += runner.forward(Step(tuple(nexts))).outcomes
            runner.release(list(members))
        found = [each.rows.block.logits[each.rows.first : each.rows.first + each.rows.count] for each in outcomes]
        return {each: np.concatenate(found[index :: len(members)]) for index, each in enumerate(members)}

    try:
        together = run(range(7), 2)
        for each in range(7):
            assert (run([each], 1)[each] == together[each]).all()
    finally:
        torch.set_num_threads(threads)
