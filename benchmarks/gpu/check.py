"""`make gpu-check`: the figures of a CUDA device, with their results as data; docs/operations.md describes it.

Exit status 1 if anything failed or a target was missed, or if there is no CUDA device (a check that cannot fail would
be none). ``--quick`` runs the cells tiny and on a CPU: does the check itself run? It writes no result.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import torch
from torch.utils import collect_env

from benchmarks.cases import GPU_CELLS, QUICK_CELLS, SHAPES
from benchmarks.compare import Played, result_of, rounds_of
from benchmarks.engines.grpc import Client
from benchmarks.engines.inprocess import INSIDE, Inside
from benchmarks.engines.process import REFERENCE, PeerKind, PeerProcess
from benchmarks.gpu.attention import LOADS, attention, attention_rows
from benchmarks.gpu.first_light import tell
from benchmarks.machine import versions
from benchmarks.record import Benchmark, Contest, Opening, Option, Record, median_of
from benchmarks.table import number, reached, target
from ferrum_rpc.logs import configure_logging

PARTS: Final = ("cells", "attention")
STATIC: Final = "transformers static, compiled"
EAGER: Final = "transformers eager"
SHAPE: Final = "qwen3-8b"
BOTH_BYTES: Final = 100 << 30
"""Two servers of the 8B shape, of 15.3 GiB of weights and 19.0 of cache each, with contexts and all else: 74 GiB."""

PACKAGES: Final = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "safetensors", "pytest")
TOOLS: Final = ("compute-sanitizer", "nvidia-smi", "gcc")


async def cells(here: Contest, device: str) -> None:
    """In process and through gRPC by turns; then the peer, which needs the memory of the former."""
    options, folder, threads = here.options, here.folder, here.options.threads
    if device == "cuda" and torch.cuda.mem_get_info()[1] < BOTH_BYTES:
        await one_at_a_time(here, device)
        return
    async with AsyncExitStack() as stack:
        session = await here.open(stack, REFERENCE, Client.open(folder, options.cells, threads, device))
        assert session is not None
        async with AsyncExitStack() as its:
            inside = await here.open(its, INSIDE, Inside.open(folder, options.cells, threads, device))
            assert inside is not None
            await here.play(options.cells, {REFERENCE: session, INSIDE: inside})
            del inside
        if options.quick:  # a compiler would take a minute
            return
        torch.cuda.empty_cache()
        name, cache = (STATIC, "static") if here.model == SHAPE else (EAGER, "dynamic")  # states have no static cache
        kind = PeerKind(name, "hf", {"cache": cache, "device": device})
        peer = await here.open(stack, name, PeerProcess.open(kind, folder, threads, here.spec.vocab_size))
        if peer is not None:
            mine = [cell for cell in options.cells if cell.batch == 1 or name == EAGER]
            await here.play(mine, {REFERENCE: session, name: peer})


async def one_at_a_time(here: Contest, device: str) -> None:
    """As `cells`, for a device whose memory does not hold two models with their caches: each side plays all cells, in
    as many steps as the first. No peer."""
    options, folder, threads = here.options, here.folder, here.options.threads
    openings: dict[str, Callable[[], Opening]] = {
        REFERENCE: lambda: Client.open(folder, options.cells, threads, device),
        INSIDE: lambda: Inside.open(folder, options.cells, threads, device),
    }
    played: dict[str, Played] = {}
    for name, opening in openings.items():
        async with AsyncExitStack() as its:
            player = await here.open(its, name, opening())
            assert player is not None
            for cell in options.cells:
                here.machine.read()
                steps = played[cell.name].steps if cell.name in played else 0
                found = await rounds_of(cell, {name: player}, name, options.rounds, options.round_seconds, steps)
                played.setdefault(cell.name, found).by_name.update(found.by_name)
            del player
        torch.cuda.empty_cache()
    for cell in options.cells:
        here.add(cell, result_of(cell, played[cell.name], REFERENCE))


def machine(*, rehearse: bool) -> int:
    """Versions and devices: the first step of first light. Fails without a device."""
    print(collect_env.get_pretty_env_info())  # type: ignore[no-untyped-call]
    tell({"packages": versions(PACKAGES), "tools": {name: shutil.which(name) for name in TOOLS}})
    if torch.cuda.is_available() or rehearse:
        return 0
    print("torch finds no CUDA device: either this machine has none, or the driver or torch's build does not match")
    return 1


def targets(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Shares of the limits that the device had in the same run, at least."""
    found, prefix = [], "CUDA, Qwen3-8B shape, bf16: "
    cells_ = {each["cell"]: each for each in values.get("cells", ()) if INSIDE in each["sides"]}
    for what, cell, bound in (
        ("decode b1 @1k", "decode b1 @1024", 0.85),
        ("decode b64 @2k", "decode b64 @2048", 0.80),
        ("prefill 8k", "prefill 8192", 0.60),
    ):
        its = cells_.get(cell)
        share = its["sides"][INSIDE]["tokens_per_s"] / its["roof"]["tokens_per_s"] if its else None
        found.append(target(f"{prefix}{what}, of the limit", share, bound))
    loads = {each["name"]: each["share_of_bandwidth"] for each in values.get("attention", ())}
    found.append(target(f"{prefix}attention, decode b64 @4k, of the limit", loads.get("decode, 64 x 4k"), 0.80))
    ratio_ = median_of(cells_.values(), "decode b64 @2048", INSIDE)
    return [*found, target(f"{prefix}gRPC against in process, b64, greedy", ratio_, 0.97)]


