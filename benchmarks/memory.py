"""What `ferrum-rpc plan` says of a model, beside what a process has resident of it: weights, cache, the largest step.

Each kind of weights and size of step is a process of its own, with an allocator that keeps nothing that was freed:
glibc keeps some of it, in a server too, and that is no part of a plan.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.cases import checkpoint
from benchmarks.engines.process import apart
from benchmarks.record import Benchmark, Record
from benchmarks.table import target
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, RowDType, Span, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.assembly.size import LargestStep, make_plan
from ferrum_rpc.engine.operations import TorchRunner

KINDS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
}
TARGET: Final = 0.03  # by how much a plan may be wrong
STEPS: Final = ((4096, 4), (4096, 64))  # tokens, and the sequences that they are of
QUICK_KINDS: Final = ("bfloat16",)
QUICK_STEPS: Final = ((256, 4),)
ALLOCATOR: Final = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
BLOCK: Final = 16


def resident() -> int:
    """Bytes of this process's own pages, once what is free went back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _told("smaps_rollup", "Anonymous")


def peak(*, anew: bool = False) -> int:
    """The most bytes that were resident since it was asked for ``anew``."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    return _told("status", "VmHWM")


def _told(file: str, field: str) -> int:
    """Bytes that the kernel tells of this process in a line of a file."""
    lines = Path("/proc/self", file).read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def measure(folder: Path, kind: str, tokens: int, sequences: int) -> list[dict[str, Any]]:
    """Planned and resident bytes, in a process that has loaded nothing."""
    blocks = sequences * -(-tokens // sequences // BLOCK)
    config = ModelSettings(str(folder), device="cpu", max_context=tokens // sequences, kv_blocks=blocks, **KINDS[kind])
    plan = make_plan(choose(config), LargestStep(tokens, sequences), 1 << 40)
    before = resident()
    runner = build_runner(config)
    loaded = resident()
    with torch.inference_mode():
        for buffer in runner.store.buffers:
            buffer.zero_()
        with_cache = resident()
        _step(runner, 1, BLOCK)
        began = peak(anew=True)
        _step(runner, sequences, tokens // sequences)
    found = {
        "weights": (plan.weights_bytes, loaded - before),
        "cache": (plan.kv_bytes, with_cache - loaded),
        "largest step": (plan.activations_bytes, peak() - began),
    }
    return [
        {
            "weights": kind,
            "tokens of sequences": f"{tokens} of {sequences}",
            "of": what,
            "planned, MiB": round(planned / 2**20, 1),
            "resident, MiB": round(there / 2**20, 1),
            "ratio": round(planned / max(1, there), 4),
        }
        for what, (planned, there) in found.items()
    ]


def _step(runner: TorchRunner, sequences: int, tokens: int) -> None:
    output = OutputSpec(Positions.LAST, FullLogits(RowDType.F32))
    drawn = np.random.default_rng(0).integers(1, runner.info.vocab_size, (sequences, tokens)).astype(np.int32)
    numbers = range(1, sequences + 1)
    runner.forward(Step(tuple(Span(i, drawn[i - 1], 0, output, create=True) for i in numbers)))
    runner.release(list(numbers))


async def run(options: argparse.Namespace) -> Record:
    """Every kind and step, and a file of it."""
    folder = checkpoint("tiny" if options.quick else "qwen3-0.6b")
    record = Record(options, model=folder.name, allocator=str(ALLOCATOR))
    points: list[dict[str, Any]] = []
    for kind in QUICK_KINDS if options.quick else KINDS:
        for tokens, sequences in QUICK_STEPS if options.quick else STEPS:
            points += await apart(measure, folder, kind, tokens, sequences, variables=ALLOCATOR)
            off = max(abs(each["ratio"] - 1) for each in points)
            standing = target("a plan, off by what is resident", off, TARGET, least=False)
            record.put("parts", points, targets=[standing])
    return record


BENCHMARK: Final = Benchmark("memory", run, rounds=1)
