"""What 8 and 4 bits gain and cost: how far quantized weights and a quantized cache move the answers of a model that
learned from texts, the demo model; and decode steps over an int8 cache beside those over one in bfloat16.

Each side reads the same text, and its distributions of the next token are compared with those of the model in bfloat16.
Files of GGUF's types are made by llama.cpp's own quantizer, where the environment of that peer is installed. They are
served as they are stored, where rows are rounded to 8 bits, and expanded to bfloat16, which shows what the file moves
by itself. What weights gain is in the suite and beside peers.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from benchmarks.cases import DECODE, PREFILL, QUICK_CELLS, Cell
from benchmarks.engines.inprocess import Inside
from benchmarks.machine import ROOT
from benchmarks.peers import ENVIRONMENTS
from benchmarks.record import Benchmark, Contest, Opening, Option, Record, median_of
from benchmarks.table import target
from clients.scheduler.prompts import DEMO_PROMPTS
from ferrum_rpc.building import model_folder
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.choose import choose

DEMO: Final = "demo"
WORDS: Final = (" ".join(DEMO_PROMPTS) + (ROOT / "LICENSE").read_text("ascii"))[:2048]
TEXT: Final = np.frombuffer(WORDS.encode(), dtype=np.uint8).astype(np.int32)
"""Tokens of the demo model, which are bytes, as many as it takes: of 288 a mean is off by a tenth."""

CACHES: Final = {"int8 cache": "int8", "bfloat16 cache": "auto"}
ROUNDED, EXACT = CACHES
CELL: Final = Cell(DECODE, 32, 2048, most=16)
CACHE_TARGET: Final = 1.25  # tokens a second with the int8 cache, of those with the other, at least
PEER: Final = "llama_cpp"
"""Whose environment has the quantizer."""

TYPES: Final = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M")
"""Of GGUF: llama.cpp's names."""

OURS: Final = {"int8": "Q8_0", "int4": "Q4_K_M"}
"""``--quantize``, and the type of a file that it should move answers no more than."""

SIZES: Final = {"Q8_0": 1.05, "Q4_0": 1.05, "Q4_K_M": 1.2}
"""Bytes that weights may take, in those of their file."""


def divergence(exact: npt.NDArray[np.float32], rounded: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Of ``rounded`` logits from ``exact`` ones, both [rows, vocab], in nats; and the share of equal arg-max tokens."""
    p, q = (torch.from_numpy(each).double().log_softmax(1) for each in (exact, rounded))
    found = F.kl_div(q, p, reduction="none", log_target=True).sum(1)
    return {
        "rows": len(found),
        "KL, mean": float(f"{found.mean().item():.3g}"),
        "largest": float(f"{found.max().item():.3g}"),
        "same tokens": f"{(exact.argmax(axis=1) == rounded.argmax(axis=1)).mean():.1%}",
    }


def files(folder: Path, types: Sequence[str], to: Path) -> dict[str, str]:
    """A file of each type, by its name; none where the quantizer is not installed."""
    python = ENVIRONMENTS / PEER / "bin" / "python"
    if not python.exists():
        return {}
    shutil.copytree(folder, to, dirs_exist_ok=True)
    program = [str(python), "-m", "benchmarks.engines.peers.gguf_file"]
    subprocess.run([*program, str(to), *map(str.lower, types)], cwd=ROOT, check=True, capture_output=True)
    return {kind: str(to / f"model.{kind.lower()}.gguf") for kind in types}


def bytes_held(file: str) -> float:
    """Bytes of the weights as they are stored, in those of their file."""
    held = choose(ModelSettings(file, device="cpu", kv_blocks=1)).source.weight_bytes()
    return round(held / Path(file).stat().st_size, 3)


async def rows_of(model: str, threads: int, **settings: Any) -> Any:
    """float32 [rows, vocab]: the logits behind every token of the text but its first."""
    async with Inside.open(model, [Cell(PREFILL, 1, len(TEXT))], threads, **settings) as side:
        return await side.logits(TEXT, len(TEXT) - 1)


async def answers(here: Contest) -> list[dict[str, Any]]:
    """Compare every side with the exact one, and write the rows; the targets."""
    threads, rows = here.options.threads, list[dict[str, Any]]()
    exact = await rows_of(DEMO, threads, dtype="bfloat16")

    async def compare(name: str, model: str, *, held: float | None = None, **settings: Any) -> float:
        found = divergence(exact, await rows_of(model, threads, **settings))
        rows.append({"weights": name, "bytes, of the file's": held, **found})
        here.record.put("answers", rows)
        return float(found["KL, mean"])

    await compare("bfloat16, int8 cache", DEMO, dtype="bfloat16", kv_dtype="int8")
    moved = {kind: await compare(f"--quantize {kind}", DEMO, dtype="bfloat16", quantize=kind) for kind in OURS}
    targets = []
    with TemporaryDirectory() as place:
        found = files(Path(model_folder(DEMO)), here.options.types, Path(place))
        if not found:
            here.leave_out("files of GGUF's types", f"not installed: there is no environment {PEER!r}")
        for kind, file in found.items():
            held = bytes_held(file)
            moved[kind] = await compare(f"{kind}, as stored", file, held=held)
            await compare(f"{kind}, expanded", file, dtype="bfloat16")
            if kind in SIZES:
                what = f"bytes of weights of {kind} as stored, in those of the file"
                targets.append(target(what, held, SIZES[kind], least=False, unit=" ×"))
    for ours, theirs in OURS.items():
        ratio = moved[ours] / moved[theirs] if theirs in moved else None
        targets.append(target(f"KL of --quantize {ours}, in that of {theirs}", ratio, 1.0, least=False, unit=" ×"))
    return targets


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    cell = QUICK_CELLS[-1] if options.quick else CELL
    here = Contest(options)
    async with AsyncExitStack() as stack:
        sides: dict[str, Opening] = {
            kind: Inside.open(here.folder, [cell], options.threads, kv_dtype=kv) for kind, kv in CACHES.items()
        }
        await here.play([cell], await here.open_all(stack, sides), ROUNDED)
    gained = median_of(here.record.values["cells"], cell.name, EXACT)
    standing = target(f"{cell.name} over an int8 cache, in process, of bfloat16", gained, CACHE_TARGET)
    here.record.save(targets=[standing, *await answers(here)])
    return here.record


BENCHMARK: Final = Benchmark("quantized", run, (Option("--types", [*TYPES], "of GGUF", choices=[*TYPES]),), round_s=4.0)
