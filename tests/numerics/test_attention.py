"""The paged backend against attention written out in float64, over shapes that tiles and groups must handle."""

from __future__ import annotations

from contextlib import suppress
from itertools import cycle, pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.backend import select_backend
from ferrum_rpc.attention.eight_bits import SCALE_BYTES, row_width, to_rows
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.native_paged import SHORT, NativePagedAttention
from ferrum_rpc.attention.tiles import TILE_ROWS, BandMask, MaskPattern
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.kv.store import CacheSpec, KvStore
from ferrum_rpc.usage import ISA_VARIABLE
from tests.support.cases import MIX, dense, paged_step
from tests.support.harness import check_geometry, made_or_skip, threads
from tests.support.poison import fill_slots

CPU = torch.device("cpu")

ISAS = ("avx512", "avx2", "portable")


def backends(specs, store, dtype=torch.float32, sinks=()):
    """The torch path, and where it takes such a cache our kernel in every instruction set of this machine; with queries
    of ``dtype`` where the cache does not say."""
    yield TorchPagedAttention(specs, store.keys, store.values, dtype, sinks=sinks)
    for isa in ISAS:
        with suppress(OSError):
            yield NativePagedAttention(specs, store.keys, store.values, isa, dtype, sinks=sinks)


def compare(spec, spans, *, atol=2e-6, **options):
    """Run ``spans`` (start, count) in one step over a poisoned store; hold every row to `dense`."""
    step = paged_step(spec, spans, **{"device": CPU} | options)
    check_geometry(step.geometry)
    store = SimpleNamespace(keys=[step.keys], values=[step.values])
    for backend in backends([spec], store, step.query.dtype, [step.sinks]):
        for _ in range(2):  # the second time with warm scratch and masks
            output = backend.attend(0, step.query, backend.plan(step.geometry))
        assert step.error(output) <= atol, backend.name


LONG = [(0, 33), (0, 150), (3, 64), (61, 70), (200, 129), (130, 1)]
TILES = [(0, 2 * TILE_ROWS + 9), (11, TILE_ROWS + 1), (700, TILE_ROWS)]
SPLIT = [*MIX, (1100, 1), (600, 9), (5, TILE_ROWS + 30)]
"""Also sequences that are split over several units."""

SINGLE = [(start, 1) for start in np.random.default_rng(1).integers(0, 400, size=60)]
"""Tokens that fill several groups."""

BF16 = {"dtype": torch.bfloat16, "atol": 0.03}
FP16 = {"dtype": torch.float16, "atol": 0.004}


def layers(head_dim, scale, windows, softcaps=(None, 5.0)):
    """All of these windows and caps. Numbers of heads and of KV heads take turns."""
    heads = cycle(((4, 4), (4, 2), (4, 1)))
    return [AttentionSpec(*next(heads), head_dim, scale, *each) for each in product(windows, softcaps)]


STEPS = [
    *((spec, MIX, {}) for spec in layers(16, 0.25, [None, 1, 8, 16, 33])),
    *((spec, LONG, BF16) for spec in layers(32, 0.2, [None, 1, 40, 64, 150])),
    *((spec, TILES, {"block_size": 32}) for spec in layers(8, 0.4, [100, TILE_ROWS, 2 * TILE_ROWS + 5], [None])),
    *((spec, TILES, {"block_size": 32}) for spec in layers(8, 0.4, [None], [None, 3.0])),
    # a cap that hardly bends, as of Gemma 2: its tanh is taken near 0, where what it is made of nearly cancels
    (AttentionSpec(4, 2, 16, 0.25, 33, 50.0), MIX, {}),
    (AttentionSpec(4, 2, 64, 0.125), SINGLE, {"block_size": 8}),
    *((AttentionSpec(8, 2, 32, 0.2), MIX, rounded) for rounded in (BF16, FP16)),
    *((AttentionSpec(8, 2, 16, 0.25, *each, sinks=True), SPLIT, {}) for each in [(None, None), (33, 5.0)]),
    *((AttentionSpec(6, 2, 32, 0.2, window, sinks=True), [*LONG, (1100, 1), (0, 1)], BF16) for window in (None, 40)),
]
"""Layer, spans, and what else `compare` is to know."""


