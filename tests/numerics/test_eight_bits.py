"""A cache in 8 bits: what is written is torch's rounding bit for bit, and what is read is attention over what it stands
for, in every backend and instruction set of this machine."""

from __future__ import annotations

import pytest
import torch

from ferrum_rpc.attention.eight_bits import FP8, from_rows, row_width, to_rows
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.kv.store import CacheSpec, KvStore
from tests.numerics.test_attention import CPU, LONG, backends, compare
from tests.support.cases import MIX
from tests.support.poison import fill_slots

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


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


FAR = [(500, 1), (3, 80), (1100, 2)]


@pytest.mark.parametrize(
    ("spans", "dim", "window", "softcap", "dtype"),
    [
        (MIX, 16, None, None, torch.float32),
        (MIX, 16, 16, None, torch.bfloat16),
        (MIX, 16, None, 5.0, torch.float32),
        (LONG, 48, None, None, torch.bfloat16),
        (LONG, 48, 16, None, torch.float32),
        (LONG, 48, None, 5.0, torch.bfloat16),
        (FAR, 64, None, None, torch.float32),
        (FAR, 64, 16, None, torch.bfloat16),
        (FAR, 64, None, 5.0, torch.bfloat16),
    ],
    ids=str,
)
def test_eight_bit_mixes_of_spans(spans, dim, window, softcap, dtype):
    """Every row against float64 over the numbers that the cache stands for; slots without an owner are NaN."""
    spec = AttentionSpec(4, 2, dim, dim**-0.5, window, softcap)
    compare(spec, spans, dtype=dtype, cached=torch.int8, atol=3e-6 if dtype == torch.float32 else 0.03)
