"""Paged attention on a CUDA device: one kernel for every mix of spans, where the blocks lie.

`triton_plan` decides in integers what each program does, `triton_kernels` does it, and this file puts the integers on
the device and launches. There are two kinds of plan. `plan` makes one for a step as it is. `reserve` makes one with
fixed buffers and a fixed grid, which `fill` points at a step: what a CUDA graph that was captured with it replays. What
is left of the grid ends at once.

This file imports triton: whoever chooses backends asks `triton_probe` first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.triton_kernels import attend_kernel, merge_kernel
from ferrum_rpc.attention.triton_plan import (
    FIELDS,
    Int32s,
    Launch,
    Limits,
    Sight,
    Tile,
    cut,
    flat_tables,
    padded_dim,
    tile_shapes,
)
from ferrum_rpc.attention.triton_store import store
from ferrum_rpc.core import AttentionSpec

PROGRAMS_PER_PROCESSOR = (3, 1)
"""Programs of the small and of the large tile shape that one multiprocessor holds at once (compute capability 9.0,
head_dim 128, 16 bits: 72 and 98 kB of shared memory out of 228, 128 x 128 and 212 x 256 registers out of 65,536)."""

MERGED_AT_ONCE = 32
"""Parts that a merging program reads in one access: more than most tiles have."""

LOG2_E = math.log2(math.e)


Room = dict[Sight, list[tuple[Tile, int, int]]]
"""Of each sight: its launches' tile shapes, items and merges."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One launch of a plan, on the device: int32 ``items`` and ``merges`` [n, 8], in tiles of ``tile``."""

    tile: Tile
    items: Tensor
    merges: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What the layers of a step share: the block ``tables`` (int32) and each sight's launches, views of ``buffer``."""

    buffer: Tensor
    tables: Tensor
    work: dict[Sight, list[Work]]


