"""Whether steps are right in ways that a comparison with float64 does not show: steps of first light.

pool     a cache whose layers have more than 2^32 elements answers bit for bit as a small one: offsets of blocks,
         slots and tokens are 64 bits wide. The sequences lie at its very end
equal    the same step 200 times, decode and prompt, with adapters and without, eager and replayed: the same bits
         each time
one      one step of each kind, each tensor in an allocation of its own: for compute-sanitizer, which then sees
         every access behind the end of one
races    the same under compute-sanitizer's racecheck, without what it says of cuBLAS, whose barriers it does not know
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.cases import SHAPES, write_adapter, write_checkpoint
from benchmarks.engines.inprocess import forward, load_adapter
from benchmarks.gpu.first_light import NOT_HERE_STATUS, tell
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, RowDType, Sample, Span
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import FP8_CAPABILITY
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.models.spec import ModelSpec

SMALL: Final = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 8192}
ONE_LAYER: Final = {"num_hidden_layers": 1, "max_window_layers": 1, "bos_token_id": 1, "eos_token_id": 2}
SHAPE: Final[dict[str, Any]] = SHAPES["qwen3-8b"] | SMALL | ONE_LAYER
"""A layer with the heads of Qwen3-8B."""

BLOCK: Final = 16
RANKS: Final = 20, 3  # of the adapters: no powers of two, one of them more than the kernels multiply at once
ADAPTED: Final = 150  # tokens of a prompt with an adapter: more than a large tile has rows
LENGTHS: Final = 700, 33, 1200, 5  # tokens of the prompts
REHEARSED_LENGTHS: Final = 70, 33, 120, 5
ELEMENTS: Final = 1 << 32
REPEATS: Final = 200
ALL: Final = OutputSpec(Positions.ALL, FullLogits(RowDType.F32))
DRAWN: Final = OutputSpec(Positions.LAST, Sample(top_k=50, top_p=0.9, seed=3))
Answers = list[np.ndarray]


def tokens(count: int, seed: int = 0) -> Any:
    """Token ids, int32 [count]."""
    return np.random.default_rng(seed).integers(1, SHAPE["vocab_size"], count, dtype=np.int32)


def answers(runner: TorchRunner, spans: Sequence[Span]) -> Answers:
    """The rows of a step, span by span."""
    found = []
    with runner.context():
        for outcome in forward(runner, spans):
            if outcome.rows is not None:
                block, first = outcome.rows.block, outcome.rows.first
                column = block[block.kind.columns[0]]
                found.append(column[first : first + outcome.rows.count].copy())
    return found


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


@contextmanager
def checkpoint() -> Iterator[str]:
    """A folder with a model of `SHAPE`, and adapters of it in a folder there."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_checkpoint(folder, SHAPE))
        for rank in RANKS:
            write_adapter(ModelSpec.from_config(SHAPE), rank, Path(path) / "adapters")
        yield path


def settings(folder: str, *, rehearse: bool, **others: Any) -> ModelSettings:
    """Of a runner on the GPU, or in a rehearsal on the CPU."""
    return ModelSettings(
        folder, dtype="bfloat16", block_size=BLOCK, max_sequences=16, device="cpu" if rehearse else "cuda", **others
    )


def adapted_runner(folder: str, *, rehearse: bool, **others: Any) -> TorchRunner:
    """A runner with the adapters of a `checkpoint`, numbers 1 and 2."""
    adapters: dict[str, Any] = {"adapter_dir": Path(folder) / "adapters", "max_adapter_rank": max(RANKS)}
    runner = build_runner(settings(folder, rehearse=rehearse, kv_blocks=512, **adapters, **others))
    with runner.context():
        for number, rank in enumerate(RANKS, 1):
            load_adapter(runner, number, f"rank-{rank}")
    return runner


def caches(*, rehearse: bool) -> list[dict[str, Any]]:
    """Settings of the kinds of cache that the device has."""
    return [{}] if rehearse or torch.cuda.get_device_capability() < FP8_CAPABILITY else [{}, {"kv_dtype": "fp8"}]


# --- a pool of more than 2^32 elements --------------------------------------------------------------------------------


