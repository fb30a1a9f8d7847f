"""How far quantized weights move the answers of a model that learned from texts, the demo model.

Each side reads the same text, and its distributions of the next token are compared with those of the model in bfloat16.
Sides of GGUF's types have weights that the package ``gguf`` quantized and dequantized, in bfloat16 and with rows that
are not rounded: what such a file moves by itself. As in llama.cpp's mixtures and in ours, what is not a matrix of a
layer has 8 bits.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.cache import DEMO, TEXT, divergence
from benchmarks.cases import PREFILL, Cell
from benchmarks.engines.inprocess import Inside
from benchmarks.machine import hardware
from benchmarks.record import Benchmark, Record
from benchmarks.table import target
from ferrum_rpc.building import model_folder

EXACT: Final = "bfloat16"
OURS: Final = {"int8": "Q8_0", "int4": "Q4_0"}
"""``--quantize``, and the type of a file of as many bits."""

TYPES: Final = ("Q8_0", "Q4_1", "Q4_0")
OTHERS: Final = "Q8_0"


def rounded(folder: Path, kind: str, to: Path) -> str:
    """The checkpoint ``folder`` with its matrices as type ``kind`` has them."""
    import gguf

    def as_type(values: torch.Tensor, name: str) -> torch.Tensor:
        made = gguf.GGMLQuantizationType[kind if ".layers." in name else OTHERS]
        numbers = values.to(torch.float32).numpy()
        again = gguf.quants.dequantize(gguf.quants.quantize(numbers, made), made)
        return torch.from_numpy(np.ascontiguousarray(again)).to(values.dtype)

    to.mkdir()
    for each in folder.glob("*.json"):
        shutil.copy(each, to)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: as_type(each, name) if each.dim() > 1 else each for name, each in tensors.items()}
    save_file(changed, to / "model.safetensors", {"format": "pt"})
    return str(to)


async def rows_of(model: str, threads: int, **settings: Any) -> Any:
    """float32 [rows, vocab]: the logits behind every token of the text but its first."""
    async with Inside.open(model, [Cell(PREFILL, 1, len(TEXT))], threads, dtype="bfloat16", **settings) as side:
        return await side.logits(TEXT, len(TEXT) - 1)


async def run(options: argparse.Namespace) -> Record:
    """Compare every side with the exact one."""
    threads = hardware()["cores"]
    record = Record(options, model=DEMO, threads=threads)
    folder = Path(model_folder(DEMO))
    exact, found = await rows_of(DEMO, threads), {}
    for kind in OURS:
        found[f"--quantize {kind}"] = divergence(exact, await rows_of(DEMO, threads, quantize=kind))
    with TemporaryDirectory() as place:
        for kind in TYPES:
            made = rounded(folder, kind, Path(place) / kind)
            found[f"weights of {kind}"] = divergence(exact, await rows_of(made, threads))
    moved = {name: each["KL, mean"] for name, each in found.items()}
    targets = [
        target(
            f"KL of {ours} weights and rows, in that of weights of {theirs}",
            moved[f"--quantize {ours}"] / moved[f"weights of {theirs}"],
            1.0,
            least=False,
            unit=" ×",
        )
        for ours, theirs in OURS.items()
    ]
    rows = [{"weights": name, **each} for name, each in found.items()]
    record.put("answers", rows, targets=targets)
    return record


BENCHMARK: Final = Benchmark("quantized", run, ())
