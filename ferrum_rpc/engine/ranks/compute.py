"""The compute of a model shared by ranks: sends each step to the other ranks, and computes rank 0's part.

The runner has the accounting of the cache, so blocks and slots have the same numbers on every rank, and the other ranks
need of a step only its tokens, its geometry and the requested rows. Masks are sent to each rank when they are
registered, and a step has their ids; those of grammars are sent with it. The last stage has the rows: those of this
rank if it is in that stage, else they are received, and as many steps may be in flight as there are stages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.attention.geometry import BatchGeometry, Int64Array
from ferrum_rpc.attention.recurrent_steps import RecurrentStep
from ferrum_rpc.core import RankState, Rows, Sample, Span
from ferrum_rpc.distributed.group import GroupAborted
from ferrum_rpc.engine.compute import Compute, CountsOf, TokensBehind, packed_tokens
from ferrum_rpc.engine.cuda.select import record_on_ranks
from ferrum_rpc.engine.ranks.leader import LOOK_EVERY_S, Answer, Ranks
from ferrum_rpc.engine.ranks.setup import Groups
from ferrum_rpc.engine.ranks.states import numbers_of
from ferrum_rpc.errors import DeviceLost, ExecutorError
from ferrum_rpc.kv.store import BlockContent, CacheSpec, KvStore, Saved
from ferrum_rpc.models.base import StepAdapters
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.sampling.rows import RowRequest
from ferrum_rpc.sampling.transfer import Marker

Bytes = npt.NDArray[np.uint8]


class RankedCompute(Compute):
    """``own`` computes this rank's part, which is ``shard``; ``counts_of``: `KvManager.counts`."""

    look_every_s = LOOK_EVERY_S
    masks_first = True

    def __init__(
        self,
        own: Compute,
        ranks: Ranks,
        shard: Shard,
        counts_of: CountsOf,
    ) -> None:
        super().__init__(own.model, own.attention, own.loras, own.part)
        self.late = self.in_stages = shard.stages > 1
        self._own, self._ranks, self._counts_of = own, ranks, counts_of
        self._recorded: tuple[int, int, int] | None = None
        self._wanted: tuple[list[RowRequest], list[int], list[int]] = [], [], []
        first = (shard.stages - 1) * shard.ranks
        self._first_of_last_stage = max(1, first)
        self._awaited: RemoteRows | None = None

    @property
    def others(self) -> list[int]:
        """The processes of the other ranks, in rank order."""
        return self._ranks.processes

    def record(self, spans: int, blocks: int, verify_tokens: int) -> None:
        """Capture steps on all ranks at once, with their collectives; see `record_on_ranks`. Raises InvalidRequest if
        a rank cannot."""
        self._recorded = limits = spans, blocks, verify_tokens
        others = self._ranks.order("record", *limits)
        try:
            record_on_ranks(self._own, *limits)
        except GroupAborted:
            self._ranks.collect(others)  # raises another rank's error
            raise
        except BaseException:
            self._ranks.abort()
            raise
        self._ranks.collect(others)

    def forward(
        self,
        spans: Sequence[Span],
        geometry: BatchGeometry,
        behind: TokensBehind | None = None,
        states: RecurrentStep | None = None,
    ) -> Tensor:
        """Also sends which rows are requested, which saves a second message. No tokens are ``behind``: the other ranks
        receive theirs from the host."""
        packed, adapted = packed_tokens(spans), self.adapted_rows(spans)
        requests, wanted, drafts = self.requests(spans, self._counts_of)
        requests = [*map(_seeded, requests)]
        self._wanted = requests, wanted, drafts
        step = packed, geometry, requests, adapted, None if states is None else numbers_of(states)
        if self.late:  # without rows, too: a later stage may fail
            [self._answer] = self._ranks.order("step", *step, answering=(self._first_of_last_stage,))
        else:
            self._ranks.send("step", *step)
        return self.run(packed, geometry, self.adapters_at(adapted, len(packed)), states=states)

    def run(
        self,
        packed: Int64Array,
        geometry: BatchGeometry,
        adapters: StepAdapters | None = None,
        behind: TokensBehind | None = None,
        states: RecurrentStep | None = None,
    ) -> Tensor:
        return self._own.run(packed, geometry, adapters, behind, states)

    def select(self, spans: Sequence[Span], hidden: Tensor, counts_of: CountsOf) -> tuple[list[Rows | None], list[int]]:
        requests, wanted, drafts = self._wanted
        rows: list[Rows | None] = [None] * len(spans)
        if self.late:
            self._awaited = RemoteRows(self._ranks, self._answer, wanted, rows)
        elif requests:
            for index, answer in zip(wanted, self._own.rows(hidden, requests), strict=True):
                rows[index] = answer
        return rows, drafts

    def mark(self) -> Marker:
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            return awaited
        assert self._ranks.groups is not None  # noqa: S101 - there was a step
        return GroupMark(self.model.device, self._ranks.groups)

    def recover(self) -> None:
        """Restart the ranks after a failure. Graphs with collectives refer to the old groups and are recorded anew. The
        other ranks get all masks, because they may have missed a change."""
        self._awaited = None
        self._ranks.abort()
        self._own.forget_graphs()
        self._ranks.recover(self._own.masks.all())
        super().recover()  # behind the abort: before, the device may wait for other ranks
        if self._recorded is not None:
            try:
                self.record(*self._recorded)
            except (GroupAborted, ExecutorError) as error:
                self.check_alive()
                raise DeviceLost(f"the ranks could not restart: {error}") from error

    def change_masks(self, added: Sequence[tuple[bytes, bytes]], dropped: Sequence[bytes]) -> None:
        self._own.change_masks(added, dropped)
        self._ranks.send("change_masks", added, dropped)

    def to_device(self, *arrays: Int64Array) -> list[Tensor]:
        return self._own.to_device(*arrays)

    def check_alive(self) -> None:
        self._ranks.check_alive()

    def ranks(self) -> list[RankState]:
        return [*super().ranks(), *self._ranks.states()]

    def close(self) -> None:
        self._ranks.close()


