"""One executor of a fleet, for one process lifetime: its state, its load and its cached prefixes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as ListOf
from contextlib import aclosing, suppress
from typing import Final
from weakref import WeakSet

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest

from ferrum_rpc.client.client import ExecutorClient, connection_of
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.encryption import in_words
from ferrum_rpc.client.fleet.placement import Candidate
from ferrum_rpc.client.info import ExecutorInfo, ExecutorState, ExecutorStatus
from ferrum_rpc.client.prefixes import PrefixIndex
from ferrum_rpc.client.retry import NEVER_RESEND, Deadline
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.core import Pressure
from ferrum_rpc.errors import (
    DeadlineExceeded,
    ExecutorError,
    InstanceMismatch,
    QuotaExceeded,
    SequencesExhausted,
    TransportError,
)

PREFIX_BLOCKS: Final = 1 << 17
"""Blocks of an executor's prefix cache that are known here at most: some 13 MB."""

FULL_S: Final = 1.0
"""For so long an executor that refused a sequence for want of room is passed over, where others are there."""

log = logging.getLogger("ferrum_rpc.client.fleet")


class Member:
    """One executor for one process lifetime, or until it has hung for too long. ``draining``: it refuses new sequences.
    ``trouble``: the reason while it makes no progress, or does not answer. ``gone``: it has ended, cannot be reached,
    or was abandoned, for the reason ``ending``. ``listed``: its target is still one of the fleet's. ``status``: its
    last answer, which came at ``status_at`` on `time.monotonic`; None while it does not answer. ``leaving``: sequences
    that are being moved away from it. ``coming``: sequences that were placed there and may not exist yet. ``turn``: a
    growing number that orders the times at which members were chosen last."""

    def __init__(self, target: str, client: ExecutorClient, info: ExecutorInfo, notify: Callable[[], None]) -> None:
        self.target = target
        self.client = client
        self.connection: Connection = connection_of(client)
        self.info = info
        self.index: PrefixIndex | None = None
        self.listed = True
        self.gone = False
        self.ending: ExecutorError | None = None
        self.trouble = ""
        self.status: ExecutorStatus | None = None
        self.status_at = 0.0
        self.leaving = 0
        self.coming: WeakSet[SequenceState] = WeakSet()
        self.turn = 0
        self._drains = False
        self._uptime_s = 0.0
        self._promised = (0, 0)  # blocks, and sequences
        self._promised_at: Pressure | None = None
        self._notify = notify
        self._looking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._hung_since = 0.0
        self._full_until = 0.0

    def __repr__(self) -> str:
        return f"<Member {self.target} {self.info.instance_id}: {self.condition}>"

    @property
    def condition(self) -> str:
        """Its state for display: gone, hung, draining or serving."""
        return "gone" if self.gone else "hung" if self.hung else "draining" if self.draining else "serving"

    @property
    def draining(self) -> bool:
        """Whether it has reported so, in any answer."""
        return self._drains or self.connection.context.draining

    @property
    def hung(self) -> bool:
        """Whether it makes no progress, or does not answer. It may recover."""
        return bool(self.trouble)

    @property
    def hung_s(self) -> float:
        """The seconds since it was found to hang."""
        return time.monotonic() - self._hung_since if self.hung else 0.0

    @property
    def serving(self) -> bool:
        """Whether it accepts new sequences."""
        return self.listed and not self.gone and not self.hung and not self.draining

    @property
    def model(self) -> tuple[object, ...]:
        """The properties of its model that must be equal for a sequence to continue elsewhere."""
        return self.info.model.fingerprint, self.info.model.kv_dtype

    @property
    def max_context(self) -> int:
        """The maximum tokens of a sequence there."""
        return self.info.model.max_context

    @property
    def full(self) -> bool:
        """Whether it has just refused a sequence for their number or the caller's share, has its maximum of sequences,
        or no free slot for the states of another one. Its free blocks do not show that."""
        if time.monotonic() < self._full_until:
            return True
        most, pressure = self.info.limits.max_sequences, self.pressure
        if pressure is None:
            return False
        lacks_slots = pressure.total_slots > 0 and pressure.free_slots <= self._expected(pressure)[1]
        return lacks_slots or pressure.sequences >= most > 0

    def refused(self, error: ExecutorError) -> None:
        """Skip it for a while after `SequencesExhausted` and `QuotaExceeded`."""
        if isinstance(error, SequencesExhausted | QuotaExceeded):
            self._full_until = time.monotonic() + max(FULL_S, error.retry_after_s or 0.0)

    @property
    def pressure(self) -> Pressure | None:
        """How full it was in its last answer."""
        return self.client.pressure

    def candidate(self, prompt: ListOf[int], hashes: ListOf[bytes]) -> Candidate:
        """Its data for the placement of a prompt whose blocks have these ``hashes``."""
        pressure = self.pressure
        assert pressure is not None  # noqa: S101 - a look came before
        return Candidate(
            target=self.target,
            instance_id=self.info.instance_id,
            cached_tokens=0 if self.index is None else min(len(prompt), self.index.found(hashes)),
            free_blocks=max(0, pressure.free_blocks - self._expected(pressure)[0]),
            total_blocks=pressure.total_blocks,
            block_size=pressure.block_size,
            queued_items=pressure.queued_items,
            queued_tokens=pressure.queued_tokens,
            max_batch_items=self.info.limits.max_batch_items,
            own_sequences=self.own_sequences,
            turn=self.turn,
        )

    @property
    def own_sequences(self) -> int:
        """The number of this client's sequences there, including those being created."""
        live = self.connection.live
        for each in list(self.coming):
            if each in live or each.released:
                self.coming.discard(each)
        return len(live) + len(self.coming)

    def promise(self, blocks: int) -> None:
        """Count a sequence that was placed there, with so many blocks, and is not yet in its reports."""
        if self.pressure is not None:
            promised, sequences = self._expected(self.pressure)
            self._promised = promised + blocks, sequences + 1

    def _expected(self, pressure: Pressure) -> tuple[int, int]:
        if pressure is not self._promised_at:
            self._promised, self._promised_at = (0, 0), pressure
        return self._promised

    # --- how it is --------------------------------------------------------------------------------------------------

    async def look(self, timeout_s: float) -> None:
        """Request its status; concurrent callers share a request that is sent after they called. It is gone if nothing
        listens there any more, or if another process does. It hangs if it reports so, or does not answer within
        ``timeout_s``. Before it is used again, sequences that could not be released there are released."""
        if (under_way := self._looking) is not None and not under_way.done():
            await asyncio.wait({under_way})
        if self.gone:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(timeout_s))
        await asyncio.shield(self._looking)

    async def _look(self, timeout_s: float) -> None:
        try:
            status = await self.connection.context.status(Deadline.after(timeout_s), NEVER_RESEND)
            if self.connection.context.known_info is None:  # somebody had reason to doubt it
                await self.client.info(timeout_s=timeout_s)
        except ExecutorError as error:
            self.status = None
            if error.metadata.get("grpc_code") == "UNAVAILABLE" or isinstance(error, InstanceMismatch):
                await self.end(error)
            else:
                self._hangs("it does not answer" if isinstance(error, DeadlineExceeded) else in_words(error))
            return
        if status.uptime_s < self._uptime_s:
            await self.end(TransportError("another process answers there"))
            return
        self._uptime_s = status.uptime_s
        self.status, self.status_at = status, time.monotonic()
        if status.state is ExecutorState.FAILED:
            await self.end(TransportError("its model has failed"))
        elif status.state is ExecutorState.HUNG:
            self._hangs("its device makes no progress")
        else:
            await self._works(drains=status.state is ExecutorState.DRAINING)

    def _hangs(self, trouble: str) -> None:
        if not self.hung:
            self.trouble, self._hung_since = trouble, time.monotonic()
            self._notify()

    async def _works(self, *, drains: bool) -> None:
        if self.connection.unreleased and not self.gone:  # those that fail again wait for the next look
            await self.connection.release(list(self.connection.unreleased))
        if self.hung or drains != self._drains:
            self.trouble, self._drains = "", drains
            self._notify()

    async def end(self, why: ExecutorError) -> None:
        """Mark it as gone, which ends every call to it."""
        if not self.gone:
            self.gone, self.ending = True, why
            log.warning("executor %s of the fleet is gone: %s", self.target, in_words(why))
            self._wake.set()
            self._ended.set()
            self._notify()
            await self.connection.abandon()

    async def ended(self) -> None:
        """Wait until it is gone."""
        await self._ended.wait()

    async def attend(self, every_s: float, look: Callable[[Member], Awaitable[None]], *, prefixes: bool = True) -> None:
        """Watch it until it is gone. ``prefixes``: maintain the index of its prefixes."""
        watches = (self._watch_health, *([self._follow] if prefixes else []))
        following = {asyncio.create_task(each(every_s)) for each in watches}
        try:
            while not self.gone:
                with suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        await self._wake.wait()
                self._wake.clear()
                await look(self)
        finally:
            for task in following:
                task.cancel()
            await asyncio.wait(following)

    async def _watch_health(self, every_s: float) -> None:
        """Request its status at once if its health changes, or can no longer be watched."""
        context = self.connection.context
        while not self.gone:
            with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
                async for _ in context.health.Watch(HealthCheckRequest(), metadata=context.metadata):
                    self._wake.set()
            self._wake.set()
            await asyncio.sleep(every_s)

    async def _follow(self, every_s: float) -> None:
        """Maintain the index of its prefixes. If its events end, request its status."""
        while not self.gone:
            with suppress(ExecutorError):
                async with aclosing(self.client.watch_prefixes(patience_s=0.0)) as stream:
                    async for events in stream:
                        if self.index is None:
                            self.index = PrefixIndex.of(self.info, PREFIX_BLOCKS)
                        self.index.apply(events)
            self._wake.set()
            await asyncio.sleep(every_s)
