"""`make gpu-check`: the figures of a CUDA device and the tests that wait for one, with their results as data.

    cells        prefill 8k, decode b1 @1k and b64 @2k of the Qwen3-8B shape, in process and through gRPC in turn,
                 beside the limits that the device had in the same run; then transformers, static cache and compiled
    ranks        prefill 2k, decode b1 and b8 @1k of the same shape on two ranks beside one, in turn; with one device
                 they share it, and NCCL is not run
    attention    the attention kernels alone, beside SDPA and `varlen_attn`
    tests        `tests/kernels` and `tests/gpu`, which have waited for a GPU

A device of less than 100 GiB runs one side at a time, and ratios are then of rounds that did not alternate.

A part that fails is named, and the others go on. Exit status 1 if anything failed or a target was missed, or if there
is no CUDA device (a check that cannot fail would be none). ``--only`` runs a part. ``--quick`` runs the cells tiny and
on a CPU: does the check itself run? It writes no result.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import machine, tables
from benchmarks.cases import BLOCK_SIZE, DECODE, GPU_CELLS, PREFILL, QUICK_CELLS, Cell
from benchmarks.compare import Round, alternate, contest, ratio, result_of, rounds_of
from benchmarks.engines.grpc import Client
from benchmarks.engines.inprocess import INSIDE, Inside
from benchmarks.engines.process import REFERENCE, PeerKind, PeerProcess
from benchmarks.gpu.first_light import FIGURES
from benchmarks.record import Contest, Opening, out_of, read_options
from benchmarks.targets import TARGETS
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.logs import configure_logging

PARTS: Final = ("cells", "ranks", "attention", "tests")
QUICK_PARTS: Final = PARTS[:2]
ONE_RANK: Final = "1 rank"
TRANSPORT: Final = "rank_transport="
RANK_SIDES: Final[dict[str, dict[str, Any]]] = {
    ONE_RANK: {},
    "tensor 2": {"tensor_parallel": 2},
    "pipeline 2": {"pipeline_parallel": 2},
}
RANK_CELLS: Final = (Cell(PREFILL, 1, 2048), Cell(DECODE, 1, 1024), Cell(DECODE, 8, 1024))
SUITES: Final = ("tests/kernels", "tests/gpu")
STATIC: Final = "transformers static, compiled"
LLAMA: Final = AttentionSpec(32, 8, 128, 128**-0.5)
BOTH_BYTES: Final = 100 << 30
"""Two servers of the 8B shape, of 15.3 GiB of weights and 19.0 of cache each, with contexts and all else: 74 GiB."""

BEYOND_CACHE: Final = 4
"""Times the L2 cache that timed calls read before they read the same again."""
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Load:
    """``batch`` sequences with ``cached`` tokens before and ``tokens`` in the step, for the kernels alone."""

    name: str
    batch: int
    cached: int
    tokens: int


LOADS: Final = (
    Load("decode, 64 x 4k", 64, 4095, 1),
    Load("decode, 1 x 32k", 1, 32767, 1),
    Load("decode, 8 x 1k", 8, 1023, 1),
    Load("prefill, 8k", 1, 0, 8192),
    Load("chunk of 512 after 32k", 1, 32768, 512),
)


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
        kind = PeerKind(STATIC, "hf", {"cache": "static", "device": device})
        peer = await here.open(stack, STATIC, PeerProcess.open(kind, folder, threads, here.spec.vocab_size))
        if peer is not None:
            await here.play([cell for cell in options.cells if cell.batch == 1], {REFERENCE: session, STATIC: peer})


async def one_at_a_time(here: Contest, device: str) -> None:
    """As `cells`, for a device whose memory does not hold two models with their caches: each side plays all cells, in
    as many steps as the first. No peer."""
    options, folder, threads = here.options, here.folder, here.options.threads
    openings: dict[str, Callable[[], Opening]] = {
        REFERENCE: lambda: Client.open(folder, options.cells, threads, device),
        INSIDE: lambda: Inside.open(folder, options.cells, threads, device),
    }
    played: dict[str, dict[str, list[Round]]] = {cell.name: {} for cell in options.cells}
    steps: dict[str, int] = {}
    for name, opening in openings.items():
        async with AsyncExitStack() as its:
            player = await here.open(its, name, opening())
            assert player is not None
            for cell in options.cells:
                here.machine.read()
                found = await rounds_of(
                    cell, {name: player}, name, options.rounds, options.round_seconds, steps.get(cell.name, 0)
                )
                steps[cell.name] = found.steps
                played[cell.name] |= found.by_name
            del player
        torch.cuda.empty_cache()
    for cell in options.cells:
        here.add(cell, result_of(cell, steps[cell.name], played[cell.name], REFERENCE))


async def ranks(here: Contest, device: str) -> None:
    """Two ranks beside one, all loaded at once. A step at a time: of two stages one waits for the other."""
    options, told = here.options, dict[str, str]()
    cells_, names = (QUICK_CELLS, [*RANK_SIDES][:2]) if options.quick else (RANK_CELLS, [*RANK_SIDES])
    async with AsyncExitStack() as stack:
        sides = {}
        for name in names:
            opening = Inside.open(here.folder, cells_, 1, device, dtype="bfloat16", **RANK_SIDES[name])
            side = await here.open(stack, name, opening)
            if isinstance(side, Inside):
                sides[name] = side
                told |= {choice: why for choice, why in side.runner.device.choices if choice.startswith(TRANSPORT)}
        found = [await contest(cell, sides, ONE_RANK, options.rounds, options.round_seconds) for cell in cells_]
    [(transport, why)] = told.items()
    transport = transport.removeprefix(TRANSPORT)
    nccl = (
        "rows travelled by NCCL" if transport == "nccl" else f"NCCL was not run: rows travelled by {transport} ({why})"
    )
    here.record.save(
        two_ranks={"transport": transport, "said": nccl, "cells": [each | {"roof": None} for each in found]}
    )


# --- the kernels alone ------------------------------------------------------------------------------------------------


async def attention(
    device: torch.device,
    loads: Sequence[Load],
    limits: Mapping[str, Any],
    rounds: int = 9,
    spec: AttentionSpec = LLAMA,
) -> list[dict[str, Any]]:
    """How fast each load is, and its shares of ``limits``: decode lives on memory, prefill on the matrix units. Sides
    alternate, inputs are random (a GPU computes zeros faster)."""
    torch.manual_seed(0)
    with torch.inference_mode():
        return [await _load(device, each, spec, limits, rounds) for each in loads]


def calls_of(
    device: torch.device, load: Load, spec: AttentionSpec, *, alone: bool = False
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """By side, the attention of ``load`` over caches of its own, one call after the other; and why a side is absent.
    ``alone``: ours, once."""
    from ferrum_rpc.attention.triton_paged import TritonPagedAttention

    length = load.cached + load.tokens
    blocks = -(-length // BLOCK_SIZE)
    order = torch.randperm(load.batch * blocks).numpy().astype(np.int32) + 1  # blocks lie anywhere
    tables_ = order.reshape(load.batch, blocks)
    geometry = BatchGeometry.build(BLOCK_SIZE, [load.cached] * load.batch, [load.tokens] * load.batch, list(tables_))
    shape = (load.batch * blocks + 1, BLOCK_SIZE, spec.kv_heads, spec.head_dim)
    copies = 1 if alone else _copies(device, _moved(load, spec))
    caches = [[torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2)] for _ in range(copies)]
    query = torch.randn((geometry.tokens, spec.heads, spec.head_dim), dtype=torch.bfloat16, device=device)
    backend = TritonPagedAttention([spec] * copies, [keys for keys, _ in caches], [values for _, values in caches])
    plan = backend.plan(geometry)
    calls: dict[str, list[Call]] = {"ours": [partial(backend.attend, layer, query, plan) for layer in range(copies)]}
    if alone:
        return calls, {}
    index = torch.from_numpy(tables_.astype(np.int64)).to(device)
    dense = [[each[index].flatten(1, 2)[:, :length].contiguous() for each in pair] for pair in caches]
    absent = {}
    for name, peer in (("sdpa", _sdpa), ("varlen_attn", _varlen)):
        try:
            calls[name] = [peer(load, spec, query, *pair) for pair in dense]
            calls[name][0]()
        except Exception as error:  # a torch, or a device, without it
            calls.pop(name, None)
            absent[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
    return calls, absent


def _moved(load: Load, spec: AttentionSpec) -> int:
    """Bytes of K and V."""
    length = load.cached + load.tokens
    return 2 * load.batch * length * spec.kv_heads * spec.head_dim * torch.bfloat16.itemsize


async def _load(
    device: torch.device, load: Load, spec: AttentionSpec, limits: Mapping[str, Any], rounds: int
) -> dict[str, Any]:
    calls, absent = calls_of(device, load, spec)

    async def take(several: Sequence[Call], _: int) -> Round:
        return Round(step_s=[_seconds(several, device)])

    turns, _ = await alternate({name: partial(take, each) for name, each in calls.items()}, rounds, settle_s=0)
    taken = {name: [turn[name] for turn in turns] for name in calls}
    seconds = float(np.median([each.step_s[0] for each in taken["ours"]]))
    work = 4 * load.tokens * (load.cached + (load.tokens + 1) / 2) * load.batch * spec.heads * spec.head_dim
    return {
        **asdict(load),
        "ms": 1e3 * seconds,
        "ratios": {name: ratio(each, taken["ours"]) for name, each in taken.items() if name != "ours"},
        "absent": absent,
        "share_of_bandwidth": _moved(load, spec) / seconds / (limits["read_gb_s"] * 1e9),
        "share_of_matrix_units": work / seconds / (limits["bf16_tflops"] * 1e12),
    }


def _sdpa(load: Load, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Call:
    """Torch's attention over K and V [batch, length, kv_heads, head_dim] that lie densely: no paging to pay for."""
    packed = query.view(load.batch, load.tokens, spec.heads, spec.head_dim).transpose(1, 2)
    key, value = (each.transpose(1, 2).contiguous() for each in (key, value))
    mask = None
    if load.tokens > 1 and load.cached:
        mask = torch.ones(load.tokens, key.shape[2], dtype=torch.bool, device=key.device).tril(load.cached)
    causal = load.tokens > 1 and not load.cached
    return lambda: F.scaled_dot_product_attention(
        packed, key, value, mask, is_causal=causal, scale=spec.scale, enable_gqa=True
    )


