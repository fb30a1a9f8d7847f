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
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.models.parts.attention import Attention
from ferrum_rpc.models.parts.clamped import Clamped
from ferrum_rpc.models.parts.latent import LatentAttention
from ferrum_rpc.models.parts.layer import LayerSpec
from ferrum_rpc.models.parts.recurrent import Recurrent
from ferrum_rpc.models.rotary import rotate
from ferrum_rpc.native import library

if TYPE_CHECKING:
    from ferrum_rpc.native.triton_heads import CacheRows

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
"""By `Dense.activation`, but for those of `Clamped`."""

CLAMPED: Final = "clamped"
NATIVE: Final = {SILU: 0, "gelu_tanh": 1, "relu": 2, CLAMPED: 3}
"""Those of the C and CUDA kernels, by `activation_name`: ``enum activation`` of norm_rope_gate.h."""


def activation_name(activation: str | Clamped) -> str:
    """What an activation is called, whatever its numbers."""
    return CLAMPED if isinstance(activation, Clamped) else activation


class FusedOps(Protocol):
    """What lies between the products of one layer, and of all that are shaped as it is. Rows are contiguous and of the
    model's dtype, norms float32 (or wider)."""

    name: str

    def of(self, layer: LayerSpec) -> FusedOps:
        """The same for a layer of another shape."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Tensor | None) -> Tensor:
        """Add ``delta``, multiplied with the layer's scale of residuals, to ``hidden`` [T, width] in place, and return
        the sum normed: x / rms(x) * weight, or (x - mean(x)) / deviation(x) * weight + bias. ``norm`` [1 or 2, width]:
        weights, and biases where there are any. None: the sum itself."""

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Heads:
        """Query [T, heads, head_dim], key and value [T, kv_heads, head_dim] of ``qkv`` [T, all heads side by side],
        which they may overwrite: query and key normed by ``norm`` ([heads + kv_heads, head_dim], or None), each head or
        the whole query and the whole key, and rotated by one rotation's ``cos`` and ``sin`` of `Rotary`, or not. For
        layers with attention."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """activation(gate) * up [T, n] of ``gate_up`` [T, 2n], or as `Clamped`; of an MLP without a gate
        activation(up), of [T, n]."""


@runtime_checkable
class StoringOps(FusedOps, Protocol):
    """Operations that can write keys and values to the cache while they have them."""

    def heads_stored(
        self, into: CacheRows | None, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None
    ) -> Heads:
        """As `heads`, whose key and value are also written ``into`` a cache."""


@runtime_checkable
class GatingOps(FusedOps, Protocol):
    """Operations that have the gates of recurrent layers and of gated attention too; see `recurrent_rows`, which does
    without."""

    def decays(self, written: Tensor, decay: Tensor, speed: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """``speed * softplus(decay + shift)`` and the sigmoid of ``written``, both [T, heads] in float32."""

    def gate_heads(self, heads: Tensor, gates: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """``heads`` [T, heads, n] times the sigmoid of ``gates``; with a ``norm`` [n] normed, and times their SiLU."""


def split_heads(qkv: Tensor, mixer: Attention) -> Heads:
    """Query, key and value as views of ``qkv``, which is dense."""
    heads = (mixer.heads, mixer.kv_heads, mixer.kv_heads)
    query, key, value = qkv.view(len(qkv), sum(heads), mixer.head_dim).split_with_sizes(heads, 1)
    return query, key, value


def _heads(mixer: Attention | LatentAttention | Recurrent) -> tuple[int, int, int, int, str | None]:
    """Heads, KV heads, the channels of a head and those rotated, and how heads are normed; zeros without attention, and
    with a latent one, whose heads other layers rotate (`LayerSpec.rotated`)."""
    if not isinstance(mixer, Attention):
        return 0, 0, 0, 0, None
    return mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.rotary_dim, mixer.qk_norm


class TorchFusedOps:
    """On any device, in any dtype."""

    name = "torch"

    def __init__(self, layer: LayerSpec, dtype: torch.dtype) -> None:
        self._norm, self._residual = layer.norm, layer.residual
        self._mixer, self._mlp = layer.mixer, layer.mlp
        self._dtype = dtype
        self._fp32 = torch.promote_types(dtype, torch.float32)

    def of(self, layer: LayerSpec) -> TorchFusedOps:
        return TorchFusedOps(layer, self._dtype)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Tensor | None) -> Tensor:
        if delta is not None and self._residual == 1.0:
            hidden.add_(delta)
        elif delta is not None:  # torch would round the scale to the rows' dtype
            hidden.copy_(torch.add(hidden.to(self._fp32), delta.to(self._fp32), alpha=self._residual))
        if norm is None:
            return hidden
        rows, shape, eps = hidden.to(self._fp32), hidden.shape[-1:], self._norm.eps
        if self._norm.kind == "layer":
            normed = F.layer_norm(rows, shape, norm[0], norm[1] if len(norm) > 1 else None, eps)
        else:
            normed = F.rms_norm(rows, shape, norm[0], eps)
        return normed.to(self._dtype)

    def heads(self, qkv: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Heads:
        mixer, eps = self._mixer, self._norm.eps
        assert isinstance(mixer, Attention)  # noqa: S101 - no other layer has heads
        rotating = mixer.heads + mixer.kv_heads
        heads = qkv.view(len(qkv), rotating + mixer.kv_heads, mixer.head_dim)
        rows = heads[:, :rotating].to(self._fp32)
        if norm is not None and mixer.qk_norm == "row":
            parts = rows.split_with_sizes((mixer.heads, mixer.kv_heads), 1)
            rows = torch.cat([F.rms_norm(each, each.shape[1:], None, eps) for each in parts], 1).mul_(norm)
        elif norm is not None:
            rows = F.rms_norm(rows, (mixer.head_dim,), None, eps).mul_(norm)
        if cos is not None and sin is not None:
            rows = rotate(rows, cos, sin)
        rotated = rows.to(self._dtype)
        return rotated[:, : mixer.heads], rotated[:, mixer.heads :], heads[:, rotating:]

    def gate(self, gate_up: Tensor) -> Tensor:
        activation = self._mlp.activation
        if isinstance(activation, Clamped):
            gate, up = gate_up.to(self._fp32).chunk(2, dim=-1)
            gate = gate.clamp(max=activation.limit)
            factor = up.clamp(-activation.limit, activation.limit).add_(1.0)
            return gate.mul(activation.slope).sigmoid_().mul_(gate).mul_(factor).to(self._dtype)
        if not self._mlp.gated:
            return ACTIVATIONS[activation](gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)


class NativeFusedOps:
    """On a CPU, in bfloat16 or float32, with the activations of `NATIVE`. Raises OSError where the kernel is not built
    or a width is not a multiple of any vector."""

    name = "native"

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, lanes: int | None = None) -> None:
        mixer, mlp, norm = layer.mixer, layer.mlp, layer.norm
        heads, kv_heads, head_dim, rotary_dim, qk_norm = _heads(mixer)
        self._library = library.load()
        self._mixer, self._gated = mixer, mlp.gated
        self._dtype = dtype
        widths = math.gcd(mixer.hidden, *mlp.widths, rotary_dim // 2, head_dim // 2)
        self.lanes = self._library.ferrum_rows_lanes(widths if lanes is None else math.gcd(widths, lanes))
        if not self.lanes or lanes not in (None, self.lanes):
            raise OSError(f"rows of {widths} must be multiples of a vector of this machine")
        self.kind = library.RowKindStruct(
            norm.kind == "layer",
            norm.bias,
            NATIVE[activation_name(mlp.activation)],
            mlp.gated,
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            qk_norm == "row",
            norm.eps,
            layer.residual,
            *(mlp.activation if isinstance(mlp.activation, Clamped) else ()),
        )

    def of(self, layer: LayerSpec) -> NativeFusedOps:
        return NativeFusedOps(layer, self._dtype)

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
        assert isinstance(self._mixer, Attention)  # noqa: S101 - no other layer has heads
        return split_heads(qkv, self._mixer)

    def gate(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty((len(gate_up), gate_up.shape[-1] // (1 + self._gated)))
        self._run(library.GATE, gate_up, out.shape[-1], out=out.data_ptr())
        return out

    def _run(self, task: int, rows: Tensor, width: int, **pointers: int | None) -> None:
        """``rows`` and what the pointers name must be contiguous, and alive until this returns."""
        job = library.RowTask(
            kind=ctypes.addressof(self.kind),
            task=task,
            wide=self._dtype == torch.float32,
            threads=torch.get_num_threads(),
            width=width,
            count=len(rows),
            hidden=rows.data_ptr(),
            **pointers,
        )
        self._library.ferrum_rows(ctypes.addressof(job), self.lanes)
