"""What both sides run: the models, the outputs, the sequences and their tokens, all from fixed seeds.

A round is decode steps of the same sequences: its first step rolls every sequence back to `Workload.context` tokens in
the same call (so lengths stay bounded and no step of a round differs between the sides), and is not timed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.environment import ROOT
from benchmarks.shapes import SHAPES, write_checkpoint
from ferrum_rpc.core import (
    FullLogits,
    Greedy,
    LogitRows,
    OutputKind,
    OutputSpec,
    Positions,
    RowBlock,
    RowDType,
    TokenRows,
)

IDENTITY: Final = "identity"
BUILT_IN: Final = (IDENTITY, "demo")
SEED: Final = 20261121
CACHE: Final = ROOT / ".cache" / "bench"
BLOCK_SIZE: Final = 16
CONTEXT: Final = 256
IDENTITY_CONTEXT: Final = 64
MAX_STEPS: Final = 128
"""Timed steps of a round, at most: so much do the sequences grow within one."""

LEAD_IN: Final = 2
"""Steps of a round that are not timed: the roll-back, and one that finds the caches as the timed ones do."""

OUTPUTS: Final[dict[str, OutputKind]] = {
    "greedy": Greedy(),
    "full-bf16": FullLogits(RowDType.BF16),
    "full-f32": FullLogits(RowDType.F32),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """One model and the sequences that are decoded: ``batch`` at most, ``context`` tokens each before a round."""

    name: str
    path: str
    context: int
    batch: int
    max_steps: int = MAX_STEPS

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `ferrum-rpc serve`, for the server and for the runner in this process alike."""
        tokens = self.context + LEAD_IN + self.max_steps
        per_sequence = -(-tokens // BLOCK_SIZE) + 1
        return {"block_size": BLOCK_SIZE, "kv_blocks": self.batch * per_sequence}

    def prompts(self, vocab_size: int) -> npt.NDArray[np.int32]:
        """Int32 [batch, context]."""
        return self._random(0, vocab_size, (self.batch, self.context))

    def tokens(self, vocab_size: int) -> npt.NDArray[np.int32]:
        """What is fed in the steps of every round, int32 [steps, batch]: chosen beforehand, so that both sides run the
        same steps whatever they answer."""
        return self._random(1, vocab_size, (LEAD_IN + self.max_steps, self.batch))

    @staticmethod
    def _random(stream: int, vocab_size: int, shape: tuple[int, int]) -> npt.NDArray[np.int32]:
        return np.random.default_rng((SEED, stream)).integers(0, vocab_size, shape, dtype=np.int32)


def output_spec(output: str) -> OutputSpec:
    """What every sequence of a step asks for."""
    return OutputSpec(Positions.LAST, OUTPUTS[output])


def digest(block: RowBlock) -> bytes:
    """Of a step's packed rows."""
    match block:
        case TokenRows(token_ids=values) | LogitRows(logits=values):
            return hashlib.blake2b(values.tobytes(), digest_size=8).digest()
        case _:
            raise TypeError(f"{type(block).__name__} is no output of this benchmark")


def outputs_for(requested: list[str], batch: int) -> list[str]:
    """The columns of a batch size: full rows are bfloat16, and for one sequence float32 as well."""
    columns = ["greedy"] if "greedy" in requested else []
    if "full" in requested:
        columns += ["full-bf16", "full-f32"] if batch == 1 else ["full-bf16"]
    return columns


def workload(model: str, batch: int, max_steps: int) -> Workload:
    """``model``: identity, demo, a name of `SHAPES` (written to the cache on first use), or a folder."""
    context = IDENTITY_CONTEXT if model == IDENTITY else CONTEXT
    path = str(checkpoint(model)) if model in SHAPES else model
    if model not in BUILT_IN and not Path(path).is_dir():
        raise SystemExit(f"no model {model!r}: write identity, demo, {', '.join(SHAPES)} or a folder")
    return Workload(Path(model).name, path, context, batch, max_steps)


def checkpoint(shape: str) -> Path:
    """The folder with random weights of a shape; written whole or not at all, and anew where the shape has changed."""
    folder = CACHE / shape
    written = folder / "config.json"
    if not written.is_file() or not SHAPES[shape].items() <= json.loads(written.read_text("utf-8")).items():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"writing random weights of {shape} to {folder.relative_to(ROOT)} (once)")
        partial = CACHE / f"{shape}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write_checkpoint(partial, SHAPES[shape], seed=SEED).rename(folder)
    return folder
