"""A model of which each rank has half of the heads and half of the MLP, and sums what its layers make over the group,
is the whole model."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.distributed.gloo import GlooGroup
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.layers import NativeLayers, PlainLayers, assemble
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.native_linear import PairFactory
from tests.numerics.harness import CPU, Executor, error, native, rounded_model

FAMILIES = ("qwen3", "gemma2", "starcoder2", "cohere2")
"""Plain, with norms after each half, with biases, and with both halves of the same row."""

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 32}
TOKENS = np.random.default_rng(7).integers(0, 300, size=(3, 60))
STEPS = [{0: 40, 1: 3}, {0: 1, 2: 33}, {0: 1, 1: 1, 2: 1}]


@pytest.fixture(scope="module", params=["shared memory", "gloo"])
def groups(request):
    if request.param == "shared memory" and (reason := shared_memory.available()):
        pytest.skip(f"no shared memory: {reason}")
    join = shared_memory.join if request.param == "shared memory" else GlooGroup
    store = HashStore()
    with ExitStack() as stack, ThreadPoolExecutor(2) as ranks:
        made = list(ranks.map(lambda rank: join(store, rank, 2), range(2)))
        yield [stack.enter_context(closing(group)) for group in made]


def half(name, tensor, rank):
    """A rank's part of a tensor of a checkpoint."""
    if re.search(r"(q|k|v|gate|up)_proj|c_fc", name):
        return tensor.chunk(2)[rank]
    if re.search(r"(o|down|c)_proj\.weight", name):
        return tensor.chunk(2, dim=1)[rank]
    return torch.zeros_like(tensor) if rank and re.search(r"(o|down|c)_proj\.bias", name) else tensor


def halves(reference, spec, dtype, factory, groups):
    """A decoder of each rank."""
    spec = replace(spec, layers=tuple(layer.share(2) for layer in spec.layers))
    for group in groups:
        made = Decoder(spec, dtype, CPU, factory())
        for name in made.expected_tensors():
            made.load(name, half(name, reference.state_dict()[name], group.rank))
        made._loaded = replace(made._loaded, layers=assemble(made._loaded.layers._layers, group))
        yield made


def run(executor) -> list[torch.Tensor]:
    """Hidden rows of every step."""
    used, found = dict.fromkeys(range(len(TOKENS)), 0), []
    for step in STEPS:
        spans = {each: TOKENS[each, used[each] : used[each] + count] for each, count in step.items()}
        found.append(torch.cat(list(executor.step(spans, logits=False).values())))
        used |= {each: used[each] + count for each, count in step.items()}
    return found


def together(executors) -> Iterator[list[torch.Tensor]]:
    with ThreadPoolExecutor(2) as ranks:
        yield from ranks.map(run, executors)


def pair_factory():
    try:
        return PairFactory()
    except OSError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("family", FAMILIES)
def test_halves_in_float32_are_the_whole(family, groups):
    reference = rounded_model(family, torch.float32, **SHAPE)
    whole = native(reference, torch.float32, "plain")
    wanted = run(Executor(whole))
    parts = halves(reference, whole.spec, torch.float32, lambda: PlainLinear, groups)
    one, other = together([Executor(each) for each in parts])
    for ours, theirs, expected in zip(one, other, wanted, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_halves_in_c_are_the_whole_and_the_same_bits_as_layers_one_by_one(family, groups):
    reference = rounded_model(family, torch.bfloat16, **SHAPE)
    whole = native(reference, torch.bfloat16, "plain")
    exact = run(Executor(native(reference, torch.float32, "plain")))
    parts = list(halves(reference, whole.spec, torch.bfloat16, pair_factory, groups))
    if not all(isinstance(each._loaded.layers, NativeLayers) for each in parts):
        pytest.skip("norms, rotation and gate are not ours here")
    one, other = together([Executor(each) for each in parts])
    apart = [Executor(each) for each in parts]
    for each in apart:
        each.compute._native = None
    called_back, _ = together(apart)
    for each in parts:
        each._loaded = replace(
            each._loaded, layers=PlainLayers(each._loaded.layers._layers, each._loaded.layers._group)
        )
    plain, _ = together([Executor(each) for each in parts])
    found = zip(one, other, called_back, plain, strict=True)
    for rows, expected, usual in zip(found, exact, run(Executor(whole)), strict=True):
        assert all(torch.equal(rows[0], each) for each in rows[1:])
        assert error(rows[0], expected.double()) < 1.5 * error(usual, expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_ends_where_the_group_is_given_up(dtype, groups):
    reference = rounded_model("qwen3", dtype, **SHAPE)
    factory = pair_factory if dtype == torch.bfloat16 else lambda: PlainLinear
    spec = native(reference, dtype, "plain").spec
    executors = [Executor(each) for each in halves(reference, spec, dtype, factory, groups)]
    with ThreadPoolExecutor(1) as threads:
        alone = threads.submit(executors[0].step, {0: TOKENS[0, :3]})
        time.sleep(0.05)
        assert not alone.done()
        groups[0].abort()
        with pytest.raises(GroupAborted):
            alone.result(3)
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lambda group: group.renew(1 + (dtype == torch.bfloat16)), groups))
    one, other = together([Executor(each.model) for each in executors])
    assert all(map(torch.equal, one, other))
