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


def measure(device: torch.device, loads: tuple[Load, ...], limits: dict[str, float], *, rounds: int = 9) -> Any:
    """Per load, the seconds of each side, and its shares of ``limits``: a dict for JSON."""
    torch.manual_seed(0)
    return {"spec": asdict(LLAMA), "loads": [_load(device, each, LLAMA, limits, rounds) for each in loads]}


def shapes(device: torch.device, loads: tuple[Load, ...]) -> list[Any]:
    """Per load, the seconds with other tile shapes than the chosen ones."""
    return [{"name": each.name, "shapes": _shapes(device, _Case(device, each, LLAMA).kernel)} for each in loads]


class _Case:
    """``load`` on the device: random K and V in blocks that lie anywhere."""

    def __init__(self, device: torch.device, load: Load, spec: AttentionSpec) -> None:
        self.spec, self.dtype = spec, torch.bfloat16
        self.length = load.cached + load.tokens
        blocks = -(-self.length // BLOCK_SIZE)
        order = torch.randperm(load.batch * blocks).numpy().astype(np.int32) + 1
        self.tables = order.reshape(load.batch, blocks)
        self.geometry = BatchGeometry.build(
            BLOCK_SIZE, [load.cached] * load.batch, [load.tokens] * load.batch, list(self.tables)
        )
        shape = (load.batch * blocks + 1, BLOCK_SIZE, spec.kv_heads, spec.head_dim)
        self.keys, self.values = (torch.randn(shape, dtype=self.dtype, device=device) for _ in range(2))
        self.query = torch.randn((self.geometry.tokens, spec.heads, spec.head_dim), dtype=self.dtype, device=device)

    def kernel(self, tiles: tuple[Tile, Tile] | None = None) -> Call:
        """The kernel's call."""
        backend = TritonPagedAttention([self.spec], [self.keys], [self.values], tiles=tiles)
        plan = backend.plan(self.geometry)
        return lambda: backend.attend(0, self.query, plan)


def _load(device: torch.device, load: Load, spec: AttentionSpec, limits: dict[str, float], rounds: int) -> Any:
    case = _Case(device, load, spec)
    query, length, dtype = case.query, case.length, case.dtype
    tables = torch.from_numpy(case.tables.astype(np.int64)).to(device)
    key, value = (each[tables].flatten(1, 2)[:, :length].contiguous() for each in (case.keys, case.values))
    sides, absent = {"ours": case.kernel()}, {}
    for name, peer in (("sdpa", _sdpa), ("varlen_attn", _varlen)):
        try:
            call = peer(load, spec, query, key, value)
            call()
            sides[name] = call
        except Exception as error:  # a torch, or a device, without it
            absent[name] = reason(error)
    seconds = alternate_calls(device, sides, rounds)
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
    }


def _shapes(device: torch.device, kernel: Callable[[tuple[Tile, Tile]], Call]) -> Any:
    """Seconds with each of `TILES`, or why there are none: a shape may need more than the device has."""
    found = []
    for small, large in TILES:
        try:
            result: float | str = median(alternate_calls(device, {"": kernel((small, large))}, 3)[""])
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


def device_limits(device: torch.device, *, tiny: bool) -> dict[str, float]:
    """What memory moves in a second (the better of a copy, read and written, and of a read) and what a square product
    computes."""
    count, side = (1 << 20, 256) if tiny else (1 << 30, 8192)
    source, target = (torch.empty(count, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    calls: dict[str, Call] = {
        "copy": lambda: target.copy_(source),
        "read": lambda: source.view(torch.int32).amax(),
        "product": lambda: left @ right,
    }
    seconds = {name: median(each) for name, each in alternate_calls(device, calls, 5).items()}
    copied, read = 2 * source.nbytes / seconds["copy"], source.nbytes / seconds["read"]
    return {
        "bytes_per_s": max(copied, read),
        "copy_bytes_per_s": copied,
        "read_bytes_per_s": read,
        "operations_per_s": 2 * side**3 / seconds["product"],
    }


def alternate_calls(device: torch.device, sides: dict[str, Call], rounds: int) -> dict[str, list[float]]:
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
