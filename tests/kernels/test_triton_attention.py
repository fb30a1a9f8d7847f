"""The paged attention kernels against attention written out in float64, over every kind of span, layer and split.

Here and in `tests/support/cases.py` every slot that no sequence owns holds NaN: one read too many shows in the result.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention import triton_paged, triton_probe
from ferrum_rpc.attention.eight_bits import FP8, SCALE_BYTES, to_rows
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.staging import Layout, Staging
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.attention.triton_plan import Multiprocessor, SplitLimits, TileShape
from ferrum_rpc.attention.triton_probe import probe
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.selection import Unsuited
from tests.kernels.launches import Launches
from tests.support.cases import LONG, MIX, SPECS, TOLERANCE, PagedStep, paged_step

SMALL = AttentionSpec(4, 2, 16, 0.25)
FINE = (TileShape(16, 16, 4, 3, 16, programs=3), TileShape(32, 16, 4, 3, 32))
"""Small tiles, so that short sequences have many and are split often."""


def kernels(step: PagedStep, processors: int | None = None, tiles: tuple[TileShape, ...] | None = None):
    dtype = step.query.dtype
    sinks = [step.sinks]
    return TritonPagedAttention(
        [step.spec], [step.keys], [step.values], dtype, processors=processors, tiles=tiles, sinks=sinks
    )


def rounded(step: PagedStep) -> PagedStep:
    """``step`` over a cache in fp8. What is expected stays: it is off by what rounding changes."""
    return replace(step, keys=to_rows(step.keys, FP8), values=to_rows(step.values, FP8))


def attend(step: PagedStep, backend=None) -> torch.Tensor:
    backend = kernels(step) if backend is None else backend
    return backend.attend(0, step.query, backend.plan(step.geometry))


@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_layer(device, name):
    step = paged_step(SPECS[name], MIX[1:8], device=device, seed=1)
    assert step.error(attend(step)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_type(device, dtype):
    step = paged_step(replace(SMALL, heads=8), MIX, device=device, dtype=dtype)
    assert step.error(attend(step)) <= TOLERANCE[dtype]
    assert attend(step).dtype == dtype


GROUPS = {group: AttentionSpec(2 * group, 2, 16, 0.3) for group in (1, 4, 7, 20)}
STEPS = {
    "window of one": (replace(SMALL, window=1), [*MIX, (61, 40)], 8),
    "window of a block": (replace(SMALL, window=16), [*MIX, (61, 40)], 8),
    "window, cap": (replace(SMALL, window=33, softcap=5.0), [*MIX, (61, 40)], 8),
    "cap": (replace(SMALL, softcap=5.0), [*MIX, (61, 40)], 8),
    "blocks of 1": (SMALL, [(37, 1), (0, 33), (5, 3)], 1),
    "blocks of 3": (SMALL, [(37, 1), (0, 33), (5, 3)], 3),
    "blocks of 64": (SMALL, [(37, 1), (0, 33), (5, 3)], 64),
    "long beside short": (SMALL, [(start // 10, -(-count // 10)) for start, count in LONG], 16),
} | {f"group of {group}": (spec, [(20, 1), (3, 6), (0, 1), (40, 2)], 16) for group, spec in GROUPS.items()}
"""Layer, spans, and tokens of a block."""


@pytest.mark.parametrize("name", STEPS)
def test_rows_across_blocks_and_tiles(device, name):
    spec, spans, block_size = STEPS[name]
    step = paged_step(spec, spans, device=device, block_size=block_size)
    assert step.error(attend(step, kernels(step, 8, FINE))) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("which", "position", "fp8"), [("keys", 0, False), ("values", 17, False), ("values", 17, True), ("keys", 40, True)]
)
def test_what_is_no_number_in_an_owned_slot_shows(device, which, position, fp8):
    step = paged_step(SMALL, [(40, 1), (20, 1)], device=device)
    if fp8:
        step = rounded(step)
    clean = attend(step, kernels(step, 8, FINE)).cpu()
    block = step.geometry.blocks[step.geometry.table_start[0] + position // 16]
    row = getattr(step, which)[int(block), position % 16, 1]
    if fp8:
        row[-SCALE_BYTES:] = 255
    else:
        row[:] = torch.nan
    answer = attend(step, kernels(step, 8, FINE)).cpu()
    assert answer[0, 2:].isnan().all()
    assert torch.equal(answer[0, :2], clean[0, :2]) and torch.equal(answer[1], clean[1])


def test_decode_verify_and_prefill_have_tiles_of_their_own(device):
    """The shapes of a device: 4, 20 and 80 rows per KV head, alone and split."""
    spec = AttentionSpec(8, 2, 16, 0.25)
    step = paged_step(spec, [(33, 1), (700, 5), (0, 20), (12, 5)], device=device, dtype=torch.bfloat16)
    for processors in (1, 16):
        backend = kernels(step, processors)
        [works] = backend.plan(step.geometry).work.values()
        assert [work.tile.rows for work in works] == [16, 64, 128]
        assert len(works[1].merges) or processors == 1
        assert step.error(attend(step, backend)) <= TOLERANCE[torch.bfloat16]
    [verify] = backend.reserve(8, 5, 9).launches.values()
    assert [(each.tile.rows, each.merged_rows) for each in verify] == [(64, 20)]


def test_compiled_kernels_decide_how_many_programs_run_at_once(monkeypatch):
    """As on a device; the widest kernel of a tile counts, and tiles are split for as many as run."""
    registers = {16: iter((96, 128)), 32: iter((212, 40))}

    class Compiled:
        def __getitem__(self, grid):
            metadata = SimpleNamespace(shared=72_192)
            return lambda *_, **names: SimpleNamespace(n_regs=next(registers[names["ROWS"]]), metadata=metadata)

    monkeypatch.setattr(triton_paged, "attend_kernel", Compiled())
    monkeypatch.setattr(triton_paged, "merge_kernel", defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setattr(triton_paged, "_device_facts", lambda _: (8, 227 << 10, Multiprocessor(228 << 10, 2048)))
    layer = torch.zeros(9, 16, 2, 16)
    backend = TritonPagedAttention([SMALL, replace(SMALL, window=9)], [layer] * 2, [layer] * 2)
    reserved = [next(iter(backend.reserve(1, tokens, 1).launches.values()))[0] for tokens in (1, 9)]
    assert [each.tile.programs for each in reserved] == [3, 2]
    assert [each.items - 1 for each in reserved] == [SplitLimits(programs * 8 // 2).parts for programs in (3, 2)]


@pytest.mark.parametrize(("dtype", "sinks"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_split_and_unsplit_are_one_answer(device, dtype, sinks):
    spec = replace(SMALL, window=75, sinks=sinks)
    step = paged_step(spec, [(100, 1), (50, 18), (3, 1)], device=device, dtype=dtype)
    whole, split = kernels(step, 1, FINE), kernels(step, 16, FINE)
    assert not any(len(work.merges) for [*works] in whole.plan(step.geometry).work.values() for work in works[1:])
    assert all(len(work.merges) for works in split.plan(step.geometry).work.values() for work in works)
    assert step.error(attend(step, whole)) <= TOLERANCE[dtype]
    assert step.error(attend(step, split)) <= TOLERANCE[dtype]


def test_more_parts_than_one_access_merges(device):
    step = paged_step(AttentionSpec(2, 1, 16, 0.25), [(3, 1), (559, 1)], device=device)
    backend = kernels(step, 40, FINE)
    [[work]] = backend.plan(step.geometry).work.values()
    assert work.merges[:, 4].max() > triton_paged.MERGED_AT_ONCE
    assert step.error(attend(step, backend)) <= TOLERANCE[torch.float32]


def test_where_blocks_lie_does_not_change_a_bit(device):
    one, other = (paged_step(SMALL, MIX[5:], device=device, order=order) for order in (1, 2))
    assert (one.geometry.blocks != other.geometry.blocks).any()
    assert torch.equal(attend(one, kernels(one, 16, FINE)), attend(other, kernels(other, 16, FINE)))


@pytest.mark.parametrize(
    ("dtype", "dim", "block_size", "layer"),
    [(torch.bfloat16, 20, 3, {"window": 33, "softcap": 5.0}), (torch.float16, 64, 16, {})],
    ids=str,
)
def test_a_cache_in_fp8_is_read_as_torch_reads_it_wherever_it_lies(device, dtype, dim, block_size, layer):
    """Prefill, pieces behind a cache, and decode that is split; near what an exact cache answers."""
    spec, spans = AttentionSpec(8, 2, dim, dim**-0.5, **layer), [(0, 5), (37, 1), (16, 16), (0, 21), (90, 1)]
    one, other = (
        rounded(paged_step(spec, spans, device=device, dtype=dtype, block_size=block_size, order=order))
        for order in (1, 2)
    )
    backend = kernels(one, 12, FINE)
    assert any(len(work.merges) for works in backend.plan(one.geometry).work.values() for work in works)
    answer = attend(one, backend)
    assert answer.dtype == dtype and torch.equal(answer, attend(other, kernels(other, 12, FINE)))
    oracle = attend(one, TorchPagedAttention([spec], [one.keys], [one.values], dtype))
    torch.testing.assert_close(answer, oracle, rtol=0, atol=TOLERANCE[dtype])
    changed = answer.cpu().double() - one.expected
    assert 0.005 < changed.square().mean().sqrt() < 0.03 and changed.abs().max() < 0.25  # of values of unit variance


# --- plans ------------------------------------------------------------------------------------------------------------


class Reserved:
    """A plan with fixed launches, as a captured graph has it, and what is sent to it."""

    def __init__(self, backend: TritonPagedAttention, device: torch.device, **room: int) -> None:
        self.backend, self.room = backend, backend.reserve(**room)
        self.layout = Layout(tuple((np.int32, size) for size in self.room.sizes))
        self.staging = Staging(device)
        self.sections = self.staging.open(self.layout)
        self.plan = backend.bind(self.room, self.sections)

    def fill(self, geometry: BatchGeometry) -> None:
        self.staging.send(self.layout, self.backend.fill(self.room, geometry))


@pytest.mark.parametrize(("tokens", "processors"), [(1, 1), (1, 12), (5, 12)])
def test_a_reserved_plan_follows_the_step(device, tokens, processors):
    """The same launches and buffers, as a captured graph has them; what changes is what they read."""
    spec = AttentionSpec(8, 2, 16, 0.25, window=30)
    steps = [[(50, tokens), (3, 1), (0, tokens)], [(70, 1)], [(0, 1), (20, tokens), (90, tokens)]]
    reserved = None
    for spans in steps:
        step = paged_step(spec, spans, device=device)
        backend = kernels(step, processors, FINE)
        if reserved is None:
            reserved = Reserved(backend, device, spans=3, tokens=tokens, blocks=20)
        reserved.fill(step.geometry)
        assert step.error(backend.attend(0, step.query, reserved.plan)) <= TOLERANCE[torch.float32]
        if tokens == 1:  # then all spans have one tile shape: cut as they would be alone
            exact = backend.attend(0, step.query, backend.plan(step.geometry))
            assert torch.equal(backend.attend(0, step.query, reserved.plan), exact)


def test_a_step_that_has_no_room_in_a_plan_leaves_it_as_it_was(device):
    step = paged_step(SMALL, [(20, 1), (3, 1)], device=device)
    reserved = Reserved(kernels(step, 1), device, spans=2, tokens=1, blocks=3)
    reserved.fill(step.geometry)
    before = [each.clone() for each in reserved.sections]
    longer = BatchGeometry.build(16, [40], [1], [np.arange(1, 4, dtype=np.int32)])
    for spans in ([(160, 1)], [(0, 90)]):
        bigger = paged_step(SMALL, spans, device=device)
        with pytest.raises(ValueError, match="reserved"):
            reserved.fill(bigger.geometry)
    assert all(torch.equal(*each) for each in zip(before, reserved.sections, strict=True))
    reserved.fill(longer)
    assert not all(torch.equal(*each) for each in zip(before, reserved.sections, strict=True))


def test_a_split_tile_of_more_rows_than_a_plan_merges_is_refused(device):
    step = paged_step(SMALL, [(100, 2)], device=device)
    backend = kernels(step, 12, FINE)
    backend.fill(backend.reserve(spans=1, tokens=2, blocks=9), step.geometry)
    with pytest.raises(ValueError, match="reserved"):
        backend.fill(backend.reserve(spans=1, tokens=1, blocks=9), step.geometry)


def test_a_plan_merges_the_rows_that_its_spans_have_and_no_more():
    """A decode step of an 8B model: 4 rows of a tile of 16 are a group."""
    spec = AttentionSpec(32, 8, 128, 1.0)
    layer = torch.zeros(1, 16, 8, 128)
    backend = TritonPagedAttention([spec], [layer], [layer], processors=132)
    assert [each.merged_rows for [each] in backend.reserve(64, 1, 9).launches.values()] == [4]
    one = BatchGeometry.build(16, [8191], [1], [np.arange(512, dtype=np.int32)])
    [work] = backend.draft(one)[0].launches[next(iter(backend.reserve(1, 1, 1).launches))]
    assert (work.merges, work.merged_rows) == (1, 4)


@pytest.mark.parametrize("tokens", [1, 3])
def test_merges_have_a_program_for_each_split_row_and_where_nothing_is_split_none_is_launched(
    device, monkeypatch, tokens
):
    """Of a tile of 16 rows: a group of 2 for each token, of both KV heads."""
    launches = Launches(monkeypatch)
    for start, expected in ((0, []), (90, [(2 * tokens, 2, 1)])):
        step = paged_step(SMALL, [(start, tokens)], device=device)
        assert step.error(attend(step, kernels(step, 12, FINE))) <= TOLERANCE[torch.float32]
        assert [grid for name, grid in launches.made if name == "merge_kernel"] == expected


def test_a_row_depends_on_its_neighbours_so_equal_bits_are_not_offered(device):
    step = paged_step(SMALL, [(200, 1), (190, 1), (180, 1), (170, 1)], device=device)
    backend, blocks = kernels(step, 8, FINE), step.geometry.table_start[1]
    alone = BatchGeometry.build(16, [200], [1], [step.geometry.blocks[:blocks]])
    own = backend.attend(0, step.query[:1], backend.plan(alone))
    assert not torch.equal(own, attend(step, backend)[:1])
    assert backend.exact_span_tokens == 0


def test_layers_share_a_plan_and_may_differ_in_window_and_heads(device):
    specs = [AttentionSpec(4, 2, 16, 0.25), AttentionSpec(2, 2, 16, 0.4, window=9), AttentionSpec(4, 2, 16, 0.25)]
    steps = [paged_step(spec, MIX[:6], device=device, seed=seed) for seed, spec in enumerate(specs)]
    backend = TritonPagedAttention(specs, [step.keys for step in steps], [step.values for step in steps])
    plan = backend.plan(steps[0].geometry)
    assert len(plan.work) == 2
    for layer, step in enumerate(steps):
        assert step.error(backend.attend(layer, step.query, plan)) <= TOLERANCE[torch.float32]


UNLIKE = [
    AttentionSpec(4, 2, 16, 0.25),
    AttentionSpec(8, 1, 16, 0.25),
    AttentionSpec(4, 4, 40, 0.2, window=33),
    AttentionSpec(4, 2, 40, 0.2, softcap=5.0),
    AttentionSpec(4, 2, 16, 0.25),
]
"""Layers with unlike KV heads."""


@pytest.mark.parametrize("fp8", [False, True])
def test_layers_may_differ_in_kv_heads_and_their_width(device, fp8):
    """Each is split for the programs of its own heads, whatever the others are, also in a reserved plan."""
    spans = [(100, 1), (0, 1), (50, 1), (3, 1)]
    steps = [paged_step(spec, spans, device=device, seed=seed) for seed, spec in enumerate(UNLIKE)]
    steps = [rounded(step) if fp8 else step for step in steps]
    keys, values = [step.keys for step in steps], [step.values for step in steps]
    backend = TritonPagedAttention(UNLIKE, keys, values, torch.float32, processors=12, tiles=FINE)
    geometry, reserved = steps[0].geometry, Reserved(backend, device, spans=4, tokens=1, blocks=20)
    reserved.fill(geometry)
    plan = backend.plan(geometry)
    assert len(plan.work) == 4
    for layer, (spec, step) in enumerate(zip(UNLIKE, steps, strict=True)):
        alone = TritonPagedAttention(
            [spec], keys[layer:][:1], values[layer:][:1], torch.float32, processors=12, tiles=FINE
        )
        expected = alone.attend(0, step.query, alone.plan(geometry))
        assert fp8 or step.error(expected) <= TOLERANCE[torch.float32]
        for each in (plan, reserved.plan):
            assert torch.equal(backend.attend(layer, step.query, each), expected)
        key, value = (torch.randn(2, spec.kv_heads, spec.head_dim, device=device) for _ in range(2))
        slots = torch.tensor([16, 37], device=device)
        before = [each[layer].clone() for each in (keys, values)]
        backend.write(layer, slots, key, value)
        for cache, old, new in zip((keys, values), before, (key, value), strict=True):
            old.flatten(0, 1)[slots] = to_rows(new, FP8) if fp8 else new
            assert torch.equal(cache[layer].view(torch.uint8), old.view(torch.uint8))


def test_queries_may_be_a_view_of_a_fused_projection(device):
    step = paged_step(SMALL, MIX, device=device)
    fused = torch.cat([step.query, torch.full_like(step.query, float("nan"))], dim=1)
    backend = kernels(step)
    output = backend.attend(0, fused[:, : step.spec.heads], backend.plan(step.geometry))
    assert step.error(output) <= TOLERANCE[torch.float32] and output.is_contiguous()


def test_an_empty_step_has_an_empty_answer(device):
    step = paged_step(SMALL, [(0, 1)], device=device)
    backend = kernels(step)
    empty = BatchGeometry.build(16, [], [], [])
    assert backend.attend(0, step.query[:0], backend.plan(empty)).shape == (0, 4, 16)


def test_after_a_warm_up_no_step_waits_for_a_compiler(device, monkeypatch):
    launches = Launches(monkeypatch)
    specs = [replace(SMALL, softcap=5.0), replace(SMALL, window=9)]
    layer = torch.zeros(9, 16, 2, 16, device=device)
    backend = TritonPagedAttention(specs, [layer] * 2, [layer] * 2, processors=12, tiles=FINE)
    backend.warm_up()
    warm = set(launches.variants)
    assert Counter(name for name, *_ in warm) == {"attend_kernel": 4, "merge_kernel": 2}
    for blocks in (5, 6):  # what follows the tables in a plan's buffer moves with them
        tables = [np.arange(1, 1 + blocks, dtype=np.int32)] * 2
        step = BatchGeometry.build(16, [blocks * 16 - 1, 0], [1, 9], tables)
        for index in range(2):
            backend.attend(index, torch.zeros(10, 4, 16, device=device), backend.plan(step))
    assert launches.variants == warm


# --- whether the kernels can be used: they are asked, and the answer is a reason that a person can act on -------------


def test_layers_that_the_kernels_compute_right_have_no_reason_against(device):
    specs = [SMALL, replace(SMALL, window=4096, softcap=30.0), replace(SMALL, kv_heads=1), replace(SMALL, head_dim=24)]
    assert probe(device, specs, torch.float32) is TritonPagedAttention


def test_a_wrong_answer_is_a_reason(device, monkeypatch):
    monkeypatch.setattr(triton_paged, "_exponent", lambda spec: (spec.scale, 0.0))
    with pytest.raises(Unsuited, match="differs from float32"):
        probe(device, [SMALL], torch.float32)


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [(SMALL, torch.float64, "float64"), (replace(SMALL, head_dim=512), torch.float32, "512")],
)
def test_what_the_kernels_do_not_know_is_a_reason(device, spec, dtype, reason):
    with pytest.raises(Unsuited, match=reason):
        probe(device, [spec], dtype)


def test_no_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton_probe, "find_spec", lambda _: None)
    with pytest.raises(Unsuited, match="triton is not installed"):
        probe(torch.device("cuda"), [SMALL], torch.bfloat16)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_follows_the_step():
    device = torch.device("cuda")
    spec = AttentionSpec(32, 8, 128, 128**-0.5)
    steps = [
        paged_step(spec, [(start, 1) for start in starts], device=device, dtype=torch.bfloat16, seed=seed)
        for seed, starts in enumerate(([5, 700, 33, 1], [2000, 0, 90, 15], [64, 64, 64, 4000]))
    ]
    first = max(steps, key=lambda step: len(step.keys))
    query, (keys, values) = first.query.clone(), (first.keys.clone(), first.values.clone())
    backend = TritonPagedAttention([spec], [keys], [values])
    reserved = Reserved(backend, device, spans=4, tokens=1, blocks=1000)
    reserved.fill(first.geometry)
    backend.attend(0, query, reserved.plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = backend.attend(0, query, reserved.plan)
    for step in steps:
        keys[: len(step.keys)], values[: len(step.values)] = step.keys, step.values
        query.copy_(step.query)
        reserved.fill(step.geometry)
        graph.replay()
        assert step.error(output) <= TOLERANCE[torch.bfloat16]