async def run(options: argparse.Namespace) -> Record:
    """The parts; ``failed`` are the targets that were missed."""
    device = "cpu" if options.quick else "cuda"
    options.cells = QUICK_CELLS if options.quick else GPU_CELLS
    options.command = options.command.replace("benchmarks gpu", "benchmarks.gpu")
    options.benchmark += ", rehearsed" * options.quick
    here = Contest(options, device=device)
    record, values = here.record, here.record.values
    gpu = device if options.quick else f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    values["settings"]["gpu"] = gpu
    failed: list[str] = []
    if "cells" in options.only:
        await cells(here, device)
    if "attention" in options.only and not options.quick:
        here.machine.read()
        record.save(attention=await attention(torch.device(device), LOADS, here.machine.limits()))
        record.put("attention", attention_rows(values["attention"]))
    if here.model == SHAPE:
        values["targets"] = targets(values)
        failed = [
            f"{each['what']}: {number(each['value'])}, not ≥ {each['bound']:g}"
            for each in values["targets"]
            if reached(each) is False
        ]
    here.note_limits()
    record.save(failed=failed, notes=[*values["notes"], *(f"missed: {each}" for each in failed)])
    return record


BENCHMARK: Final = Benchmark(
    "gpu",
    run,
    (
        Option("--only", list(PARTS), "parts", choices=PARTS),
        Option("--model", SHAPE, "a shape of benchmarks/shapes.json", "tiny", choices=[*SHAPES]),
        Option("--figures", False, "also print the results as a line for first light"),
    ),
    variant=lambda options: "" if options.model == SHAPE else str(options.model),
    round_s=2.0,
    file="gpu-check.json",
)


def main(argv: Sequence[str]) -> None:
    """Check, write, exit."""
    options = BENCHMARK.parse(argv)
    if not options.quick and not torch.cuda.is_available():
        sys.exit("gpu-check: torch finds no CUDA device; nothing was checked")
    configure_logging(level="warning")
    record = asyncio.run(run(options))
    record.tell()
    for each in record.values["failed"]:
        print(f"gpu-check: FAILED {each}")
    if options.figures:
        tell(record.values)
    sys.exit(bool(record.values["failed"]))
