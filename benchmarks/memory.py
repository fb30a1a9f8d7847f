"""What `ferrum-rpc plan` says of a model, beside what a process has resident of it: weights, cache, the largest step.

Each kind of weights and size of step is a process of its own, with an allocator that keeps nothing that was freed:
glibc keeps some of it, in a server too, and that is no part of a plan. A step is prompts of equal length, and a row of
float32 logits of each.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks import tables
from benchmarks.cases import checkpoint
from benchmarks.machine import ROOT
from benchmarks.record import Record, finish, out_of, read_options
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
TARGET: Final = 0.03
"""By how much a plan may be wrong."""

STEPS: Final = ((4096, 4), (4096, 64))
"""Tokens, and the sequences that they are of."""

QUICK_KINDS: Final = ("bfloat16",)
QUICK_STEPS: Final = ((256, 4),)
ALLOCATOR: Final = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
LOOK_EVERY_S: Final = 0.002
BLOCK: Final = 16
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process's own pages, once what is free went back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


class Peak:
    """The most that was resident while the block ran, over what was when it began: ``taken``."""

    def __enter__(self) -> Peak:
        self.taken, self._ended = 0, threading.Event()
        self._began = self._now()
        self._looking = threading.Thread(target=self._look)
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._looking.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            self.taken = max(self.taken, self._now() - self._began)

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


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
        with Peak() as peak:
            _step(runner, sequences, tokens // sequences)
    found = {
        "weights": (plan.weights_bytes, loaded - before),
        "cache": (plan.kv_bytes, with_cache - loaded),
        "largest step": (plan.activations_bytes, peak.taken),
    }
    step = {"kind": kind, "tokens": tokens, "sequences": sequences}
    return [
        {**step, "of": what, "planned": planned, "resident": there, "ratio": round(planned / max(1, there), 4)}
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
    folder = checkpoint("tiny" if options.quick else options.shape)
    record = Record("memory", {"allocator": ALLOCATOR}, options.out)
    points: list[dict[str, Any]] = []
    for kind in QUICK_KINDS if options.quick else KINDS:
        for tokens, sequences in QUICK_STEPS if options.quick else STEPS:
            asked = f"Path({str(folder)!r}), {kind!r}, {tokens}, {sequences}"
            program = f"from benchmarks.memory import *; print(json.dumps(measure({asked})))"
            points += await _in_a_process_of_its_own(program)
            record.save(model=folder.name, points=points, off=max(abs(each["ratio"] - 1) for each in points))
    return record


async def _in_a_process_of_its_own(program: str) -> list[dict[str, Any]]:
    """What ``program`` prints."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, env=os.environ | ALLOCATOR, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await started.communicate()
    if started.returncode:
        raise RuntimeError(f"a measurement ended with status {started.returncode}")
    found: list[dict[str, Any]] = json.loads(printed)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="Plans beside what is resident.")
    parser.add_argument("--shape", default="qwen3-0.6b", help="of benchmarks/shapes.json (default: qwen3-0.6b)")
    options = read_options(parser, argv, rounds=1)
    options.out = out_of(options, "memory")
    finish(run(options), lambda result: tables.show(tables.memory(result["points"])))


if __name__ == "__main__":
    main()
