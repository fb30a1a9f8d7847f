"""New keys and values reach their slots and nothing else, in one launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention.eight_bits import FP8, from_rows, row_width
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.kv.store import CacheSpec, KvStore
from ferrum_rpc.native.triton_heads import CacheRows, place_heads
from tests.support.poison import fill_slots


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (1, 80), (8, 192)])
@pytest.mark.parametrize(
    ("dtype", "cached"), [(each, kept) for each in (torch.float32, torch.bfloat16) for kept in (each, FP8)], ids=str
)
def test_it_writes_what_the_torch_path_writes(device, heads, head_dim, dtype, cached):
    generator, specs = torch.Generator().manual_seed(0), [AttentionSpec(heads, heads, head_dim, 1.0)] * 2
    fused = torch.randn(5, 3 * heads, head_dim, generator=generator)  # query, key and value of a projection
    fused *= 10 ** torch.randn(5, 3 * heads, 1, generator=generator)
    fused[1], fused[2, :, 3] = 0.0, 1e-43
    fused[3, heads, 5], fused[4, -1, 0] = torch.inf, torch.nan
    fused, slots = fused.to(device, dtype), torch.tensor([5, 0, 23, 9, 4], device=device)
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    found = []
    for backend in (TorchPagedAttention, TritonPagedAttention):
        store = KvStore([CacheSpec(heads, row_width(head_dim, cached), cached)] * 2, 6, 4, device)
        fill_slots(store, torch.arange(24), 7.0)
        backend(specs, store.keys, store.values, dtype).write(1, slots, key, value)
        found.append((*store.keys, *store.values))
    for expected, written in zip(*found, strict=True):
        ours, exact = (from_rows(each, dtype) if cached == FP8 else each for each in (written, expected))
        nothing = exact.isnan()
        assert torch.equal(ours.isnan(), nothing)
        known = ~nothing.any(-1)  # the bytes of others are of no account
        assert torch.equal(written[known], expected[known])


def test_no_tokens_are_no_launch(device):
    each = KvStore([CacheSpec(1, 16, torch.float32)], 2, 4, device)
    empty = torch.empty(0, 1, 16, device=device)
    fill_slots(each, torch.arange(8), 7.0)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    place_heads(None, empty, empty, into=CacheRows(each.keys[0], each.values[0], slots))
    assert (each.keys[0] == 7).all()


def test_what_is_not_dense_is_refused(device):
    layer = torch.zeros(2, 4, 2, 16, device=device)
    new, slots = torch.zeros(1, 2, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="dense"):
        place_heads(None, new, new, into=CacheRows(layer[:, :2], layer[:, :2], slots))
    with pytest.raises(ValueError, match="dense"):
        place_heads(
            None, new, torch.zeros(1, 16, 2, device=device).transpose(1, 2), into=CacheRows(layer, layer, slots)
        )
