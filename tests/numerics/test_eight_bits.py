"""A cache in 8 bits: what is written is torch's rounding bit for bit, and what is read is attention over what it stands
for, in every backend and instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.eight_bits import FP8, from_rows, row_width, to_rows
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.native_paged import SHORT, NativePagedAttention
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.kv.store import CacheSpec, KvStore
from tests.kernels.cases import dense
from tests.numerics.test_attention import CPU, LONG, MIX, backends, isas
from tests.poison import fill_slots

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 0.03}


def store_of(spec, blocks, block_size, layers=1):
    """Slots that nothing was written to are NaN."""
    kept = CacheSpec(spec.kv_heads, row_width(spec.head_dim, torch.int8), torch.int8)
    store = KvStore([kept] * layers, blocks, block_size, CPU)
    fill_slots(store, torch.ones(blocks * block_size, dtype=torch.bool))
    return store


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
def test_a_number_is_off_by_half_a_step_at_most(dtype):
    numbers = (
        torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 7)[:, None, None]
    )
    numbers[0, 1] = 0.0
    rows = to_rows(numbers, dtype)
    assert (rows.shape, rows.dtype) == ((7, 3, 20), dtype)
    step = numbers.abs().amax(-1, keepdim=True) / 127
    if dtype == FP8:  # three bits behind the first, and 2 ** -9 of what 448 stands for
        step = torch.maximum(numbers.abs() / 8, step * 127 / 448 / 512)
    assert ((from_rows(rows, torch.float32) - numbers).abs() <= step * 0.50001).all()
    assert not from_rows(to_rows(torch.full((1, 8), 1e-44), dtype), torch.float32).any()  # too small for a scale


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_of_a_head_with_a_number_that_is_not_finite_all_are_none(value, dtype):
    numbers = torch.ones(2, 3, 8)
    numbers[1, 2, 5] = value
    found = from_rows(to_rows(numbers, dtype), torch.float32).isnan()
    assert found[1, 2].all() and found.sum() == 8


def test_a_slot_that_was_filled_with_nan_reads_as_nan():
    store = store_of(AttentionSpec(2, 2, 8, 1.0), 2, 4)
    assert from_rows(store.keys[0], torch.bfloat16).isnan().all()
    fill_slots(store, torch.arange(8), 0.0)
    assert not from_rows(store.values[0], torch.float32).any()


@DTYPES
@pytest.mark.parametrize("dim", [16, 48, 64, 128])
def test_eight_bit_new_tokens_reach_their_slots_and_nothing_else(dtype, dim):
    spec, slots = AttentionSpec(2, 2, dim, 1.0), torch.tensor([5, 40, 41, 127, 6])
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(5, 6, dim, generator=generator) * 10 ** torch.randn(5, 6, 1, generator=generator)
    fused[1], fused[2, :, 3], fused[4, 4, 1] = 0.0, 1e-43, torch.inf
    fused = fused.to(dtype)  # query, key and value of a projection
    key, value = fused[:, 2:4], fused[:, 4:]
    store = store_of(spec, 32, 4, layers=2)
    for backend in backends([spec] * 2, store, dtype):
        fill_slots(store, torch.arange(128), 7.0)
        backend.write(1, slots, key, value)
        for written, rows in ((store.keys, key), (store.values, value)):
            expected = torch.full((128, 2, dim + 4), 7, dtype=torch.int8)
            expected[slots] = to_rows(rows)
            found = written[1].flatten(0, 1)
            nothing = from_rows(expected, torch.float32).isnan()  # their bytes are of no account
            assert torch.equal(from_rows(found, torch.float32).isnan(), nothing)
            finite = ~nothing.any(-1)
            assert torch.equal(found[finite], expected[finite])
            assert (written[0] == 7).all()


@DTYPES
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (16, None), (None, 5.0)])
@pytest.mark.parametrize(("spans", "dim"), [(MIX, 16), (LONG, 48), ([(500, 1), (3, 80), (1100, 2)], 64)], ids=str)
def test_eight_bit_mixes_of_spans(spans, dim, window, softcap, dtype):
    """Every row against float64 over the numbers that the cache stands for; slots without an owner are NaN."""
    spec = AttentionSpec(4, 2, dim, dim**-0.5, window, softcap)
    generator = torch.Generator().manual_seed(1)
    sizes = [-(-(start + count) // 16) for start, count in spans]
    store = store_of(spec, sum(sizes) + 2, 16)
    order = (1 + np.random.default_rng(1).permutation(sum(sizes) + 1)).astype(np.int32)
    tables = np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])
    starts, counts = zip(*spans, strict=True)
    everything = BatchGeometry.build(16, [0] * len(spans), [sum(each) for each in spans], tables)
    key, value = (torch.randn(everything.tokens, 2, dim, generator=generator).to(dtype) for _ in range(2))
    TorchPagedAttention([spec], store.keys, store.values, dtype).write(
        0, torch.from_numpy(everything.slots), key, value
    )
    key, value = (from_rows(to_rows(each), torch.float64) for each in (key, value))
    geometry = BatchGeometry.build(16, list(starts), list(counts), tables)
    query = torch.randn(geometry.tokens, 4, dim, generator=generator).to(dtype)
    for backend in backends([spec], store, dtype):
        output = backend.attend(0, query, backend.plan(geometry))
        for span in range(len(starts)):
            rows = slice(*geometry.query_start[span : span + 2])
            seen = slice(*everything.query_start[span : span + 2])
            expected = dense(spec, query[rows], key[seen], value[seen])
            torch.testing.assert_close(output[rows].double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.float32, 3), (torch.bfloat16, 3), (torch.bfloat16, SHORT + 8)], ids=str
)
def test_eight_bit_keys_of_which_one_is_no_number(dtype, count):
    """It shows in every row that sees it and in no other, but for a long span that torch computes."""
    spec = AttentionSpec(4, 2, 32, 0.2, 20)
    store, table, length = store_of(spec, 6, 16), np.arange(1, 6, dtype=np.int32), 70
    store.keys[0].copy_(to_rows(torch.randn(6, 16, 2, 32)))
    store.values[0].copy_(to_rows(torch.randn(6, 16, 2, 32)))
    geometry = BatchGeometry.build(16, [length - count], [count], [table])
    query, rows = torch.randn(count, 4, 32).to(dtype), torch.arange(length - count, length)
    for backend in isas([spec], store, dtype):
        plan = backend.plan(geometry)
        clean = backend.attend(0, query, plan)
        for position in (3, length - count - 20, length - count, length - 2, length - 1):
            scale = store.keys[0].flatten(0, 1)[16 + position, 1, 32:]
            before = scale.clone()
            scale.fill_(-1)
            answer = backend.attend(0, query, plan)
            scale.copy_(before)
            sees = (rows >= position) & (rows - position < 20)
            assert answer[sees][:, 2:].isnan().all()
            assert torch.equal(answer[:, :2], clean[:, :2])
            if count <= SHORT or backend.takes_long_spans:
                assert torch.equal(answer[~sees], clean[~sees])


def test_eight_bit_answers_depend_on_neither_threads_nor_neighbours_nor_on_where_a_long_span_is_cut():
    spec = AttentionSpec(8, 2, 64, 0.125)
    store = store_of(spec, 130, 16)
    for tensor in (*store.keys, *store.values):
        tensor.copy_(to_rows(torch.randn(130, 16, 2, 64)))
    tables = np.split((1 + np.random.default_rng(0).permutation(129)).astype(np.int32), [32, 110])
    backend = NativePagedAttention([spec], store.keys, store.values, dtype=torch.bfloat16)
    query = torch.randn(500, 8, 64).bfloat16()

    def attend(*spans):
        """Of ``(sequence, first, last)``."""
        starts, counts = [first for _, first, _ in spans], [last - first for _, first, last in spans]
        geometry = BatchGeometry.build(16, starts, counts, [tables[each] for each, _, _ in spans])
        rows = torch.cat([query[first % 500 :][:count] for first, count in zip(starts, counts, strict=True)])
        return backend.attend(0, rows, backend.plan(geometry)).split(counts)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        [whole], [single] = attend((0, 0, 500)), attend((1, 1100, 1101))
        torch.set_num_threads(3)
        pieces = [attend((0, *each), (1, 1100, 1101)) for each in ((0, 133), (133, 300), (300, 333), (333, 500))]
        assert torch.equal(torch.cat([first for first, _ in pieces]), whole) or not backend.takes_long_spans
        assert all(torch.equal(each, single) for _, each in pieces)
        assert torch.equal(attend((1, 1090, 1101))[0][10:], single)
    finally:
        torch.set_num_threads(threads)
