"""How far quantized weights move the answers of a model that learned from texts, the demo model.

Each side reads the same text, and its distributions of the next token are compared with those of the model in bfloat16.
Files of GGUF's types are made by llama.cpp's own quantizer, which the environment of that peer has. They are served as
they are stored, where rows are rounded to 8 bits, and expanded to bfloat16, which shows what the file moves by itself.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.cache import DEMO, TEXT, divergence
from benchmarks.cases import PREFILL, Cell
from benchmarks.engines.inprocess import Inside
from benchmarks.machine import ROOT, hardware
from benchmarks.peers import ENVIRONMENTS, install
from benchmarks.record import Benchmark, Option, Record
from benchmarks.table import target
from ferrum_rpc.building import model_folder
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.choose import choose

ENVIRONMENT: Final = "llama_cpp"
TYPES: Final = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M")
"""Of GGUF: llama.cpp's names."""

OURS: Final = {"int8": "Q8_0", "int4": "Q4_K_M"}
"""``--quantize``, and the type of a file that it should move answers no more than."""

SIZES: Final = {"Q8_0": 1.05, "Q4_0": 1.05, "Q4_K_M": 1.2}
"""Bytes that weights may take, in those of their file."""


def files(folder: Path, types: Sequence[str], to: Path) -> dict[str, str]:
    """A file of each type, by its name."""
    if not types:
        return {}
    if failed := install(ENVIRONMENT):
        raise RuntimeError("llama.cpp cannot be installed: {}: {}".format(*failed))
    shutil.copytree(folder, to, dirs_exist_ok=True)
    program = [str(ENVIRONMENTS / ENVIRONMENT / "bin" / "python"), "-m", "benchmarks.engines.peers.gguf_file"]
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


async def run(options: argparse.Namespace) -> Record:
    """Compare every side with the exact one."""
    threads = hardware()["cores"]
    record = Record(options, model=DEMO, threads=threads)
    exact, rows = await rows_of(DEMO, threads, dtype="bfloat16"), list[dict[str, Any]]()

    async def compare(name: str, model: str, *, held: float | None = None, **settings: Any) -> float:
        found = divergence(exact, await rows_of(model, threads, **settings))
        rows.append({"weights": name, "bytes, of the file's": held, **found})
        return float(found["KL, mean"])

    moved = {kind: await compare(f"--quantize {kind}", DEMO, dtype="bfloat16", quantize=kind) for kind in OURS}
    targets = []
    with TemporaryDirectory() as place:
        for kind, file in files(Path(model_folder(DEMO)), options.types, Path(place)).items():
            held = bytes_held(file)
            moved[kind] = await compare(f"{kind}, as stored", file, held=held)
            await compare(f"{kind}, expanded", file, dtype="bfloat16")
            if kind in SIZES:
                what = f"bytes of weights of {kind} as stored, in those of the file"
                targets.append(target(what, held, SIZES[kind], least=False, unit=" ×"))
    for ours, theirs in OURS.items():
        ratio = moved[ours] / moved[theirs] if theirs in moved else None
        targets.append(target(f"KL of --quantize {ours}, in that of {theirs}", ratio, 1.0, least=False, unit=" ×"))
    record.put("answers", rows, targets=targets)
    return record


BENCHMARK: Final = Benchmark("quantized", run, (Option("--types", [*TYPES], "of GGUF", choices=[*TYPES]),))