def pool(*, rehearse: bool) -> int:
    """See above. Without the memory for it: not here."""
    slot = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    small, large = 512, 600 if rehearse else ELEMENTS // (BLOCK * slot) + 1024
    needed = 2 * large * BLOCK * slot * 2
    if not rehearse and torch.cuda.mem_get_info()[0] < 1.1 * needed:
        print(f"a pool of {needed / 2**30:.0f} GiB does not fit this device: nothing was compared")
        return NOT_HERE_STATUS
    wrong, lengths = 0, REHEARSED_LENGTHS if rehearse else LENGTHS
    with checkpoint() as folder:
        for kind in caches(rehearse=rehearse):
            found = []
            for blocks in (small, large):
                order = tuple(range(blocks, 0, -1))  # the last block is handed out first
                config = settings(folder, rehearse=rehearse, kv_blocks=blocks, block_order=order, **kind)
                runner = build_runner(config)
                elements = runner.store.keys[0].numel()
                found.append([row for spans in history(lengths) for row in answers(runner, spans)])
                runner.close()
                del runner
            if not rehearse:
                torch.cuda.empty_cache()
            differ = sum(not np.array_equal(*pair) for pair in zip(*found, strict=True))
            print(f"{kind or 'bfloat16'}: {elements:,} elements, {differ} of {len(found[0])} answers differ")
            wrong += differ + (elements <= ELEMENTS and not rehearse)
    tell({"differ": wrong, "elements": elements})
    return int(wrong > 0)


# --- equal steps ------------------------------------------------------------------------------------------------------


def equal(*, rehearse: bool) -> int:
    """See above."""
    differ, lengths = dict[str, int](), REHEARSED_LENGTHS if rehearse else LENGTHS
    with checkpoint() as folder:
        for graphs in ("auto", "off"):
            runner = adapted_runner(folder, rehearse=rehearse, cuda_graphs=graphs)
            for spans in (*list(history(lengths))[:1], adapted(ADAPTED, create=True)):
                answers(runner, spans)
            steps = {
                "decode": [Span(s, tokens(1, s), length, ALL) for s, length in enumerate(lengths)],
                "draw": [Span(s, tokens(1, s), length, DRAWN) for s, length in enumerate(lengths)],
                "verify": [Span(s, tokens(5, s), length, ALL) for s, length in enumerate(lengths)],
                "chunk": [Span(2, tokens(512, 7), lengths[2], ALL)],
                "adapters": adapted(1, create=False),
                "chunks with adapters": adapted(70, create=False),
            }
            for name, spans in steps.items():
                first = answers(runner, spans)
                count = sum(
                    not all(map(np.array_equal, first, answers(runner, spans)))
                    for _ in range(3 if rehearse else REPEATS)
                )
                differ[f"{name}, graphs {graphs}"] = count
                print(f"{name}, cuda_graphs={graphs}: {count} of {REPEATS} steps differ from the first")
            runner.close()
    tell({"differ": differ})
    return int(any(differ.values()))


# --- one step of each kind, for a sanitizer ---------------------------------------------------------------------------


def one(*, rehearse: bool) -> int:
    """See above."""
    if not rehearse:
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read when the first tensor is allocated
    with checkpoint() as folder:
        for kind in caches(rehearse=rehearse):
            runner = adapted_runner(folder, rehearse=rehearse, cuda_graphs="off", **kind)
            for spans in (adapted(ADAPTED, create=True), adapted(1, create=False)):
                answers(runner, spans)
            steps = list(history(LENGTHS))
            for spans in [*steps[:2], steps[2], *steps[5:]]:
                answers(runner, spans)
            with runner.context():
                runner.fork(2, [20], None)
            answers(runner, [Span(20, tokens(1), LENGTHS[2], DRAWN), Span(3, tokens(1), 3, DRAWN)])
            chosen = [name for name, _ in runner.device.choices]
            print(kind, *chosen, sep="\n  ")
            if not rehearse and not {"attention=triton", "adapters=triton", "sampling=triton"} <= {*chosen}:
                print("not all Triton kernels ran: nothing was checked")
                return 1
            runner.close()
    return 0


def races(*, rehearse: bool) -> int:
    """See above. The sanitizer cannot be told to leave cuBLAS out: steps then end with an illegal access."""
    assert not rehearse
    command = ["compute-sanitizer", "--tool", "racecheck", "--print-limit", "100000"]
    command += [sys.executable, "-m", "benchmarks.gpu", "one"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"Race reported between .* access at (\w+)\S* *\n=+ +and .* access at (\w+)", done.stdout)
    ours = sorted({name for pair in found for name in pair if not name.startswith(("nvjet", "cublas", "cutlass"))})
    print(*(done.stdout + done.stderr).splitlines()[-30:], sep="\n")
    print(f"{len(found)} races reported, of our kernels: {', '.join(ours) or 'none'}")
    tell({"races": len(found), "ours": len(ours)})
    return int(bool(ours) or done.returncode != 0 or "RACECHECK SUMMARY" not in done.stdout)
