"""What is left for the cache of a GPU: all but the weights, the largest step, its sampling and a reserve."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine import memory
from ferrum_rpc.engine.assembly import build, measure, size
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import Choices, choose
from ferrum_rpc.engine.assembly.size import CUDA_RESERVE, SAMPLING_BYTES, LargestStep, StepBytes, make_plan, step_bytes
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.engine.ranks.setup import make_cache
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.spec import ModelSpec

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes.json"
FULL = LargestStep(8192, 256)


@pytest.fixture(scope="module")
def eight_b(tmp_path_factory):
    """A checkpoint of the 8B shape whose 16 GB are a hole in the file."""
    folder = tmp_path_factory.mktemp("qwen3-8b")
    config = json.loads(SHAPES.read_text())["qwen3-8b"]
    (folder / "config.json").write_text(json.dumps(config))
    header, end = dict[str, Any](), 0
    for name, placement in layout(ModelSpec.from_config(config)).items():
        begin, end = end, end + 2 * int(np.prod(placement.shape))
        header[name] = {"dtype": "BF16", "shape": list(placement.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def chosen(folder: Path, **others: Any) -> Choices:
    return choose(ModelSettings(str(folder), device="cuda", **others), elsewhere=True)


def test_24_gb_with_an_8b_model_leave_room_for_the_largest_step(eight_b):
    free = (24 << 30) - (500 << 20)  # without the context
    choices = chosen(eight_b, max_sequences=256)
    plan = make_plan(choices, FULL, free)
    sampling = 256 * 151_936 * SAMPLING_BYTES
    assert plan.fits and (plan.sampling_bytes, plan.reserve_bytes) == (sampling, CUDA_RESERVE)
    step = step_bytes(choices, FULL)
    assert step.activations > 0.7 * 2**30
    assert free - plan.weights_bytes - plan.kv_bytes >= step.activations + sampling + CUDA_RESERVE
    assert plan.kv_tokens > 30_000
    assert "600 MiB in reserve" in plan.reason and "(computed)" in plan.reason


def test_smaller_steps_leave_more_to_the_cache(eight_b):
    free, choices = 24 << 30, chosen(eight_b, max_sequences=256)
    full, small = (make_plan(choices, each, free) for each in (FULL, LargestStep(1024, 32)))
    assert small.kv_bytes - full.kv_bytes > 1.3 * 2**30
    assert make_plan(choices, LargestStep(8192, 4096), free).sampling_bytes == full.sampling_bytes, "256 at once"


def test_a_gpu_without_room_for_a_step_is_told_a_smaller_one(eight_b):
    choices, weights = chosen(eight_b), chosen(eight_b).source.weight_bytes()
    plan = make_plan(choices, FULL, weights + CUDA_RESERVE + (3 << 29))
    assert not plan.fits and "--max-batch-tokens" in plan.alternative
    none = make_plan(choices, FULL, weights + CUDA_RESERVE)
    assert not none.fits and "lower --max-batch-tokens" in none.reason


def test_a_cache_that_is_set_too_large_is_reported(eight_b):
    """It would be allocated, and the first full step would run out of memory."""
    choices = chosen(eight_b, kv_memory=7 << 30)
    plan = make_plan(choices, FULL, (24 << 30) - (500 << 20))
    assert plan.weights_bytes + plan.kv_bytes < plan.memory_bytes and not plan.fits
    assert "--kv-blocks" in plan.alternative and "do not fit" in plan.advice


def test_a_cpu_has_its_share_as_before():
    assert step_bytes(choose(ModelSettings("identity", device="cpu")), FULL) == StepBytes()


def test_memory_that_the_allocator_keeps_is_free(monkeypatch):
    free = [10]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[-1], 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(70))
    assert memory.free_memory(torch.device("cuda")) == 70


# --- a step that is measured ------------------------------------------------------------------------------------------


class Allocator:
    """torch's statistics of a GPU that is not there: the tensors of ``work`` take ``peak`` bytes at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peak: int) -> None:
        self.calls: list[str] = []
        for name, found in (
            ("reset_peak_memory_stats", None),
            ("memory_allocated", 1000),
            ("synchronize", None),
            ("max_memory_allocated", 1000 + peak),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda _, name=name, found=found: self.calls.append(name) or found)


