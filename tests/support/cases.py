"""Steps for the attention kernels with known answers: paged K and V, queries, and the attention in float64.

Every slot that no sequence owns holds NaN, and blocks lie in a random order: what reads a slot too many is found.
Needs torch and numpy, nothing else of the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.eight_bits import from_rows, to_rows
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.core import AttentionSpec

Spans: TypeAlias = Sequence[tuple[int, int]]
"""``(tokens cached before, tokens)`` of each."""

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error against float64, for values of unit variance."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """``keys``, ``values`` [num_blocks, block_size, kv_heads, head_dim] and ``query`` [T, heads, head_dim] on the
    device; ``expected``, as ``query``, is float64 on the host."""

    spec: AttentionSpec
    geometry: BatchGeometry
    keys: Tensor
    values: Tensor
    query: Tensor
    expected: Tensor
    sinks: Tensor | None = None

    def error(self, output: Tensor) -> float:
        """Largest difference of ``output`` from the expected one; NaN where it has any."""
        return float((output.cpu().double() - self.expected).abs().max())


def paged_step(
    spec: AttentionSpec,
    spans: Spans,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    seed: int = 0,
    order: int = 0,
    cached: torch.dtype | None = None,
) -> PagedStep:
    """A step of ``spans``. ``seed`` decides what is in it and ``order`` where its blocks lie. ``cached``: an 8-bit type
    of the cache; what is expected is of the numbers that it stands for."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [-(-(start + count) // block_size) for start, count in spans]
    places = 1 + np.random.default_rng(order).permutation(sum(sizes) + 2).astype(np.int32)
    tables = np.split(places[: sum(sizes)], np.cumsum(sizes)[:-1])
    geometry = BatchGeometry.build(block_size, [s for s, _ in spans], [n for _, n in spans], tables)
    shape = (len(places) + 1, block_size, spec.kv_heads, spec.head_dim)
    nothing = torch.full(shape, float("nan"), dtype=dtype)
    keys, values = (nothing.clone() if cached is None else to_rows(nothing, cached) for _ in range(2))
    query = torch.randn(geometry.tokens, spec.heads, spec.head_dim, generator=generator).to(dtype)
    expected = torch.empty(query.shape, dtype=torch.float64)
    sinks = 2 * torch.randn(spec.heads, generator=generator) if spec.sinks else None
    for index, table in enumerate(tables):
        length = int(geometry.lengths[index])
        rows = slice(geometry.query_start[index], geometry.query_start[index + 1])
        position = np.arange(length)
        at = torch.from_numpy(table[position // block_size].astype(np.int64)), torch.from_numpy(position % block_size)
        new = [torch.randn(length, spec.kv_heads, spec.head_dim, generator=generator).to(dtype) for _ in range(2)]
        keys[at], values[at] = new if cached is None else (to_rows(each, cached) for each in new)
        if cached is not None:
            new = [from_rows(each[at], torch.float64) for each in (keys, values)]
        expected[rows] = dense(spec, query[rows], *new, sinks)
    return PagedStep(spec, geometry, keys.to(device), values.to(device), query.to(device), expected, sinks)


def dense(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Causal attention written out, in float64: the last ``len(query)`` positions of ``key`` and ``value``."""
    group = spec.heads // spec.kv_heads
    key, value = (each.double().repeat_interleave(group, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    distance = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))[None]
    seen = distance >= 0
    if spec.window is not None:
        seen &= distance < spec.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


MIX: Final[Spans] = [(0, 5), (37, 1), (0, 1), (16, 1), (15, 1), (31, 1), (30, 7), (16, 16), (0, 33), (100, 1)]
"""Single tokens and chunks, at the borders of blocks of 16 and beside them."""

LONG: Final[Spans] = [(2500, 1), (900, 130), (4, 1), (0, 700)]
"""Few sequences that are longer than a tile in either direction, so that they are split."""

LLAMA: Final = AttentionSpec(8, 2, 128, 128**-0.5)
"""The heads of an 8B model, and a quarter of their number."""

SPECS: Final = {
    "group 4": LLAMA,
    "group 1": AttentionSpec(4, 4, 64, 0.125),
    "group 7": AttentionSpec(14, 2, 64, 0.125),
    "group 8, one KV head": AttentionSpec(8, 1, 128, 0.1),
    "head 80": AttentionSpec(4, 2, 80, 0.11),
    "head 96": AttentionSpec(4, 2, 96, 0.1),
    "head 256": AttentionSpec(4, 2, 256, 0.0625),
    "window": replace(LLAMA, window=40),
    "soft cap": replace(LLAMA, softcap=5.0),
    "window and soft cap": replace(LLAMA, window=100, softcap=20.0),
    "sinks": replace(LLAMA, sinks=True, window=40),
}
"""What layers of real models differ in."""
