"""What a decoder does between its matrix products: norms, the rotation of heads, the gate of the MLP.

Everything is computed in float32 (or wider) and rounded once, which is closer to the exact result than rounding after
every operation. In torch that takes several passes over every row and a dispatch for each: of a decode step of the 0.6B
shape at 32 rows about a tenth. On a CPU a C kernel (``norm_rope_gate.c``) does each in one pass, on CUDA a
kernel in Triton (`triton_fused_ops`). Torch runs everywhere, and is the oracle of both.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.models.rope import rotate
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.native import library

Heads = tuple[Tensor, Tensor, Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


SILU: Final = "silu"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    SILU: F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}
"""By `ModelSpec.activation`."""


class FusedOps(Protocol):
    """Rows are contiguous and of the model's dtype."""

    name: str

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Add ``delta`` to ``hidden`` [T, width] in place, and return the sum normed: x / rms(x) * weight [width]."""

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Heads:
        """Query [T, heads, head_dim], key and value [T, kv_heads, head_dim] of ``qkv`` [T, all heads side by side],
        which they may overwrite: query and key normed by ``norm`` (float32 [heads + kv_heads, head_dim], or None) and
        rotated by `Rotary`'s ``cos`` and ``sin``."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """activation(gate) * up [T, n] of ``gate_up`` [T, 2n]."""


def split_heads(qkv: Tensor, spec: ModelSpec) -> Heads:
    """Query, key and value as views of ``qkv``, which is dense."""
    heads = (spec.heads, spec.kv_heads, spec.kv_heads)
    query, key, value = qkv.view(len(qkv), sum(heads), spec.head_dim).split_with_sizes(heads, 1)
    return query, key, value


class TorchFusedOps:
    """On any device, in any dtype."""

    name = "torch"

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._wide = torch.promote_types(dtype, torch.float32)
        self._activation = ACTIVATIONS[spec.activation]

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        if delta is not None:
            hidden.add_(delta)
        return F.rms_norm(hidden, weight.shape, weight, self._spec.norm_eps)

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Heads:
        spec = self._spec
        heads = qkv.view(len(qkv), spec.heads + 2 * spec.kv_heads, spec.head_dim)
        rotating = heads[:, : spec.heads + spec.kv_heads].to(self._wide)
        if norm is not None:
            rotating = F.rms_norm(rotating, (spec.head_dim,), None, spec.norm_eps).mul_(norm)
        rotated = rotate(rotating, cos, sin).to(self._dtype)
        return rotated[:, : spec.heads], rotated[:, spec.heads :], heads[:, spec.heads + spec.kv_heads :]

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)


class NativeFusedOps:
    """On a CPU, in bfloat16 or float32, with silu. Raises OSError where the kernel is not built or a width is not a
    multiple of any vector."""

    name = "native"

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, lanes: int | None = None) -> None:
        self._library = library.load()
        self._spec = spec
        self._wide = int(dtype == torch.float32)
        widths = math.gcd(spec.hidden_size, spec.intermediate_size, spec.head_dim // 2)
        self.lanes = self._library.ferrum_rows_lanes(widths if lanes is None else math.gcd(widths, lanes))
        if not self.lanes or lanes not in (None, self.lanes):
            raise OSError(f"rows of {widths} are no multiple of a vector of this machine")

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        self._run(
            library.ADD_NORM,
            hidden,
            hidden.shape[-1],
            out=out.data_ptr(),
            delta=None if delta is None else delta.data_ptr(),
            weight=weight.data_ptr(),
        )
        return out

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Heads:
        spec = self._spec
        self._run(
            library.ROTATE,
            qkv,
            qkv.shape[-1],
            heads=spec.heads + spec.kv_heads,
            head_norms=None if norm is None else norm.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
        )
        return split_heads(qkv, spec)

    def gate(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty((len(gate_up), gate_up.shape[-1] // 2))
        self._run(library.GATE, gate_up, out.shape[-1], out=out.data_ptr())
        return out

    def _run(self, task: int, rows: Tensor, width: int, *, heads: int = 0, **pointers: int | None) -> None:
        """``rows`` and what the pointers name must be contiguous, and alive until this returns."""
        job = library.RowTask(
            task=task,
            wide=self._wide,
            threads=torch.get_num_threads(),
            width=width,
            heads=heads,
            head_dim=self._spec.head_dim,
            eps=self._spec.norm_eps,
            count=len(rows),
            hidden=rows.data_ptr(),
            **pointers,
        )
        self._library.ferrum_rows(ctypes.addressof(job), self.lanes)
