"""Decoder layers with their weights: products and what lies between them.

`PlainLayers` calls each by itself, wherever it runs. `MixedLayers` does so with recurrent layers among them, with
latent attention, or with experts. `NativeLayers` runs all layers in one call where products and row operations are C
kernels of ours (``layer.c``): one by one, calls and small tensors take a tenth of a step of the 0.6B shape at one row,
and of the shape of Qwen3.5-0.8B. It calls attention back in every layer, unless that is a C kernel too. It computes the
bits of the others. Latent attention and experts always run one by one, and long spans of recurrent layers.

Of a model that is cut over ranks, these are a rank's part: some heads, and some of the MLP. Then what attention's and
the MLP's last products make is summed over the group. Where all heads are normed together, so are their squares; such
layers run in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NoReturn

import torch
from torch import Tensor

from ferrum_rpc.distributed.group import Group, GroupAborted
from ferrum_rpc.models.base import Attend, CacheAttend, LatentAttend, Recur, RecurInC, StepAdapters
from ferrum_rpc.models.expert_rows import ExpertRows
from ferrum_rpc.models.fused_ops import FusedOps, GatingOps, Heads, NativeFusedOps, StoringOps, split_heads
from ferrum_rpc.models.latent_rows import LatentWeights, cached_row, normed_query
from ferrum_rpc.models.linear import Linear
from ferrum_rpc.models.native_linear import NativeLinear
from ferrum_rpc.models.parts.attention import Attention
from ferrum_rpc.models.parts.latent import LatentAttention
from ferrum_rpc.models.parts.layer import LayerSpec
from ferrum_rpc.models.parts.recurrent import Recurrent
from ferrum_rpc.models.recurrent_rows import RecurrentWeights, gated, gated_norm, recurrent_rows
from ferrum_rpc.native import library

Rotate = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Heads]
"""`FusedOps.heads`."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer: ``products`` are those of `LayerSpec.matrices`, the first of which has the ``slot``. Its norms, where
    there are any, as `FusedOps.add_norm` wants them; ``qk_norm`` as `FusedOps.heads`. ``recurrent``, ``latent``: what
    else such a layer has. ``experts``: those of its MLP. ``mlp``: the place of the MLP's first product; the
    number of products where all of the MLP are experts."""

    spec: LayerSpec
    ops: FusedOps
    products: tuple[Linear, ...]
    slot: int
    before_mixer: Tensor | None = None
    after_mixer: Tensor | None = None
    before_mlp: Tensor | None = None
    after_mlp: Tensor | None = None
    qk_norm: Tensor | None = None
    recurrent: RecurrentWeights | None = None
    latent: LatentWeights | None = None
    experts: ExpertRows | None = None
    mlp: int = 2


class PlainLayers:
    """Layers with attention, of any linears and row operations. ``group``: the ranks over which the layers are cut."""

    rowwise = False
    """Whether, attention and recurrence aside, a row depends on nothing but itself, bit for bit."""

    def __init__(self, layers: Sequence[Layer], group: Group | None = None) -> None:
        self._layers, self._group = tuple(layers), group

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend | library.AttentionStep,
        adapters: StepAdapters | None = None,
    ) -> Tensor | None:
        """All layers of ``hidden`` [T, hidden], which is changed; what the last one has yet to add. ``cos`` and ``sin``
        are those of `Rotary`. Only `NativeLayers` take attention in C. ``adapters`` change the products."""
        assert callable(attend)  # noqa: S101 - see above
        delta = None
        for index, layer in enumerate(self._layers):
            attended = attend(index, *self._heads(layer, layer.ops.heads, hidden, delta, cos, sin, adapters))
            delta = self._output_and_mlp(layer, hidden, attended, adapters)
        return delta

    def _heads(  # noqa: PLR0917 - once a layer: keywords cost time
        self,
        layer: Layer,
        rotate: Rotate,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        adapters: StepAdapters | None,
    ) -> Heads:
        """Add ``delta`` to ``hidden``; query, key and value of the sum, as ``rotate`` returns them."""
        ops, rope, norm = layer.ops, layer.spec.rope, layer.qk_norm
        normed = ops.add_norm(hidden, delta, layer.before_mixer)
        qkv = _product(layer, 0, normed, adapters)
        if norm is not None and self._group is not None and _attention(layer).qk_norm == "row":
            _norm_across_ranks(layer, qkv, norm, self._group)
            norm = None
        rotation = (None, None) if rope is None else (cos[rope], sin[rope])
        return rotate(qkv, norm, *rotation)

    def _output_and_mlp(self, layer: Layer, hidden: Tensor, attended: Tensor, adapters: StepAdapters | None) -> Tensor:
        """Add what the mixer found ([T, heads, head_dim], or flat) to ``hidden``; the MLP's answer, yet to be added."""
        ops, group = layer.ops, self._group
        output = _product(layer, layer.mlp - 1, attended.flatten(1), adapters)
        if group is not None:
            group.all_reduce(output)
        if layer.after_mixer is not None:
            output = ops.add_norm(output, None, layer.after_mixer)
        if layer.spec.parallel:
            normed = hidden if layer.before_mixer is None else ops.add_norm(hidden, None, layer.before_mixer)
            ops.add_norm(hidden, output, None)
        else:
            normed = ops.add_norm(hidden, output, layer.before_mlp)
        del output  # no longer than it must be
        delta = _of_every_row(layer, normed, adapters)
        if layer.experts is not None:
            delta = layer.experts.add(normed, delta, ops)
        assert delta is not None  # noqa: S101 - an MLP has one or the other
        if group is not None:
            group.all_reduce(delta)
        return delta if layer.after_mlp is None else ops.add_norm(delta, None, layer.after_mlp)


