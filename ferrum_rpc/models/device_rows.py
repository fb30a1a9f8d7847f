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
from ferrum_rpc.selection import Candidate, Unsuited, select

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
    reason = "one launch each, every row read and written once"
    triton = Candidate("triton", lambda: _kernels(spec, dtype, device), reason)
    plain = Candidate(TorchRowOps.name, lambda: TorchRowOps(spec, dtype))
    return select(triton, plain, what="row operations", field="rows")[1:]


def _kernels(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> RowOps:
    if find_spec("triton") is None:
        raise Unsuited("it is not installed")
    if torch.version.hip is not None:
        raise Unsuited("the kernels are for CUDA, not for ROCm")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Unsuited(f"the kernels do not know {str(dtype).removeprefix('torch.')}")
    if spec.activation != SILU:
        raise Unsuited(f"the kernels know the gate of {SILU}, not of {spec.activation}")
    if spec.hidden_size > WIDEST:
        raise Unsuited(f"rows of {spec.hidden_size} are wider than {WIDEST}")
    error, tolerance = _error(spec, dtype, device), max(8 * torch.finfo(dtype).eps, LEAST_TOLERANCE)
    if not error <= tolerance:  # so that NaN fails too
        raise Unsuited(f"a small step differs from torch's by {error:.1e}, more than {tolerance:.0e}")
    from ferrum_rpc.models.triton_rows import TritonRowOps

    return TritonRowOps(spec)


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
