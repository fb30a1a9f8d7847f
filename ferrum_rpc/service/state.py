"""The state of the service floor: the process's life cycle, live sequences, recorded answers, counters.

The forward path and the cache operations share only this state. Everything here runs on the event loop, without locks;
the state of the model thread is read through snapshots, without waiting.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from ferrum_rpc.core import DeviceInfo, Limits, ModelInfo, PrefixUse, Pressure, named
from ferrum_rpc.engine.api import Engine, Operation
from ferrum_rpc.engine.commands import Command, Operations
from ferrum_rpc.errors import DeviceLost, Draining, ExecutorError, SequencesExhausted, Starting, StepFailed, counted
from ferrum_rpc.executor.v1.info_pb2 import (
    CAPABILITY_ADAPTERS,
    CAPABILITY_GRAMMAR,
    CAPABILITY_KV_TRANSPORT_NIXL,
    CAPABILITY_PARK,
)
from ferrum_rpc.failpoints import NO_FAILPOINTS, Failpoints
from ferrum_rpc.service.adapters import AdapterTable
from ferrum_rpc.service.grammars import GrammarTable
from ferrum_rpc.service.guard.slots import Slots
from ferrum_rpc.service.handles import HandleTable, gone
from ferrum_rpc.service.leases import LeaseTable
from ferrum_rpc.service.masks import MaskTable
from ferrum_rpc.service.meters import Direction, TransferMeter
from ferrum_rpc.service.nixl import Nixl
from ferrum_rpc.service.parked import ParkedFiles
from ferrum_rpc.service.peers import Peers
from ferrum_rpc.service.quotas import Quotas, Unread
from ferrum_rpc.service.records import (
    RETRY_AFTER_S,
    Account,
    Adapter,
    LeaseRecord,
    Resource,
    SequenceEnd,
    SequenceRecord,
)
from ferrum_rpc.service.replay import ReplayLog, scope_of
from ferrum_rpc.service.supervisor import Supervisor
from ferrum_rpc.wire.info import CAPABILITIES

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

RETRY_ELSEWHERE_S: Final = 1.0
"""What a refusal while starting or draining suggests to wait."""


class Lifecycle(enum.Enum):
    """Where the process stands. ``HUNG`` is only ever reported (`ServerState.condition`): it passes, and what was
    serving or draining goes on with that."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    HUNG = "hung"


@dataclass(slots=True)
class ServiceCounters:
    """Events since the start."""

    sequences_created: int = 0
    sequences_released: int = 0
    sequences_forked: int = 0
    sequences_parked: int = 0
    sequences_exported: int = 0
    sequences_imported: int = 0
    kv_exhausted: int = 0
    queue_full: int = 0
    tokens_truncated: int = 0
    adapter_tokens: int = 0
    leases_expired: int = 0
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys((ending.value for ending in SequenceEnd), 0))

    @property
    def sequences_expired(self) -> int:
        """Sequences that ended with their lease, or by their idle time."""
        return self.ended[SequenceEnd.EXPIRED.value] + self.ended[SequenceEnd.IDLE.value]


