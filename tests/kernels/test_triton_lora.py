"""The kernels of adapters against torch's products: every module, mixed steps, shards, and recorded launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.engine.cuda.graphs import CudaCapture, Graphs, GraphShape
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models import lora, lora_choice, triton_lora
from ferrum_rpc.models.adapter_config import LowRank
from ferrum_rpc.models.layout import TensorPlacement, layout
from ferrum_rpc.models.lora import Loras, TorchLoras, TorchStep
from ferrum_rpc.models.lora_choice import check_small_steps
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.triton_lora import PROGRAMS, TritonLoras
from ferrum_rpc.sampling.transfer import to_device
from ferrum_rpc.selection import Unsuited
from tests.kernels.launches import Launches
from tests.support.checkpoints import make_model
from tests.support.fixtures import PER_SEQUENCE, PagedModel, PlannedTorch
from tests.support.harness import native
from tests.support.inside import held_bytes
from tests.support.rerun import Rerun

MAX_RANK = 20
ADAPTERS: dict[int, dict[str, int]] = {
    1: dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 4),
    2: {"q_proj": 3, "v_proj": MAX_RANK},
    3: {"up_proj": 17, "down_proj": 1},
}
"""The rank of each module that an adapter changes."""

MIXED = [(1, 0, 3), (2, 4, 1), (1, 5, 1), (3, 6, 18), (2, 25, 2)]
"""``(adapter, first row, rows)``. Rows 3, 24 and 27 have none; rows of 1 and 2 are apart; 3 has more than one tile."""

ROWS = 28


@cache
def spec(family: str = "qwen3") -> ModelSpec:
    model = make_model(family, num_hidden_layers=1)
    return ModelSpec.from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})


def adapter(loras: Loras, number: int) -> list[LowRank]:
    ranks = [(module, ADAPTERS[number].get(module.rpartition(".")[2])) for module in loras.modules]
    return [LowRank(module, rank, 0.5, module, module) for module, rank in ranks if rank]


def load(loras: Loras, number: int, seed: int = 0) -> None:
    changed = adapter(loras, number)
    loras.add(number, loras.changes(changed))
    generator = torch.Generator().manual_seed(10 * seed + number)
    for each in changed:
        size_out, size_in = loras.modules[each.module]
        a = torch.randn((each.rank, size_in), generator=generator) / size_in**0.5
        loras.put(number, each, a, torch.randn((size_out, each.rank), generator=generator))


def products(here: Mapping[str, TensorPlacement]) -> list[tuple[int, int, int]]:
    """Slot, columns of x, and columns of y."""
    sizes: dict[int, tuple[int, int]] = {}
    for each in here.values():
        if each.adaptable:
            sizes[each.slot] = each.local[1], max(each.first + each.rows, sizes.get(each.slot, (0, 0))[1])
    return [(slot, *size) for slot, size in sizes.items()]


def rows_of(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn((ROWS, size), generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "shard"),
    [
        (torch.float32, 1e-5, WHOLE),
        (torch.float32, 1e-5, Shard(1, 2)),
        (torch.bfloat16, 2**-6, WHOLE),
        (torch.float16, 2**-9, Shard(0, 2)),
    ],
    ids=str,
)
def test_a_step_of_several_adapters_and_of_none_is_torchs(device, dtype, tolerance, shard):
    whole = spec()
    here = layout(whole, shard)
    ours = TritonLoras(layout(whole), dtype, device, here, max_rank=MAX_RANK)
    theirs = TorchLoras(layout(whole), dtype, device, here)
    for number in ADAPTERS:
        load(ours, number)
        load(theirs, number)
    step, expected = ours.step(MIXED, ROWS), theirs.step(MIXED, ROWS)
    plain = [each for each in range(ROWS) if not any(first <= each < first + count for _, first, count in MIXED)]
    for slot, size_in, size_out in products(here):
        x, before = rows_of(2 * size_in, slot, dtype, device)[:, :size_in], rows_of(size_out, 9, dtype, device)
        found, truth = before.clone(), before.clone()
        step.add(slot, x, found)
        expected.add(slot, x, truth)
        assert not torch.equal(truth, before)
        torch.testing.assert_close(found, truth, rtol=tolerance, atol=tolerance)
        assert torch.equal(found[plain], before[plain])


def test_the_memory_of_an_adapter_is_what_was_announced(device):
    loras = TritonLoras(layout(spec()), torch.bfloat16, device, max_rank=MAX_RANK)
    load(loras, 2)
    assert loras.nbytes(loras.changes(adapter(loras, 2))) == held_bytes(loras) > 0
    loras.drop(2)
    assert len(loras) == held_bytes(loras) == 0


@pytest.mark.parametrize("made", [TorchLoras, partial(TritonLoras, max_rank=MAX_RANK)], ids=["torch", "triton"])
def test_matrices_are_sent_without_waiting(device, made, monkeypatch):
    """By `to_device`: a copy from ordinary memory waits for the device, and for the steps in flight."""
    sent = []
    for module in (lora, triton_lora):
        monkeypatch.setattr(module, "to_device", lambda host, there: sent.append(host) or to_device(host, there))
    loras = made(layout(spec()), torch.float32, device)
    load(loras, 1)
    assert sum(each.dtype == torch.float32 for each in sent) == 2 * len(loras.modules)


@pytest.mark.parametrize("spans", [[(1, 0, 1)], [(2, 0, 20)], MIXED], ids=str)
def test_all_adapters_of_a_step_are_two_launches_for_each_product_that_any_changes(device, spans, monkeypatch):
    """Whatever their number, their ranks and their rows."""
    launches = Launches(monkeypatch)
    loras = TritonLoras(layout(spec()), torch.float32, device, max_rank=MAX_RANK)
    for number in ADAPTERS:
        load(loras, number)
    step, changed = loras.step(spans, ROWS), 0
    for slot, size_in, size_out in products(layout(spec())):
        x, y = (rows_of(size, slot, torch.float32, device) for size in (size_in, size_out))
        before = y.clone()
        step.add(slot, x, y)
        changed += not torch.equal(y, before)
    assert changed and [name for name, _ in launches.made] == ["shrink_kernel", "expand_kernel"] * changed


class Sections:
    """Where the arrays of steps of up to ``ROWS`` rows lie, for launches that are recorded once."""

    def __init__(self, loras: Loras, device: torch.device) -> None:
        room = loras.reserve(ROWS)
        assert room is not None
        self.tensors = [torch.from_numpy(each).to(device) for each in room.arrays(recorded=True)]
        assert not any(each.any() for each in self.tensors)
        self.recorded = room.bind(self.tensors)

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        for section, each in zip(self.tensors, arrays, strict=True):
            section.zero_()
            section[: len(each)] = torch.from_numpy(each)


def test_launches_recorded_before_any_adapter_serve_those_of_each_step(device):
    """Loaded, unloaded and replaced; with more tiles than programs, and in a step without any."""
    loras = TritonLoras(layout(spec()), torch.float32, device, max_rank=MAX_RANK)
    sections = Sections(loras, device)
    slot, size_in, size_out = products(layout(spec()))[0]
    x, before = rows_of(size_in, 1, torch.float32, device), rows_of(size_out, 2, torch.float32, device)

    def replayed() -> torch.Tensor:
        found = before.clone()
        sections.recorded.add(slot, x, found)
        return found

    assert torch.equal(replayed(), before)
    for seed, spans in enumerate(([(1, 0, 20)], [(2, 0, 1), (1, 1, 5), (2, 9, 1)], [(1, 27, 1)])):
        for number in {number for number, *_ in spans}:
            loras.drop(number)
            load(loras, number, seed)
        step = loras.step(spans, ROWS)
        sections.send(step.arrays(recorded=True))
        eager = before.clone()
        loras.step(spans, ROWS).add(slot, x, eager)
        assert torch.equal(replayed(), eager) and not torch.equal(eager, before)
    sections.send([np.zeros(0, np.int64)] * 2)
    assert torch.equal(replayed(), before)


def test_decode_steps_with_adapters_are_replayed_and_have_the_rows_of_torch(device):
    """A prompt is computed eagerly. Adapters come and go after the graphs were captured; the last step has none."""
    decoder = native(make_model("qwen3", num_hidden_layers=1), torch.float32, "plain", device)
    backend = TritonPagedAttention if device.type == "cuda" else PlannedTorch
    replayed = PagedModel(backend, device, decoder)
    plain = PagedModel(PlannedTorch, device, decoder, staged=False)
    loras = TritonLoras(layout(decoder.spec), torch.float32, device, max_rank=MAX_RANK)
    replayed.compute.loras, plain.compute.loras = loras, TorchLoras(layout(decoder.spec), torch.float32, device)
    capture, replays = CudaCapture(device) if device.type == "cuda" else Rerun(), []
    limits = {"max_spans": 4, "blocks_per_span": PER_SEQUENCE, "loras": loras}

    def counted(run):
        replay, output = capture(run)
        return (lambda: replays.append(replay())), output

    with torch.inference_mode():
        graphs = Graphs(replayed.compute.run_layers, replayed.attention, counted, device, **limits)
        graphs.record()
    replayed.compute.graphs = graphs
    assert set(graphs.recorded) == {GraphShape(1, spans, each) for spans in (1, 2, 4) for each in (False, True)}
    tokens = np.random.default_rng(0)
    for count, adapters in ((9, {0: 1, 2: 2}), (1, {0: 1, 2: 2}), (1, {0: 3, 1: 3, 2: 2}), (1, {})):
        for world in (replayed, plain):
            for number in ADAPTERS:
                world.compute.loras.drop(number)
            for number in set(adapters.values()):
                load(world.compute.loras, number)
            world.adapters = adapters
        ids = tokens.integers(0, 300, (3, count))
        rows, truth = (world.step(*enumerate(ids)) for world in (replayed, plain))
        torch.testing.assert_close(rows, truth, rtol=1e-4, atol=1e-4)
    assert len(replays) == 3


def test_tiles_beyond_the_programs_are_computed_too(device, monkeypatch):
    loras = TritonLoras(layout(spec()), torch.float32, device, max_rank=MAX_RANK)
    load(loras, 1)
    load(loras, 2)
    slot, size_in, size_out = products(layout(spec()))[0]
    x, before = rows_of(size_in, 1, torch.float32, device), rows_of(size_out, 2, torch.float32, device)
    found = []
    for programs in (PROGRAMS, 2):
        monkeypatch.setattr("ferrum_rpc.models.triton_lora.PROGRAMS", programs)
        found.append(before.clone())
        loras.step([(1, 0, 18), (2, 18, 10)], ROWS).add(slot, x, found[-1])
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_small_steps_of_every_product_agree_with_torch(device, family):
    check_small_steps(layout(spec(family)), torch.bfloat16, device)


def test_kernels_that_compute_something_else_are_refused(device, monkeypatch):
    monkeypatch.setattr(TorchStep, "add", lambda *_: None)
    with pytest.raises(Unsuited, match=r"differs from torch's by \d"):
        check_small_steps(layout(spec()), torch.float32, device)


def test_without_a_gpu_the_kernels_are_no_candidate():
    reason, loras = lora_choice.select_loras(
        layout(spec()), torch.float32, torch.device("cpu"), max_rank=MAX_RANK, native=False
    )
    assert (reason, loras.name, loras.reserve(1)) == ("", "torch", None)


def test_numbers_that_are_not_finite_are_refused(device):
    loras = TritonLoras(layout(spec()), torch.float16, device, max_rank=MAX_RANK)
    [module, *_] = loras.modules
    change = LowRank(module, 2, 1.0, "a", "b")
    loras.add(1, loras.changes([change]))
    size_out, size_in = loras.modules[module]
    with pytest.raises(InvalidRequest, match="b holds NaN"):
        loras.put(1, change, torch.zeros((2, size_in)), torch.full((size_out, 2), 1e6))
