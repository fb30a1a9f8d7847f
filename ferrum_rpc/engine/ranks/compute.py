"""What the runner of a model that ranks share computes with: it tells the others, and does rank 0's own part.

The cache's books live with the runner, so blocks and slots are the same numbers on every rank, and all that the others
need of a step is its tokens and its geometry. Rows are wanted of the last stage: where that is this rank, as ever;
else they come when they are there, and up to so many steps are under way as there are stages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.attention.backend import AttentionBackend
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.core import Rows, Sample, Span, TokenArray
from ferrum_rpc.engine.compute import Compute, packed_tokens
from ferrum_rpc.engine.ranks.leader import LOOK_EVERY_S, Ranks
from ferrum_rpc.kv.store import CacheSpec, KvStore, Saved
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.sampling.parted import Part
from ferrum_rpc.sampling.rows import Request
from ferrum_rpc.sampling.transfer import Mark

Bytes = npt.NDArray[np.uint8]


class RankedCompute(Compute):
    """``shard`` is this rank's part, ``part`` that of the vocabulary; ``tokens_of``: see `Compute.select`."""

    look_every_s = LOOK_EVERY_S

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        ranks: Ranks,
        shard: Shard,
        tokens_of: Callable[[int], TokenArray],
        *,
        part: Part | None,
        loras: Loras | None = None,
    ) -> None:
        super().__init__(model, attention, loras, part)
        self.late = self.in_stages = shard.stages > 1
        self._ranks, self._tokens_of = ranks, tokens_of
        self._others = range(1, shard.ranks * shard.stages)
        self._wanted: tuple[list[Request], list[int], list[int]] = [], [], []
        self._serial = 0
        first = (shard.stages - 1) * shard.ranks
        self._last_stage = range(max(1, first), first + shard.ranks)
        self._awaited: Awaited | None = None

    @property
    def others(self) -> list[int]:
        """The processes of the other ranks, in their order."""
        return self._ranks.processes

    def forward(self, spans: Sequence[Span], geometry: BatchGeometry) -> Tensor:
        """Also tells the others which rows will be wanted: a second message would be waited for."""
        packed, adapted = packed_tokens(spans), self.adapted_rows(spans)
        requests, wanted, drafts = self.requests(spans, self._tokens_of)
        requests = [*map(_seeded, requests)]
        self._wanted = requests, wanted, drafts
        if self.late and requests:
            first = self._last_stage.start
            step = packed, geometry, requests, adapted
            [self._serial] = self._ranks.order("step", *step, to=[first])
            self._ranks.tell("step", *step, to=[each for each in self._others if each != first])
        else:
            self._ranks.tell("step", packed, geometry, requests, adapted)
        return self.run(packed, geometry, self.adapters_at(adapted, len(packed)))

    def select(
        self, spans: Sequence[Span], hidden: Tensor, tokens_of: Callable[[int], TokenArray]
    ) -> tuple[list[Rows | None], list[int]]:
        requests, wanted, drafts = self._wanted
        rows: list[Rows | None] = [None] * len(spans)
        if requests and self.late:
            self._awaited = Awaited(self._ranks, self._serial, wanted, rows)
        elif requests:
            for index, answer in zip(wanted, self.rows(hidden, requests), strict=True):
                rows[index] = answer
        return rows, drafts

    def mark(self) -> Mark:
        awaited, self._awaited = self._awaited, None
        return super().mark() if awaited is None else awaited

    def recover(self) -> None:
        self._awaited = None
        self._ranks.recover()

    def check_alive(self) -> None:
        self._ranks.check_alive()

    def close(self) -> None:
        self._ranks.close()


def _seeded(request: Request) -> Request:
    """Where any seed will do, all ranks have the same."""
    kind = request.kind
    if not isinstance(kind, Sample) or kind.seed is not None:
        return request
    return request._replace(kind=replace(kind, seed=random.getrandbits(64)))


