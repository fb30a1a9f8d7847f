"""Paged attention in plain torch: the path that runs everywhere, and the oracle of every faster backend.

Torch has no kernel that reads blocks in place. The blocks of a row are gathered into a scratch buffer, which is
allocated once (a new tensor per call costs page faults: 26 against 9 ms a layer at 32 x 512) and small enough to stay
in the cache, and SDPA reads them there. Three facts shape the code:

- A single-token span needs no causal mask once the GQA group is folded into the query axis. Several such spans with
  equally many blocks share one SDPA call. Slots of the last block after a sequence's end are masked, and zeroed first,
  because a NaN in a masked slot would leak through 0 * NaN.
- SDPA's ``is_causal`` aligns at the top left, which is right only for a span that starts at position 0. For others the
  mask of a tile of query rows is a view of one matrix that depends only on ``key - query``: no step builds a mask.
- A logit soft cap and a sink have no fused kernel: they take the explicit path, in float32.

Blocks are gathered exactly: nothing beyond ``ceil(length / block_size)`` is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.attention.eight_bits import MAX_MAGNITUDE, from_rows, to_rows
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.sinks import Sinks, held
from ferrum_rpc.attention.tiles import TILE_ROWS, BandMask, DecodeGroup, LongSpan, MaskPattern, PatternWork, Planner
from ferrum_rpc.core import AttentionSpec

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference of a GPU's kernels from float32 arithmetic, for values of unit variance: some units in the last
place."""

TorchPlan = dict[MaskPattern, PatternWork]


