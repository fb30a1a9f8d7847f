"""What every rank, including rank 0, makes from the same settings: its part of the model, its groups and its cache."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.distributed import PrefixStore, Store

from ferrum_rpc.attention.backend import AttentionBackend
from ferrum_rpc.attention.recurrent_steps import RecurrentStore
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
CUDA: Final[Literal["cuda"]] = "cuda"


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup that rank 0 sends to rank ``number``. ``transport`` carries rows (`SHARED_MEMORY`, `GLOO` or `NCCL`,
    for this ``reason``), ``host`` the data between hosts (one of the former two); ``address``: this rank's address for
    others, for gloo. ``neighbours``: the number of ranks on its machine, including itself; ``seat``: its index among
    these; ``sharers``: the number of ranks that compute in the same memory, of a machine or of a GPU."""

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
    def device(self) -> torch.device:
        """The device of its seat, with an index: the current device of a thread is not always that of the rank."""
        kind = self.settings.device
        return torch.device(kind, self.seat % torch.cuda.device_count()) if kind == CUDA else torch.device(kind)

    @property
    def recordable(self) -> bool:
        """Whether steps with collectives can be CUDA graphs, because none of them passes through a host."""
        return self.transport == NCCL

    @property
    def threads(self) -> int:
        """The compute threads of this process: its share of the machine's."""
        return self.settings.threads or max(1, torch.get_num_threads() // self.neighbours)


class Groups:
    """The groups of one rank: of ``all`` ranks, and of the ranks that share its layers, which may be the same group, or
    none. The latter have another group for data on the host, which may be the same too."""

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
        """The parallel context of the rank."""
        shard = setup.shard
        pipe = None
        if shard.stages > 1:
            before, behind = setup.number - shard.ranks, setup.number + shard.ranks
            pipe = PipelineLinks(self.all, None if shard.first else before, None if shard.last else behind)
        return ParallelContext(shard, self.stage, pipe)

    def part(self, setup: Setup, vocabulary: int) -> VocabShard | None:
        """The rank's shard of so many tokens; None: all, or no head."""
        shard = setup.shard
        if self._host is None or shard.ranks == 1 or not shard.last:
            return None
        return VocabShard(self._host, shard.token_width(vocabulary), vocabulary)

    def each(self) -> list[Group]:
        """Every group once."""
        return self._each

    def check(self) -> None:
        """Raise if queued work of the device may not have been carried out; see `Group.check`."""
        for group in self.each():
            group.check()

    def abort(self) -> None:
        """Abort the waits in all groups."""
        for group in self.each():
            group.abort()

    def renew(self, epoch: int) -> None:
        """Renew the groups, together with all ranks."""
        for group in self.each():
            group.renew(epoch)

    def close(self) -> None:
        """Close the groups."""
        for group in self.each():
            group.close()


def _join(setup: Setup, store: Store, rank: int, size: int) -> Group:
    """A group for tensors on the model's device. Raises InvalidRequest if NCCL does not work here."""
    device = setup.device
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
    """A cache of so many ``blocks``, including the null block, and the backend that reads and writes it."""
    shared = {"sources": choices.facts.sources} if choices.facts.sources else {}
    store = make(choices.cache, blocks, block_size, choices.device, **shared)
    _, factory = choices.attention
    return store, factory(model.attention_specs, store.keys, store.values, sinks=model.sinks)


def make_slots(
    choices: Choices, slots: int, make: Callable[..., RecurrentStore] = RecurrentStore
) -> RecurrentStore | None:
    """So many slots for the states of its recurrent layers; None: there are no such layers."""
    layers = choices.facts.recurrent
    if not layers:
        return None
    dtype, device = choices.facts.dtype, choices.device
    return make(layers[0], len(layers), slots, dtype=dtype, device=device, kernels=choices.kernels)
