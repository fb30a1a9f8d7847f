"""A model over a paged cache, without the engine's books: steps go straight to `Compute`, with graphs or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.eight_bits import row_width
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.core import Greedy, OutputSpec, Positions, Span
from ferrum_rpc.engine.compute import Compute, TokensBehind
from ferrum_rpc.engine.cuda.compute import StagedCompute
from ferrum_rpc.kv.store import CacheSpec, KvStore
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.identity import IdentityConfig, IdentityModel
from tests.support.poison import fill_slots

BLOCK_SIZE = 4
BLOCKS = 200
PER_SEQUENCE = 12
GREEDY = OutputSpec(Positions.LAST, Greedy())


class Reserved:
    """How large a plan of `PlannedTorch` is, and the step that it was filled with last."""

    def __init__(self, blocks: int) -> None:
        self.sizes = [blocks]
        self.rows, self.plan = 0, None


class PlannedTorch(TorchPagedAttention):
    """The oracle with plans of a fixed size, as far as a `tests.support.rerun.Rerun` needs them: filled on the host."""

    name = "planned torch"

    def draft(self, geometry: BatchGeometry) -> tuple[Reserved, list[Any]]:
        room = self.reserve(0, 0, geometry.blocks.size)
        return room, self.fill(room, geometry)

    def reserve(self, spans: int, tokens: int, blocks: int) -> Reserved:
        del spans, tokens
        return Reserved(blocks)

    def fill(self, room: Reserved, geometry: BatchGeometry) -> list[Any]:
        if geometry.blocks.size > room.sizes[0]:
            raise ValueError("no room")
        room.rows, room.plan = geometry.tokens, super().plan(geometry)
        return [geometry.blocks]

    def bind(self, room: Reserved, sections: Sequence[Tensor]) -> Reserved:
        assert [len(each) for each in sections] == room.sizes
        return room

    def warm_up(self) -> None:
        pass

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        del key, value
        return self.attend(layer, query, plan)

    def rows(self, layer: int, slots: Tensor) -> Any:
        raise NotImplementedError("the identity model writes nothing itself")

    def attend(self, layer: int, query: Tensor, plan: Any) -> Tensor:
        if not isinstance(plan, Reserved):
            return super().attend(layer, query, plan)
        output = torch.full_like(query, float("nan"))  # what nobody computes may hold anything
        if plan.plan is not None:
            self.attend_into(layer, query[: plan.rows], plan.plan, output[: plan.rows])
        return output


class PagedModel:
    """``compute`` over a cache of its own, in which every slot that was never written holds NaN."""

    def __init__(
        self,
        backend: Any,
        device: torch.device,
        model: Model | None = None,
        *,
        staged: bool = True,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = IdentityModel(IdentityConfig(vocab_size=64, kv_heads=1), device) if model is None else model
        specs = self.model.attention_specs
        kv_dtype = kv_dtype or self.model.dtype
        layers = [CacheSpec(spec.kv_heads, row_width(spec.head_dim, kv_dtype), kv_dtype) for spec in specs]
        self.store = KvStore(layers, BLOCKS, BLOCK_SIZE, device)
        fill_slots(self.store, torch.arange(BLOCKS * BLOCK_SIZE))
        self.attention = backend(specs, self.store.keys, self.store.values)
        self.compute = StagedCompute(self.model, self.attention) if staged else Compute(self.model, self.attention)
        self.lengths: dict[int, int] = {}
        self.adapters: dict[int, int] = {}
        """Of sequences that have one."""

    def geometry(self, spans: Sequence[Span]) -> BatchGeometry:
        """Sequence s owns the blocks 1 + s * PER_SEQUENCE and on, in falling order."""
        first = [1 + span.sequence * PER_SEQUENCE for span in spans]
        tables = [np.arange(low + PER_SEQUENCE - 1, low - 1, -1, dtype=np.int32) for low in first]
        return BatchGeometry.build(
            BLOCK_SIZE, [span.start for span in spans], [len(span.tokens) for span in spans], tables
        )

    def step(self, *tokens: tuple[int, Sequence[int]], behind: TokensBehind | None = None) -> Tensor:
        """Hidden rows of ``(sequence, tokens)`` each, on the host. ``behind``: the tokens of the first of them."""
        spans = [
            Span(
                sequence,
                np.array(ids, dtype=np.int32),
                self.lengths.get(sequence, 0),
                GREEDY,
                adapter=self.adapters.get(sequence, 0),
            )
            for sequence, ids in tokens
        ]
        with torch.inference_mode():
            hidden = self.compute.forward(spans, self.geometry(spans), behind)
            found = hidden.clone().cpu()
        self.lengths |= {span.sequence: span.end for span in spans}
        return found

    def truncate(self, sequence: int, length: int) -> None:
        self.lengths[sequence] = length

    def cached(self) -> Tensor:
        """K and V of all layers but for the null block, NaN as zero."""
        layers = [torch.stack(each) for each in zip(self.store.keys, self.store.values, strict=True)]
        return torch.stack(layers)[:, :, 1:].nan_to_num(0.0).cpu()
