"""Whether steps are right in ways that a comparison with float64 does not show: offsets beyond 2^32, equal bits every
time, and no access outside of a tensor and no race by what compute-sanitizer says.

Without a CUDA device they run small on a CPU, but for the sanitizer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, RowDType, Sample, Span
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import FP8_CAPABILITY
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.models.spec import ModelSpec
from tests.support.adapters import Weights, make_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.process import ROOT
from tests.support.rows import answered

CUDA: Final = torch.cuda.is_available()
SIZES: Final = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 8192}
HEADS: Final = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1}
"""A layer with the heads of Qwen3-8B."""

BLOCK: Final = 16
RANKS: Final = 20, 3  # of the adapters: no powers of two, one of them more than the kernels multiply at once
ADAPTED: Final = 150  # tokens of a prompt with an adapter: more than a large tile has rows
LENGTHS: Final = (700, 33, 1200, 5) if CUDA else (70, 33, 120, 5)  # tokens of the prompts
ELEMENTS: Final = 1 << 32
REPEATS: Final = 200 if CUDA else 3
ALL: Final = OutputSpec(Positions.ALL, FullLogits(RowDType.F32))
DRAWN: Final = OutputSpec(Positions.LAST, Sample(top_k=50, top_p=0.9, seed=3))
KINDS: Final[list[dict[str, Any]]] = [{}]
if CUDA and torch.cuda.get_device_capability() >= FP8_CAPABILITY:
    KINDS.append({"kv_dtype": "fp8"})
ONE_STEP: Final = f"{__file__}::test_one_step_of_each_kind"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of `SIZES` and `HEADS` in bfloat16, and adapters of it in a folder there."""
    path = make_checkpoint(tmp_path_factory.mktemp("steady") / "model", dtype=torch.bfloat16, **SIZES, **HEADS)
    for rank in RANKS:
        weights = Weights(ModelSpec.from_config(json.loads((path / "config.json").read_text())))
        make_adapter(path / "adapters" / f"rank-{rank}", weights, r=rank, dtype=torch.bfloat16)
    return path


def make_runner(folder: Path, *, blocks: int = 512, adapters: bool = True, **more: Any) -> TorchRunner:
    """A runner; with the adapters, numbers 1 and 2."""
    if adapters:
        more |= {"adapter_dir": folder / "adapters", "max_adapter_rank": max(RANKS)}
    sizes: dict[str, Any] = {"block_size": BLOCK, "kv_blocks": blocks, "max_sequences": 16}
    device = "cuda" if CUDA else "cpu"
    runner = build_runner(ModelSettings(str(folder), dtype="bfloat16", device=device, **sizes, **more))
    with runner.context():
        for number, rank in enumerate(RANKS if adapters else (), 1):
            runner.open_adapter(number, f"rank-{rank}")
            while runner.read_adapter(number) is None:
                pass
    return runner


def tokens(count: int, seed: int = 0) -> Any:
    """Token ids, int32 [count]."""
    return np.random.default_rng(seed).integers(1, SIZES["vocab_size"], count, dtype=np.int32)


def answers(runner: TorchRunner, spans: Sequence[Span]) -> list[np.ndarray]:
    """The columns of a step's rows."""
    return [column.copy() for columns in answered(runner, *spans) for column in columns.values()]


def history(lengths: Sequence[int]) -> Iterator[list[Span]]:
    """Steps of several sequences: prompts, a chunk, decode, a verify behind a roll-back, and a mixed one."""
    yield [Span(s, tokens(length, s), 0, ALL, create=True) for s, length in enumerate(lengths)]
    yield [Span(0, tokens(300, 9), lengths[0], ALL)]
    for at in range(3):
        yield [Span(s, tokens(1, at), length + at, ALL) for s, length in enumerate(lengths) if s]
    yield [Span(s, tokens(5, 20 + s), length, ALL) for s, length in enumerate(lengths) if s]
    yield [Span(9, tokens(150, 30), 0, ALL, create=True), Span(3, tokens(1, 31), 10, ALL)]