class StoringLayers(PlainLayers):
    """Layers of `StoringOps`: the rotation writes K and V to the cache in the same launch, if attention says where."""

    def __init__(self, layers: Sequence[Layer], group: Group | None = None) -> None:
        super().__init__(layers, group)
        self._rotations = [layer.ops.heads_stored for layer in layers if isinstance(layer.ops, StoringOps)]

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend | library.AttentionStep,
        adapters: StepAdapters | None = None,
    ) -> Tensor | None:
        if not isinstance(attend, CacheAttend):
            return super().forward(hidden, cos, sin, attend, adapters)
        delta = None
        for index, (layer, rotation) in enumerate(zip(self._layers, self._rotations, strict=True)):
            rotate = partial(rotation, attend.rows(index))
            attended = attend.stored(index, *self._heads(layer, rotate, hidden, delta, cos, sin, adapters))
            delta = self._output_and_mlp(layer, hidden, attended, adapters)
        return delta


class MixedLayers(PlainLayers):
    """Layers with attention, which may be gated or latent, and recurrent ones."""

    def __init__(self, layers: Sequence[Layer], group: Group | None = None) -> None:
        super().__init__(layers, group)
        self.rowwise = all(map(_is_native, layers))
        counts = {True: count(), False: count()}
        self._places = [next(counts[layer.recurrent is None]) for layer in layers]
        """Of each layer its number among those of its kind, by which ``attend`` and ``recur`` know it."""

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend | library.AttentionStep,
        adapters: StepAdapters | None = None,
        *,
        recur: Recur | RecurInC | None = None,
    ) -> Tensor | None:
        """``recur`` must be given if a layer is recurrent."""
        assert callable(attend)  # noqa: S101 - only `NativeLayers` take another
        delta = None
        for layer, place in zip(self._layers, self._places, strict=True):
            if layer.recurrent is not None:
                assert callable(recur)  # noqa: S101 - see above
                mixed = self._recurrent(layer, place, hidden, delta, recur, adapters)
            elif layer.latent is not None:
                mixed = self._latent(layer, place, hidden, delta, cos, sin, attend, adapters)
            elif _attention(layer).gated:
                mixed = self._gated(layer, place, hidden, delta, cos, sin, attend, adapters)
            else:
                mixed = attend(place, *self._heads(layer, layer.ops.heads, hidden, delta, cos, sin, adapters))
            delta = self._output_and_mlp(layer, hidden, mixed, adapters)
        return delta

    def _gated(  # noqa: PLR0917 - as `_heads`
        self,
        layer: Layer,
        place: int,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """As `_heads`, attended, each head times the sigmoid of the gate beside its query."""
        mixer = _attention(layer)
        gates = list[Tensor]()

        def rotate(rows: Tensor, norm: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> Heads:
            queries, others = rows.tensor_split([2 * mixer.heads * mixer.head_dim], 1)
            query, gate = queries.view(len(rows), mixer.heads, 2, mixer.head_dim).unbind(2)
            gates.append(gate)
            return layer.ops.heads(torch.cat((query.flatten(1), others), 1), norm, cos, sin)

        attended = attend(place, *self._heads(layer, rotate, hidden, delta, cos, sin, adapters))
        return gated(attended, gates[0], _gating(layer))

    @staticmethod
    def _latent(  # noqa: PLR0917 - as `_heads`
        layer: Layer,
        place: int,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Add ``delta`` to ``hidden``; what attention finds for the sum in a cache of latents."""
        mixer, weights, rope = layer.spec.mixer, layer.latent, layer.spec.rope
        assert isinstance(mixer, LatentAttention) and weights is not None  # noqa: S101 - the caller knows
        assert rope is not None and isinstance(attend, LatentAttend)  # noqa: S101 - such models have both
        inputs = _product(layer, 0, layer.ops.add_norm(hidden, delta, layer.before_mixer), adapters)
        row = cached_row(inputs, mixer, weights, cos[rope], sin[rope])
        if weights.query_norm is None:
            query = inputs[:, : mixer.heads * mixer.shape.key_dim].contiguous()
        else:
            query = _product(layer, 1, normed_query(inputs, weights), adapters)
        rotated = weights.queries.heads(query, None, cos[rope], sin[rope])[0]
        return attend.latent(place, rotated, row, weights.lifts)

    @staticmethod
    def _recurrent(  # noqa: PLR0917 - as `_heads`
        layer: Layer,
        place: int,
        hidden: Tensor,
        delta: Tensor | None,
        recur: Recur,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Add ``delta`` to ``hidden``; what the recurrence finds for the sum, normed and gated [T, value_heads *
        value_dim]."""
        mixer, weights = layer.spec.mixer, layer.recurrent
        assert isinstance(mixer, Recurrent) and weights is not None  # noqa: S101 - the caller knows
        inputs = _product(layer, 0, layer.ops.add_norm(hidden, delta, layer.before_mixer), adapters)
        rows = recurrent_rows(inputs, mixer.shape, weights, _gating(layer))
        found = recur(place, weights.taps[:, 0], rows.channels, rows.log_decay, rows.beta)
        return gated_norm(found, rows.gate, weights, layer.spec.norm.eps, _gating(layer))


def _gating(layer: Layer) -> GatingOps | None:
    return layer.ops if isinstance(layer.ops, GatingOps) else None


def _product(layer: Layer, index: int, x: Tensor, adapters: StepAdapters | None) -> Tensor:
    y = layer.products[index](x)
    if adapters is not None:
        adapters.add(layer.slot + index, x, y)
    return y


def _of_every_row(layer: Layer, normed: Tensor, adapters: StepAdapters | None) -> Tensor | None:
    """The answer of the MLP, or of the part of it that computes every row. None: all of it are experts."""
    if layer.mlp == len(layer.products):
        return None
    gated = layer.ops.gate(_product(layer, layer.mlp, normed, adapters))
    return _product(layer, layer.mlp + 1, gated, adapters)


def _attention(layer: Layer) -> Attention:
    mixer = layer.spec.mixer
    assert isinstance(mixer, Attention)  # noqa: S101 - the caller knows
    return mixer


def _norm_across_ranks(layer: Layer, qkv: Tensor, norm: Tensor, group: Group) -> None:
    """Norm the whole query and the whole key of every row, in place; each rank has as many heads of them, and a head
    that several have counts for each."""
    mixer = _attention(layer)
    heads = qkv.view(len(qkv), -1, mixer.head_dim)[:, : mixer.heads + mixer.kv_heads]
    parts = heads.to(norm.dtype).split_with_sizes((mixer.heads, mixer.kv_heads), 1)
    squares = torch.stack([each.square().mean((1, 2)) for each in parts], 1)
    group.all_reduce(squares)
    scales = squares.div_(group.size).add_(layer.spec.norm.eps).rsqrt_()[:, :, None, None].unbind(1)
    heads.copy_(torch.cat([each * scale for each, scale in zip(parts, scales, strict=True)], 1).mul_(norm))


class NativeLayers(MixedLayers):
    """On a CPU in bfloat16, with native linears and row operations throughout: all layers in one call. Attention is
    called back in every layer, or in C as well. Where layers are recurrent or gated, both must be in C."""

    def __init__(self, layers: Sequence[Layer], group: Group | None = None) -> None:
        super().__init__(layers, group)
        self._plain = all(layer.spec.plain for layer in layers)
        recurrent = [_recurrent_weights(layer) for layer in layers]
        self._weights = (library.LayerWeights * len(layers))(*map(_weights, layers, self._places, recurrent))
        self._kept = recurrent
        self._space = _native(layers[0].products[0]).space
        self._library = self._space.library
        self._attention = ctypes.cast(self._library.ferrum_attention_layer, ctypes.c_void_p).value
        self._callbacks = callbacks = _Callbacks(self._layers, group)
        self._handle = self._library.ferrum_layers_new(self._space.handle, *callbacks.reduce)
        self._held = self._handle, ctypes.addressof(self._weights), len(layers)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.ferrum_layers_free(self._handle)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend | library.AttentionStep,
        adapters: StepAdapters | None = None,
        *,
        recur: Recur | RecurInC | None = None,
    ) -> Tensor | None:
        """With attention in C ``adapters`` must have an address, and ``recur`` must be in C."""
        context: int | None = None
        if isinstance(attend, library.AttentionStep):
            context = ctypes.addressof(attend)
        elif not self._plain or (adapters is not None and adapters.address is None):
            return super().forward(hidden, cos, sin, attend, adapters, recur=recur)
        else:
            self._callbacks.attend = attend
        delta = torch.empty_like(hidden)
        in_c = None if callable(recur) else recur
        jobs = None if in_c is None else in_c.jobs()
        status = self._library.ferrum_layers_run(
            *self._held,
            self._callbacks.attention if context is None else self._attention,
            context,
            None if adapters is None else adapters.address,
            None if jobs is None else jobs.ctypes.data,
            0 if jobs is None else jobs.shape[1],
            hidden.data_ptr(),
            delta.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            len(hidden),
            torch.get_num_threads(),
        )
        if in_c is not None:
            in_c.advanced()
        if status < 0:
            raise MemoryError("no memory for a layer's buffers")
        self._callbacks.attend = None  # what it holds is the step's
        if status:
            self._callbacks.fail()
        return delta


class _Callbacks:
    """What C calls within layers: ``attention``, the address of a function that calls ``attend``, and of a ``group``
    that sums, a function and its context."""

    def __init__(self, layers: Sequence[Layer], group: Group | None) -> None:
        self._mixers = [layer.spec.mixer for layer in layers]
        self._group = group
        self._error: BaseException | None = None
        self.attend: Attend | None = None
        self._functions = library.ATTEND(self._attend), library.REDUCE(self._reduce)
        self.attention, reduce = (ctypes.cast(each, ctypes.c_void_p).value for each in self._functions)
        self.reduce: tuple[int | None, int | None] = (None, None)
        if group is not None:
            self.reduce = group.native_sum or (reduce, None)

    def _attend(self, _context: int | None, layer: int, qkv: int, count: int, attended: int) -> int:
        try:
            mixer = self._mixers[layer]
            assert isinstance(mixer, Attention)  # noqa: S101 - others are not called back
            rows = _bfloat16(qkv, count * (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim)
            assert self.attend is not None  # noqa: S101 - `forward` has set it
            answer = self.attend(layer, *split_heads(rows.view(count, -1), mixer))
            _bfloat16(attended, answer.numel()).view(answer.shape).copy_(answer)
        except BaseException as error:  # C cannot carry it
            self._error = error
            return 1
        return 0

    def _reduce(self, _context: int | None, rows: int, elements: int) -> int:
        assert self._group is not None  # noqa: S101 - or it has no address in C
        try:
            self._group.all_reduce(_bfloat16(rows, elements).view(-1, self._mixers[0].hidden))
        except BaseException as error:  # C cannot carry it
            self._error = error
            return 1
        return 0

    def fail(self) -> NoReturn:
        """Raise what ended a call."""
        error, self._error = self._error, None
        raise GroupAborted("a sum over the ranks ended") if error is None else error


def _bfloat16(address: int, elements: int) -> Tensor:
    """What C has at an address."""
    return torch.frombuffer((ctypes.c_char * (2 * elements)).from_address(address), dtype=torch.bfloat16)


def assemble(layers: Sequence[Layer], group: Group | None = None) -> PlainLayers:
    """`NativeLayers` if every part is native and there are neither latents nor experts; `MixedLayers` if a layer is
    recurrent, has gated or latent attention, or experts; `StoringLayers` if all operations can write to the cache.
    ``group``: the ranks over which the model is cut."""
    # what lies between products must be each rank's own
    if layers and all(_is_native(each) and _runs_in_c(each) and not (group and _norms_rows(each)) for each in layers):
        return NativeLayers(layers, group)
    if not all(layer.spec.plain for layer in layers):
        return MixedLayers(layers, group)
    storing = all(isinstance(layer.ops, StoringOps) for layer in layers)
    return StoringLayers(layers, group) if storing else PlainLayers(layers, group)


def _runs_in_c(layer: Layer) -> bool:
    """Whether ``layer.c`` knows its parts, which are native, and takes their heads."""
    if not layer.spec.in_c:
        return False
    if layer.recurrent is not None:
        return _recurrent_weights(layer) is not None
    mixer = _attention(layer)
    return not mixer.gated or library.row_lanes(mixer.head_dim) > 0


def _norms_rows(layer: Layer) -> bool:
    return isinstance(layer.spec.mixer, Attention) and layer.spec.mixer.qk_norm == "row"


def _is_native(layer: Layer) -> bool:
    own = isinstance(layer.ops, NativeFusedOps) and all(isinstance(each, NativeLinear) for each in layer.products)
    lifted = layer.latent is None or layer.latent.lifts.native
    return own and lifted and (layer.experts is None or layer.experts.native)


def _recurrent_weights(layer: Layer) -> library.RecurrentWeightsStruct | None:
    mixer = layer.spec.mixer
    if layer.recurrent is None or not isinstance(mixer, Recurrent):
        return None
    return layer.recurrent.in_c(mixer.shape, layer.spec.norm.eps)


def _weights(layer: Layer, place: int, recurrent: library.RecurrentWeightsStruct | None) -> library.LayerWeights:
    assert isinstance(layer.ops, NativeFusedOps)  # noqa: S101 - assemble looked
    mixer = layer.spec.mixer
    gate_lanes = library.row_lanes(mixer.head_dim) if isinstance(mixer, Attention) and mixer.gated else 0
    norms = layer.before_mixer, layer.after_mixer, layer.before_mlp, layer.after_mlp, layer.qk_norm
    return library.LayerWeights(
        (ctypes.c_void_p * len(layer.products))(*(_native(each).address for each in layer.products)),
        *(None if each is None else each.data_ptr() for each in norms),
        None if recurrent is None else ctypes.addressof(recurrent),
        layer.slot,
        -1 if layer.spec.rope is None else layer.spec.rope,
        layer.ops.lanes,
        layer.spec.parallel,
        place,
        gate_lanes,
        layer.ops.kind,
    )


def _native(linear: Linear) -> NativeLinear:
    assert isinstance(linear, NativeLinear)  # noqa: S101 - assemble looked
    return linear
