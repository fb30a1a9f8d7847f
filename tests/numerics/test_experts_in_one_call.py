"""Experts in one call of C: the bits of each product by itself, in every instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ferrum_rpc.models.expert_rows import TOGETHER, ExpertRouter, ExpertRows, route
from ferrum_rpc.models.fused_ops import NativeFusedOps
from ferrum_rpc.models.native_linear import ByteFactory, NativeLinear, NibbleFactory, PairFactory, Workspace
from ferrum_rpc.models.parts.clamped import Clamped
from ferrum_rpc.models.parts.experts import Experts, Routing
from ferrum_rpc.models.spec import ModelSpec
from tests.support.checkpoints import make_model
from tests.support.harness import made_or_skip, threads

HIDDEN, INNER, COUNT = 128, 64, 9
ROUTING = Routing("softmax", 3, normed=True)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16() / 8


def products(space, name, shape, seed, *, biased):
    """Of each expert one; ``mixed``: of three parts of two kinds."""
    n, k = shape
    factories = {"pairs": PairFactory, "bytes": ByteFactory, "nibbles": NibbleFactory}
    for expert in range(COUNT):
        bias = draw(n, seed=seed - expert) * 4 if biased else None
        if name != "mixed":
            yield factories[name](space)(draw(n, k, seed=seed + expert), bias)
            continue
        rows = n // 2, n // 4, n // 4
        kinds = (NibbleFactory, PairFactory, NibbleFactory)
        weights, biases = draw(n, k, seed=seed + expert).split(rows), [None] * 3 if bias is None else bias.split(rows)
        yield NativeLinear.joined(
            [kind(space)(*each) for kind, *each in zip(kinds, weights, biases, strict=True)],
        )


def one_by_one(rows, gated_shared, routed, products, ops):
    """What experts find, each of whose products is a call, summed in their order."""
    (experts, weights), (gate_ups, downs) = routed, products
    found = torch.zeros(len(rows), ROUTING.chosen, HIDDEN)
    for expert in range(COUNT):
        own = experts == expert
        if own.any():
            found[own] = downs[expert](ops.gate(gate_ups[expert](rows[own.any(1)]))).float()
    total = found[:, 0] * weights[:, :1]
    for place in range(1, ROUTING.chosen):
        total += found[:, place] * weights[:, place : place + 1]
    return (total + gated_shared).bfloat16()


@pytest.mark.parametrize("beside", ["none", "plain", "gated", "none, but biases and clamped gates"])
@pytest.mark.parametrize("name", ["pairs", "bytes", "nibbles", "mixed"])
def test_experts_in_one_call_have_the_bits_of_their_products_one_by_one(isa, name, beside):
    """Of rows of which few experts have any, and of more than are computed at a time."""
    space, gated, alone = made_or_skip(Workspace), beside == "gated", beside.startswith("none")
    activation = "silu" if beside != "none, but biases and clamped gates" else Clamped(limit=0.4, slope=1.7)
    biased = isinstance(activation, Clamped)
    gate_name = "mlp.shared_expert_gate" if gated else None
    part = Experts(HIDDEN, INNER, activation, COUNT, INNER * (not alone), ROUTING, shared_gate=gate_name, bias=biased)
    spec = ModelSpec.from_config(make_model("qwen3").config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    ops = NativeFusedOps(
        replace(spec.layers[0], mlp=part, mixer=replace(spec.layers[0].mixer, hidden=HIDDEN)), torch.bfloat16
    )
    router = ExpertRouter(draw(COUNT + gated, HIDDEN, seed=7), PairFactory(space))
    shapes = {10: (2 * INNER, HIDDEN), 100: (HIDDEN, INNER)}
    made = [list(products(space, name, shape, seed, biased=biased)) for seed, shape in shapes.items()]
    experts = ExpertRows(part, router, None, *made)
    assert experts.native
    for count in (1, 2, 40, TOGETHER // ROUTING.chosen + 5):
        rows = draw(count, HIDDEN, seed=count)
        shared = None if alone else draw(count, HIDDEN, seed=count + 1)
        scores, logit = router(rows).tensor_split([COUNT], 1)
        chosen = route(scores, ROUTING, None)
        gate = torch.stack((logit, torch.zeros_like(logit)), -1).softmax(-1)[..., 0] if gated else 1.0
        expected = one_by_one(rows, 0.0 if shared is None else shared.float() * gate, chosen, made, ops)
        for each in (1, 2) if count > 40 else (1,):
            with threads(each):
                assert torch.equal(experts.add(rows, shared, ops), expected)