def adapted(length: int, *, create: bool) -> list[Span]:
    """Spans of two adapters and of none, of ``length`` tokens each."""
    return [
        Span(s, tokens(length, s), 0 if create else ADAPTED, ALL, create=create, adapter=adapter)
        for s, adapter in enumerate((1, 0, 2, 1), 30)
    ]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_cache_of_more_than_4_g_elements_answers_as_a_small_one(folder, kind):
    """Offsets of blocks, slots and tokens are 64 bits wide. The sequences lie at the very end of the cache."""
    slot = HEADS["num_key_value_heads"] * HEADS["head_dim"]
    small, large = 512, ELEMENTS // (BLOCK * slot) + 1024 if CUDA else 600
    needed = 2 * large * BLOCK * slot * 2
    if CUDA and torch.cuda.mem_get_info()[0] < 1.1 * needed:
        pytest.skip(f"a cache of {needed / 2**30:.0f} GiB does not fit this device")
    found = []
    for blocks in (small, large):
        order = tuple(range(blocks, 0, -1))  # the last block is handed out first
        runner = make_runner(folder, blocks=blocks, adapters=False, block_order=order, **kind)
        elements = runner.store.keys[0].numel()
        found.append([row for spans in history(LENGTHS) for row in answers(runner, spans)])
        runner.close()
        del runner
    assert elements > ELEMENTS or not CUDA
    assert all(map(np.array_equal, *found))


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_equal_steps_have_equal_bits(folder, graphs):
    runner = make_runner(folder, cuda_graphs=graphs)
    for spans in (next(history(LENGTHS)), adapted(ADAPTED, create=True)):
        answers(runner, spans)
    steps = {
        "decode": [Span(s, tokens(1, s), length, ALL) for s, length in enumerate(LENGTHS)],
        "draw": [Span(s, tokens(1, s), length, DRAWN) for s, length in enumerate(LENGTHS)],
        "verify": [Span(s, tokens(5, s), length, ALL) for s, length in enumerate(LENGTHS)],
        "chunk": [Span(2, tokens(512, 7), LENGTHS[2], ALL)],
        "adapters": adapted(1, create=False),
        "chunks with adapters": adapted(70, create=False),
    }
    for name, spans in steps.items():
        first = answers(runner, spans)
        differ = sum(not all(map(np.array_equal, first, answers(runner, spans))) for _ in range(REPEATS))
        assert not differ, f"{name}: {differ} of {REPEATS} steps differ from the first"
    runner.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_step_of_each_kind(folder, kind):
    """What the sanitizer watches, with each tensor in an allocation of its own: it sees an access behind any end."""
    runner = make_runner(folder, cuda_graphs="off", **kind)
    for spans in (adapted(ADAPTED, create=True), adapted(1, create=False), *history(LENGTHS)):
        answers(runner, spans)
    with runner.context():
        runner.fork(2, [20], None)
    answers(runner, [Span(20, tokens(1), LENGTHS[2], DRAWN), Span(3, tokens(1), 3, DRAWN)])
    chosen = {name for name, _ in runner.device.choices}
    assert not CUDA or {"attention=triton", "adapters=triton", "sampling=triton"} <= chosen, "nothing was checked"
    runner.close()


def sanitized(*tool: str) -> subprocess.CompletedProcess[str]:
    """`test_one_step_of_each_kind` under a tool of compute-sanitizer."""
    if not CUDA or shutil.which("compute-sanitizer") is None:
        pytest.skip("needs a CUDA device and compute-sanitizer")
    command = ["compute-sanitizer", *tool, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--confcutdir=tests/gpu", ONE_STEP]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_no_access_is_outside_of_a_tensor():
    done = sanitized("--tool", "memcheck", "--error-exitcode", "9")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_our_kernels_have_no_races_in_shared_memory():
    """The sanitizer cannot be told to leave cuBLAS out, whose barriers it does not know: steps then end with an illegal
    access."""
    done = sanitized("--tool", "racecheck", "--print-limit", "100000")
    found = re.findall(r"Race reported between .* access at (\w+)\S* *\n=+ +and .* access at (\w+)", done.stdout)
    ours = {name for pair in found for name in pair if not name.startswith(("nvjet", "cublas", "cutlass"))}
    assert not ours and done.returncode == 0 and "RACECHECK SUMMARY" in done.stdout, done.stdout[-4000:]
