"""`make gpu-check`: the figures of a CUDA device, with their results as data; docs/operations.md describes its parts.

A part that fails is named, and the other goes on. Exit status 1 if anything failed or a target was missed, or if there
is no CUDA device (a check that cannot fail would be none). ``--quick`` runs the cells tiny and on a CPU: does the check
itself run? It writes no result.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import BLOCK_SIZE, GPU_CELLS, QUICK_CELLS, SHAPES
from benchmarks.compare import Played, Round, alternate, ratio, result_of, rounds_of
from benchmarks.engines.grpc import Client
from benchmarks.engines.inprocess import INSIDE, Inside
from benchmarks.engines.process import REFERENCE, PeerKind, PeerProcess
from benchmarks.gpu.first_light import tell
from benchmarks.record import Benchmark, Contest, Opening, Option, Record, median_of
from benchmarks.table import Row, number, reached, target
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.logs import configure_logging

PARTS: Final = ("cells", "attention")
PEER_KERNELS: Final = ("sdpa", "varlen_attn")
STATIC: Final = "transformers static, compiled"
EAGER: Final = "transformers eager"
SHAPE: Final = "qwen3-8b"
LLAMA: Final = AttentionSpec(32, 8, 128, 128**-0.5)
BOTH_BYTES: Final = 100 << 30
"""Two servers of the 8B shape, of 15.3 GiB of weights and 19.0 of cache each, with contexts and all else: 74 GiB."""

BEYOND_CACHE: Final = 4  # times the L2 cache that timed calls read before they read the same again
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


# --- the kernels alone ------------------------------------------------------------------------------------------------


async def attention(
    device: torch.device, loads: Sequence[Load], limits: Mapping[str, Any], rounds: int = 9, spec: AttentionSpec = LLAMA
) -> list[dict[str, Any]]:
    """How fast each load is, and its shares of ``limits``: decode lives on memory, prefill on the matrix units. Sides
    alternate, inputs are random (a GPU computes zeros faster)."""
    torch.manual_seed(0)
    with torch.inference_mode():
        return [await _load(device, each, spec, limits, rounds) for each in loads]


def attention_rows(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each load of the kernels alone; how long peers took, of ours."""
    return [
        {
            "attention alone": load["name"],
            "ms": load["ms"],
            "of the bandwidth": round(load["share_of_bandwidth"], 2),
            "of the matrix units": round(load["share_of_matrix_units"], 2),
        }
        | {f"{side} took, ×": load["ratios"].get(side, f"none: {load['absent'].get(side)}") for side in PEER_KERNELS}
        for load in found
    ]


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
    for name, peer in zip(PEER_KERNELS, (_sdpa, _varlen), strict=True):
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

    taken, _ = await alternate({name: partial(take, each) for name, each in calls.items()}, rounds, settle_s=0)
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
    options = {"scale": spec.scale, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:  # torch 2.11 asks for no such permission
        options["enable_gqa"] = True
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


def attend(*, rehearse: bool) -> None:
    """Our kernels, each kind of step once, after a launch that compiles: ``ncu`` reads their counters."""
    assert not rehearse
    with torch.inference_mode():
        for load in LOADS:
            calls, _ = calls_of(torch.device("cuda"), load, LLAMA, alone=True)
            for _ in range(2):
                calls["ours"][0]()
            torch.cuda.synchronize()
            print(load.name)


# --- the program ------------------------------------------------------------------------------------------------------


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
    """The parts, one after the other; ``failed`` are those that failed, and the targets that were missed."""
    device = "cpu" if options.quick else "cuda"
    options.cells = QUICK_CELLS if options.quick else GPU_CELLS
    options.command = options.command.replace("benchmarks gpu", "benchmarks.gpu")
    options.benchmark += ", rehearsed" * options.quick
    here = Contest(options, device=device)
    record, values = here.record, here.record.values
    gpu = device if options.quick else f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    values["settings"]["gpu"] = gpu
    failed: list[str] = []

    async def run_attention() -> None:
        here.machine.read()
        record.save(attention=await attention(torch.device(device), LOADS, here.machine.limits()))
        record.put("attention", attention_rows(values["attention"]))

    runs: dict[str, Callable[[], Awaitable[None]]] = {
        "cells": partial(cells, here, device),
        "attention": run_attention,
    }
    for part, measure in runs.items():
        if part in options.only and (part == "cells" or not options.quick):
            try:
                await measure()
            except Exception as error:
                traceback.print_exc()
                failed.append(f"{part}: {type(error).__name__}: {error}"[:300])
    if here.model == SHAPE:
        values["targets"] = targets(values)
        failed += [
            f"{each['what']}: {number(each['value'])}, not ≥ {each['bound']:g}"
            for each in values["targets"]
            if reached(each) is False
        ]
    here.note_limits()
    record.save(failed=failed, notes=[*values["notes"], *(f"missed or failed: {each}" for each in failed)])
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
