"""What a decoder layer does before and after its attention: products and what lies between them, put together.

`PlainLayers` calls them one by one, wherever they run. `NativeLayers` makes one call of each half where all parts are C
kernels of ours (``layer.c``): a step of the 0.6B shape at one row loses a tenth of its time to calls and
small tensors otherwise. Where attention is ours as well, it runs many layers in one call. All compute the same bits.

Of a model that is cut over ranks, these are a rank's part: some heads, and some of the MLP. Then what attention's and
the MLP's last products make is summed over the group. Where all heads are normed together, so are their squares; such
layers are put together in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from ferrum_rpc.distributed.group import Group, GroupAborted
from ferrum_rpc.models.base import StepAdapters
from ferrum_rpc.models.fused_ops import FusedOps, Heads, NativeFusedOps, split_heads
from ferrum_rpc.models.linear import Linear
from ferrum_rpc.models.lora import DOWN, GATE_UP, OUTPUT, QKV
from ferrum_rpc.models.native_linear import NativeLinear
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.native import library


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One block. Its norms, where there are any, as `FusedOps.add_norm` wants them; ``qk_norm`` as `FusedOps.heads`."""

    before_attention: Tensor | None
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    after_attention: Tensor | None
    before_mlp: Tensor | None
    gate_up: Linear
    down: Linear
    after_mlp: Tensor | None


