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

from ferrum_rpc.models.rotary import rotate
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

NATIVE: Final = {SILU: 0, "gelu_tanh": 1, "relu": 2}
"""Those of the C and CUDA kernels: ``enum activation`` of norm_rope_gate.h."""


class FusedOps(Protocol):
    """Rows are contiguous and of the model's dtype, norms float32 (or wider)."""

    name: str

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Tensor | None) -> Tensor:
        """Add ``delta``, multiplied with the spec's scale of residuals, to ``hidden`` [T, width] in place, and return
        the sum normed: x / rms(x) * weight, or (x - mean(x)) / deviation(x) * weight + bias. ``norm`` [1 or 2, width]:
        weights, and biases where there are any. None: the sum itself."""

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Heads:
        """Query [T, heads, head_dim], key and value [T, kv_heads, head_dim] of ``qkv`` [T, all heads side by side],
        which they may overwrite: query and key normed by ``norm`` ([heads + kv_heads, head_dim], or None), each head or
        the whole query and the whole key, and turned by one rotation's ``cos`` and ``sin`` of `Rotary`, or not."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """activation(gate) * up [T, n] of ``gate_up`` [T, 2n]; of an MLP without a gate activation(up), of [T, n]."""


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

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Tensor | None) -> Tensor:
        spec = self._spec
        if delta is not None and spec.scales.residual == 1.0:
            hidden.add_(delta)
        elif delta is not None:  # torch would round the scale to the rows' dtype
            hidden.copy_(torch.add(hidden.to(self._wide), delta.to(self._wide), alpha=spec.scales.residual))
        if norm is None:
            return hidden
        wide, shape = hidden.to(self._wide), hidden.shape[-1:]
        if spec.norm == "layer":
            normed = F.layer_norm(wide, shape, norm[0], norm[1] if len(norm) > 1 else None, spec.norm_eps)
        else:
            normed = F.rms_norm(wide, shape, norm[0], spec.norm_eps)
        return normed.to(self._dtype)

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Heads:
        spec = self._spec
        heads = qkv.view(len(qkv), spec.heads + 2 * spec.kv_heads, spec.head_dim)
        turning = heads[:, : spec.heads + spec.kv_heads].to(self._wide)
        if norm is not None and spec.qk_norm == "row":
            parts = turning.split_with_sizes((spec.heads, spec.kv_heads), 1)
            turning = torch.cat([F.rms_norm(each, each.shape[1:], None, spec.norm_eps) for each in parts], 1).mul_(norm)
        elif norm is not None:
            turning = F.rms_norm(turning, (spec.head_dim,), None, spec.norm_eps).mul_(norm)
        if cos is not None and sin is not None:
            turning = rotate(turning, cos, sin)
        turned = turning.to(self._dtype)
        return turned[:, : spec.heads], turned[:, spec.heads :], heads[:, spec.heads + spec.kv_heads :]

    def gate(self, gate_up: Tensor) -> Tensor:
        if not self._spec.gated:
            return self._activation(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)


class NativeFusedOps:
    """On a CPU, in bfloat16 or float32, with the activations of `NATIVE`. Raises OSError where the kernel is not built
    or a width is not a multiple of any vector."""

    name = "native"

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, lanes: int | None = None) -> None:
        self._library = library.load()
        self._spec = spec
        self._wide = int(dtype == torch.float32)
        widths = math.gcd(spec.hidden_size, spec.intermediate_size, spec.rotary_dim // 2, spec.head_dim // 2)
        self.lanes = self._library.ferrum_rows_lanes(widths if lanes is None else math.gcd(widths, lanes))
        if not self.lanes or lanes not in (None, self.lanes):
            raise OSError(f"rows of {widths} are no multiple of a vector of this machine")
        self.kind = library.RowKindStruct(
            spec.norm == "layer",
            spec.norm_bias,
            NATIVE[spec.activation],
            spec.gated,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.rotary_dim,
            spec.qk_norm == "row",
            spec.norm_eps,
            spec.scales.residual,
        )

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Tensor | None) -> Tensor:
        out = hidden if norm is None else torch.empty_like(hidden)
        if norm is None and delta is None:
            return hidden
        self._run(
            library.ADD_NORM,
            hidden,
            hidden.shape[-1],
            out=out.data_ptr(),
            delta=None if delta is None else delta.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
        )
        return out

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Heads:
        self._run(
            library.ROTATE,
            qkv,
            qkv.shape[-1],
            norm=None if norm is None else norm.data_ptr(),
            cos=None if cos is None else cos.data_ptr(),
            sin=None if sin is None else sin.data_ptr(),
        )
        return split_heads(qkv, self._spec)

    def gate(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty((len(gate_up), gate_up.shape[-1] // (1 + self._spec.gated)))
        self._run(library.GATE, gate_up, out.shape[-1], out=out.data_ptr())
        return out

    def _run(self, task: int, rows: Tensor, width: int, **pointers: int | None) -> None:
        """``rows`` and what the pointers name must be contiguous, and alive until this returns."""
        job = library.RowTask(
            kind=ctypes.addressof(self.kind),
            task=task,
            wide=self._wide,
            threads=torch.get_num_threads(),
            width=width,
            count=len(rows),
            hidden=rows.data_ptr(),
            **pointers,
        )
        self._library.ferrum_rows(ctypes.addressof(job), self.lanes)
