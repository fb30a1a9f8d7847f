"""Who does what lies between a decoder's matrix products on this device, and why: Triton's kernels on CUDA.

As with every kernel that was never tested together with this driver and this GPU, the last question is put to the
kernels themselves. This file can be imported where triton cannot.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.models.row_ops import SILU, RowOps, TorchRowOps, select_row_ops
from ferrum_rpc.models.spec import ModelSpec

WIDEST: Final = 16384
"""Numbers of a row that one program holds in its registers."""

LEAST_TOLERANCE: Final = 4e-6
"""A GPU's exponentials and quotients are good to some units in float32's last place."""

MOST_HEADS: Final = 16
"""Heads of the probe: a real model's are alike."""


def select_rows_for(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, interpreted: bool = False
) -> tuple[str, RowOps]:
    """``(reason, ops)``: on CUDA the Triton kernels where a small step of theirs agrees with torch's, else what
    `select_row_ops` says. ``interpreted``: ask the kernels on a CPU too, as tests do through Triton's interpreter."""
    if device.type != "cuda" and not interpreted:
        return select_row_ops(spec, dtype, device)
    obstacle = _obstacle(spec, dtype, device)
    if obstacle is not None:
        return f"triton: {obstacle}", TorchRowOps(spec, dtype)
    from ferrum_rpc.models.triton_rows import TritonRowOps

    return "one launch each, every row read and written once", TritonRowOps(spec)


def _obstacle(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "it is not installed"
    if torch.version.hip is not None:
        return "the kernels are for CUDA, not for ROCm"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels do not know {str(dtype).removeprefix('torch.')}"
    if spec.activation != SILU:
        return f"the kernels know the gate of {SILU}, not of {spec.activation}"
    if spec.hidden_size > WIDEST:
        return f"rows of {spec.hidden_size} are wider than {WIDEST}"
    try:
        error = _error(spec, dtype, device)
    except Exception as failure:  # whatever a compiler or a driver may raise: the other way runs without them
        first_line = str(failure).partition("\n")[0]
        return f"a small step failed: {type(failure).__name__}: {first_line}"
    tolerance = max(8 * torch.finfo(dtype).eps, LEAST_TOLERANCE)
    if not error <= tolerance:  # so that NaN fails too
        return f"a small step differs from torch's by {error:.1e}, more than {tolerance:.0e}"
    return None


def _error(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> float:
    """Largest difference from torch's answers, over one plus their size."""
    from ferrum_rpc.models.triton_rows import TritonRowOps

    kv_heads = min(spec.kv_heads, MOST_HEADS // 4)
    spec = replace(spec, heads=min(spec.heads, MOST_HEADS - kv_heads), kv_heads=kv_heads)
    rotating = spec.heads + spec.kv_heads
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, kind)

    hidden, delta, weight = draw(3, spec.hidden_size), draw(3, spec.hidden_size), draw(spec.hidden_size)
    qkv = draw(3, (rotating + spec.kv_heads) * spec.head_dim)
    norm = draw(rotating, spec.head_dim, kind=torch.float32) if spec.qk_norm else None
    angles = draw(3, 1, spec.head_dim // 2, kind=torch.float32)
    cos, sin = torch.cat([angles.cos(), angles.cos()], -1), angles.sin()
    gate_up = draw(3, 2 * spec.intermediate_size)
    found = [
        (
            ops.add_norm(hidden.clone(), None, weight),
            ops.add_norm(hidden.clone(), delta, weight),
            *(each.contiguous() for each in ops.heads(qkv.clone(), norm, cos, sin)),
            ops.gate(gate_up),
        )
        for ops in (TorchRowOps(spec, dtype), TritonRowOps(spec))
    ]
    differences = [((a - b).abs() / (1 + a.abs())).max() for a, b in zip(*found, strict=True)]
    return float(torch.stack([each.float() for each in differences]).max())
