"""The KV store moves bytes, in all layers at once and bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.eight_bits import FP8, MAX_MAGNITUDE, from_rows
from ferrum_rpc.kv.store import CacheSpec, KvStore
from ferrum_rpc.sampling.transfer import Marker
from tests.support.fake_device import fake_device
from tests.support.poison import fill_slots

CPU = torch.device("cpu")
ALIKE = [CacheSpec(2, 8, torch.float32)] * 3
DIFFERENT = [CacheSpec(*each) for each in ((2, 8, torch.bfloat16), (1, 24, torch.float32), (2, 8, torch.bfloat16))]


LAYERS = {"alike": ALIKE, "different": DIFFERENT}
LAYERS |= {"one row": [CacheSpec(1, 12, torch.bfloat16, pairs=False)] * 3}
LAYERS |= {name: [CacheSpec(2, 12, dtype)] * 3 for name, dtype in (("int8", torch.int8), ("fp8", FP8))}


@pytest.fixture(params=LAYERS)
def store(request):
    """Random content, always the same: bytes of it are scales, which may be no numbers. Slot 6 is not a number."""
    made, generator = KvStore(LAYERS[request.param], 6, 4, CPU), torch.Generator().manual_seed(0)
    for tensor in (*made.keys, *made.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 40)
    fill_slots(made, torch.tensor([6]))
    return made


def snapshot(store):
    """Bytes of every tensor, [blocks, ...]."""
    return [tensor.clone().view(torch.uint8) for tensor in (*store.keys, *store.values)]


def test_copied_blocks_read_all_before_they_write(store):
    before = snapshot(store)
    store.copy_blocks(np.array([(1, 2), (2, 3), (5, 4)]))
    for now, then in zip(snapshot(store), before, strict=True):
        assert torch.equal(now[[2, 3, 4]], then[[1, 2, 5]])
        assert torch.equal(now[[0, 1, 5]], then[[0, 1, 5]])


def test_restore_undoes_a_write_bit_for_bit_nan_included(store):
    before = snapshot(store)
    slots = torch.tensor([5, 6, 17])
    saved = store.save(slots.numpy())
    for tensor in (*store.keys, *store.values):
        tensor.flatten(0, 1)[slots] = (torch.randn(3, *tensor.shape[2:]) * 40).to(tensor.dtype)
    assert not any(torch.equal(now, then) for now, then in zip(snapshot(store), before, strict=True))
    store.restore(saved)
    assert all(torch.equal(now, then) for now, then in zip(snapshot(store), before, strict=True))


def test_fill_by_slots_or_by_mask(store):
    mask = torch.zeros(24, dtype=torch.bool)
    mask[3:7] = True
    fill_slots(store, mask)
    for tensor in (*store.keys, *store.values):
        nothing = from_rows(tensor, torch.float32) if tensor.dtype in MAX_MAGNITUDE else tensor
        assert torch.equal(nothing.reshape(24, -1).isnan().all(1), mask)
    fill_slots(store, torch.tensor([3, 4, 5, 6]), 0.0)
    for tensor in (*store.keys, *store.values):
        assert not tensor.flatten(0, 1)[3:7].any()


def test_every_layer_has_its_shape_and_dtype_and_a_place_of_its_own():
    store = KvStore(DIFFERENT, 6, 4, CPU)
    for number, (spec, *tensors) in enumerate(zip(DIFFERENT, store.keys, store.values, strict=True)):
        for tensor in tensors:
            assert (tensor.shape, tensor.dtype) == ((6, 4, spec.kv_heads, spec.head_dim), spec.dtype)
            tensor.fill_(number)
    for number, tensors in enumerate(zip(store.keys, store.values, strict=True)):
        assert all((tensor == number).all() for tensor in tensors)
    assert sum(buffer.nbytes for buffer in store.buffers) == 6 * 4 * 2 * (2 * 16 * 2 + 24 * 4)
    assert sum(spec.slot_bytes for spec in DIFFERENT) == 2 * (2 * 16 * 2 + 24 * 4)


def test_a_row_that_is_key_and_value_is_there_once():
    store = KvStore(LAYERS["one row"], 6, 4, CPU)
    assert [buffer.shape for buffer in store.buffers] == [(3, 1, 6, 4, 1, 12)]
    assert sum(spec.slot_bytes for spec in LAYERS["one row"]) == store.own_block_bytes // 4 == 3 * 12 * 2
    for key, value in zip(store.keys, store.values, strict=True):
        assert key.data_ptr() == value.data_ptr() and key.shape == value.shape
    assert len(store.read(np.array([1, 2]), 0, 12)) == 1


@pytest.mark.parametrize(("name", "layers", "sizes"), [("layers", [], (6, 4)), ("num_blocks", ALIKE, (0, 4))])
def test_what_cannot_be_is_refused(name, layers, sizes):
    with pytest.raises(ValueError, match=name):
        KvStore(layers, *sizes, CPU)
    with pytest.raises(ValueError, match="head_dim"):
        CacheSpec(2, 0, torch.float32)


def test_what_is_read_is_written_elsewhere_bit_for_bit(store):
    before, width = snapshot(store), min(tensor.shape[-1] for tensor in store.keys) - 4
    here, there = np.array([6, 2, 17]), np.array([20, 21, 3])
    for layer in range(3):
        store.write(there, layer, width, store.read(here, layer, width))
    for now, then in zip(snapshot(store), before, strict=True):
        assert torch.equal(now.flatten(0, 1)[there], then.flatten(0, 1)[here])
        assert torch.equal(now[1:5], then[1:5])


def test_a_block_comes_back_bit_for_bit(store):
    before = snapshot(store)
    content = store.read_block(1)
    store.write_block(4, bytes(content))
    [again, other] = store.read_blocks([4, 2])
    assert bytes(again()) == bytes(content)
    store.write_blocks([5, 0], [bytes(content), bytes(other())])
    for now, then in zip(snapshot(store), before, strict=True):
        assert torch.equal(now, then[[2, 1, 2, 3, 1, 1]])


@pytest.mark.parametrize("layers", LAYERS)
def test_blocks_of_a_device_are_gathered_at_once_and_nobody_waits(layers, monkeypatch):
    """What is written behind them does not change them. All layers' bytes lie as `read_block` of a host has them."""
    marks = []

    class Mark(Marker):
        def __init__(self, device):
            self.waited = False
            marks.append(self)

        def wait(self):
            self.waited = True

    monkeypatch.setattr("ferrum_rpc.kv.store.Marker", Mark)
    here, generator = KvStore(LAYERS[layers], 6, 4, CPU), torch.Generator().manual_seed(0)
    for tensor in (*here.keys, *here.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 40)
    with fake_device() as device:
        there = KvStore(LAYERS[layers], 6, 4, device)
        there.write_blocks(range(6), [bytes(here.read_block(block)) for block in range(6)])
        contents = there.read_blocks([3, 1])
        there.write_block(3, bytes(here.read_block(0)))
        assert len(marks) == 1 and not marks[0].waited
        assert [bytes(each()) for each in contents] == [bytes(here.read_block(block)) for block in (3, 1)]
        assert marks[0].waited and bytes(there.read_block(3)) == bytes(here.read_block(0))


