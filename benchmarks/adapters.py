"""What adapters cost: decode steps in which every sequence has one of its own, or all have the same, beside steps of
the plain model.

One runner in this process, whose sequences are of three sides; rounds alternate, so that the ratios are of one run.
"""

from __future__ import annotations

import argparse
import json
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import CACHE, CONTEXT, DECODE, QUICK_CELLS, SEED, Cell
from benchmarks.engines.inprocess import Inside
from benchmarks.record import Benchmark, Contest, Record, median_of
from benchmarks.table import target
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.lora import modules_of
from ferrum_rpc.models.spec import ModelSpec

EACH, ONE, BASE = "an adapter each", "one adapter for all", "without adapters"
TARGET: Final = 0.8  # tokens a second where every sequence has an adapter of its own, of those without any, at least
RANK: Final = 16
CELL: Final = Cell(DECODE, 32, CONTEXT, most=16)
SIDES: Final = 1 << 20  # between the numbers of two sides' sequences


def write_adapter(spec: ModelSpec, rank: int, folder: Path) -> str:
    """Write a random adapter of all products into a folder of its own in ``folder``, anew; returns its name."""
    import torch
    from safetensors.torch import save_file

    generator, tensors, modules = torch.Generator().manual_seed(SEED), {}, set()
    for module, (rows, width) in modules_of(layout(spec)).items():
        modules.add(module.rpartition(".")[2])
        for end, shape, size in (("lora_A", (rank, width), width**-0.5), ("lora_B", (rows, rank), 0.1)):
            numbers = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{module}.{end}.weight"] = numbers.to(torch.bfloat16)
    name = f"rank-{rank}"
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).mkdir(parents=True)
    save_file(tensors, folder / name / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(modules)}
    (folder / name / "adapter_config.json").write_text(json.dumps(config))
    return name


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    cell, rank = (QUICK_CELLS[-1], 4) if options.quick else (CELL, RANK)
    here = Contest(options)
    folder = CACHE / f"adapters-{'quick' if options.quick else 'qwen3-0.6b'}"
    name = write_adapter(here.spec, rank, folder)
    more: dict[str, Any] = {"adapter_dir": folder, "max_adapter_rank": rank, "adapter_memory": 64 << 30}
    async with AsyncExitStack() as stack:
        every = replace(cell, batch=3 * cell.batch)  # the sides share a cache
        base = await stack.enter_async_context(Inside.open(here.folder, [every], options.threads, **more))
        await base.load_adapters(name, cell.batch)
        sides = {EACH: base.beside(range(1, cell.batch + 1), SIDES), ONE: base.beside([1], 2 * SIDES), BASE: base}
        record = here.record
        record.values["settings"]["adapters"] = f"{cell.batch} of rank {rank}, of all products"
        await here.play([cell], sides, EACH)
    what = f"{cell.name} with an adapter of rank {rank} each, in process, of none"
    record.save(targets=[target(what, median_of(record.values["cells"], cell.name, BASE), TARGET)])
    return record


BENCHMARK: Final = Benchmark("adapters", run, round_s=4.0)