class TorchPagedAttention:
    """See the module. ``keys[l]`` and ``values[l]``: [num_blocks, block_size, kv_heads, head_dim]; a layer's queries
    have its dtype. In a quantized cache they are rows of `eight_bits`, dequantized to ``dtype``, that of the queries.
    """

    name = "torch"
    exact_span_tokens = 0

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        keys: list[Tensor],
        values: list[Tensor],
        dtype: torch.dtype = torch.float32,
        *,
        sinks: Sinks = (),
    ) -> None:
        if not len(specs) == len(keys) == len(values):
            raise ValueError("specs, keys and values must have one entry per layer")
        self._specs = tuple(specs)
        self._patterns = [
            MaskPattern(spec.window, _fused(spec), dtype if key.dtype in MAX_MAGNITUDE else key.dtype)
            for spec, key in zip(specs, keys, strict=True)
        ]
        self._keys, self._values = keys, values
        self._slots = [(key.flatten(0, 1), value.flatten(0, 1)) for key, value in zip(keys, values, strict=True)]
        device = keys[0].device
        self._sinks = held(specs, sinks, device)
        self._planner = Planner(keys[0].shape[1], max(key[0].nbytes for key in keys), device)
        self._masks = {pattern: BandMask(pattern, device) for pattern in self._patterns}
        self._scratch: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}

    def plan(self, geometry: BatchGeometry, spans: Sequence[int] | None = None) -> TorchPlan:
        """The work of the layers of each pattern, for all spans or those with these indices."""
        chosen = range(geometry.spans) if spans is None else spans
        return {pattern: self._planner.work(geometry, pattern, chosen) for pattern in self._masks}

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Converts ``key`` and ``value`` if they are of another dtype."""
        for place, rows in zip(self._slots[layer], (key, value), strict=True):
            place.index_copy_(
                0, slots, to_rows(rows, place.dtype) if place.dtype in MAX_MAGNITUDE else rows.to(place.dtype)
            )

    def attend(self, layer: int, query: Tensor, plan: TorchPlan) -> Tensor:
        """Causal attention of ``query`` [T, heads, head_dim]; see `AttentionBackend`."""
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        self.attend_into(layer, query, plan, output)
        return output

    def attend_into(self, layer: int, query: Tensor, plan: TorchPlan, output: Tensor) -> None:
        """As `attend`, into the rows of ``output`` [T, heads, head_dim] that the plan's spans own."""
        spec, work = self._specs[layer], plan[self._patterns[layer]]
        for group in work.decode_groups:
            self._attend_group(spec, layer, query, group, output)
        for long in work.long_spans:
            self._attend_long(spec, layer, query[long.first : long.last], long, output[long.first : long.last])

    def _attend_group(self, spec: AttentionSpec, layer: int, query: Tensor, work: DecodeGroup, output: Tensor) -> None:
        group = len(work.rows)
        key, value = self._gather(layer, work.blocks)  # [G * n * block_size, kv_heads, head_dim]
        key.index_fill_(0, work.tail, 0.0)
        value.index_fill_(0, work.tail, 0.0)
        folded = query.index_select(0, work.rows).view(group, spec.kv_heads, -1, spec.head_dim)
        key = key.view(group, -1, spec.kv_heads, spec.head_dim).transpose(1, 2)
        value = value.view(group, -1, spec.kv_heads, spec.head_dim).transpose(1, 2)
        result = _sdpa(spec, folded, key, value, work.mask, sinks=self._sinks_of(layer, 1))
        output.index_copy_(0, work.rows, result.reshape(group, spec.heads, spec.head_dim))

    def _attend_long(self, spec: AttentionSpec, layer: int, query: Tensor, work: LongSpan, output: Tensor) -> None:
        key, value = self._gather(layer, work.blocks)
        # KV heads are the batch and the group is the head axis, over which K and V have stride 0: nothing is repeated.
        grouped = query.view(len(query), spec.kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
        out = output.view(len(query), spec.kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
        shape = (spec.kv_heads, grouped.shape[1], -1, spec.head_dim)
        for tile in work.tiles:
            rows, keys = tile.last - tile.first, tile.high - tile.low
            plain = rows == keys and _fused(spec) and (spec.window is None or rows <= spec.window)
            out[:, :, tile.first : tile.last] = _sdpa(
                spec,
                grouped[:, :, tile.first : tile.last],
                key[tile.low : tile.high].transpose(0, 1)[:, None].expand(shape),
                value[tile.low : tile.high].transpose(0, 1)[:, None].expand(shape),
                None if plain else self._masks[self._patterns[layer]].view(rows, keys),
                sinks=self._sinks_of(layer, 2),
            )

    def _sinks_of(self, layer: int, axes: int) -> Tensor | None:
        """[kv_heads, group] and so many axes of length 1."""
        sinks = self._sinks[layer]
        return None if sinks is None else sinks.view(self._specs[layer].kv_heads, -1, *[1] * axes)

    def _gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of ``blocks`` in the scratch buffers, as [slots, kv_heads, head_dim]; valid until the next gather."""
        cached, count = self._keys[layer], len(blocks)
        kind = cached.shape[1:], cached.dtype
        scratch = self._scratch.get(kind)
        if scratch is None or len(scratch[0]) < count:
            capacity = count if scratch is None else max(count, 2 * len(scratch[0]))
            shape = (capacity, *cached.shape[1:])
            self._scratch[kind] = scratch = cached.new_empty(shape), cached.new_empty(shape)
        key, value = scratch[0][:count], scratch[1][:count]
        torch.index_select(cached, 0, blocks, out=key)
        torch.index_select(self._values[layer], 0, blocks, out=value)
        if cached.dtype in MAX_MAGNITUDE:
            dtype = self._patterns[layer].dtype
            key, value = from_rows(key, dtype), from_rows(value, dtype)
        return key.flatten(0, 1), value.flatten(0, 1)


class Scratch(NamedTuple):
    """Bytes that `TorchPagedAttention.attend` allocates besides its result. ``gathered``: K and V, in buffers that
    layers with such heads share; ``mask``: the masks of a `MaskPattern`; ``passing``: temporaries."""

    gathered: int
    mask: int
    passing: int


def scratch_bytes(spec: AttentionSpec, dtype: torch.dtype, slot_bytes: int, tokens: int, context: int) -> Scratch:
    """For the last ``tokens`` tokens of a sequence of ``context``. Temporaries are K and V converted to ``dtype`` if
    the cache, ``slot_bytes`` per token, is quantized, and SDPA's result of a tile, or its materialized scores."""
    seen = context if spec.window is None else min(context, spec.window + tokens)
    exact = 2 * spec.kv_heads * spec.head_dim * dtype.itemsize
    whole = tokens == context and _fused(spec) and (spec.window is None or context <= spec.window)
    rows = tokens if whole else min(tokens, TILE_ROWS)
    columns = seen if spec.window is None else min(seen, max(TILE_ROWS, spec.window))
    mask = 0 if whole else TILE_ROWS * (TILE_ROWS + columns) * dtype.itemsize
    converted = 0 if slot_bytes == exact else seen * exact
    result = rows * spec.heads * spec.head_dim * dtype.itemsize
    if _fused(spec):
        result += torch.get_num_threads() * flash_bytes(spec.head_dim, dtype)
    else:
        keys = context if spec.window is None else min(context, spec.window + rows)
        result += spec.heads * keys * (2 * rows + spec.head_dim) * max(4, dtype.itemsize)  # scores, weights, K or V
    return Scratch(
        seen * slot_bytes, mask, converted + max(result, converted // 2)
    )  # values are converted in two steps


def flash_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """What SDPA takes of a thread on a CPU (torch's FlashAttentionKernel.cpp): of a block of 64 queries by 512 keys the
    float32 scores, their maxima, sums and answers, and the weights in ``dtype`` if that is another one."""
    return 64 * (4 * (512 + 2 + head_dim) + (0 if dtype.itemsize >= 4 else 512 * dtype.itemsize))


def _fused(spec: AttentionSpec) -> bool:
    """Whether SDPA computes it, without materialized scores."""
    return spec.softcap is None and not spec.sinks


def _sdpa(
    spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, sinks: Tensor | None
) -> Tensor:
    """Attention over the last two axes; without a mask causal if there are several queries (as many as keys).
    ``sinks``: shaped as the scores, with a last axis of 1."""
    if _fused(spec):
        causal = mask is None and query.shape[-2] > 1
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=spec.scale)
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(exact) @ key.to(exact).transpose(-1, -2)).mul_(spec.scale)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if mask is not None:
        scores += mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(exact).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : value.shape[-2]]
    return (weights @ value.to(exact)).to(query.dtype)