class TritonPagedAttention:
    """See the module. ``keys[l]`` and ``values[l]``: [num_blocks, block_size, kv_heads, head_dim], one shape, dtype and
    layout for all layers, the last axis dense; queries have that dtype. ``processors`` and ``tiles`` (small, large)
    decide how work is cut; they default to what the device has. Launches go to the calling thread's stream."""

    name = "triton"

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        keys: list[Tensor],
        values: list[Tensor],
        *,
        processors: int | None = None,
        tiles: tuple[Tile, Tile] | None = None,
    ) -> None:
        if not len(specs) == len(keys) == len(values):
            raise ValueError("one spec, one key tensor and one value tensor per layer")
        if keys[0].stride(-1) != 1 or any(each.stride() != keys[0].stride() for each in (*keys, *values)):
            raise ValueError("keys and values must have one layout, with a dense last axis")
        self._specs, self._keys, self._values = tuple(specs), keys, values
        self._sights = [Sight(spec.heads // spec.kv_heads, spec.window) for spec in specs]
        _, self._block_size, self._kv_heads, self._head_dim = keys[0].shape
        self._device = keys[0].device
        device_processors, shared_bytes = _device_facts(self._device)
        self._tiles = tiles or tile_shapes(self._head_dim, keys[0].itemsize, shared_bytes)
        self._limits = [
            Limits(max(1, (processors or device_processors) * each // self._kv_heads))
            for each in PROGRAMS_PER_PROCESSOR
        ]
        # the split tiles of a launch leave their parts here, and so may the next launch: they run one after the other
        places = max(limits.parts * tile.rows for limits, tile in zip(self._limits, self._tiles, strict=True))
        self._sums = torch.empty(places * self._kv_heads * self._head_dim, dtype=torch.float32, device=self._device)
        self._stats = torch.empty(places * self._kv_heads * 2, dtype=torch.float32, device=self._device)

    # --- plans ------------------------------------------------------------------------------------------------------

    def plan(self, geometry: BatchGeometry) -> Plan:
        """A plan for this step: exact buffers, one copy to the device that nothing waits for."""
        tables = flat_tables(geometry)
        launches = {sight: self._launches(geometry, sight) for sight in dict.fromkeys(self._sights)}
        room: Room = {
            sight: [(tile, len(launch.items), len(launch.merges)) for tile, launch in found]
            for sight, found in launches.items()
        }
        plan = self._layout(len(tables), room)
        self._write(plan, tables, [launch for found in launches.values() for _, launch in found])
        return plan

    def reserve(self, spans: int, tokens: int, blocks: int) -> Plan:
        """A plan with room for any step of at most ``spans`` spans of ``tokens`` tokens at most each, whose lengths
        need ``blocks`` blocks in all. It does nothing until `fill`; its launches stay the same, as a CUDA graph needs.
        """
        room: Room = {}
        for sight in dict.fromkeys(self._sights):
            kind = int(tokens * sight.group > self._tiles[0].rows)
            tile, limits = self._tiles[kind], self._limits[kind]
            tiles = spans * -(-tokens * sight.group // tile.rows)
            room[sight] = [(tile, tiles + limits.parts, min(tiles, limits.merges))]
        plan = self._layout(blocks, room)
        plan.buffer.zero_()
        return plan

    def fill(self, plan: Plan, geometry: BatchGeometry) -> None:
        """Point a reserved plan at a step, in one copy to where its launches read. Raises ValueError, with the plan as
        it was, where the step has no room in it."""
        everything = np.arange(geometry.spans)
        launches = [
            cut(geometry, everything, sight, work.tile, self._limits[self._tiles.index(work.tile)])
            for sight, [work] in plan.work.items()
        ]
        self._write(plan, flat_tables(geometry), launches)

    def warm_up(self) -> None:
        """Compile what any step may launch, so that none waits for a compiler (seconds each, the first time)."""
        for layer in {spec: layer for layer, spec in enumerate(self._specs)}.values():
            query = torch.empty(
                (1, self._specs[layer].heads, self._head_dim), dtype=self._keys[0].dtype, device=self._device
            )
            for tokens in (1, self._tiles[1].rows):
                self.attend(layer, query, self.reserve(1, tokens, 1))

    def _launches(self, geometry: BatchGeometry, sight: Sight) -> list[tuple[Tile, Launch]]:
        """Spans whose rows fit one small tile, then the others."""
        small = np.diff(geometry.query_start) * sight.group <= self._tiles[0].rows
        kinds = zip((small, ~small), self._tiles, self._limits, strict=True)
        return [
            (tile, cut(geometry, np.flatnonzero(spans), sight, tile, limits))
            for spans, tile, limits in kinds
            if spans.any()
        ]

    def _layout(self, blocks: int, room: Room) -> Plan:
        """A plan whose buffer has room for ``blocks`` block ids and then, launch by launch, items and merges. All begin
        at a record's border: Triton compiles a launch anew where the alignment of its arguments is another."""
        sizes = [-(-blocks // FIELDS) * FIELDS]
        sizes += [count * FIELDS for launches in room.values() for _, *counts in launches for count in counts]
        buffer = torch.empty(sum(sizes), dtype=torch.int32, device=self._device)
        tables, *records = torch.split(buffer, sizes)
        views = iter([each.view(-1, FIELDS) for each in records])
        work = {
            sight: [Work(tile, next(views), next(views)) for tile, *_ in launches] for sight, launches in room.items()
        }
        return Plan(buffer, tables, work)

    def _write(self, plan: Plan, tables: Int32s, launches: list[Launch]) -> None:
        rooms = [plan.tables]
        rooms += [room for works in plan.work.values() for work in works for room in (work.items, work.merges)]
        found = [tables]
        found += [records.ravel() for launch in launches for records in (launch.items, launch.merges)]
        content = np.zeros(len(plan.buffer), dtype=np.int32)
        at = 0
        for integers, room in zip(found, rooms, strict=True):
            if integers.size > room.numel():
                raise ValueError(f"the step needs {integers.size} integers where its plan has {room.numel()} reserved")
            content[at : at + integers.size] = integers
            at += room.numel()
        host = torch.from_numpy(content)
        if self._device.type == "cuda":  # torch keeps the page-locked memory until the copy is through
            host = host.pin_memory()
        plan.buffer.copy_(host, non_blocking=True)

    # --- the layers -------------------------------------------------------------------------------------------------

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """See `AttentionBackend`."""
        store(self._keys[layer], self._values[layer], slots, key, value)

    def attend(self, layer: int, query: Tensor, plan: Plan) -> Tensor:
        """Causal attention of ``query`` [T, heads, head_dim]; see `AttentionBackend`. Rows that the plan's spans do not
        own are not written."""
        spec, key, value = self._specs[layer], self._keys[layer], self._values[layer]
        if query.stride(-1) != 1:
            query = query.contiguous()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        factor, cap = _exponent(spec)
        common = {
            "KV_HEADS": self._kv_heads,
            "GROUP": spec.heads // spec.kv_heads,
            "HEAD_DIM": self._head_dim,
            "PADDED_DIM": padded_dim(self._head_dim),
        }
        for work in plan.work[self._sights[layer]]:
            tile = work.tile
            attend_kernel[(len(work.items) * self._kv_heads,)](
                query,
                key,
                value,
                output,
                self._sums,
                self._stats,
                work.items,
                plan.tables,
                factor,
                cap,
                *query.stride()[:2],
                *key.stride()[:3],
                **common,
                BLOCK_SIZE=self._block_size,
                ROWS=tile.rows,
                KEYS=tile.keys,
                WINDOW=spec.window or 0,
                HAS_CAP=spec.softcap is not None,
                PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
            if len(work.merges):
                merge_kernel[(len(work.merges) * self._kv_heads * tile.rows,)](
                    output, self._sums, self._stats, work.merges, **common, ROWS=tile.rows, PARTS=MERGED_AT_ONCE
                )
        return output


def _exponent(spec: AttentionSpec) -> tuple[float, float]:
    """``(factor, cap)`` of the kernel, which wants exponents of 2: without a soft cap ``factor`` times a dot product is
    one; with a cap, ``factor`` times it is twice the tanh's argument, and ``cap`` times the tanh is one."""
    if spec.softcap is None:
        return spec.scale * LOG2_E, 0.0
    return 2.0 * spec.scale / spec.softcap * LOG2_E, spec.softcap * LOG2_E


def _device_facts(device: torch.device) -> tuple[int, int]:
    """``(multiprocessors, bytes of shared memory that a program may use)``; for the interpreter a small device."""
    if device.type != "cuda":
        return 4, 99 << 10
    properties = torch.cuda.get_device_properties(device)
    least = properties.shared_memory_per_block  # without the opt-in that triton takes
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", least)
