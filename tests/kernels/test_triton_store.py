"""New keys and values reach their slots and nothing else, in one launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.attention.triton_store import store
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.kv.store import CacheSpec, KvStore


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (1, 80), (8, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_writes_what_the_store_writes(device, heads, head_dim, dtype):
    generator = torch.Generator().manual_seed(0)
    stores = [KvStore([CacheSpec(heads, head_dim, dtype)] * 2, 6, 4, device) for _ in range(2)]
    for each in stores:
        each.fill_slots(torch.arange(24), 7.0)
    slots = torch.tensor([5, 0, 23, 9, 4], device=device)
    fused = torch.randn(5, 3 * heads, head_dim, generator=generator).to(device)  # query, key and value of a projection
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    TorchPagedAttention([AttentionSpec(heads, heads, head_dim, 1.0)] * 2, stores[0].keys, stores[0].values).write(
        1, slots, key, value
    )
    store(stores[1].keys[1], stores[1].values[1], slots, key, value)
    for layer in range(2):
        assert torch.equal(stores[0].keys[layer], stores[1].keys[layer])
        assert torch.equal(stores[0].values[layer], stores[1].values[layer])


def test_no_tokens_are_no_launch(device):
    each = KvStore([CacheSpec(1, 16, torch.float32)], 2, 4, device)
    empty = torch.empty(0, 1, 16, device=device)
    each.fill_slots(torch.arange(8), 7.0)
    store(each.keys[0], each.values[0], torch.empty(0, dtype=torch.int64, device=device), empty, empty)
    assert (each.keys[0] == 7).all()


def test_what_is_not_dense_is_refused(device):
    layer = torch.zeros(2, 4, 2, 16, device=device)
    new, slots = torch.zeros(1, 2, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="dense"):
        store(layer[:, :2], layer[:, :2], slots, new, new)
    with pytest.raises(ValueError, match="dense"):
        store(layer, layer, slots, new, torch.zeros(1, 16, 2, device=device).transpose(1, 2))