class ServerState:
    """One executor's state. Bound to the running event loop. ``engine`` runs the steps; it is set before the server
    takes calls, and may still be loading then."""

    engine: Engine

    def __init__(
        self,
        limits: Limits,
        failpoints: Failpoints = NO_FAILPOINTS,
        park_dir: Path | None = None,
        nixl: Nixl | None = None,
    ) -> None:
        self.limits = limits
        self.failpoints = failpoints
        self.supervisor = Supervisor()
        self.handles = HandleTable()
        self.quotas = Quotas(limits)
        self.leases = LeaseTable(limits, self.quotas, self.handles.instance_id)
        self.masks = MaskTable(limits, lambda work: self.engine.submit(work))  # noqa: PLW0108 - it is set later
        self.grammars = GrammarTable(limits, lambda work: self.engine.submit(work))  # noqa: PLW0108
        self.adapters = AdapterTable(limits.max_adapters, lambda work: self.engine.submit(work))  # noqa: PLW0108
        self.unread = Unread(limits)
        self.replay = ReplayLog(limits.replay_bytes)
        self.parked = ParkedFiles(park_dir, limits)
        self.tier_reads = Slots(1)
        """Whose turn it is to read a piece of the second tier: a step waits for one piece at most."""
        self.nixl = nixl
        self.peers = Peers()
        self.transfers = {each: TransferMeter() for each in Direction}
        self.capabilities = (
            *CAPABILITIES,
            *((CAPABILITY_ADAPTERS,) if self.adapters.offered else ()),
            *((CAPABILITY_PARK,) if self.parked.offered else ()),
            *((CAPABILITY_KV_TRANSPORT_NIXL,) if nixl is not None else ()),
        )
        """What GetInfo says, and an item may need. With the model GRAMMAR is added, or KV_TRANSPORT_NIXL removed."""
        self.sessions = 0
        self.watchers = 0
        self.unnamed: dict[SequenceRecord, None] = {}
        """Sequences of transfers, which no handle names: copies that exports read, imports that are not whole. They are
        busy, and ``cut`` ends them. ``origin``: the stream that is on them, if any."""
        self.empty = asyncio.Event()
        self.counters = ServiceCounters()
        self.lifecycle = Lifecycle.STARTING
        self.hang: str | None = None
        """Why the engine makes no progress, as of the last `look`."""
        self.started = time.monotonic()
        self.empty.set()
        self._creating: dict[SequenceRecord, str] = {}  # with the request id of their creation
        self._closed = False
        self._model: ModelInfo | None = None
        self._device: DeviceInfo | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def serve(self, model: ModelInfo, device: DeviceInfo) -> None:
        self._model, self._device = model, device
        if model.tokenizer_sha256:
            self.capabilities = (*self.capabilities, CAPABILITY_GRAMMAR)
        if model.state_bytes or model.latent or len({*model.kv_shapes}) > 1:
            self.capabilities = tuple(each for each in self.capabilities if each != CAPABILITY_KV_TRANSPORT_NIXL)
        self.limits = replace(self.limits, max_top_tokens=min(self.limits.max_top_tokens, model.vocab_size))
        cache = self.engine.cache
        self.quotas.cache(cache.total_blocks, cache.block_size, cache.total_slots, device.window_tokens)
        if self.lifecycle is Lifecycle.STARTING:
            self.lifecycle = Lifecycle.SERVING

    def drain(self) -> None:
        """Refuse new sequences, and continue to serve existing ones."""
        if self.lifecycle is not Lifecycle.FAILED:
            self.lifecycle = Lifecycle.DRAINING

    def close(self) -> None:
        """Refuse all new calls, after the grace period."""
        self._closed = True

    def fail(self) -> None:
        self.lifecycle = Lifecycle.FAILED

    def look(self) -> None:
        """Check whether the engine makes progress."""
        self.hang = self.engine.hang_reason(time.monotonic())

    @property
    def condition(self) -> Lifecycle:
        """The reported state, for health, `GetStatus` and the metrics. A hang hides a drain, because a client that saw
        only the drain would request the cache of its sequences, and wait."""
        hangs = self.hang is not None and self.lifecycle in {Lifecycle.SERVING, Lifecycle.DRAINING}
        return Lifecycle.HUNG if hangs else self.lifecycle

    def farewell(self, message: str) -> ExecutorError:
        """The error that ends sessions when the executor ends: `Draining` with the ``message``, or `DeviceLost`."""
        if self.lifecycle is Lifecycle.FAILED:
            return self._lost()
        return Draining(message, retry_after_s=RETRY_ELSEWHERE_S)

    @staticmethod
    def _lost() -> DeviceLost:
        return DeviceLost("the model thread is gone; the executor must be restarted")

    @property
    def model(self) -> ModelInfo:
        """The loaded model; raises `Starting`, `Draining` or `DeviceLost` before and after its life."""
        if self.lifecycle is Lifecycle.FAILED:
            raise self._lost()
        if self._model is None:
            raise Starting("the model is loading; nothing was started", retry_after_s=RETRY_ELSEWHERE_S)
        if self._closed:
            raise Draining("the executor has finished; nothing was started", retry_after_s=RETRY_ELSEWHERE_S)
        return self._model

    @property
    def device(self) -> DeviceInfo:
        """The device of the model. Raises as `model` does."""
        _ = self.model
        assert self._device is not None  # noqa: S101 - set together with the model
        return self._device

    def pressure(self) -> Pressure:
        """How full the executor is, as of the last step. Never waits."""
        engine, cache = self.engine, self.engine.cache
        size, total, free, *_ = cache
        sequences, slots = len(self.handles.live), (cache.free_slots, cache.total_slots)
        waiting, running = (engine.queued_items, engine.queued_tokens), engine.counters.running
        return named(Pressure, (free, total, size, *waiting, sequences, running, *slots))

    # --- sequences --------------------------------------------------------------------------------------------------

    def mint(  # noqa: PLR0917
        self,
        count: int,
        account: Account,
        lease: LeaseRecord | None,
        length: int,
        origin: object | None = None,
        held_to: int = 0,
        prefix: PrefixUse | None = None,
        adapter: Adapter | None = None,
        creation: str = "",
        start: int = 0,
    ) -> list[SequenceRecord]:
        """Records of sequences to be created with ``length`` tokens, of which those from ``start`` on are to be written
        or promised, or the refusal. Each must be followed by `publish`
        or `discard`. They are busy, and members of their lease, from the beginning: a long prefill must not outlive it.
        ``creation``: the request id that makes them."""
        if self.lifecycle is Lifecycle.DRAINING:
            raise Draining("the executor takes no new sequences; nothing was started", retry_after_s=RETRY_ELSEWHERE_S)
        live, creating, limit = len(self.handles), len(self._creating), self.limits.max_sequences
        if live + creating + count > limit:
            raise SequencesExhausted(
                f"at most {counted(limit, 'sequence')} may be live: {live} are live, {creating} are being created, and "
                f"{count} more are requested; release some" + (", or wait" if creating else ""),
                metadata={"max_sequences": self.limits.max_sequences},
                retry_after_s=RETRY_AFTER_S,
            )
        account.allocate(Resource.SEQUENCES, count)
        self.empty.clear()
        records = [self.handles.mint(account) for _ in range(count)]
        for record in records:
            self._creating[record] = creation
            record.busy, record.origin, record.held_from, record.held_to = True, origin, start, held_to
            record.prefix, record.adapter = prefix, adapter
            if adapter is not None:
                adapter.sequences += 1
            if lease is not None:
                record.lease = lease
                lease.members[record] = None
            record.touch()
        try:
            for record in records:
                self.quotas.charge(record, start, length)
        except ExecutorError:
            for record in records:
                self.discard(record)
            raise
        return records

    def publish(self, record: SequenceRecord) -> None:
        """Note that a minted sequence now exists."""
        record.busy = False
        self.handles.insert(record)
        self.counters.sequences_created += 1
        self._creating.pop(record, None)

    def discard(self, record: SequenceRecord) -> None:
        """Discard a minted sequence that was not created."""
        self._creating.pop(record, None)
        record.busy = False
        self._uncharge(record)
        _call_on_freed([record])

    def drop(self, record: SequenceRecord) -> None:
        """Free the blocks of a transfer's sequence that is no longer needed."""
        self.unnamed.pop(record, None)
        if record in self._creating:
            self._creating.pop(record, None)
            self._uncharge(record)
        else:
            self.quotas.refund(record)
            self._set_empty()
        self.free([record.sequence], partial(_call_on_freed, [record]))

    def unfinished_imports(self) -> list[SequenceRecord]:
        """The sequences of incomplete imports."""
        return [record for record in list(self.unnamed) if record in self._creating]

    def abandon(self, records: Sequence[SequenceRecord]) -> None:
        """Release sequences whose handles will not be answered; those that were minted exist in the engine."""
        for record in records:
            if record in self._creating:
                self.publish(record)
        self.release(records, SequenceEnd.ABANDONED)

    def remove(self, record: SequenceRecord, ending: SequenceEnd = SequenceEnd.RELEASED) -> bool:
        """Take a sequence out of the table; its blocks are the caller's to free. False: it was not there."""
        if not self.handles.remove(record, ending):
            return False
        self.counters.sequences_released += 1
        self.counters.ended[ending.value] += 1
        self.replay.forget_rows(scope_of(record.account.caller.name, record.id))
        self.parked.drop(record)
        self._uncharge(record)
        return True

    def release(self, records: Sequence[SequenceRecord], ending: SequenceEnd = SequenceEnd.RELEASED) -> None:
        """Take idle sequences out of the table and have their blocks freed; those that are gone are free already."""
        numbers = []
        for record in records:
            number = None if record.parked else record.sequence
            if self.remove(record, ending) and number is not None:
                numbers.append(number)
        self.free(numbers, partial(_call_on_freed, records))

    def free(
        self, numbers: Sequence[int], then: Callable[[Any], object] = lambda _: None, *, attempts: int = 1
    ) -> None:
        """Have the engine free its sequences of these numbers; ``then`` is called with how many blocks it freed, or
        with the end of the engine. ``attempts``: how often it will have tried then."""
        if numbers:
            done = partial(self._freed, numbers, then, attempts)
            self.engine.submit(Operation(Command(Operations.release, numbers), done))
        else:
            then(0)

    def _freed(self, numbers: Sequence[int], then: Callable[[Any], object], attempts: int, result: object) -> None:
        if isinstance(result, StepFailed):  # nothing changed, and no client has these handles: retry here
            again = partial(self.free, numbers, then, attempts=attempts + 1)
            asyncio.get_running_loop().call_later(RETRY_AFTER_S, again)
            return
        if attempts > 1 and isinstance(result, int):
            log.info("blocks_freed_late", blocks=result, attempts=attempts)
        then(result)

    def end(self, records: Sequence[SequenceRecord], ending: SequenceEnd) -> None:
        """Release sequences: idle ones now, those with a call in flight when it ends. Runs are cut."""
        for record in records:
            record.pending_end = record.pending_end or ending
            if record.successor is not None:
                record.successor.withdraw(gone(ending))
            if record.cut is not None:
                record.cut(gone(ending))
        self.release([record for record in records if not record.busy], ending)

    def sequences(self) -> list[SequenceRecord]:
        """All sequences: live ones, those being created, and those of transfers."""
        return list({**self.unnamed, **dict.fromkeys(self._creating), **dict.fromkeys(self.handles.records())})

    def cut_runs(self, error: ExecutorError) -> None:
        """End all runs at their next step, and all transfers."""
        for record in self.sequences():
            if record.successor is not None:
                record.successor.withdraw(error)
            if record.cut is not None:
                record.cut(error)

    def creation(self, owner: str, request_id: str) -> SequenceRecord | None:
        """The sequence that a caller's creation in flight makes, if its request id is this."""
        found = (
            each
            for each, made_by in self._creating.items()
            if made_by == request_id and each.account.caller.name == owner
        )
        return next(found, None)

    async def ended(self, records: Sequence[SequenceRecord], ending: SequenceEnd) -> int:
        """`end`, and wait until their blocks are free. Returns how many there were."""
        freed: asyncio.Queue[None] = asyncio.Queue()
        for record in records:
            record.on_freed.append(partial(freed.put_nowait, None))
        self.end(records, ending)
        for _ in records:
            await freed.get()
        return len(records)

    def end_lease(self, lease: LeaseRecord, *, expired: bool) -> list[SequenceRecord]:
        """The lease is gone. Returns its sequences, which the caller must `end`; those that are being created too."""
        self.leases.remove(lease, expired=expired)
        self.counters.leases_expired += expired
        return list(lease.members)

    def _uncharge(self, record: SequenceRecord) -> None:
        record.account.free(Resource.SEQUENCES)
        self.quotas.refund(record)
        if record.adapter is not None:
            record.adapter.sequences -= 1
        if record.lease is not None:
            record.lease.members.pop(record, None)
        self._set_empty()

    def _set_empty(self) -> None:
        if not (self._creating or self.unnamed or self.handles.live):
            self.empty.set()


def _call_on_freed(records: Sequence[SequenceRecord], _: object = None) -> None:
    for record in records:
        while record.on_freed:
            record.on_freed.pop()()