def _seeded(request: RowRequest) -> RowRequest:
    """Rows without a seed get one that is the same on all ranks."""
    kind = request.kind
    if not isinstance(kind, Sample) or kind.seed is not None:
        return request
    return request._replace(kind=replace(kind, seed=random.getrandbits(64)))


class GroupMark(Marker):
    """The end of a step on this rank's device. Waiting for it raises if ranks aborted the step meanwhile."""

    __slots__ = ("_groups",)

    def __init__(self, device: torch.device, groups: Groups) -> None:
        super().__init__(device)
        self._groups = groups

    def wait(self) -> None:
        super().wait()
        self._groups.check()


class RemoteRows(Marker):
    """The end of a step in the last stage, and its ``wanted`` rows, received from there."""

    __slots__ = ("_answer", "_ranks", "_rows", "_wanted")

    def __init__(self, ranks: Ranks, answer: Answer, wanted: Sequence[int], rows: list[Rows | None]) -> None:
        super().__init__(torch.device("cpu"))
        self._ranks, self._answer, self._wanted, self._rows = ranks, answer, wanted, rows

    def passed(self) -> bool:
        return self._answer.done()

    def wait(self) -> None:
        [answers] = self._ranks.collect([self._answer])
        for index, answer in zip(self._wanted, answers or (), strict=True):
            self._rows[index] = answer


class RankedStore(KvStore):
    """Rank 0's part of the cache. Operations on blocks run on all ranks, and reads combine all ranks: a layer's heads
    in their order, as of a single rank, and a block's bytes rank by rank. ``kv_heads``: of each layer of
    all stages, the heads on all ranks together. ``slots``: those for recurrent states that each rank has besides."""

    def __init__(
        self,
        layers: Sequence[CacheSpec],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        ranks: Ranks,
        shard: Shard,
        kv_heads: Sequence[int],
        slots: int = 0,
    ) -> None:
        super().__init__(layers, num_blocks, block_size, device)
        self._ranks, self._shard, self._kv_heads = ranks, shard, kv_heads
        stages = [Shard(0, shard.ranks, stage, shard.stages) for stage in range(shard.stages)]
        self._stages = [each.layers(len(kv_heads)) for each in stages]
        self._numbers = 0
        self._block_bytes = [self.own_block_bytes, *ranks.ask("equip", num_blocks, block_size, slots)]

    def copy_blocks(self, pairs: Int64Array) -> None:
        self._ranks.send("cache", "copy_blocks", pairs)
        super().copy_blocks(pairs)

    def save(self, slots: Int64Array) -> Saved:
        self._numbers += 1
        self._ranks.send("save", self._numbers, slots)
        saved = super().save(slots)
        saved.number = self._numbers
        return saved

    def restore(self, saved: Saved) -> None:
        self._ranks.send("restore", saved.number)
        super().restore(saved)

    def read(self, slots: Int64Array, layer: int, width: int) -> tuple[Bytes, ...]:
        kv_heads = self._kv_heads[layer]
        layer, owners = self._owners(layer)
        others = self._ranks.order("cache", "read", slots, layer, width, to=[each for each in owners if each])
        found = [super().read(slots, layer, width)] if 0 in owners else []
        found += self._ranks.collect(others)
        heads = len(slots), kv_heads // len(owners), -1
        return tuple(
            np.concatenate([part.reshape(heads) for part in parts], 1).reshape(-1) for parts in zip(*found, strict=True)
        )

    def write(self, slots: Int64Array, layer: int, width: int, parts: Sequence[Any]) -> None:
        kv_heads = self._kv_heads[layer]
        layer, owners = self._owners(layer)
        each = max(1, kv_heads // self._shard.ranks)
        heads = [np.frombuffer(part, np.uint8).reshape(len(slots), kv_heads, -1) for part in parts]
        first = owners[0] - owners[0] % self._shard.ranks
        for rank in range(self._shard.ranks):
            low = rank * kv_heads // self._shard.ranks
            own = [part[:, low : low + each].tobytes() for part in heads]
            if first + rank == 0:
                super().write(slots, layer, width, own)
            else:
                self._ranks.send("cache", "write", slots, layer, width, own, to=[first + rank])

    @property
    def block_bytes(self) -> int:
        return sum(self._block_bytes)

    def read_block(self, block: int) -> Bytes:
        others = self._ranks.order("cache", "read_block", block)
        return np.concatenate([super().read_block(block), *self._ranks.collect(others)])

    def read_blocks(self, blocks: Sequence[int]) -> list[BlockContent]:
        """One by one, and there when this returns: ranks wait for each other."""
        return [partial(np.asarray, self.read_block(block)) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        for block, content in zip(blocks, contents, strict=True):
            self.write_block(block, content)

    def write_block(self, block: int, content: bytes) -> None:
        ends = np.cumsum(self._block_bytes).tolist()
        for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if number == 0:
                super().write_block(block, content[first:end])
            else:
                self._ranks.send("cache", "write_block", block, content[first:end], to=[number])

    def _owners(self, layer: int) -> tuple[int, list[int]]:
        """Which layer of its stage a layer is, and ranks that have all of its heads between them, each once."""
        ranks = self._shard.ranks
        stage = next(index for index, layers in enumerate(self._stages) if layer in layers)
        same = max(1, ranks // self._kv_heads[layer])  # neighbouring ranks with the same head
        return layer - self._stages[stage].start, list(range(stage * ranks, (stage + 1) * ranks, same))