@pytest.mark.parametrize(("spec", "spans", "options"), STEPS)
def test_every_row_of_a_step(spec, spans, options):
    compare(spec, spans, **options)


@pytest.mark.parametrize("isa", ["any", "avx512", "avx512_vnni"])
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 1), (48, 5), (80, 64), (96, 1), (192, 5), (256, 64), (320, 5), (512, 16), (64, 5)]
)
def test_long_spans_of_any_head_and_block(head_dim, block_size, isa, monkeypatch):
    """With AVX-512 pairs are multiplied by AVX-512 BF16 or in float32: one of the two is the choice for this CPU, and
    all other tests take it."""
    if isa != "any":
        monkeypatch.setenv(ISA_VARIABLE, isa)
    spec = AttentionSpec(7, 1, head_dim, head_dim**-0.5)
    compare(spec, [(0, 40), (90, 65)], block_size=block_size, **BF16)


def test_sinks_that_are_not_what_the_layers_say_are_refused():
    specs = [AttentionSpec(4, 2, 8, 0.3, sinks=True), AttentionSpec(4, 2, 8, 0.3)]
    store = KvStore([CacheSpec(2, 8, torch.float32)] * 2, 3, 4, CPU)
    for sinks in ((), [None, None], [torch.zeros(3), None], [torch.zeros(4), torch.zeros(4)], [torch.zeros(4)]):
        for backend in (TorchPagedAttention, NativePagedAttention):
            with pytest.raises(ValueError, match=r"sinks|shorter"):
                backend(specs, store.keys, store.values, sinks=sinks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_same_code_is_the_reference_on_a_gpu(dtype, window, softcap):
    spec = AttentionSpec(4, 2, 16, 0.25, window, softcap)
    compare(spec, MIX, dtype=dtype, atol=1e-3 if dtype == torch.float32 else 0.05, device=torch.device("cuda"))
    compare(spec, [(0, TILE_ROWS + 9), (11, TILE_ROWS + 1)], dtype=dtype, atol=0.05, device=torch.device("cuda"))


@pytest.mark.parametrize("window", [None, 5])
def test_a_band_mask_is_what_its_definition_says(window):
    masks = BandMask(MaskPattern(window, True, torch.float32), CPU)
    for rows, keys in ((1, 1), (3, 3), (2, 9), (TILE_ROWS, TILE_ROWS + 40), (7, 300)):
        position = keys - rows + torch.arange(rows)[:, None]
        column = torch.arange(keys)[None]
        visible = column <= position
        if window is not None:
            visible &= column > position - window
        assert torch.equal(masks.view(rows, keys) == 0, visible)


MIXED = [
    (AttentionSpec(4, 2, 16, 0.25), torch.float32),
    (AttentionSpec(4, 1, 32, 0.2, 5), torch.float32),
    (AttentionSpec(6, 6, 16, 0.3, None, 4.0), torch.bfloat16),
    (AttentionSpec(4, 2, 48, 0.15, 40), torch.bfloat16),
]


@pytest.mark.parametrize("dtypes", ["mixed", "float32", "bfloat16"])
def test_layers_may_differ_in_heads_head_dim_and_dtype(dtypes):
    """And in their windows and soft caps, in every backend."""
    specs = [spec for spec, _ in MIXED]
    kinds = [kind if dtypes == "mixed" else getattr(torch, dtypes) for _, kind in MIXED]
    layers = [CacheSpec(spec.kv_heads, spec.head_dim, kind) for spec, kind in zip(specs, kinds, strict=True)]
    store = KvStore(layers, 24, 16, CPU)
    fill_slots(store, torch.arange(24 * 16))
    order = (1 + np.random.default_rng(0).permutation(23)).astype(np.int32)
    counts = [70, 3, 1, 40]
    tables = np.split(order, [5, 6, 7])
    generator = torch.Generator().manual_seed(0)
    first = BatchGeometry.build(16, [0] * 4, counts, tables)
    second = BatchGeometry.build(
        16, counts, [1, 33, 1, 5], [*tables[:1], order[[5, 10, 11]], tables[2], order[[7, 8, 9]]]
    )
    names = []
    for backend in backends(specs, store):
        names.append(backend.name)
        for layer, (spec, kind) in enumerate(zip(specs, kinds, strict=True)):
            seen = [torch.empty(0, 2, spec.kv_heads, spec.head_dim)] * 4
            for geometry in (first, second):
                plan, bounds = backend.plan(geometry), geometry.query_start
                query, key, value = (
                    torch.randn(geometry.tokens, heads, spec.head_dim, generator=generator).to(kind)
                    for heads in (spec.heads, spec.kv_heads, spec.kv_heads)
                )
                backend.write(layer, torch.from_numpy(geometry.slots), key, value)
                answer = backend.attend(layer, query, plan)
                for span in range(4):
                    rows = slice(bounds[span], bounds[span + 1])
                    seen[span] = torch.cat([seen[span], torch.stack((key[rows], value[rows]), 1)])
                    expected = dense(spec, query[rows], *seen[span].unbind(1))
                    tolerance = 2e-6 if kind == torch.float32 else 0.03
                    torch.testing.assert_close(answer[rows].double(), expected, rtol=0, atol=tolerance)
    assert names[0] == "torch" and "native" in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_kernel_passes_its_probe_for_layers_of_every_kind(dtype):
    specs = [spec for spec, _ in MIXED]
    for others in ([], [AttentionSpec(4, 2, 32, 0.3, sinks=True)], [AttentionSpec(4, 2, 16, 0.25, 33, 50.0)]):
        assert select_backend(CPU, [*specs, *others], dtype)[0] == "native"
    name, reason, _ = select_backend(CPU, [*specs, AttentionSpec(2, 1, 6, 0.3)], dtype)
    assert name == "torch" and "heads of 6" in reason


def test_an_empty_step_has_a_geometry():
    geometry = BatchGeometry.build(4, [], [], [])
    check_geometry(geometry)
    assert (geometry.spans, geometry.tokens) == (0, 0)


def test_the_choice_of_a_backend_has_a_reason():
    spec = AttentionSpec(2, 1, 8, 0.3)
    name, reason, factory = select_backend(CPU, [spec], torch.float32)
    assert name == "native" and "in place" in reason and factory is NativePagedAttention
    assert select_backend(CPU, [spec], torch.float32, "torch")[1] == "requested"
    with pytest.raises(InvalidRequest, match="nonesuch") as refused:
        select_backend(CPU, [spec], torch.float32, "nonesuch")
    assert refused.value.field == "attention_backend"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here triton's kernels run")
def test_triton_is_not_for_a_cpu_unless_it_is_interpreted(monkeypatch):
    spec = AttentionSpec(2, 1, 16, 0.3)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InvalidRequest, match=r"'triton' is not available: .*the kernels support CUDA, not cpu"):
        select_backend(CPU, [spec], torch.float32, "triton")


