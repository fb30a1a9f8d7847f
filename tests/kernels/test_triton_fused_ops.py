"""What lies between the products, in Triton: the exact result rounded once, and nothing else written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ferrum_rpc.attention.eight_bits import FP8, row_width
from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.kv.store import CacheSpec, KvStore
from ferrum_rpc.models import triton_fused_ops
from ferrum_rpc.models.fused_ops import TorchFusedOps
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.triton_fused_ops import TritonFusedOps
from tests import exact_rows
from tests.checkpoints import TINY
from tests.exact_rows import close
from tests.poison import fill_slots

MODEL = ModelSpec.from_config(
    {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    | {"hidden_size": 96, "intermediate_size": 1500, "head_dim": 40, "num_hidden_layers": 1}
)
SPEC = replace(MODEL.layers[0], mixer=replace(MODEL.layers[0].mixer, heads=7, kv_heads=2))
"""No power of two anywhere, and more heads than a program has."""


def model(layer):
    """Of one such layer."""
    layer = replace(layer, mlp=replace(layer.mlp, hidden=layer.mixer.hidden))
    return replace(MODEL, layers=(layer,), hidden_size=layer.mixer.hidden, norm=layer.norm)


TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def draw(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@TYPES
def test_the_sum_is_kept_and_normed(device, dtype):
    weight, delta = draw(device, 1, 96, seed=1), draw(device, 3, 96, dtype=dtype, seed=2)
    hidden = draw(device, 3, 96, dtype=dtype) * 3
    total = hidden + delta
    for each in (delta, None):
        normed = TritonFusedOps(SPEC).add_norm(hidden, each, weight)
        assert torch.equal(hidden, total)
        exact = total.double() * (total.double().square().mean(-1, keepdim=True) + SPEC.norm.eps).rsqrt()
        close(normed, exact * weight.double())


@TYPES
@pytest.mark.parametrize("normed", [False, True])
def test_query_and_key_are_normed_and_rotated_and_value_is_left(device, dtype, normed):
    qkv = draw(device, 3, 11 * 40, dtype=dtype)
    norm = draw(device, 9, 40, seed=1) if normed else None
    angles = draw(device, 3, 1, 20, seed=2)
    cos, sin = torch.cat([angles.cos(), angles.cos()], -1), angles.sin()
    heads = qkv.clone().view(3, 11, 40)
    wide = heads[:, :9].double()
    if norm is not None:
        wide = F.rms_norm(wide, (40,), None, SPEC.norm.eps) * norm.double()
    first, second = wide[..., :20], wide[..., 20:]
    c, s = cos[..., :20].double(), sin.double()
    expected = torch.cat([first * c - second * s, second * c + first * s], -1)
    query, key, value = TritonFusedOps(SPEC).heads(qkv, norm, cos, sin)
    close(query, expected[:, :7])
    close(key, expected[:, 7:])
    assert torch.equal(value, heads[:, 9:])


@TYPES
def test_the_gate_is_rounded_once(device, dtype):
    gate_up = draw(device, 2, 3000, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    close(TritonFusedOps(SPEC).gate(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("name", exact_rows.VARIANTS)
def test_what_families_differ_in(device, name):
    spec = exact_rows.variant(SPEC, name)

    def drawn(*shape, **options):
        return draw(device, *shape, **options)

    exact_rows.check(TritonFusedOps(spec), spec, drawn, close, torch.float32)


@pytest.mark.parametrize("cached", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("name", [*exact_rows.VARIANTS, None])
def test_the_cache_gets_the_bits_that_a_launch_of_its_own_writes(device, name, cached):
    layer = SPEC if name is None else exact_rows.variant(SPEC, name)
    mixer, ops = layer.mixer, TritonFusedOps(layer)
    qkv = draw(device, 3, 11 * 40, dtype=torch.bfloat16)
    norm = draw(device, 9, 40, seed=1) if mixer.qk_norm else None
    angles = draw(device, 3, 1, mixer.rotary_dim // 2, seed=2)
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


def test_no_rows_are_no_launch(device):
    ops = TritonFusedOps(SPEC)
    empty = draw(device, 0, 96)
    assert ops.add_norm(empty, empty, draw(device, 1, 96)).shape == (0, 96)
    assert ops.gate(draw(device, 0, 3000)).shape == (0, 1500)
    query, key, value = ops.heads(draw(device, 0, 440), None, draw(device, 0, 1, 40), draw(device, 0, 1, 20))
    assert query.shape == (0, 7, 40) and key.shape == value.shape == (0, 2, 40)


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_that_agree_with_torch_are_taken(device, dtype):
    reason, ops = select_fused_ops(model(SPEC), dtype, device, interpreted=True)
    assert isinstance(ops, TritonFusedOps), reason


@pytest.mark.parametrize("name", exact_rows.VARIANTS)
def test_kernels_of_every_family_are_taken(device, name):
    reason, ops = select_fused_ops(model(exact_rows.variant(SPEC, name)), torch.bfloat16, device, interpreted=True)
    assert isinstance(ops, TritonFusedOps), reason


def test_a_wrong_answer_or_a_failure_is_a_reason(device, monkeypatch):
    right = TritonFusedOps.gate
    monkeypatch.setattr(TritonFusedOps, "gate", lambda self, rows: right(self, rows) * 1.01)
    reason, ops = select_fused_ops(model(SPEC), torch.float32, device, interpreted=True)
    assert "differs from torch's" in reason and isinstance(ops, TorchFusedOps)
    monkeypatch.setattr(triton_fused_ops, "gate_kernel", None)
    monkeypatch.setattr(TritonFusedOps, "gate", right)
    reason, ops = select_fused_ops(model(SPEC), torch.float32, device, interpreted=True)
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
    reason, ops = select_fused_ops(model(spec), dtype, device, interpreted=True)
    assert word in reason and isinstance(ops, TorchFusedOps)


def test_on_a_cpu_the_choice_is_not_theirs():
    _, ops = select_fused_ops(model(SPEC), torch.float32, torch.device("cpu"))
    assert not isinstance(ops, TritonFusedOps)
