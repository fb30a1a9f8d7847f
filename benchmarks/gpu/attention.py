"""The attention kernels alone, beside those of torch: of memory's bandwidth, and of the matrix units.

Decode lives on memory, prefill on the matrix units. Sides take turns, over caches that the L2 cache does not hold.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import BLOCK_SIZE
from benchmarks.compare import Round, alternate, ratio
from benchmarks.table import Row
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.core import AttentionSpec

PEER_KERNELS: Final = ("sdpa", "varlen_attn")
LLAMA: Final = AttentionSpec(32, 8, 128, 128**-0.5)
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


async def attention(
    device: torch.device, loads: Sequence[Load], limits: Mapping[str, Any], rounds: int = 9, spec: AttentionSpec = LLAMA
) -> list[dict[str, Any]]:
    """How fast each load is, and its shares of ``limits``. Inputs are random (a GPU computes zeros faster)."""
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
