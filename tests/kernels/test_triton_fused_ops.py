"""What lies between the products, in Triton: the exact result rounded once, and nothing else written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention.eight_bits import FP8, row_width
from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.kv.store import CacheSpec, KvStore
from ferrum_rpc.models import triton_fused_ops
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.fused_ops import TorchFusedOps
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.triton_fused_ops import TritonFusedOps
from tests.support import exact_rows
from tests.support.checkpoints import TINY
from tests.support.exact_rows import draw, model_of
from tests.support.fixtures import PagedModel
from tests.support.poison import fill_slots

MODEL = exact_rows.one_layer(hidden_size=96, intermediate_size=1500, head_dim=40)
SPEC = replace(MODEL.layers[0], mixer=replace(MODEL.layers[0].mixer, heads=7, kv_heads=2))
"""No power of two anywhere, and more heads than a program has."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((each, torch.float32) for each in exact_rows.VARIANTS)]
    + [(each, dtype) for each in ("plain", "normed") for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_what_families_differ_in(device, name, dtype):
    """Each result is the exact one, rounded once."""
    spec = exact_rows.variant(SPEC, name)
    exact_rows.check(TritonFusedOps(spec), spec, dtype, device=device)


@pytest.mark.parametrize("cached", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("name", exact_rows.VARIANTS)
def test_the_cache_gets_the_bits_that_a_launch_of_its_own_writes(device, name, cached):
    layer = exact_rows.variant(SPEC, name)
    mixer, ops = layer.mixer, TritonFusedOps(layer)
    qkv = draw(3, 11 * 40, dtype=torch.bfloat16, device=device)
    norm = draw(9, 40, seed=1, device=device) if mixer.qk_norm else None
    angles = draw(3, 1, mixer.rotary_dim // 2, seed=2, device=device)
    rotation = (None, None) if layer.rope is None else (torch.cat([angles.cos(), angles.cos()], -1), angles.sin())
    slots, found = torch.tensor([5, 0, 23], device=device), []
    for together in (True, False):
        store = KvStore([CacheSpec(2, row_width(40, cached), cached)], 6, 4, device)
        fill_slots(store, torch.arange(24), 7.0)
        cache = TritonPagedAttention([AttentionSpec(7, 2, 40, 1.0)], store.keys, store.values, torch.bfloat16)
        if together:
            heads = ops.heads_stored(cache.rows(0, slots), qkv.clone(), norm, *rotation)
        else:
            heads = ops.heads(qkv.clone(), norm, *rotation)
            cache.write(0, slots, *heads[1:])
        found.append((*heads, *store.keys, *store.values))
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


QWEN = replace(
    ModelSpec.from_config({**TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}),
    max_context=64,
)


def decoder(device: torch.device) -> Decoder:
    """Of which every operation but the products is a kernel."""
    made = Decoder(QWEN, torch.bfloat16, device, ops=TritonFusedOps(QWEN.layers[0]))
    generator = torch.Generator().manual_seed(0)
    for name, shape in made.expected_tensors().items():
        made.load(name, torch.randn(shape, generator=generator) / shape[-1] ** 0.5)
    return made


def test_in_a_decoder_the_rotation_writes_what_a_launch_of_its_own_writes(device):
    kernels, model = partial(TritonPagedAttention, processors=1), decoder(device)
    fused, apart = (PagedModel(kernels, device, model, staged=staged) for staged in (True, False))
    for tokens in ([(0, [3, 1, 4, 1, 5]), (1, [9])], [(0, [2]), (1, [6, 5])], [(1, [3]), (0, [5])]):
        assert torch.equal(fused.step(*tokens), apart.step(*tokens))
        assert torch.equal(fused.cached(), apart.cached())


def test_no_rows_are_no_launch(device):
    ops = TritonFusedOps(SPEC)
    empty = draw(0, 96, device=device)
    assert ops.add_norm(empty, empty, draw(1, 96, device=device)).shape == (0, 96)
    assert ops.gate(draw(0, 3000, device=device)).shape == (0, 1500)
    query, key, value = ops.heads(
        draw(0, 440, device=device), None, draw(0, 1, 40, device=device), draw(0, 1, 20, device=device)
    )
    assert query.shape == (0, 7, 40) and key.shape == value.shape == (0, 2, 40)


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [("plain", torch.float32), *((each, torch.bfloat16) for each in exact_rows.VARIANTS)], ids=str
)
def test_kernels_of_every_family_are_taken(device, name, dtype):
    reason, ops = select_fused_ops(model_of(exact_rows.variant(SPEC, name), MODEL), dtype, device, interpreted=True)
    assert isinstance(ops, TritonFusedOps), reason


def test_a_wrong_answer_or_a_failure_is_a_reason(device, monkeypatch):
    right = TritonFusedOps.gate
    monkeypatch.setattr(TritonFusedOps, "gate", lambda self, rows: right(self, rows) * 1.01)
    reason, ops = select_fused_ops(model_of(SPEC, MODEL), torch.float32, device, interpreted=True)
    assert "differs from torch's" in reason and isinstance(ops, TorchFusedOps)
    monkeypatch.setattr(triton_fused_ops, "gate_kernel", None)
    monkeypatch.setattr(TritonFusedOps, "gate", right)
    reason, ops = select_fused_ops(model_of(SPEC, MODEL), torch.float32, device, interpreted=True)
    assert reason.startswith("triton: a small step failed: TypeError") and isinstance(ops, TorchFusedOps)


@pytest.mark.parametrize(
    ("spec", "dtype", "word"),
    [
        (SPEC, torch.float64, "float64"),
        (replace(SPEC, mlp=replace(SPEC.mlp, activation="gelu")), torch.float32, "not gelu"),
        (replace(SPEC, mixer=replace(SPEC.mixer, hidden=1 << 15)), torch.float32, "wider"),
    ],
)
def test_what_the_kernels_do_not_know_is_a_reason(device, spec, dtype, word):
    reason, ops = select_fused_ops(model_of(spec, MODEL), dtype, device, interpreted=True)
    assert word in reason and isinstance(ops, TorchFusedOps)


def test_on_a_cpu_the_choice_is_not_theirs():
    _, ops = select_fused_ops(model_of(SPEC, MODEL), torch.float32, torch.device("cpu"))
    assert not isinstance(ops, TritonFusedOps)
