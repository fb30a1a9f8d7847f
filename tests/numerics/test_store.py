"""The KV store moves bytes, in all layers at once and bit for bit."""

from __future__ import annotations

import pytest
import torch

from ferrum_rpc.kv.store import KvStore

SHAPE = {"layers": 3, "num_blocks": 6, "block_size": 4, "kv_heads": 2, "head_dim": 8}


def random_store(dtype=torch.float32):
    store = KvStore(**SHAPE, dtype=dtype, device=torch.device("cpu"))
    for tensor in (*store.keys, *store.values):
        tensor.copy_(torch.randn(tensor.shape))
    return store


def snapshot(store):
    return [tensor.clone() for tensor in (*store.keys, *store.values)]


def test_copied_blocks_read_all_before_they_write():
    store = random_store()
    before = snapshot(store)
    store.copy_blocks(torch.tensor([(1, 2), (2, 3), (5, 4)]))
    for now, then in zip(snapshot(store), before, strict=True):
        assert torch.equal(now[[2, 3, 4]], then[[1, 2, 5]])
        assert torch.equal(now[[0, 1, 5]], then[[0, 1, 5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_restore_undoes_a_write_bit_for_bit_nan_included(dtype):
    store = random_store(dtype)
    store.fill_slots(torch.tensor([6]), float("nan"))
    before = snapshot(store)
    slots = torch.tensor([5, 6, 17])
    saved = store.save(slots)
    for layer in range(3):
        for tensor in (store.keys[layer], store.values[layer]):
            tensor.flatten(0, 1)[slots] = torch.randn(3, 2, 8).to(dtype)
    store.restore(saved)
    for now, then in zip(snapshot(store), before, strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))


def test_fill_by_slots_or_by_mask():
    store = random_store()
    mask = torch.zeros(24, dtype=torch.bool)
    mask[3:7] = True
    store.fill_slots(mask, float("nan"))
    for tensor in snapshot(store):
        assert torch.equal(tensor.view(24, -1).isnan().all(1), mask)
    store.fill_slots(torch.tensor([3, 4, 5, 6]), 0.0)
    assert not any(tensor.isnan().any() for tensor in snapshot(store))


def test_sizes():
    store = KvStore(**SHAPE, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert store.bytes_per_block == 3 * 2 * 4 * 2 * 8 * 2
    assert store.layers == 3
    assert store.keys[2].shape == (6, 4, 2, 8)
    with pytest.raises(ValueError, match="head_dim"):
        KvStore(**SHAPE | {"head_dim": 0}, dtype=torch.float32, device=torch.device("cpu"))
