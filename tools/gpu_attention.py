"""How fast the attention kernel is, beside torch's, as parts of what the device can do in the same run.

Decode lives on memory: its figure is the bytes of K and V over the time, against the bandwidth that a copy has. Prefill
lives on the matrix units: its figure is operations per second, against a large product. Sides alternate (A B A B ...),
inputs are random (a GPU computes zeros faster), and every figure is the median of its rounds.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.attention.triton_plan import Tile
from ferrum_rpc.core import AttentionSpec
from tools.gpu_cases import LLAMA, reason

BLOCK_SIZE: Final = 16
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Load:
    """``batch`` sequences with ``cached`` tokens before and ``tokens`` in the step."""

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
TINY: Final = (Load("decode, 2 x 20", 2, 19, 1), Load("prefill, 24", 1, 0, 24))
"""For the interpreter: whether the check itself runs."""

TILES: Final = (
    (Tile(16, 64, 4, 5, 128), Tile(128, 64, 8, 3, 512)),
    (Tile(16, 64, 4, 3, 128), Tile(128, 64, 8, 4, 512)),
    (Tile(16, 128, 4, 3, 128), Tile(128, 64, 8, 5, 512)),
    (Tile(16, 128, 8, 5, 256), Tile(64, 64, 4, 3, 512)),
    (Tile(16, 32, 4, 7, 128), Tile(128, 128, 8, 3, 512)),
)
"""Shapes to try beside the chosen ones, small and large."""


def measure(device: torch.device, loads: tuple[Load, ...], *, spec: AttentionSpec = LLAMA, rounds: int = 9) -> Any:
    """The limits of ``device`` and, per load, the seconds of each side: a dict for JSON."""
    torch.manual_seed(0)
    limits = _limits(device, tiny=loads is TINY)
    found = [_load(device, each, spec, limits, rounds) for each in loads]
    return {"limits": limits, "spec": asdict(spec), "loads": found}


def _load(device: torch.device, load: Load, spec: AttentionSpec, limits: dict[str, float], rounds: int) -> Any:
    length = load.cached + load.tokens
    blocks = -(-length // BLOCK_SIZE)
    dtype = torch.bfloat16
    order = torch.randperm(load.batch * blocks).numpy().astype(np.int32) + 1
    geometry = BatchGeometry.build(
        BLOCK_SIZE, [load.cached] * load.batch, [load.tokens] * load.batch, list(order.reshape(load.batch, blocks))
    )
    shape = (load.batch * blocks + 1, BLOCK_SIZE, spec.kv_heads, spec.head_dim)
    keys, values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    query = torch.randn((geometry.tokens, spec.heads, spec.head_dim), dtype=dtype, device=device)

    def kernel(tiles: tuple[Tile, Tile] | None = None) -> Call:
        backend = TritonPagedAttention([spec], [keys], [values], tiles=tiles)
        plan = backend.plan(geometry)
        return lambda: backend.attend(0, query, plan)

    tables = torch.from_numpy(order.reshape(load.batch, blocks).astype(np.int64)).to(device)
    key, value = (each[tables].flatten(1, 2)[:, :length].contiguous() for each in (keys, values))
    sides, absent = {"ours": kernel()}, {}
    for name, peer in (("sdpa", _sdpa), ("varlen_attn", _varlen)):
        try:
            call = peer(load, spec, query, key, value)
            call()
            sides[name] = call
        except Exception as error:  # a torch, or a device, without it
            absent[name] = reason(error)
    seconds = _alternate(device, sides, rounds)
    moved = 2 * load.batch * length * spec.kv_heads * spec.head_dim * dtype.itemsize
    pairs = load.tokens * (load.cached + (load.tokens + 1) / 2) * load.batch
    work = 4 * pairs * spec.heads * spec.head_dim
    ours = median(seconds["ours"])
    return {
        **asdict(load),
        "bytes": moved,
        "operations": work,
        "seconds": {side: median(each) for side, each in seconds.items()},
        "over_ours": {
            side: [peer / mine for mine, peer in zip(seconds["ours"], seconds[side], strict=True)]
            for side in sides
            if side != "ours"
        },
        "absent": absent,
        "share_of_bandwidth": moved / ours / limits["bytes_per_s"],
        "share_of_matrix_units": work / ours / limits["operations_per_s"],
        "shapes": _shapes(device, kernel, TILES if device.type == "cuda" else ()),
    }


def _shapes(device: torch.device, kernel: Callable[[tuple[Tile, Tile]], Call], tiles: Any) -> Any:
    """Seconds with each of ``tiles``, or why there are none: a shape may need more than the device has."""
    found = []
    for small, large in tiles:
        try:
            result: float | str = median(_alternate(device, {"": kernel((small, large))}, 3)[""])
        except Exception as error:
            result = reason(error)
        found.append({"small": asdict(small), "large": asdict(large), "result": result})
    return found


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


def _limits(device: torch.device, *, tiny: bool) -> dict[str, float]:
    """What a copy moves (read and written) and what a square product computes, each second."""
    count, side = (1 << 20, 256) if tiny else (1 << 30, 8192)
    source, target = (torch.empty(count, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = _alternate(device, {"copy": lambda: target.copy_(source), "product": lambda: left @ right}, 5)
    return {
        "bytes_per_s": 2 * source.nbytes / median(seconds["copy"]),
        "operations_per_s": 2 * side**3 / median(seconds["product"]),
    }


def _alternate(device: torch.device, sides: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each side in each round. On CUDA the call is a graph's, so that only the device counts."""
    timers = {name: _cuda_timer(call) if device.type == "cuda" else _timer(call) for name, call in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer())
    return seconds


def _timer(call: Call) -> Callable[[], float]:
    def timer() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return timer


def _cuda_timer(call: Call, calls: int = 20) -> Callable[[], float]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles, and fills caches that a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()

    def timer() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

    return timer
