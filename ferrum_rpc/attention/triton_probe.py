"""Whether the CUDA kernels can be used here, and if not, the reason for the log.

The last check runs the kernels. A driver, a compiler and a GPU that were never tested together may compute something
else, and a wrong answer is worse than a slow one.

This file can be imported where triton cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ferrum_rpc.attention.eight_bits import FP8, from_rows, to_rows
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.sinks import random_sinks
from ferrum_rpc.attention.torch_paged import TOLERANCE, TorchPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.selection import Unsuited

MIN_CAPABILITY = (8, 0)
"""The first with bfloat16 and asynchronous copies to shared memory."""

MAX_HEAD_DIM = 256
"""Wider heads do not fit a program's registers."""

SPANS = ((0, 5), (41, 1), (0, 1), (15, 20), (300, 1), (7, 70))
"""``(tokens cached, tokens)``: chunks and single tokens, across blocks and tiles, one long enough to be split."""

WRITTEN = 8
"""Tokens of the step whose keys and values the kernels write."""

BLOCK_SIZE = 16


def probe(
    device: torch.device, specs: Sequence[AttentionSpec], dtype: torch.dtype, cached: torch.dtype | None = None
) -> Any:
    """The backend of the kernels, after small steps on ``device`` with layers of ``specs``, queries in ``dtype``, and K
    and V in it or in `FP8`. Raises `Unsuited` with the reason if they cannot be used, or the error of the compiler or
    the driver."""
    if find_spec("triton") is None:
        raise Unsuited("triton is not installed")
    _check_device(device)
    cached = cached or dtype
    for each in {dtype, cached} - {FP8}:
        if each not in TOLERANCE:
            raise Unsuited(f"the kernels do not support {each}")
    if (max_head_dim := max(spec.head_dim for spec in specs)) > MAX_HEAD_DIM:
        raise Unsuited(f"heads of {max_head_dim} are wider than {MAX_HEAD_DIM}")
    if min(spec.scale for spec in specs) <= 0:
        raise Unsuited("the kernels need a positive softmax scale")
    from ferrum_rpc.attention.triton_paged import TritonPagedAttention

    for spec in dict.fromkeys(specs):
        error = _error(TritonPagedAttention, device, spec, dtype, cached)
        if not error <= TOLERANCE[dtype]:  # so that NaN fails too
            tolerance = f"{TOLERANCE[dtype]:.0e}"
            raise Unsuited(f"a small step differs from float32 arithmetic by {error:.1e}, more than {tolerance}")
    return TritonPagedAttention


def _check_device(device: torch.device) -> None:
    import triton

    if triton.knobs.runtime.interpret:
        return
    if device.type != "cuda" or torch.version.hip is not None:
        raise Unsuited(f"the kernels support CUDA, not {'ROCm' if device.type == 'cuda' else device.type}")
    if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        found, minimum = (".".join(map(str, each)) for each in (capability, MIN_CAPABILITY))
        raise Unsuited(f"compute capability {found} is below {minimum}")


def _error(backend: Any, device: torch.device, spec: AttentionSpec, dtype: torch.dtype, cached: torch.dtype) -> float:
    """Largest difference between the kernels on ``device`` and the torch path in float32 on the CPU."""
    if spec.window is not None:
        spec = replace(spec, window=min(spec.window, 24))  # so that the steps here are longer than the window
    sizes = [-(-(start + count) // BLOCK_SIZE) for start, count in SPANS]
    blocks = np.random.default_rng(0).permutation(sum(sizes)).astype(np.int32) + 1
    tables = np.split(blocks, np.cumsum(sizes)[:-1])
    geometry = BatchGeometry.build(BLOCK_SIZE, [start for start, _ in SPANS], [count for _, count in SPANS], [*tables])
    generator = torch.Generator().manual_seed(0)
    shape = (sum(sizes) + 1, BLOCK_SIZE, spec.kv_heads, spec.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn((geometry.tokens, spec.heads, spec.head_dim), generator=generator).to(dtype)
    known = [from_rows(to_rows(each, FP8), dtype) if cached == FP8 else each for each in (keys, values)]
    sinks = random_sinks([spec], generator)
    exact = TorchPagedAttention([spec], [known[0].float()], [known[1].float()], sinks=sinks)
    expected = exact.attend(0, query.float(), exact.plan(geometry))
    slots = torch.from_numpy(geometry.slots[:WRITTEN])
    new = [each.flatten(0, 1)[slots].to(device) for each in (keys, values)]
    cache = [to_rows(each, FP8) if cached == FP8 else each.clone() for each in (keys, values)]
    for each in cache:
        each.flatten(0, 1)[slots] = 0
    kernels = backend([spec], [cache[0].to(device)], [cache[1].to(device)], dtype, sinks=sinks)
    kernels.write(0, slots.to(device), *new)
    found = kernels.attend(0, query.to(device), kernels.plan(geometry))
    return float((found.cpu().float() - expected).abs().max())