class Awaited(Mark):
    """The rows of a step, of which the last stage answers those that are ``wanted``."""

    __slots__ = ("_ranks", "_rows", "_serial", "_wanted")

    def __init__(self, ranks: Ranks, serial: int, wanted: Sequence[int], rows: list[Rows | None]) -> None:
        super().__init__(torch.device("cpu"))
        self._ranks, self._serial, self._wanted, self._rows = ranks, serial, wanted, rows

    def passed(self) -> bool:
        return self._ranks.answered([self._serial])

    def wait(self) -> None:
        [answers] = self._ranks.collect([self._serial])
        for index, answer in zip(self._wanted, answers, strict=True):
            self._rows[index] = answer


class RankedStore(KvStore):
    """Rank 0's part of the cache. What is done to blocks is done on all ranks, and what is read is of all ranks: a
    layer's heads in their order, as if one had them, and a block's bytes rank by rank. ``layers`` of all stages have
    the same spec; there are ``count`` of them, and ``kv_heads`` heads on all ranks together."""

    def __init__(
        self,
        layers: Sequence[CacheSpec],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        ranks: Ranks,
        shard: Shard,
        count: int,
        kv_heads: int,
    ) -> None:
        super().__init__(layers, num_blocks, block_size, device)
        self._ranks, self._shard, self._kv_heads = ranks, shard, kv_heads
        self._stages = [Shard(0, shard.ranks, stage, shard.stages).layers(count) for stage in range(shard.stages)]
        self._numbers = 0
        self._block_bytes = [super().block_bytes, *ranks.ask("equip", num_blocks, block_size)]

    def copy_blocks(self, pairs: Tensor) -> None:
        self._ranks.tell("copy_blocks", pairs.numpy())
        super().copy_blocks(pairs)

    def save(self, slots: Tensor) -> Saved:
        self._numbers += 1
        self._ranks.tell("save", self._numbers, slots.numpy())
        saved = super().save(slots)
        saved.number = self._numbers
        return saved

    def restore(self, saved: Saved) -> None:
        self._ranks.tell("restore", saved.number)
        super().restore(saved)

    def read(self, slots: Tensor, layer: int, width: int) -> tuple[Bytes, ...]:
        layer, owners = self._owners(layer)
        others = self._ranks.order("read", slots.numpy(), layer, width, to=[each for each in owners if each])
        found = [super().read(slots, layer, width)] if 0 in owners else []
        found += self._ranks.collect(others)
        heads = len(slots), self._kv_heads // len(owners), -1
        return tuple(
            np.concatenate([part.reshape(heads) for part in parts], 1).reshape(-1) for parts in zip(*found, strict=True)
        )

    def write(self, slots: Tensor, layer: int, width: int, parts: Sequence[Any]) -> None:
        layer, owners = self._owners(layer)
        each = max(1, self._kv_heads // self._shard.ranks)
        heads = [np.frombuffer(part, np.uint8).reshape(len(slots), self._kv_heads, -1) for part in parts]
        first = owners[0] - owners[0] % self._shard.ranks
        for rank in range(self._shard.ranks):
            low = rank * self._kv_heads // self._shard.ranks
            own = [part[:, low : low + each].tobytes() for part in heads]
            if first + rank == 0:
                super().write(slots, layer, width, own)
            else:
                self._ranks.tell("write", slots.numpy(), layer, width, own, to=[first + rank])

    @property
    def block_bytes(self) -> int:
        return sum(self._block_bytes)

    def read_block(self, block: int) -> Bytes:
        others = self._ranks.order("read_block", block)
        return np.concatenate([super().read_block(block), *self._ranks.collect(others)])

    def write_block(self, block: int, content: bytes) -> None:
        ends = np.cumsum(self._block_bytes).tolist()
        for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if number == 0:
                super().write_block(block, content[first:end])
            else:
                self._ranks.tell("write_block", block, content[first:end], to=[number])

    def _owners(self, layer: int) -> tuple[int, list[int]]:
        """Which layer of its stage a layer is, and ranks that have all of its heads between them, each once."""
        ranks = self._shard.ranks
        stage = next(index for index, layers in enumerate(self._stages) if layer in layers)
        same = max(1, ranks // self._kv_heads)  # neighbours that have the same head
        return layer - self._stages[stage].start, list(range(stage * ranks, (stage + 1) * ranks, same))