# --- layers that share keys and values --------------------------------------------------------------------------------


def test_a_layer_with_the_keys_and_values_of_another_one_keeps_none():
    narrow, wide = CacheSpec(2, 8, torch.bfloat16), CacheSpec(1, 24, torch.float32)
    layers, sources = [narrow, wide, narrow, wide, narrow], [0, 1, 2, 1, 0]
    store = KvStore(layers, 6, 4, torch.device("cpu"), sources=sources)
    assert store.block_bytes == KvStore([narrow, wide, narrow], 6, 4, torch.device("cpu")).block_bytes
    for layer, source in enumerate(sources):
        for parts in (store.keys, store.values):
            assert parts[layer].data_ptr() == parts[source].data_ptr()
            parts[layer].fill_(source + 1)
    kept = [store.read(np.array([5, 9]), layer, 24)[0] for layer in range(3)]
    assert [each.view(np.float32)[0] for each in kept[1:2]] == [2.0]
    saved = store.save(np.array([5]))
    store.keys[3][1, 1] = 7.0
    store.restore(saved)
    assert (store.keys[1] == 2.0).all() and (store.keys[0] == 1.0).all() and (store.keys[2] == 3.0).all()


@pytest.mark.parametrize("sources", [[0, 0], [1, 1], [1, 0]])
def test_a_layer_has_the_keys_and_values_of_one_with_its_spec_that_has_its_own(sources):
    different = [CacheSpec(2, 8, torch.bfloat16), CacheSpec(1, 16, torch.bfloat16)]
    with pytest.raises(ValueError, match="same spec"):
        KvStore(different, 6, 4, torch.device("cpu"), sources=sources)
