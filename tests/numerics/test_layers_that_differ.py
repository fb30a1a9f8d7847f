"""Layers may differ in heads and head dimension: each computes what it computes in a model of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.backend import select_backend
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.models.identity import IdentityConfig, IdentityModel
from tests.numerics.harness import CPU, Executor

SHAPES = ((4, 4, 8), (8, 2, 16), (6, 1, 32), (4, 4, 8))
"""Heads, kv heads and head dimension of each layer."""

STEPS = [{0: 70, 1: 3, 2: 40}, {0: 1}, {1: 40, 0: 1, 2: 5}, {0: 1, 1: 1, 2: 1}]
"""Tokens of each sequence: short spans, long ones, and both in one step."""


class Joined(IdentityModel):
    """One layer of every shape; its hidden rows are theirs side by side."""

    def __init__(self, shapes):
        self.parts = [
            IdentityModel(
                IdentityConfig(layers=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim, positional=True), CPU
            )
            for heads, kv_heads, head_dim in shapes
        ]
        self.dtype, self.device = torch.float32, CPU
        self.attention_specs = tuple(part.attention_specs[0] for part in self.parts)

    def forward(self, inputs, attend):
        def of(layer):
            return lambda _, *qkv: attend(layer, *qkv)

        return torch.cat([part.forward(inputs, of(layer)) for layer, part in enumerate(self.parts)], dim=-1)


def rows(model, backend):
    """Hidden rows of every span of `STEPS`."""
    executor = Executor(model)
    factory = select_backend(CPU, model.attention_specs, model.dtype, backend)[2]
    executor.compute = Compute(model, factory(model.attention_specs, executor.store.keys, executor.store.values))
    tokens, used, found = np.random.default_rng(5).integers(0, 256, size=(3, 200)), [0, 0, 0], []
    for step in STEPS:
        spans = {each: tokens[each, used[each] : used[each] + count] for each, count in step.items()}
        found += executor.step(spans, logits=False).values()
        for each, count in step.items():
            used[each] += count
    return torch.cat(found)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_each_layer_gives_the_bits_that_it_gives_alone(backend):
    expected = [rows(Joined([shape]), backend) for shape in SHAPES]
    assert torch.equal(rows(Joined(SHAPES), backend), torch.cat(expected, dim=-1))