class Layers(Protocol):
    """All layers of a decoder. ``hidden`` [T, hidden] is changed in place; ``delta`` [T, hidden] is what the layer
    before has yet to add to it. ``cos`` and ``sin`` are those of `Rotary`. ``adapters`` change the products."""

    def before(  # noqa: PLR0917 - once a layer: keywords cost time
        self,
        layer: int,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        adapters: StepAdapters | None = None,
    ) -> Heads:
        """Add ``delta`` to ``hidden``; query, key and value of the sum, as `FusedOps.heads`."""

    def after(self, layer: int, hidden: Tensor, attended: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Add what attention found ([T, heads, head_dim]) to ``hidden``; the MLP's answer, yet to be added."""


class PlainLayers:
    """Any linears and row operations."""

    def __init__(self, spec: ModelSpec, layers: Sequence[Layer], ops: FusedOps, group: Group | None = None) -> None:
        self._spec, self._layers, self._ops, self._group = spec, layers, ops, group

    def before(  # noqa: PLR0917
        self,
        layer: int,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        adapters: StepAdapters | None = None,
    ) -> Heads:
        parts, rope = self._layers[layer], self._spec.layer_ropes[layer]
        normed = self._ops.add_norm(hidden, delta, parts.before_attention)
        turning = (None, None) if rope is None else (cos[rope], sin[rope])
        qkv, norm = _product(parts.qkv, normed, adapters, layer, QKV), parts.qk_norm
        if norm is not None and self._group is not None and self._spec.qk_norm == "row":
            self._norm_together(qkv, norm, self._group)
            norm = None
        return self._ops.heads(qkv, norm, *turning)

    def after(self, layer: int, hidden: Tensor, attended: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        parts, ops = self._layers[layer], self._ops
        output = self._summed(_product(parts.output, attended.flatten(1), adapters, layer, OUTPUT))
        output = self._normed(output, parts.after_attention)
        if self._spec.parallel:
            normed = self._normed(hidden, parts.before_attention)
            ops.add_norm(hidden, output, None)
        else:
            normed = ops.add_norm(hidden, output, parts.before_mlp)
        del output  # no longer than it must be
        gated = ops.gate(_product(parts.gate_up, normed, adapters, layer, GATE_UP))
        return self._normed(self._summed(_product(parts.down, gated, adapters, layer, DOWN)), parts.after_mlp)

    def _norm_together(self, qkv: Tensor, norm: Tensor, group: Group) -> None:
        """Norm the whole query and the whole key of every row, in place; each rank has as many heads of them, and a
        head that several have counts for each."""
        spec = self._spec
        heads = qkv.view(len(qkv), -1, spec.head_dim)[:, : spec.heads + spec.kv_heads]
        parts = heads.to(norm.dtype).split_with_sizes((spec.heads, spec.kv_heads), 1)
        squares = torch.stack([each.square().mean((1, 2)) for each in parts], 1)
        group.all_reduce(squares)
        scales = squares.div_(group.size).add_(spec.norm_eps).rsqrt_()[:, :, None, None].unbind(1)
        heads.copy_(torch.cat([each * scale for each, scale in zip(parts, scales, strict=True)], 1).mul_(norm))

    def _summed(self, rows: Tensor) -> Tensor:
        if self._group is not None:
            self._group.all_reduce(rows)
        return rows

    def _normed(self, rows: Tensor, norm: Tensor | None) -> Tensor:
        return rows if norm is None else self._ops.add_norm(rows, None, norm)


def _product(linear: Linear, x: Tensor, adapters: StepAdapters | None, layer: int, product: int) -> Tensor:
    y = linear(x)
    if adapters is not None:
        adapters.add(layer, product, x, y)
    return y


class NativeLayers:
    """On a CPU in bfloat16, with native linears and row operations throughout. ``ops`` says how wide vectors are."""

    def __init__(
        self, spec: ModelSpec, layers: Sequence[Layer], ops: NativeFusedOps, group: Group | None = None
    ) -> None:
        self._spec = spec
        self._held = tuple(layers)
        self._weights = (library.LayerWeights * len(layers))(
            *(_weights(spec, layer, rope, ops) for layer, rope in zip(layers, spec.layer_ropes, strict=True))
        )
        self._addresses = [ctypes.addressof(weights) for weights in self._weights]
        space = _native(layers[0].qkv).space
        self._space = space
        self._library = space.library
        self._width = _native(layers[0].qkv).n
        self._handle = self._library.ferrum_layers_new(space.handle)
        self._plain = PlainLayers(spec, layers, ops, group)
        self._sum = None if group is None else _Sum(group, spec.hidden_size)
        if self._sum is not None:
            self._library.ferrum_layers_reduce(self._handle, self._sum.function, self._sum.context)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.ferrum_layers_free(self._handle)

    def before(  # noqa: PLR0917
        self,
        layer: int,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        adapters: StepAdapters | None = None,
    ) -> Heads:
        if adapters is not None and adapters.address is None:
            return self._plain.before(layer, hidden, delta, cos, sin, adapters)
        count = len(hidden)
        qkv = hidden.new_empty((count, self._width))
        with self._adapted(adapters, layer):
            self._check(
                self._library.ferrum_layer_before(
                    self._handle,
                    self._addresses[layer],
                    hidden.data_ptr(),
                    None if delta is None else delta.data_ptr(),
                    cos.data_ptr(),
                    sin.data_ptr(),
                    count,
                    qkv.data_ptr(),
                    torch.get_num_threads(),
                )
            )
        return split_heads(qkv, self._spec)

    def after(self, layer: int, hidden: Tensor, attended: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """``attended`` is contiguous."""
        if adapters is not None and adapters.address is None:
            return self._plain.after(layer, hidden, attended, adapters)
        delta = torch.empty_like(hidden)
        with self._adapted(adapters, layer):
            self._check(
                self._library.ferrum_layer_after(
                    self._handle,
                    self._addresses[layer],
                    hidden.data_ptr(),
                    attended.data_ptr(),
                    len(hidden),
                    delta.data_ptr(),
                    torch.get_num_threads(),
                )
            )
        return delta

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: library.AttentionStep,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """All layers with their attention, of ``hidden`` [T, hidden], which is changed; what the last one has yet to
        add."""
        delta = torch.empty_like(hidden)
        step = (self._handle, self._addresses[0], ctypes.addressof(attention))
        rows = (*(each.data_ptr() for each in (hidden, delta, cos, sin)), len(hidden), torch.get_num_threads())
        with self._adapted(adapters):
            self._check(self._library.ferrum_layers_run(*step, len(self._held), *rows))
        return delta

    @contextmanager
    def _adapted(self, adapters: StepAdapters | None, layer: int = 0) -> Iterator[None]:
        """The calls within are of this layer, or of all, with these adapters."""
        if adapters is None:
            yield
            return
        self._library.ferrum_layers_adapt(self._handle, adapters.address, layer)
        try:
            yield
        finally:
            self._library.ferrum_layers_adapt(self._handle, None, 0)

    def _check(self, status: int) -> None:
        if status < 0:
            raise MemoryError("no memory for a layer's buffers")
        if status and self._sum is not None:
            self._sum.fail()


class _Sum:
    """What C calls for a group's sum of bfloat16 rows [T, ``width``]: ``function`` and ``context`` are addresses."""

    def __init__(self, group: Group, width: int) -> None:
        self._group, self._width = group, width
        self._error: BaseException | None = None
        self.function: int | None
        self.context: int | None
        if (native := group.native_sum) is not None:
            self.function, self.context = native
            return
        self._callback = library.REDUCE(self._reduce)
        self.function, self.context = ctypes.cast(self._callback, ctypes.c_void_p).value, None

    def _reduce(self, _context: int | None, rows: int, elements: int) -> int:
        try:
            there = (ctypes.c_char * (2 * elements)).from_address(rows)
            self._group.all_reduce(torch.frombuffer(there, dtype=torch.bfloat16).view(-1, self._width))
        except BaseException as error:  # C cannot carry it
            self._error = error
            return 1
        return 0

    def fail(self) -> NoReturn:
        """Raise what ended the sum."""
        error, self._error = self._error, None
        raise GroupAborted("a sum over the ranks ended") if error is None else error


def put_together(spec: ModelSpec, layers: Sequence[Layer], ops: FusedOps, group: Group | None = None) -> Layers:
    """In one call each where every part is native. ``group``: the ranks over which the model is cut."""
    linears = (each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
    apart = group is None or spec.qk_norm != "row"  # what lies between products is each rank's own
    if isinstance(ops, NativeFusedOps) and layers and apart and all(isinstance(each, NativeLinear) for each in linears):
        return NativeLayers(spec, layers, ops, group)
    return PlainLayers(spec, layers, ops, group)


def _weights(spec: ModelSpec, layer: Layer, rope: int | None, ops: NativeFusedOps) -> library.LayerWeights:
    linears = (_native(each).address for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
    norms = layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp, layer.qk_norm
    return library.LayerWeights(
        *linears,
        *(None if each is None else each.data_ptr() for each in norms),
        -1 if rope is None else rope,
        ops.lanes,
        spec.parallel,
        ops.kind,
    )


def _native(linear: Linear) -> NativeLinear:
    assert isinstance(linear, NativeLinear)  # noqa: S101 - put_together looked
    return linear