def small(choices: Choices, model: Model) -> Compute:
    """Over a cache of two blocks."""
    return Compute(model, make_cache(choices, model, 2, choices.config.block_size)[1])


def test_the_largest_step_runs_over_two_blocks(monkeypatch, checkpoint_of):
    found: dict[str, Any] = {}
    run, rows = Compute.run, Compute.rows

    def see_run(self: Any, packed: Any, geometry: Any, adapters: Any = None, **more: Any) -> Tensor:
        found.update(tokens=geometry.tokens, last=geometry.lengths.tolist(), used=set(geometry.blocks.tolist()))
        return run(self, packed, geometry, adapters, **more)

    def see_rows(self: Any, hidden: Tensor, requests: Any) -> Any:
        found.update(rows=len(requests), kinds={each.kind.top_p for each in requests})
        return rows(self, hidden, requests)

    monkeypatch.setattr(Compute, "run", see_run)
    monkeypatch.setattr(Compute, "rows", see_rows)
    folder = checkpoint_of(max_position_embeddings=100)
    choices = choose(ModelSettings(str(folder), device="cpu", attention="torch"))
    model, _ = choices.load()
    allocator = Allocator(monkeypatch, 5000)
    with torch.inference_mode():
        assert measure.measure_step(choices, small(choices, model), LargestStep(230, 7)) == 5000
    assert found == {"tokens": 230, "last": [100, 100, 100], "used": {1}, "rows": 7, "kinds": {0.9}}
    assert allocator.calls == ["reset_peak_memory_stats", "memory_allocated", "synchronize", "max_memory_allocated"]


def test_a_step_that_does_not_fit_even_alone_is_refused(monkeypatch):
    choices = choose(ModelSettings("identity", device="cpu"))
    model, _ = choices.load()
    Allocator(monkeypatch, 0)
    monkeypatch.setattr(Compute, "run", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with torch.inference_mode(), pytest.raises(InvalidRequest, match=r"step of 8,192 tokens .* --max-batch-tokens"):
        measure.measure_step(choices, small(choices, model), FULL)


@pytest.mark.parametrize("kv_memory", [None, 1 << 20])
def test_the_cache_gets_what_the_measured_step_leaves(monkeypatch, checkpoint_of, kv_memory):
    """A runner on a CPU whose memory is counted as a GPU's. Where the cache's size is set, nothing is measured."""
    config = ModelSettings(str(checkpoint_of()), device="cpu", max_sequences=1 << 20, kv_memory=kv_memory)
    peak, free, asked = 50 << 20, 700 << 20, list[LargestStep]()
    monkeypatch.setattr(build, "step_bytes", lambda *_: StepBytes(3 << 20, 2 << 20, CUDA_RESERVE))
    monkeypatch.setattr(build, "measure_step", lambda _, __, largest, *___: asked.append(largest) or peak)
    monkeypatch.setattr(build, "free_memory", lambda _: free)
    runner = build_runner(config, largest=LargestStep(512, 8))
    taken = runner.kv.total_blocks * 16 * runner.info.kv_bytes_per_token
    if kv_memory is not None:
        assert not asked and taken <= kv_memory
        return
    assert asked == [LargestStep(512, 8)]
    left = (free - CUDA_RESERVE - peak) * size.CUDA_SHARE
    assert left - 16 * runner.info.kv_bytes_per_token <= taken <= left
    [reason] = [why for name, why in runner.device.choices if name.startswith("kv_blocks=")]
    assert "48 MiB of activations (measured), 2048 KiB of sampling, 600 MiB in reserve" in reason