@pytest.mark.parametrize(
    ("spec", "dtype", "why"),
    [
        (AttentionSpec(2, 1, 8, 0.3), torch.float16, "not float16"),
        (AttentionSpec(2, 1, 6, 0.3), torch.float32, "must be a multiple"),
        (AttentionSpec(2, 1, 2048, 0.3), torch.float32, "must be a multiple"),
    ],
    ids=["dtype", "narrow heads", "wide heads"],
)
def test_a_cache_that_the_kernel_cannot_read_gets_the_torch_path_and_a_reason(spec, dtype, why):
    name, reason, factory = select_backend(CPU, [spec], dtype)
    assert (name, factory) == ("torch", TorchPagedAttention) and why in reason
    with pytest.raises(InvalidRequest, match=why):
        select_backend(CPU, [spec], dtype, "native")


@pytest.mark.usefixtures("no_library")
def test_without_the_library_the_torch_path_runs_and_says_what_to_do():
    name, reason, _ = select_backend(CPU, [AttentionSpec(2, 1, 8, 0.3)], torch.float32)
    assert name == "torch" and "not installed" in reason and "compiler" in reason


# --- the native kernel ------------------------------------------------------------------------------------------------


class Cache:
    """A store of one layer with random content, and sequences of these lengths in it. ``cached``: its type, where it is
    not that of the queries."""

    def __init__(self, lengths, *, spec, block_size=16, dtype=torch.bfloat16, cached=None):
        generator = torch.Generator().manual_seed(3)
        sizes = [-(-length // block_size) for length in lengths]
        blocks = sum(sizes) + 1
        self.spec, self.block_size, kept = spec, block_size, cached or dtype
        layer = CacheSpec(spec.kv_heads, row_width(spec.head_dim, kept), kept)
        self.store = KvStore([layer], blocks, block_size, CPU)
        for tensor in (*self.store.keys, *self.store.values):
            content = torch.randn((blocks, block_size, spec.kv_heads, spec.head_dim), generator=generator)
            tensor.copy_(content if cached is None else to_rows(content, cached))
        order = 1 + np.random.default_rng(3).permutation(blocks - 1).astype(np.int32)
        self.tables = np.split(order, np.cumsum(sizes)[:-1])
        self.lengths = lengths
        self.queries = torch.randn((len(lengths), 64, spec.heads, spec.head_dim), generator=generator).to(dtype)
        self.backend = NativePagedAttention([spec], self.store.keys, self.store.values, dtype=dtype)

    def attend(self, sequences, counts):
        """The last ``counts`` tokens of these sequences in one step."""
        starts = [self.lengths[each] - count for each, count in zip(sequences, counts, strict=True)]
        geometry = BatchGeometry.build(self.block_size, starts, counts, [self.tables[each] for each in sequences])
        query = torch.cat([self.queries[each, :count] for each, count in zip(sequences, counts, strict=True)])
        answer = self.backend.attend(0, query, self.backend.plan(geometry))
        return dict(zip(sequences, answer.split(list(counts)), strict=True))


@pytest.mark.parametrize("window", [None, 700])
def test_an_answer_depends_on_neither_the_threads_nor_the_rest_of_the_batch(window):
    cache = Cache([1, 40, 513, 1100, 2000, 700], spec=AttentionSpec(8, 2, 32, 0.2, window))
    everybody, counts = range(6), [1, 3, 1, 1, 1, 40]
    with threads(3):
        together = cache.attend(everybody, counts)
    with threads(1):
        again = cache.attend(everybody, counts)
    for sequence, count in zip(everybody, counts, strict=True):
        assert torch.equal(together[sequence], again[sequence])
        assert torch.equal(together[sequence], cache.attend([sequence], [count])[sequence])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("window", "cached"), [(None, torch.bfloat16), (100, torch.bfloat16), (None, torch.int8)])
def test_a_long_span_may_be_cut_anywhere_and_have_any_neighbours(window, cached, isa):
    """Bit for bit, as long as no piece is short. Of each four values the first two are large and cancel, so that the
    last bits of a sum in float32 show in the answer; seven heads and these cuts make blocks of all numbers of rows."""
    spec = AttentionSpec(7, 1, 64, 0.125, window)
    store = KvStore([CacheSpec(1, row_width(64, cached), cached)], 80, 16, CPU)
    key, value = (torch.randn(80, 16, 1, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    key[:, 1::4], value[:, 1::4] = key[:, ::4], value[:, ::4] * -(2.0**18)
    value[:, ::4] *= 2.0**18
    for tensor, content in ((store.keys[0], key), (store.values[0], value)):
        tensor.copy_(to_rows(content) if cached == torch.int8 else content)
    tables = np.split((1 + np.random.default_rng(0).permutation(79)).astype(np.int32), [32])
    backend = made_or_skip(lambda: NativePagedAttention([spec], store.keys, store.values, isa, torch.bfloat16))
    query = torch.randn(500, 7, 64).bfloat16()

    def attend(first, last, neighbour=0):
        starts, counts = [first, 200][: 1 + bool(neighbour)], [last - first, neighbour][: 1 + bool(neighbour)]
        geometry = BatchGeometry.build(16, starts, counts, tables[: len(starts)])
        rows = torch.cat([query[first:last], query[:neighbour]])
        return backend.attend(0, rows, backend.plan(geometry))[: last - first]

    whole, cuts = attend(0, 500), [*pairwise((0, 133, 300, 333, 467, 500))]
    for count, neighbour in product((1, 3), (0, 1, 90)):
        with threads(count):
            assert torch.equal(torch.cat([attend(*each, neighbour) for each in cuts]), whole)


def test_short_and_long_spans_of_a_step_go_to_their_kernels_and_come_back_in_order():
    cache = Cache([300, 90, 64, 200, 33], spec=AttentionSpec(4, 2, 16, 0.25), dtype=torch.float32)
    counts = [1, SHORT + 1, 64, SHORT, 1]
    together = cache.attend(range(5), counts)
    oracle = TorchPagedAttention([cache.spec], cache.store.keys, cache.store.values)
    for sequence, count in enumerate(counts):
        geometry = BatchGeometry.build(16, [cache.lengths[sequence] - count], [count], [cache.tables[sequence]])
        expected = oracle.attend(0, cache.queries[sequence, :count], oracle.plan(geometry))
        torch.testing.assert_close(together[sequence], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("count", "dtype", "atol"), [(1, torch.float32, 1e-4), (64, torch.bfloat16, 0.05)])
def test_large_scores_neither_overflow_nor_lose_the_small_ones(count, dtype, atol):
    cache = Cache([100, 900], spec=AttentionSpec(2, 1, 16, 30.0), dtype=dtype)
    oracle = TorchPagedAttention([cache.spec], cache.store.keys, cache.store.values)
    geometry = BatchGeometry.build(16, [100 - count, 900 - count], [count] * 2, cache.tables)
    query = cache.queries[:, :count].flatten(0, 1)
    answer = cache.backend.attend(0, query, cache.backend.plan(geometry))
    torch.testing.assert_close(answer, oracle.attend(0, query, oracle.plan(geometry)), rtol=0, atol=atol)


def poison(cache, tensor, position, head, value):
    """Put ``value`` into the slot of ``position`` of the cache's only sequence, of one KV head; what undoes it."""
    row = tensor[cache.tables[0][position // cache.block_size], position % cache.block_size, head]
    place = row[-SCALE_BYTES:] if row.dtype == torch.int8 else row[5]
    before = place.clone()
    place.fill_(-1 if row.dtype == torch.int8 else value)  # a scale of which every bit is set
    return lambda: place.copy_(before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("window", "softcap", "cached", "dtype", "count"),
    [
        (None, None, None, torch.float32, 1),
        (None, 5.0, None, torch.float32, 3),
        (20, None, None, torch.float32, 3),
        (20, None, None, torch.bfloat16, 1),
        (None, 5.0, None, torch.bfloat16, 3),
        (20, None, None, torch.bfloat16, SHORT + 8),
        (20, None, torch.int8, torch.float32, 1),
        (20, None, torch.int8, torch.bfloat16, 3),
        (20, None, torch.int8, torch.bfloat16, SHORT + 8),
    ],
    ids=str,
)
def test_a_key_that_is_no_number_shows_in_every_row_that_sees_it_and_in_no_other(  # noqa: PLR0917
    isa, window, softcap, cached, dtype, count
):
    """Of a long span that torch computes it may show in all rows: torch multiplies what is masked by 0."""
    length, head = 70, 1
    cache = Cache([length], spec=AttentionSpec(4, 2, 32, 0.2, window, softcap), dtype=dtype, cached=cached)
    with suppress(OSError):
        cache.backend = NativePagedAttention([cache.spec], cache.store.keys, cache.store.values, isa, dtype)
    clean = cache.attend([0], [count])[0]
    rows = torch.arange(length - count, length)
    for position in range(length):
        restore = poison(cache, cache.store.keys[0], position, head, torch.nan)
        answer = cache.attend([0], [count])[0]
        restore()
        sees = (rows >= position) & (rows - position < (window or length))
        assert answer[sees][:, 2:].isnan().all()
        if count <= SHORT or cache.backend.takes_long_spans:
            assert torch.equal(answer[~sees], clean[~sees])
        assert torch.equal(answer[:, :2], clean[:, :2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1, torch.float32), (17, torch.float32), (17, torch.bfloat16), (1030, torch.bfloat16)],
    ids=str,
)
def test_what_is_not_finite_counts_as_in_the_definition(dtype, value, which, length):
    cache = Cache([length], spec=AttentionSpec(4, 2, 32, 0.2), dtype=dtype)
    slots = torch.from_numpy(cache.tables[0].astype(np.int64))
    query = cache.queries[:1, 0]
    geometry = BatchGeometry.build(16, [length - 1], [1], cache.tables)
    for position in sorted({0, length // 2, length - 1, *range(0, length, 97)}):
        restore = poison(cache, getattr(cache.store, which)[0], position, 0, value)
        answer = cache.backend.attend(0, query, cache.backend.plan(geometry))
        key, value_ = (each[0][slots].flatten(0, 1)[:length] for each in (cache.store.keys, cache.store.values))
        expected = dense(cache.spec, query, key, value_)
        restore()
        tolerance = 2e-6 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(answer.double(), expected, rtol=0, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spans", [[(0, 3)], [(5, 1), (0, 40), (17, 2)]], ids=str)
def test_new_tokens_reach_their_slots_and_nothing_else(spans, dtype):
    heads, dim = 2, 32
    rng = np.random.default_rng(0)
    tables = np.split((1 + rng.permutation(30)).astype(np.int32), [10, 20])[: len(spans)]
    geometry = BatchGeometry.build(4, [start for start, _ in spans], [count for _, count in spans], tables)
    slots = torch.from_numpy(geometry.slots)
    fused = torch.randn(geometry.tokens, 3 * heads, dim).to(dtype)  # query, key and value of a projection
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    store = KvStore([CacheSpec(heads, dim, dtype)] * 2, 32, 4, CPU)
    for backend in backends([AttentionSpec(heads, heads, dim, 1.0)] * 2, store):
        fill_slots(store, torch.arange(128), 7.0)
        backend.write(1, slots, key, value)
        for written, rows in ((store.keys, key), (store.values, value)):
            expected = torch.full((128, heads, dim), 7.0, dtype=dtype)
            expected[slots] = rows
            assert torch.equal(written[1].flatten(0, 1), expected)
            assert (written[0] == 7).all()


def test_padding_may_be_written_to_the_null_block():
    store = KvStore([CacheSpec(2, 8, torch.float32)], 6, 4, CPU)
    for backend in backends([AttentionSpec(2, 2, 8, 1.0)], store):
        fill_slots(store, torch.arange(24), 7.0)
        backend.write(0, torch.tensor([0, 0, 0]), torch.randn(3, 2, 8), torch.randn(3, 2, 8))
        assert (store.keys[0][1:] == 7).all()
