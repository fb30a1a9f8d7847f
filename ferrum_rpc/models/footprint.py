"""What a `Decoder` takes of the memory, from its spec alone: nothing is read or allocated.

Weights are what `Decoder.load` leaves, matrix by matrix as their `LinearFactory` holds them. Activations are the
tensors that live at the fullest moment of a step: the names in the sums are variables of `Decoder.forward`, `layers`
and ``layer.c``. What attention and the recurrence take while they compute is given, for their files know it. Tests hold
both to what is really allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

import torch

from ferrum_rpc.models.base import ONE_CALL_TOKENS
from ferrum_rpc.models.expert_rows import TOGETHER, ExpertRouter
from ferrum_rpc.models.fused_ops import FusedOps, NativeFusedOps, TorchFusedOps
from ferrum_rpc.models.latent_rows import LatentLifts, of_own
from ferrum_rpc.models.layout import EMBEDDED, HEAD, LAYERS, Held, HeldPart
from ferrum_rpc.models.linear import LinearFactory
from ferrum_rpc.models.native_linear import (
    JOB_ROWS,
    SUM_BYTES,
    NibbleFactory,
    PanelFactory,
    QuantizedFactory,
    RowBytes,
    StoredFactory,
)
from ferrum_rpc.models.parts.attention import Attention
from ferrum_rpc.models.parts.clamped import Clamped
from ferrum_rpc.models.parts.dense import Dense
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.parts.latent import LatentAttention
from ferrum_rpc.models.parts.recurrent import Recurrent
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec

LOOKED_UP: Final = 1 + 4 + 2
"""Bytes for each number of a row that is looked up in a table of integers: as stored, as float32, and as it is used."""

THREAD_BYTES: Final = 9 << 8
"""What the kernels' buffers take of a thread for each channel of a head, about: 256 queries in float32, their sums,
and K and V of 64 positions. AVX-512 BF16 and AMX read queries in bfloat16, and take less."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderBuild:
    """What a decoder is made of: ``spec`` is the part ``shard`` of the model ``whole``. ``linear`` holds the matrices
    of layers, ``head`` that of the head. ``ops`` is None for a device that is not in this machine. ``held``: the
    matrices that stay as they are stored. ``quantize``: how weights are quantized, as `ModelFacts` has it."""

    spec: ModelSpec
    whole: ModelSpec
    shard: Shard
    dtype: torch.dtype
    linear: LinearFactory
    head: LinearFactory
    ops: FusedOps | None
    held: Held = field(default_factory=dict, kw_only=True)
    quantize: str = field(default="none", kw_only=True)

    @property
    def packed(self) -> bool:
        """Whether its products are our kernel's."""
        return isinstance(self.linear, PanelFactory)


def weight_bytes(build: DecoderBuild) -> int:
    """Bytes of all weights once they are loaded. Raises InvalidRequest where they cannot be held so."""
    spec, dtype, linear, shard = build.spec, build.dtype, build.linear, build.shard
    norms = [norm for layer in spec.layers for norm in layer.norms()]
    total = 0
    for index, layer in enumerate(spec.layers):
        for each in (*layer.matrices(), *(other for other in layer.others() if not other.apart)):
            held = build.held.get(f"{LAYERS}{index}.{each.role}.weight")
            fine = {"fine": each.fine} if isinstance(linear, NibbleFactory) else {}
            total += _matrix_bytes(held, each.shape, linear, dtype, bias=each.bias, **fine)
        if isinstance(layer.mixer, LatentAttention):
            total += LatentLifts.nbytes(layer.mixer, of_own(linear), dtype)
        if isinstance(layer.mlp, Experts):
            total += ExpertRouter.nbytes(layer.mlp, linear, dtype)
        total += sum(each.size for each in layer.floats()) * max(4, dtype.itemsize)
    table, tied = (spec.vocab_size, spec.hidden_size), spec.tied_embeddings and shard.last
    in_panels = tied and isinstance(build.head, PanelFactory)  # then the head is the embedding too
    if EMBEDDED in build.held:
        total += _matrix_bytes(build.held[EMBEDDED], table, build.head, dtype)
    elif shard.first and not in_panels:
        total += math.prod(table) * dtype.itemsize
    if shard.last:  # a tied head is all that the last stage keeps of the embedding
        norms.append(spec.norm.weights("norm", "", spec.hidden_size))
        if not (tied and EMBEDDED in build.held):
            shared = tied and shard.first and not in_panels
            total += _matrix_bytes(build.held.get(HEAD), table, build.head, dtype, shared=shared)
    return total + sum(norm.size for norm in norms) * max(4, dtype.itemsize)


