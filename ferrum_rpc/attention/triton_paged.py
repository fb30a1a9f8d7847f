"""Paged attention on a CUDA device: one kernel for every mix of spans, which reads the blocks in place.

`triton_plan` computes in integers what each program does, `triton_kernels` has the kernels, and this file launches
them. A plan is a few sections of integers on the device. `draft` gives the sections of one step. `reserve` gives their
size for any step up to a size, and `fill` their contents for one such step. Launches and addresses then stay the same,
as a CUDA graph needs, and unused programs of the grid end at once. The caller copies the sections to the device with
the other inputs of a step; `plan` is for callers that have no others.

This file imports triton; `triton_probe` checks whether that is possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.eight_bits import FP8, SCALE_BYTES
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.sinks import Sinks, held
from ferrum_rpc.attention.staging import Layout, Staging
from ferrum_rpc.attention.triton_kernels import attend_kernel, merge_kernel
from ferrum_rpc.attention.triton_plan import (
    FIELDS,
    Int32s,
    Launch,
    LaunchCapacity,
    LayerKind,
    Multiprocessor,
    PlanCapacity,
    PromptRun,
    SplitLimits,
    TileShape,
    Tiling,
    cut,
    padded_dim,
    prompt_runs,
    sections_of,
    tile_shapes,
)
from ferrum_rpc.attention.varlen_prompts import PromptAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.native.triton_heads import CacheRows, place_heads

PROMPT_TOKENS = 512
"""The tokens from which a prompt goes to a `PromptAttention`: shorter ones do not pay for a call of a torch operation
in each layer (some 30 us on the host, estimated)."""

MERGED_AT_ONCE = 32
"""Parts that a merging program reads in one access: more than most tiles have."""

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, eq=False)
class BoundLaunch:
    """One launch of a plan, on the device: int32 ``items`` and ``merges`` [n, 8], in tiles of ``tile``. Split tiles
    have ``merged_rows`` rows at most."""

    tile: TileShape
    merged_rows: int
    items: Tensor
    merges: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan:
    """The block ``tables`` (int32) of a step, the launches of each kind of layer, and the ``prompts`` that other
    kernels compute, with their ends; all on the device."""

    tables: Tensor
    work: dict[LayerKind, list[BoundLaunch]]
    prompts: Sequence[tuple[PromptRun, Tensor]] = ()


class TritonPagedAttention:
    """See the module. ``keys[l]`` and ``values[l]``: [num_blocks, block_size, kv_heads, head_dim] of the layer, in one
    layout, the last axis dense; all layers have one block size and dtype, and queries have that dtype. Or they are rows
    of `eight_bits` in `FP8`, which each program dequantizes; then ``dtype`` is that of the queries. ``processors`` and
    ``tiles`` (with rising rows) decide how work is split; the defaults fit the device, and how many of their programs
    run at once is computed from the registers and the shared memory of the compiled kernels. ``prompts`` computes whole
    prompts of `PROMPT_TOKENS` and more in plans of `draft`. Launches go to the calling thread's stream."""

    name = "triton"
    exact_span_tokens = 0

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        keys: list[Tensor],
        values: list[Tensor],
        dtype: torch.dtype = torch.float32,
        *,
        processors: int | None = None,
        tiles: tuple[TileShape, ...] | None = None,
        sinks: Sinks = (),
        prompts: PromptAttention | None = None,
    ) -> None:
        if not len(specs) == len(keys) == len(values):
            raise ValueError("specs, keys and values must have one entry per layer")
        if any(key.stride() != value.stride() or key.stride(-1) != 1 for key, value in zip(keys, values, strict=True)):
            raise ValueError("a layer's keys and values must have one layout, with a dense last axis")
        self._specs, self._keys, self._values = tuple(specs), keys, values
        self._kinds = [
            LayerKind(spec.heads // spec.kv_heads, spec.window, (spec.kv_heads, spec.head_dim)) for spec in specs
        ]
        self._block_size = keys[0].shape[1]
        self._quantized = keys[0].dtype == FP8
        self._dtype = dtype if self._quantized else keys[0].dtype
        self._scales = list(zip(keys, values, strict=True))  # not read
        if self._quantized:
            words = [
                [
                    each.view(torch.float32)[..., spec.head_dim // SCALE_BYTES]
                    for each, spec in zip(layers, specs, strict=True)
                ]
                for layers in (keys, values)
            ]
            self._scales = list(zip(*words, strict=True))
            self._keys, self._values = ([e.view(torch.float8_e4m3fn) for e in layers] for layers in (keys, values))
        self._device = keys[0].device
        self._prompts = prompts
        self._sinks = held(specs, sinks, self._device)
        device_processors, shared_bytes, multiprocessor = _device_facts(self._device)
        self._sums = self._stats = torch.empty(4, dtype=torch.float32, device=self._device)
        self._tilings: dict[tuple[int, int], Tiling] = {}
        for shape in dict.fromkeys(kind.shape for kind in self._kinds):
            kv_heads, head_dim = shape
            own = tiles or tile_shapes(head_dim, self._dtype.itemsize, shared_bytes)
            if tiles is None and multiprocessor is not None:
                own = tuple([self._measured(shape, tile, multiprocessor) for tile in own])
            wanted = [max(1, (processors or device_processors) * tile.programs // kv_heads) for tile in own]
            self._tilings[shape] = Tiling(own, tuple(map(SplitLimits, wanted)))
        # buffers for the parts of split tiles; launches share them, because they run one after the other
        places = [
            (kv_heads * limits.parts * tile.rows, head_dim)
            for (kv_heads, head_dim), tiling in self._tilings.items()
            for tile, limits in zip(tiling.tiles, tiling.limits, strict=True)
        ]
        sums, stats = max(rows * head_dim for rows, head_dim in places), 2 * max(rows for rows, _ in places)
        self._sums, self._stats = (
            torch.empty(size, dtype=torch.float32, device=self._device) for size in (sums, stats)
        )

    def _measured(self, shape: tuple[int, int], tile: TileShape, multiprocessor: Multiprocessor) -> TileShape:
        """``tile`` with the programs that a multiprocessor holds at once of its kernels for layers of this shape, the
        largest of which counts. Compiles them: how many registers they have depends on Triton and on the device."""
        found = []
        for layer in [each for each in self._every_kind() if self._kinds[each].shape == shape]:
            kernel = self._launch_nothing(layer, tile)
            found.append(multiprocessor.programs(kernel.n_regs, kernel.metadata.shared, tile.warps))
        return replace(tile, programs=min(found))

    # --- plans ------------------------------------------------------------------------------------------------------

    def plan(self, geometry: BatchGeometry) -> TritonPlan:
        """A plan for `attend` of this step, with one asynchronous copy to the device."""
        capacity, sections = self._draft(geometry, (), range(geometry.spans))
        staging = Staging(self._device)
        layout = Layout(tuple((np.int32, size) for size in capacity.sizes))
        plan = self.bind(capacity, staging.open(layout))
        staging.send(layout, sections)
        return plan

    def draft(self, geometry: BatchGeometry) -> tuple[PlanCapacity, list[Int32s]]:
        """The capacity that this step needs, and the sections of its plan, which is for `attend_new`."""
        if self._prompts is None:
            return self._draft(geometry, (), range(geometry.spans))
        return self._draft(geometry, *prompt_runs(geometry, PROMPT_TOKENS))

    def _draft(
        self, geometry: BatchGeometry, prompts: tuple[PromptRun, ...], others: Sequence[int]
    ) -> tuple[PlanCapacity, list[Int32s]]:
        found = {kind: self._launches(geometry, others, kind) for kind in dict.fromkeys(self._kinds)}
        capacity = {
            kind: [LaunchCapacity.of(tile, launch) for tile, launch in launches] for kind, launches in found.items()
        }
        sections = sections_of([each for some in found.values() for _, each in some], geometry.blocks, prompts)
        return PlanCapacity(capacity, geometry.blocks.size, prompts), sections

    def reserve(self, spans: int, tokens: int, blocks: int) -> PlanCapacity:
        """The capacity for any step of at most ``spans`` spans of at most ``tokens`` tokens each, whose lengths need
        ``blocks`` blocks in all. A plan bound to it keeps its launches, as a CUDA graph needs.
        """
        capacity = {}
        for kind in dict.fromkeys(self._kinds):
            rows = tokens * kind.group
            tiling = self._tilings[kind.shape]
            tile, limits = tiling.tiles[at := tiling.place(rows)], tiling.limits[at]
            tiles = spans * -(-rows // tile.rows)
            merges = min(tiles, limits.merges)
            capacity[kind] = [LaunchCapacity(tile, tiles + limits.parts, merges, min(rows, tile.rows))]
        return PlanCapacity(capacity, blocks)

    def fill(self, capacity: PlanCapacity, geometry: BatchGeometry) -> list[Int32s]:
        """The sections of a reserved plan for this step. Raises ValueError if the step does not fit."""
        launches = []
        for kind, [reserved] in capacity.launches.items():
            tiling = self._tilings[kind.shape]
            limits = tiling.limits[tiling.tiles.index(reserved.tile)]
            launches.append(launch := cut(geometry, range(geometry.spans), kind, reserved.tile, limits))
            if not reserved.fits(needed := LaunchCapacity.of(reserved.tile, launch)):
                raise ValueError(f"the step needs {needed}, and its plan has {reserved} reserved")
        if geometry.blocks.size > capacity.blocks:
            raise ValueError(f"the step has {geometry.blocks.size} blocks, and its plan has {capacity.blocks} reserved")
        return sections_of(launches, geometry.blocks)

    def bind(self, capacity: PlanCapacity, sections: Sequence[Tensor]) -> TritonPlan:
        """The plan that reads ``sections`` (int32 on the device, of the sizes of ``capacity``, aligned to records).
        Sections of zeros make a plan without work."""
        records = iter(sections)
        work = {
            kind: [
                BoundLaunch(each.tile, each.merged_rows, *(next(records).view(-1, FIELDS) for _ in range(2)))
                for each in launches
            ]
            for kind, launches in capacity.launches.items()
        }
        prompts = [(run, next(records)) for run in capacity.prompts]
        return TritonPlan(next(records), work, prompts)

    def warm_up(self) -> None:
        """Compile all kernels that a step may launch, so that no step waits for a compiler (seconds each)."""
        for layer in self._every_kind():
            for tile in self._tilings[self._kinds[layer].shape].tiles:
                self._launch_nothing(layer, tile)

    def _launch_nothing(self, layer: int, tile: TileShape) -> Any:
        """Launch programs without work. Returns the compiled kernel of attention."""
        spec, device = self._specs[layer], self._device
        record = torch.zeros((1, FIELDS), dtype=torch.int32, device=device)
        query = torch.empty((1, spec.heads, spec.head_dim), dtype=self._dtype, device=device)
        return self._launch(layer, query, query, BoundLaunch(tile, 1, record, record), record)

    def _every_kind(self) -> list[int]:
        """A layer of each kind that Triton compiles kernels for."""
        places = [tuple([each.data_ptr() % 16 for each in pair]) for pair in zip(self._keys, self._values, strict=True)]
        return list({kind: layer for layer, kind in enumerate(zip(self._specs, places, strict=True))}.values())

    def _launches(
        self, geometry: BatchGeometry, spans: Sequence[int], kind: LayerKind
    ) -> list[tuple[TileShape, Launch]]:
        """The launches of ``spans`` that take the same tile shape, in the order of the shapes."""
        tiling = self._tilings[kind.shape]
        of_tile: list[list[int]] = [[] for _ in tiling.tiles]
        starts, lengths = geometry.starts.tolist(), geometry.lengths.tolist()
        for span in spans:
            of_tile[tiling.place((lengths[span] - starts[span]) * kind.group)].append(span)
        kinds = zip(of_tile, tiling.tiles, tiling.limits, strict=True)
        return [(tile, cut(geometry, some, kind, tile, limits)) for some, tile, limits in kinds if some]

    # --- the layers -------------------------------------------------------------------------------------------------

    def rows(self, layer: int, slots: Tensor) -> CacheRows:
        scales = self._scales[layer] if self._quantized else None
        return CacheRows(self._keys[layer], self._values[layer], slots, scales)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        place_heads(None, key, value, into=self.rows(layer, slots))

    def attend(self, layer: int, query: Tensor, plan: TritonPlan) -> Tensor:
        """Causal attention of ``query`` [T, heads, head_dim]; see `AttentionBackend`. Rows that the plan's spans do not
        own are not written."""
        if query.stride(-1) != 1:
            query = query.contiguous()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for work in plan.work[self._kinds[layer]]:
            self._launch(layer, query, output, work, plan.tables)
        return output

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: TritonPlan) -> Tensor:
        """As `attend`, with the step's own K and V; prompts in the plan need no others."""
        output = self.attend(layer, query, plan)
        for run, ends in plan.prompts:
            assert self._prompts is not None  # noqa: S101 - `draft` looked
            own = slice(run.first, run.first + run.ends[-1])
            heads = query[own], key[own], value[own]
            self._prompts(output[own], heads, ends, run.longest, self._specs[layer])
        return output

    def _launch(self, layer: int, query: Tensor, output: Tensor, work: BoundLaunch, tables: Tensor) -> Any:
        """Attention of the tiles of ``work``. Returns the compiled kernel."""
        spec, key, value, tile = self._specs[layer], self._keys[layer], self._values[layer], work.tile
        factor, cap = _exponent(spec)
        sinks = self._sinks[layer]
        behind = self._stats if sinks is None else sinks  # not read if there are none
        common = {
            "KV_HEADS": spec.kv_heads,
            "GROUP": spec.heads // spec.kv_heads,
            "HEAD_DIM": spec.head_dim,
            "PADDED_DIM": padded_dim(spec.head_dim),
            "HAS_SINKS": sinks is not None,
        }
        kernel = attend_kernel[(len(work.items) * spec.kv_heads,)](
            query,
            key,
            value,
            *self._scales[layer],
            behind,
            output,
            self._sums,
            self._stats,
            work.items,
            tables,
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
            QUANTIZED=self._quantized,
            PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if len(work.merges):
            merge_kernel[(work.merged_rows, spec.kv_heads, len(work.merges))](
                output,
                self._sums,
                self._stats,
                behind,
                work.merges,
                **common,
                ROWS=tile.rows,
                PARTS=MERGED_AT_ONCE,
            )
        return kernel


def _exponent(spec: AttentionSpec) -> tuple[float, float]:
    """``(factor, cap)`` of the kernel, which wants exponents of 2: without a soft cap ``factor`` times a dot product is
    one; with a cap, ``factor`` times it is twice the tanh's argument, and ``cap`` times the tanh is one."""
    if spec.softcap is None:
        return spec.scale * LOG2_E, 0.0
    return 2.0 * spec.scale / spec.softcap * LOG2_E, spec.softcap * LOG2_E


def _device_facts(device: torch.device) -> tuple[int, int, Multiprocessor | None]:
    """The number of multiprocessors, the bytes of shared memory that a program may use, and what a multiprocessor's
    programs share; for the interpreter a small device, whose kernels are not compiled."""
    if device.type != "cuda":
        return 4, 99 << 10, None
    properties: Any = torch.cuda.get_device_properties(device)
    guaranteed = properties.shared_memory_per_block  # without the opt-in that triton takes
    program = getattr(properties, "shared_memory_per_block_optin", guaranteed)
    shared = getattr(properties, "shared_memory_per_multiprocessor", program + 1024)
    multiprocessor = Multiprocessor(shared, properties.max_threads_per_multi_processor)
    return properties.multi_processor_count, program, multiprocessor
