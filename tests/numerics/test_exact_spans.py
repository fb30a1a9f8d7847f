"""`exact_span_tokens`: spans of up to so many tokens give the very bits of single decodes, whatever the neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.models.identity import IdentityConfig, IdentityModel
from ferrum_rpc.models.native_linear import ByteFactory, NibbleFactory, PairFactory
from tests.numerics.test_native_layers import decoder
from tests.numerics.whole_models import exact, native_of
from tests.support.harness import CPU, Executor, native, rounded_model

RNG = np.random.default_rng(11)
PROMPT = RNG.integers(0, 250, size=70)
GENERATED = RNG.integers(0, 250, size=75)
TOKENS = np.concatenate([PROMPT, GENERATED])
NEIGHBOURS = RNG.integers(0, 250, size=(2, 200))
PIECES = [32, 1, 2, 31, 9]
MODELS = {
    "bfloat16": lambda: decoder(PairFactory),
    "int8": lambda: decoder(ByteFactory),
    "int4": lambda: decoder(NibbleFactory),
    "recurrent, bfloat16": lambda: exact(PairFactory),
    "recurrent, int8": lambda: exact(ByteFactory),
    "recurrent, int4": lambda: exact(NibbleFactory),
    "experts, bfloat16": lambda: exact(PairFactory, "Next"),
    "experts, int8": lambda: exact(ByteFactory, "3.5 MoE"),
    "experts, int4": lambda: exact(NibbleFactory, "Next"),
    "experts alone, bfloat16": lambda: exact(PairFactory, "Qwen3 MoE"),
    "experts alone, int8": lambda: exact(ByteFactory, "Qwen3 MoE"),
    "sinks, clamped gates, bfloat16": lambda: exact(PairFactory, "gpt-oss"),
    "sinks, clamped gates, int8": lambda: exact(ByteFactory, "gpt-oss"),
    "sinks, clamped gates, int4": lambda: exact(NibbleFactory, "gpt-oss"),
    "latent, bfloat16": lambda: exact(PairFactory, "V3"),
    "latent, int8": lambda: exact(ByteFactory, "V3"),
    "latent, int4": lambda: exact(NibbleFactory, "V3"),
    "identity": lambda: IdentityModel(IdentityConfig(head_dim=32), CPU),
    "identity, positional": lambda: IdentityModel(IdentityConfig(head_dim=32, positional=True), CPU),
}


def bits(executor: Executor, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows, and what the cache holds of sequence 0 and its neighbours' blocks aside."""
    slots = executor.tables[0].tolist()
    store = executor.store
    cached = [each[slots].flatten(0, 1)[: executor.lengths[0]] for each in (*store.keys, *store.values)]
    return [torch.cat(rows), *cached]


def singly(model, kv_dtype) -> list[torch.Tensor]:
    executor = Executor(model, kv_dtype=kv_dtype)
    executor.step({0: PROMPT})
    return bits(executor, [executor.step({0: [token]})[0] for token in GENERATED])


def in_pieces(model, kv_dtype) -> list[torch.Tensor]:
    """The prompt as it was fed, the rest in short pieces, beside long and short neighbours."""
    executor, rows, at = Executor(model, kv_dtype=kv_dtype), [], 0
    executor.step({0: PROMPT, 1: NEIGHBOURS[0][:90]})
    for number, count in enumerate(PIECES):
        spans = {0: GENERATED[at : at + count], 1: NEIGHBOURS[0][90 + number : 91 + number]}
        if number in {1, 3}:
            spans[2] = NEIGHBOURS[1][number * 40 : number * 40 + 40]
        rows.append(executor.step(spans)[0])
        at += count
    assert at == len(GENERATED)
    return bits(executor, rows)


CACHES = dict(zip(MODELS, ["auto", "int8"] * len(MODELS), strict=False))
CACHES |= {name: "auto" for name in MODELS if name.startswith("latent")}
"""Both kinds of caches meet every kind of products and of layers; latents have no other."""


@pytest.mark.parametrize(("name", "kv_dtype"), CACHES.items())
def test_short_pieces_have_the_bits_of_single_tokens(name, kv_dtype, isa):
    model = MODELS[name]()
    executor = Executor(model, kv_dtype=kv_dtype)
    if executor.backend.exact_span_tokens == 0:
        pytest.skip("no attention kernel of ours takes such heads here")
    assert executor.compute.exact_span_tokens == max(PIECES)
    for one, other in zip(singly(model, kv_dtype), in_pieces(model, kv_dtype), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "deepseek_v3"])
@pytest.mark.parametrize(("dtype", "linear"), [(torch.float32, "auto"), (torch.bfloat16, "plain")], ids=str)
def test_nothing_is_promised_of_products_that_are_not_ours(family, dtype, linear):
    assert Executor(native(rounded_model(family, dtype), dtype, linear)).compute.exact_span_tokens == 0


def test_nothing_is_promised_of_row_operations_that_are_not_ours():
    """Of heads whose rotated part fills no vector."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.125}
    reference = rounded_model("qwen3_5", torch.bfloat16, head_dim=32, rope_parameters=rope)
    executor = Executor(native_of(reference, PairFactory))
    assert executor.backend.exact_span_tokens == 32 and executor.compute.exact_span_tokens == 0


def test_the_build_tells_what_its_choices_promise():
    config = ModelSettings(path="identity", device="cpu", kv_blocks=8, identity_head_dim=32)
    runner = build_runner(config)
    assert runner.device.exact_span_tokens == runner.compute.exact_span_tokens
    promised = {"native": 32, "torch": 0}
    assert runner.device.exact_span_tokens == promised[runner.device.attention_backend]
