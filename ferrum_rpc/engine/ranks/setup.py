"""What every rank makes of the same settings, rank 0 too: its part of the model, its groups, its part of the cache."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ferrum_rpc.attention.backend import AttentionBackend
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.distributed.gloo import LOOPBACK, GlooGroup
from ferrum_rpc.distributed.group import Group, GroupAborted
from ferrum_rpc.distributed.nccl import NcclGroup
from ferrum_rpc.distributed.staged import StagedGroup
from ferrum_rpc.engine.assembly.choose import Choices
from ferrum_rpc.engine.ranks.messages import JOIN_S
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.kv.store import KvStore
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.decoder import ParallelContext, PipelineLinks
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.sampling.vocab_parallel import VocabShard

SHARED_MEMORY: Final = "shared-memory"
GLOO: Final = "gloo"
NCCL: Final = "nccl"


@dataclass(frozen=True, slots=True)
class Setup:
    """What rank 0 tells rank ``number``. ``transport`` carries rows (`SHARED_MEMORY`, `GLOO` or `NCCL`, ``reason`` says
    why), ``host`` what is told of them from host to host (one of the former two); ``address``: by which others reach
    this rank, for gloo. ``neighbours``: how many ranks are on its machine, itself among them; ``seat``: which of these
    it is; ``sharers``: how many of all compute in the same memory, of a machine or of a GPU."""

    settings: ModelSettings
    number: int
    transport: str
    host: str
    reason: str
    address: str
    neighbours: int
    seat: int
    sharers: int

    @property
    def shard(self) -> Shard:
        """Its part."""
        return Shard.at(self.number, self.settings.tensor_parallel, self.settings.pipeline_parallel)

    @property
    def recordable(self) -> bool:
        """Whether steps with what ranks say in them can be CUDA graphs: nothing of it passes through a host."""
        return self.transport == NCCL

    @property
    def threads(self) -> int:
        """Those that compute in this process: the machine's are shared."""
        return self.settings.threads or max(1, torch.get_num_threads() // self.neighbours)


class Groups:
    """Those of one rank: of ``all`` ranks, and of those that share its layers, which may be the same, or none. The
    latter have another for what lies on the host, which may be the same too."""

    def __init__(self, setup: Setup, store: Store) -> None:
        shard, size = setup.shard, setup.settings.ranks
        store.set_timeout(datetime.timedelta(seconds=JOIN_S))
        self.all = _join(setup, PrefixStore("all", store), setup.number, size)
        self.stage: Group | None = None
        self._each: list[Group] = [self.all]
        if shard.stages == 1:
            self.stage = self.all
        elif shard.ranks > 1:
            self.stage = _join(setup, PrefixStore(f"stage{shard.stage}", store), shard.rank, shard.ranks)
            self._each.append(self.stage)
        self._host = self.stage.host if isinstance(self.stage, StagedGroup) else self.stage
        if setup.transport == NCCL and shard.ranks > 1:
            self._host = _join_hosts(setup, PrefixStore(f"hosts{shard.stage}", store), shard.rank, shard.ranks)
            self._each.append(self._host)

    def parallel(self, setup: Setup) -> ParallelContext:
        """Where the rank stands."""
        shard = setup.shard
        pipe = None
        if shard.stages > 1:
            before, behind = setup.number - shard.ranks, setup.number + shard.ranks
            pipe = PipelineLinks(self.all, None if shard.first else before, None if shard.last else behind)
        return ParallelContext(shard, self.stage, pipe)

    def part(self, setup: Setup, vocabulary: int) -> VocabShard | None:
        """Which of so many tokens the rank has; None: all, or no head."""
        shard = setup.shard
        if self._host is None or shard.ranks == 1 or not shard.last:
            return None
        return VocabShard(self._host, shard.token_width(vocabulary), vocabulary)

    def each(self) -> list[Group]:
        """Every one once."""
        return self._each

    def check(self) -> None:
        """Raise where what was queued on the device may not have been carried out; see `Group.check`."""
        for group in self.each():
            group.check()

    def abort(self) -> None:
        """End what waits in any."""
        for group in self.each():
            group.abort()

    def renew(self, epoch: int) -> None:
        """Begin anew, as all ranks do."""
        for group in self.each():
            group.renew(epoch)

    def close(self) -> None:
        """They are not needed any more."""
        for group in self.each():
            group.close()


def _join(setup: Setup, store: Store, rank: int, size: int) -> Group:
    """A group for tensors where the model is. Raises InvalidRequest where NCCL does not work here."""
    device = torch.device(setup.settings.device)
    if setup.transport == NCCL:
        try:
            return NcclGroup(store, rank, size, device)
        except GroupAborted as error:
            message = f"{error}; --rank-transport gloo works without NCCL, more slowly; NCCL_DEBUG=INFO logs more"
            raise InvalidRequest(message, field="rank_transport") from error
    host = _join_hosts(setup, store, rank, size)
    return host if device.type == "cpu" else StagedGroup(host, device)


def _join_hosts(setup: Setup, store: Store, rank: int, size: int) -> Group:
    if setup.host == SHARED_MEMORY:
        return shared_memory.join(store, rank, size)
    return GlooGroup(store, rank, size, host=setup.address or LOOPBACK)


def make_cache(
    choices: Choices, model: Model, blocks: int, block_size: int, make: Callable[..., KvStore] = KvStore
) -> tuple[KvStore, AttentionBackend]:
    """A cache of so many ``blocks``, the null block among them, and what reads and writes it."""
    store = make(choices.cache, blocks, block_size, choices.device)
    _, factory = choices.attention
    return store, factory(model.attention_specs, store.keys, store.values, sinks=model.sinks)