def _varlen(load: Load, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Call:
    """Torch's attention for packed sequences (FlashAttention), over the same dense K and V."""
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    length = key.shape[1]
    ends = torch.arange(load.batch + 1, dtype=torch.int32, device=key.device)
    query_ends, key_ends = ends * load.tokens, ends * length
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    options = {"scale": spec.scale, "window_size": (-1, 0), "enable_gqa": True}
    return lambda: varlen.varlen_attn(query, key, value, query_ends, key_ends, load.tokens, length, **options)


def _copies(device: torch.device, moved: int) -> int:
    """Of a cache of which a call reads ``moved`` bytes: so many that no call finds its own in the L2 cache, as no layer
    of a model does."""
    if device.type != "cuda":
        return 1
    return -(-BEYOND_CACHE * torch.cuda.get_device_properties(device).L2_cache_size // moved)


def _seconds(calls: Sequence[Call], device: torch.device) -> float:
    """Of one of ``calls``, which are made one after the other; on a GPU in a graph of many, so that only the device
    counts."""

    def all_() -> None:
        for call in calls:
            call()

    if device.type == "cuda":
        testing: Any = importlib.import_module("triton.testing")
        return float(testing.do_bench_cudagraph(all_, return_mode="median")) / 1e3 / len(calls)
    began = time.perf_counter()
    all_()
    return (time.perf_counter() - began) / len(calls)


# --- the tests, and the program ---------------------------------------------------------------------------------------


def run_suite(folder: str) -> dict[str, int]:
    """How many tests of ``folder`` passed, were skipped and failed. What the whole suite shares (quiet logs) needs
    packages that these tests do not."""
    command = [sys.executable, "-m", "pytest", folder, "-q", "-p", "no:cacheprovider", f"--rootdir={machine.ROOT}"]
    command += [f"--confcutdir={folder}"]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|skipped|failed|error)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
    return {"passed": passed, "skipped": skipped, "failed": failed, "status": done.returncode}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Check a CUDA device.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--figures", action="store_true", help="also print the results as a line for first light")
    options = read_options(parser, argv, rounds=5, round_s=2.0)
    if options.out is None and not options.quick:
        options.out = machine.RESULTS / "gpu-check.json"
    options.cells, options.out = QUICK_CELLS if options.quick else GPU_CELLS, out_of(options, "gpu")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Check, write, exit."""
    options = parse(argv)
    if not options.quick and not torch.cuda.is_available():
        sys.exit("gpu-check: torch finds no CUDA device; nothing was checked")
    configure_logging(level="warning")
    device = "cpu" if options.quick else "cuda"
    here = Contest(options, "gpu, rehearsed" if options.quick else "gpu", "qwen3-8b", device)
    record, values = here.record, here.record.values
    values["settings"]["gpu"] = (
        device if options.quick else f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    )
    failed: list[str] = []

    async def run_attention() -> None:
        here.machine.read()
        record.save(attention=await attention(torch.device(device), LOADS, here.machine.limits()))

    async def run_tests() -> None:
        record.save(tests={suite: run_suite(suite) for suite in SUITES})
        failed.extend(f"{suite}: {each}" for suite, each in values["tests"].items() if each["status"])

    runs: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "cells": partial(cells, here, device),
        "ranks": partial(ranks, here, device),
        "attention": run_attention,
        "tests": run_tests,
    }
    for part in PARTS if not options.quick else QUICK_PARTS:
        if part in options.only:
            try:
                asyncio.run(runs[part]())
            except Exception as error:
                traceback.print_exc()
                failed.append(f"{part}: {type(error).__name__}: {error}"[:300])
    for target in TARGETS if not options.quick else ():
        row = target.row({"gpu": ("", values)})
        if target.benchmark == "gpu" and row[3] == "no":
            failed.append(f"{row[0]}: {row[1]}, not {row[2]}")
    record.save(failed=failed, limits=here.machine.limits())
    tables.show_suite(values)
    for each in failed:
        print(f"gpu-check: FAILED {each}")
    record.tell()
    if options.figures:
        print(FIGURES + json.dumps(values))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