def _matrix_bytes(
    held: tuple[HeldPart, ...] | None,
    shape: tuple[int, int],
    factory: LinearFactory,
    dtype: torch.dtype,
    **options: int,
) -> int:
    total = 0
    for part in held or (HeldPart((), shape[0], None),):
        made: Callable[..., int] = factory.nbytes if part.form is None else StoredFactory.nbytes
        total += made(part.rows, shape[1], dtype if part.form is None else part.form, **options)
    return total


def activation_bytes(build: DecoderBuild, tokens: int, rows: int, attending: int | None, recurring: int = 0) -> int:
    """Bytes of a step of ``tokens`` tokens that wants float32 logits of ``rows`` of them; ``attending``: what attention
    takes of a layer while it computes, besides its answer; None: it can run in one call with the layers.
    ``recurring``: what the recurrence of a layer takes, its answer included."""
    spec, size = build.spec, build.dtype.itemsize
    layers = dict.fromkeys(spec.layers)
    native = _runs_in_c(build) and all(each.plain for each in layers)  # else long spans run layer by layer
    hidden = spec.hidden_size
    rotary_dim = spec.attention.rotary_dim
    angles = 4 * (rotary_dim + rotary_dim // 2) * len(spec.ropes)
    kept, held, moments, buffers = 0, 2 * hidden * size, [0], 0  # held: hidden, delta
    if isinstance(build.linear, PanelFactory):
        forms = {part.form for parts in build.held.values() for part in parts if part.form is not None}
        ready = _ready_bytes(build, build.linear)
        kept += ready
        experts = {layer.mlp for layer in layers if isinstance(layer.mlp, Experts)}
        buffers = max((_expert_buffers(each, tokens, ready) for each in experts if _calls_experts(build)), default=0)
        of_thread = max(build.linear.thread_bytes, *(StoredFactory.thread_bytes(form) for form in forms), 0)
        buffers += torch.get_num_threads() * (of_thread + min(tokens, JOB_ROWS) * SUM_BYTES)
    passing = build.linear.passing(build.dtype)
    widths = {layer: (*_widths(layer.mixer), *_widths(layer.mlp)) for layer in layers}
    if native and attending is not None:  # and its answer, which is copied
        moments.append(max(attended for _, attended, _, _ in widths.values()) * tokens * size + attending)
    for before, layer in () if native else dict.fromkeys(zip((None, *spec.layers), spec.layers, strict=False)):
        made, attended, up, gated = widths[layer]
        mixing = [tokens * ((hidden + made) * size + made * passing)]  # normed, and what the first product makes
        if isinstance(layer.mixer, Attention):
            in_torch = isinstance(build.ops, TorchFusedOps)
            mixing += _attention_moments(layer.mixer, tokens, size, attending or 0, in_torch=in_torch)
        elif isinstance(layer.mixer, LatentAttention):
            mixing.append(_latent_moment(layer.mixer, tokens, size, attending or 0))
        else:
            mixing.append(_recurrent_moment(layer.mixer, tokens, size, recurring))
        moments.append(max(mixing) + tokens * (widths[before][1] if before else 0) * size)  # what that one found
        normed = hidden if layer.norm_names.before_mlp or layer.parallel else 0
        moments.append(tokens * ((normed + up + attended) * size + max(gated * size, up * passing)))
        moments.append(tokens * ((max(attended, gated) + attended) * size + hidden * passing))
        if isinstance(layer.mlp, Experts):
            found = _expert_moment(layer.mlp, tokens, size, in_c=_calls_experts(build))
            moments.append(found + tokens * attended * size)
    fp32 = 4 if build.packed or size >= 4 else 4 + size
    logits = rows * (hidden * size + spec.vocab_size * fp32) * build.shard.last
    rotation = hidden * size + angles + angles * 2 // 3  # hidden; angles, cosines, sines, and the cosines twice
    looked_up = tokens * hidden * LOOKED_UP * (EMBEDDED in build.held or isinstance(build.head, QuantizedFactory))
    peaks = looked_up, tokens * rotation, tokens * (held + angles) + max(moments), tokens * hidden * size + logits
    return buffers + one_call_bytes(build, tokens) + tokens * kept + max(peaks)


def one_call_bytes(build: DecoderBuild, tokens: int) -> int:
    """What C keeps of steps that run in one call: normed rows, the MLP's, and the mixer's; 0: none does."""
    if not _runs_in_c(build):
        return 0
    layers, hidden = dict.fromkeys(build.spec.layers), build.spec.hidden_size
    mixers = [(*_widths(each.mixer), _beside(each.mixer)) for each in layers]
    row = _grown(*(hidden + sum(_widths(each.mlp)) for each in layers)) + _grown(*map(sum, mixers))
    return min(tokens, tokens if all(each.plain for each in layers) else ONE_CALL_TOKENS) * row * build.dtype.itemsize


def _runs_in_c(build: DecoderBuild) -> bool:
    """Whether layers can run in one call."""
    return build.packed and isinstance(build.ops, NativeFusedOps) and all(each.in_c for each in build.spec.layers)


def _ready_bytes(build: DecoderBuild, linear: PanelFactory) -> int:
    """Of a row that products make ready, for all parts of a matrix at once."""
    asked = list[RowBytes]()
    for index, layer in enumerate(build.spec.layers):
        for each in (*layer.matrices(), *layer.others()):
            k = each.columns.size
            if parts := build.held.get(f"{LAYERS}{index}.{each.role}.weight"):
                forms = (part.form for part in parts)
                of_parts = (linear.row_bytes(k) if form is None else StoredFactory.row_bytes(k, form) for form in forms)
                asked.append(reduce(RowBytes.beside, of_parts))
            elif isinstance(linear, NibbleFactory):
                asked.append(linear.row_bytes(k, fine=each.fine > 0))
            else:
                asked.append(linear.row_bytes(k))
    if isinstance(build.head, PanelFactory):  # of fewer rows, but perhaps of more bytes each
        asked.append(build.head.row_bytes(build.spec.hidden_size))
    return sum(_grown(*each) for each in zip(*asked, strict=True))


def _beside(mixer: Attention | LatentAttention | Recurrent) -> int:
    """Elements of what C makes of a row besides what a mixer's products read and make."""
    if isinstance(mixer, Recurrent):
        return 2 * 2 * mixer.shape.value_heads  # floats
    if isinstance(mixer, Attention) and mixer.gated:
        return (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
    return 0


def _widths(part: Attention | LatentAttention | Recurrent | Dense | Experts) -> tuple[int, int]:
    """Of the rows that its first product makes, and of those that its last one reads; zeros where it has none."""
    matrices = part.matrices()
    return (matrices[0].shape[0], matrices[-1].shape[1]) if matrices else (0, 0)


def _grown(*wanted: int) -> int:
    """What a buffer has become that was asked for so much (``buffer.h``)."""
    size = 0
    for each in wanted:
        size = max(each, 2 * size) if each > size else size
    return size


def _attention_moments(mixer: Attention, tokens: int, size: int, attending: int, *, in_torch: bool) -> tuple[int, int]:
    """Bytes of a layer while heads are rotated (``in_torch``: by `TorchFusedOps`), and while attention computes."""
    hidden, attended = mixer.hidden, mixer.heads * mixer.head_dim
    rotating = _rotating_in_torch(mixer, size) if in_torch else 0
    qkv = (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
    if not mixer.gated:
        return tokens * ((hidden + qkv) * size + rotating), tokens * (qkv + attended) * size + attending
    made = attended + qkv  # kept for the gates; queries are copied out of it, and then again with the rest
    rotated = (mixer.heads + mixer.kv_heads) * mixer.head_dim * in_torch
    gating = attended * (3 * 4 if size < 4 else 2 * size)  # of a row, in float32
    return (
        tokens * ((hidden + made + qkv) * size + max(rotating, attended * size)),
        max(tokens * (qkv + rotated) * size + attending, tokens * attended * size + gating)
        + tokens * (made + attended) * size,
    )


def _recurrent_moment(mixer: Recurrent, tokens: int, size: int, recurring: int) -> int:
    """Bytes of a layer while the recurrence computes, or its answer is normed: what the product made, and of each value
    head two numbers."""
    made, values = _widths(mixer)
    wide = max(4, size)
    norming = 2 * tokens * values * size + 3 * values * wide  # of a row it has three copies
    return tokens * (made * size + 2 * mixer.shape.value_heads * wide) + max(recurring, norming)


def _latent_moment(mixer: LatentAttention, tokens: int, size: int, attending: int) -> int:
    """Bytes of a layer while its latent attention computes: what the first product made; queries, and a copy of them or
    what they are made of; the row that is cached, and its latent. ``attending``: of attention, with its answer."""
    made, attended = _widths(mixer)
    queries, wide = mixer.heads * mixer.shape.key_dim, max(4, size)
    rotating = tokens * (2 * queries * wide + 3 * mixer.shape.width * wide)
    return tokens * made * size + max(rotating, tokens * (queries + mixer.shape.width + attended) * size + attending)


def _calls_experts(build: DecoderBuild) -> bool:
    """Whether all experts of a layer are one call of C."""
    return build.packed and isinstance(build.ops, NativeFusedOps)


def _expert_buffers(part: Experts, tokens: int, row_bytes: int) -> int:
    """Bytes that ``experts.c`` keeps. ``row_bytes``: of a row that is made ready."""
    rows = tokens * part.routing.chosen
    together = min(rows, TOGETHER) * (3 * part.inner * 2 + max(row_bytes, part.hidden * 2))
    return rows * (2 * 4 + part.hidden * 2) + together


def _expert_moment(part: Experts, tokens: int, size: int, *, in_c: bool) -> int:
    """Bytes of a layer while its experts compute: the row, and that of the part that all rows have; for each of the
    ``chosen`` the row and the answer; of one expert, which may have all rows, its products, and what torch makes of a
    clamped gate; and the sums. ``in_c``: the two rows and their sum."""
    hidden, wide, chosen = part.hidden, max(4, size), part.routing.chosen
    routing = tokens * part.count * 4 * wide + tokens * chosen * 4 * 8
    if in_c:
        return tokens * 2 * hidden * size + max(routing, tokens * hidden * size)
    clamping = 4 * part.inner * wide if isinstance(part.activation, Clamped) else 0
    expert = tokens * ((3 * part.inner + hidden) * size + clamping)
    sums = 2 * tokens * hidden * wide
    return tokens * (2 + 2 * chosen) * hidden * size + max(routing, expert, sums)


def _rotating_in_torch(mixer: Attention, size: int) -> int:
    """Bytes of the copies of a token's query and key in `TorchFusedOps.heads`, and of its cosines if these are made
    longer."""
    copies = 4 * (2 if mixer.qk_norm or size < 4 else 1)
    longer = 4 * mixer.head_dim * (mixer.rotary_dim < mixer.head_dim)
    return (mixer.heads + mixer.kv_heads) * mixer.head_dim * copies + longer
