"""`make bench-peers`: ours beside every other engine that runs on this machine, one peer at a time, in one run.

Like beside like: a peer with weights in 8 or 4 bits is measured against ours with as many, the others against bfloat16.
``--model qwen3.5-0.8b`` is a model with recurrent layers, ``qwen3-30b-a3b-3`` one with experts.

A peer that needs packages of its own has them in an environment of its own, ``.venv-peers/NAME``, made from
``benchmarks/environments/NAME.txt``. Each gets the same weights and the same tokens as our server, and its rounds
alternate with the server's: A B A B for every cell. A peer that cannot be installed, started or driven is named with
the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from benchmarks.cases import CELLS, QUICK_CELLS, SHAPES, USUAL, Cell
from benchmarks.compare import Player, Unsupported
from benchmarks.engines.grpc import INT4, INT8, QUANTIZED, Client, open_quantized
from benchmarks.engines.process import REFERENCE, PeerKind, PeerProcess
from benchmarks.machine import ROOT
from benchmarks.record import Benchmark, Contest, Option, Record, shape_of
from benchmarks.suite import EAGER
from ferrum_rpc.usage import masked_isa

SPINS: Final = {"GOMP_SPINCOUNT": "300000"}
"""llama.cpp meets at an OpenMP barrier after every operation, a thousand times a step: it gets libgomp's own default,
spelled out (the number is libgomp's), or each barrier would put its threads to sleep."""

LLAMA_CPP: Final = "llama_cpp_avx2" if masked_isa() == "avx2" else "llama_cpp"
"""Its environment: it is built for instruction sets, and gets no better ones than ours under `FERRUM_ISA`."""

VLLM: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "LD_PRELOAD": "{environment}/lib/libiomp5.so",
}
"""Its engine in the process that times it, room for the largest cell (GiB), and the OpenMP that it advises."""

PEERS: Final = (
    EAGER,
    PeerKind("transformers static, compiled", "hf", {"cache": "static"}),
    PeerKind("llama.cpp bf16", "llama_cpp_peer", {"type": "bf16"}, LLAMA_CPP, SPINS),
    PeerKind("llama.cpp Q8_0", "llama_cpp_peer", {"type": "q8_0"}, LLAMA_CPP, SPINS, INT8),
    PeerKind("llama.cpp Q4_K_M", "llama_cpp_peer", {"type": "q4_k_m"}, LLAMA_CPP, SPINS, INT4),
    PeerKind("vLLM CPU bf16", "vllm_peer", {}, "vllm", VLLM),
    PeerKind("OpenVINO GenAI bf16", "openvino_peer", {"weights": "bf16"}, "openvino"),
    PeerKind("OpenVINO GenAI int8", "openvino_peer", {"weights": "int8"}, "openvino", rival=INT8),
    PeerKind("OpenVINO GenAI int4", "openvino_peer", {"weights": "int4"}, "openvino", rival=INT4),
)

BITS: Final = {REFERENCE: "bf16", INT8: "int8", INT4: "int4"}
ENVIRONMENTS: Final = ROOT / ".venv-peers"
REQUIREMENTS: Final = ROOT / "benchmarks" / "environments"


def install(name: str) -> tuple[str, str] | None:
    """Make or complete an environment: the call of pip that failed and the last line of why, or None. What is there
    already costs a second."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENTS / name)], check=True)
    for line in (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            print(f"{name}: pip {line}", flush=True)
            command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *line.split()]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                return line, (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    return None


async def against(here: Contest, cells: Sequence[Cell], kind: PeerKind, name: str, side: Player) -> None:
    """A peer and ``side`` of ours by turns."""
    async with AsyncExitStack() as stack:
        home = ENVIRONMENTS.resolve() / kind.environment
        opening = PeerProcess.open(kind, here.folder, here.options.threads, here.spec.vocab_size, home)
        if peer := await here.open(stack, kind.name, opening):
            try:
                await here.play(cells, {name: side, kind.name: peer}, name)
            except Unsupported as error:  # it ended between two rounds
                here.leave_out(kind.name, str(error))


async def run(options: argparse.Namespace) -> Record:
    """Install what is missing. Our servers stay up; a peer after the other."""
    chosen = [each for each in PEERS if each.name in options.peers]
    wanted = dict.fromkeys(kind.environment for kind in chosen if kind.environment)
    failed = {name: trouble for name in wanted if (trouble := install(name))}
    here, threads = Contest(options), options.threads
    cells: Sequence[Cell] = QUICK_CELLS if options.quick else CELLS
    if shape_of(options):  # targets are of the usual one
        cells = [replace(cell, target=None, goal=None) for cell in cells]
    async with AsyncExitStack() as stack:
        ours = {REFERENCE: await here.open(stack, REFERENCE, Client.open(here.folder, cells, threads))}
        for name in QUANTIZED:
            if any(kind.rival == name for kind in chosen):
                ours[name] = await here.open(stack, name, open_quantized(name, here.folder, cells, threads))
        for kind in chosen:
            if kind.environment in failed:
                here.leave_out(kind.name, "not installed: {}: {}".format(*failed[kind.environment]))
                continue
            rival = kind.rival if ours.get(kind.rival) else REFERENCE
            if side := ours[rival]:
                await against(here, cells, kind, rival, side)
    return here.record


def variant(options: argparse.Namespace) -> str:
    """Another shape, or peers in as many bits alone, are a run of their own, not a newer one of all."""
    rivals = {each.rival for each in PEERS if each.name in options.peers}
    bits = BITS[rivals.pop()] if len(rivals) == 1 else ""
    return "-".join(filter(None, (shape_of(options), bits)))


BENCHMARK: Final = Benchmark(
    "peers",
    run,
    (
        Option("--model", USUAL[0], "the shape of the model", USUAL[1], choices=[*SHAPES]),
        Option("--peers", [each.name for each in PEERS], "peers", choices=[each.name for each in PEERS]),
    ),
    rounds=3,
    round_s=2.0,
    variant=variant,
)
