"""The paged backend against attention written out in float64, over shapes that tiles and groups must handle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.backend import select_backend
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.tiles import TILE_ROWS, BandMask
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.kv.store import KvStore

CPU = torch.device("cpu")


def dense(spec, query, key, value, start):
    """float64 [n, heads, dim]: row r of the span sees positions ``.. start + r`` of key and value [length, ...]."""
    group = spec.heads // spec.kv_heads
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    position = start + torch.arange(len(query))[:, None]
    visible = torch.arange(len(key))[None] <= position
    if spec.window is not None:
        visible &= torch.arange(len(key))[None] > position - spec.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def compare(spec, spans, *, block_size=16, dtype=torch.float32, atol=2e-6, seed=0, device=CPU):
    """Run ``spans`` (start, count) in one step over a poisoned store; compare every row with `dense`."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [-(-(start + count) // block_size) for start, count in spans]
    blocks = sum(sizes) + 2
    store = KvStore(1, blocks, block_size, spec.kv_heads, spec.head_dim, dtype=dtype, device=device)
    store.fill_slots(torch.ones(blocks * block_size, dtype=torch.bool), float("nan"))
    order = (1 + rng.permutation(blocks - 1)).astype(np.int32)
    tables = np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])
    geometry = BatchGeometry.build(block_size, [s for s, _ in spans], [n for _, n in spans], tables)
    geometry.check()
    content = []
    for (start, count), table in zip(spans, tables, strict=True):
        length = start + count
        key, value = (
            torch.randn(length, spec.kv_heads, spec.head_dim, generator=generator).to(dtype) for _ in range(2)
        )
        position = np.arange(length)
        slots = torch.from_numpy(table[position // block_size].astype(np.int64) * block_size + position % block_size)
        store.write(0, slots.to(device), key.to(device), value.to(device))
        content.append((key, value))
    query = torch.randn(geometry.tokens, spec.heads, spec.head_dim, generator=generator).to(dtype)
    backend = TorchPagedAttention([spec], store.keys, store.values)
    for _ in range(2):  # the second time with warm scratch and masks
        output = backend.attend(0, query.to(device), backend.plan(geometry)).cpu()
    for span, (start, _) in enumerate(spans):
        rows = slice(geometry.query_start[span], geometry.query_start[span + 1])
        expected = dense(spec, query[rows], *content[span], start)
        torch.testing.assert_close(output[rows].double(), expected, rtol=0, atol=atol)


HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
MIX = [(0, 5), (37, 1), (0, 1), (16, 1), (15, 1), (31, 1), (30, 7), (16, 16), (0, 33), (100, 1)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 8, 16, 33])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_every_mix_of_spans(heads, window, softcap):
    compare(AttentionSpec(*HEADS[heads], 16, 0.25, window, softcap), MIX)


@pytest.mark.parametrize("window", [None, 100, TILE_ROWS, 2 * TILE_ROWS + 5])
def test_spans_longer_than_a_tile(window):
    spec = AttentionSpec(2, 1, 8, 0.4, window)
    compare(spec, [(0, 2 * TILE_ROWS + 9), (11, TILE_ROWS + 1), (700, TILE_ROWS)], block_size=32)


def test_softcap_in_long_spans():
    compare(AttentionSpec(2, 1, 8, 0.4, None, 3.0), [(0, TILE_ROWS + 30), (9, TILE_ROWS + 1)])


def test_many_single_tokens_fill_several_groups():
    spec = AttentionSpec(4, 2, 64, 0.125)
    compare(spec, [(start, 1) for start in np.random.default_rng(1).integers(0, 400, size=60)], block_size=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype):
    compare(AttentionSpec(8, 2, 32, 0.2), MIX, dtype=dtype, atol=0.03 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_same_code_is_the_reference_on_a_gpu(dtype, window, softcap):
    spec = AttentionSpec(4, 2, 16, 0.25, window, softcap)
    compare(spec, MIX, dtype=dtype, atol=1e-3 if dtype == torch.float32 else 0.05, device=torch.device("cuda"))
    compare(spec, [(0, TILE_ROWS + 9), (11, TILE_ROWS + 1)], dtype=dtype, atol=0.05, device=torch.device("cuda"))


def test_scale_is_the_specs():
    compare(AttentionSpec(2, 2, 16, 1.7), MIX)


@pytest.mark.parametrize("window", [None, 5])
def test_a_band_mask_is_what_its_definition_says(window):
    masks = BandMask(window, torch.float32, CPU)
    for rows, keys in ((1, 1), (3, 3), (2, 9), (TILE_ROWS, TILE_ROWS + 40), (7, 300)):
        position = keys - rows + torch.arange(rows)[:, None]
        column = torch.arange(keys)[None]
        visible = column <= position
        if window is not None:
            visible &= column > position - window
        assert torch.equal(masks.view(rows, keys) == 0, visible)


def test_layers_may_differ_in_their_window():
    specs = [AttentionSpec(2, 1, 8, 0.3, window) for window in (None, 3)]
    store = KvStore(2, 9, 4, 1, 8, dtype=torch.float32, device=CPU)
    geometry = BatchGeometry.build(4, [0], [20], [np.arange(1, 6, dtype=np.int32)])
    key = torch.randn(20, 1, 8)
    query = torch.randn(20, 2, 8)
    backend = TorchPagedAttention(specs, store.keys, store.values)
    plan = backend.plan(geometry)
    for layer, spec in enumerate(specs):
        store.write(layer, torch.from_numpy(geometry.slots), key, key)
        expected = dense(spec, query, key, key, 0)
        torch.testing.assert_close(backend.attend(layer, query, plan).double(), expected, rtol=0, atol=2e-6)


def test_geometry_refuses_what_cannot_be():
    table = np.arange(1, 3, dtype=np.int32)
    for starts, counts, tables in (([0], [0], [table]), ([-1], [2], [table]), ([0], [9], [table]), ([0], [1], [])):
        with pytest.raises(ValueError, match=r"."):
            BatchGeometry.build(4, starts, counts, tables)


def test_an_empty_step_has_a_geometry():
    geometry = BatchGeometry.build(4, [], [], [])
    geometry.check()
    assert (geometry.spans, geometry.tokens) == (0, 0)


def test_the_choice_of_a_backend_has_a_reason():
    spec = AttentionSpec(2, 1, 8, 0.3)
    name, reason, factory = select_backend(CPU, [spec])
    assert name == "torch" and "cpu" in reason and factory is TorchPagedAttention
    assert select_backend(CPU, [spec], "torch")[1] == "requested"
    with pytest.raises(InvalidRequest, match="nonesuch") as refused:
        select_backend(CPU, [spec], "nonesuch")
    assert refused.value.field == "attention_backend"
