"""What a `Decoder` takes of the memory, from its spec alone: nothing is read or allocated.

Weights are what `Decoder.load` leaves, matrix by matrix as their `LinearFactory` holds them. Activations are the
tensors that live at the fullest moment of a step: the names in the sums are variables of `Decoder.forward`, `layers`
and ``layer.c``. Tests hold both to what is really allocated.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

from ferrum_rpc.models.fused_ops import NativeFusedOps, TorchFusedOps
from ferrum_rpc.models.layout import layout, parameter_shapes
from ferrum_rpc.models.linear import LinearFactory
from ferrum_rpc.models.native_linear import GROUP, ByteFactory, PairFactory
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec

THREAD_BYTES: Final = 2 << 10
"""What the kernels' buffers take of a thread for each channel of a head, about."""


class Making(NamedTuple):
    """How a decoder is put together. ``ops``: the class of its `FusedOps`. ``attends``: attention is native, of spans
    of any length. ``shard``: the part of the model that ``spec`` is."""

    spec: ModelSpec
    dtype: torch.dtype
    linear: LinearFactory
    ops: type
    attends: bool = False
    shard: Shard = WHOLE

    @property
    def together(self) -> bool:
        """Whether its layers and their attention run in one call."""
        return self.native and self.attends

    @property
    def native(self) -> bool:
        """Whether its layers are `NativeLayers`."""
        return isinstance(self.linear, PairFactory | ByteFactory) and issubclass(self.ops, NativeFusedOps)


def weight_bytes(making: Making) -> int:
    """Bytes of all weights once they are loaded. Raises InvalidRequest where they cannot be held so."""
    spec, dtype, linear, shard = making.spec, making.dtype, making.linear, making.shard
    table = [placement for placement in layout(spec).values() if shard.has(placement.parameter, spec)]
    shapes, total = parameter_shapes(table), 0
    if spec.tied_embeddings and shard.last:
        total += linear.nbytes(spec.vocab_size, spec.hidden_size, dtype, shared=shard.first)
        if not shard.first:
            del shapes["embedding"]  # the head is all that is kept of it
    norms = {placement.parameter for placement in table if placement.norm}
    for name, shape in shapes.items():
        if name.endswith(".weight"):
            rows, width = shape
            total += linear.nbytes(rows, width, dtype, bias=name.replace(".weight", ".bias") in shapes)
        elif not name.endswith(".bias"):
            total += math.prod(shape) * (max(4, dtype.itemsize) if name in norms else dtype.itemsize)
    return total


def activation_bytes(making: Making, tokens: int, rows: int, *, attending: int = 0) -> int:
    """Bytes of a step of ``tokens`` tokens that wants float32 logits of ``rows`` of them; ``attending``: what attention
    takes of a layer while it computes, besides its answer."""
    spec, size = making.spec, making.dtype.itemsize
    hidden, inner, attended = spec.hidden_size, spec.intermediate_size, spec.heads * spec.head_dim
    qkv = attended + 2 * spec.kv_heads * spec.head_dim
    angles = 4 * (spec.rotary_dim + spec.rotary_dim // 2) * len(spec.ropes)
    mlp = (2 + spec.gated) * inner  # gate_up, gated
    kept, held = 0, 2 * hidden * size  # hidden, delta
    moments = [0]
    if making.native:
        kept = (hidden + mlp) * size  # normed, and the MLP's
        if isinstance(making.linear, ByteFactory):
            width = _grown(hidden, attended, inner)
            kept += width + width // GROUP * 8  # rows in 8 bits, their scales, and where they start
    if making.together:
        kept += (qkv + attended) * size
    else:
        held += attended * size  # of the layer before
        moments.append(tokens * (qkv + attended) * size + attending)
    if not making.native:
        rotating = _rotating_in_torch(spec, size) if issubclass(making.ops, TorchFusedOps) else 0
        moments.append(tokens * ((hidden + qkv) * size + rotating))  # normed, qkv
        normed = hidden if spec.names.before_mlp or spec.parallel else 0
        moments.append(tokens * (normed + mlp) * size)
    widened = 4 if making.native or size >= 4 else 4 + size
    logits = rows * (hidden * size + spec.vocab_size * widened) * making.shard.last
    turning = hidden * size + angles + angles * 2 // 3  # hidden; angles, cosines, sines, and the cosines twice
    peaks = tokens * turning, tokens * (held + angles) + max(moments), tokens * hidden * size + logits
    return tokens * kept + max(peaks)


def _grown(*wanted: int) -> int:
    """What a buffer has become that was asked for so much (``buffer.h``)."""
    size = 0
    for each in wanted:
        size = max(each, 2 * size) if each > size else size
    return size


def _rotating_in_torch(spec: ModelSpec, size: int) -> int:
    """Bytes of the copies of a token's query and key in `TorchFusedOps.heads`."""
    copies = 4 + (4 if spec.qk_norm or size < 4 else 0) + (size if size < 4 else 0)
    return (spec.heads + spec.kv_heads) * spec.head_dim * copies
