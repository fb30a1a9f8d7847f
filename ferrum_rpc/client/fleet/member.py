"""One executor of a fleet, for one life of its process: how it is, how full, and what its prefix cache has."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as ListOf
from contextlib import aclosing, suppress
from typing import Final

from ferrum_rpc.client.client import ExecutorClient
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.fleet.placement import Candidate
from ferrum_rpc.client.info import ExecutorInfo, ExecutorState
from ferrum_rpc.client.prefixes import PrefixIndex
from ferrum_rpc.client.retry import NEVER_RESEND, Deadline
from ferrum_rpc.core import Pressure
from ferrum_rpc.errors import ExecutorError, InstanceMismatch

PREFIX_BLOCKS: Final = 1 << 17
"""Blocks of an executor's prefix cache that are known here at most: some 13 MB."""

log = logging.getLogger("ferrum_rpc.client")


class Member:
    """One executor for one life of its process. ``draining``: it takes no new sequences. ``gone``: it has ended, or
    nobody can reach it. ``listed``: its target is still one of the fleet's. ``leaving``: sequences that are being moved
    away from it."""

    def __init__(self, target: str, client: ExecutorClient, info: ExecutorInfo, notify: Callable[[], None]) -> None:
        self.target = target
        self.client = client
        self.connection: Connection = client._connection
        self.info = info
        self.index: PrefixIndex | None = None
        self.listed = True
        self.gone = False
        self.leaving = 0
        self._drains = False
        self._uptime_s = 0.0
        self._promised = 0
        self._promised_at: Pressure | None = None
        self._notify = notify
        self._looking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._heard = time.monotonic()

    def __repr__(self) -> str:
        how = "gone" if self.gone else "draining" if self.draining else "serving"
        return f"<Member {self.target} {self.info.instance_id}: {how}>"

    @property
    def draining(self) -> bool:
        """Whether it has said so, in whatever answer."""
        return self._drains or self.connection.context.draining

    @property
    def serving(self) -> bool:
        """Whether it takes new sequences."""
        return self.listed and not self.gone and not self.draining

    @property
    def pressure(self) -> Pressure | None:
        """How full it was in its last answer."""
        return self.client.pressure

    def candidate(self, prompt: ListOf[int], hashes: ListOf[bytes]) -> Candidate:
        """What is known of it for a prompt, whose blocks have these ``hashes``."""
        pressure = self.pressure
        assert pressure is not None  # noqa: S101 - a look came before
        return Candidate(
            target=self.target,
            instance_id=self.info.instance_id,
            cached_tokens=0 if self.index is None else min(len(prompt), self.index.found(hashes)),
            free_blocks=max(0, pressure.free_blocks - self._expected(pressure)),
            total_blocks=pressure.total_blocks,
            block_size=pressure.block_size,
            queued_items=pressure.queued_items,
            queued_tokens=pressure.queued_tokens,
            max_batch_items=self.info.limits.max_batch_items,
        )

    def promise(self, blocks: int) -> None:
        """A sequence goes there that will take so many: not yet in what it tells."""
        if self.pressure is not None:
            self._promised = self._expected(self.pressure) + blocks

    def _expected(self, pressure: Pressure) -> int:
        if pressure is not self._promised_at:
            self._promised, self._promised_at = 0, pressure
        return self._promised

    # --- how it is --------------------------------------------------------------------------------------------------

    async def look(self, timeout_s: float, patience_s: float) -> None:
        """Ask how it is; callers at the same time share the question, if it is asked after they came. It is gone where
        nothing listens there any more, where another process does, or where it is silent for ``patience_s``."""
        if (under_way := self._looking) is not None and not under_way.done():
            await asyncio.wait({under_way})
        if self.gone:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(timeout_s, patience_s))
        await asyncio.shield(self._looking)

    async def _look(self, timeout_s: float, patience_s: float) -> None:
        try:
            status = await self.client._status(Deadline.after(timeout_s), NEVER_RESEND)
            if self.connection.context.known_info is None:  # somebody had reason to doubt it
                await self.client.info(timeout_s=timeout_s)
        except ExecutorError as error:
            silent_s = time.monotonic() - self._heard
            refused = error.metadata.get("grpc_code") == "UNAVAILABLE"
            if refused or isinstance(error, InstanceMismatch) or silent_s > patience_s:
                await self.end(error.message)
            return
        self._heard = time.monotonic()
        if status.uptime_s < self._uptime_s:
            await self.end("another process answers there")
            return
        self._uptime_s = status.uptime_s
        if status.state is ExecutorState.FAILED:
            await self.end("its model has failed")
        elif (drains := status.state is ExecutorState.DRAINING) != self._drains:
            self._drains = drains
            self._notify()

    async def end(self, why: str) -> None:
        """It is gone: every call to it ends now."""
        if not self.gone:
            self.gone = True
            log.warning("executor %s of the fleet is gone: %s", self.target, why)
            self._wake.set()
            self._ended.set()
            self._notify()
            await self.connection.abandon()

    async def ended(self) -> None:
        """Wait until it is gone."""
        await self._ended.wait()

    async def attend(self, every_s: float, look: Callable[[Member], Awaitable[None]]) -> None:
        """Until it is gone."""
        events = asyncio.create_task(self._follow(every_s))
        try:
            while not self.gone:
                with suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        await self._wake.wait()
                self._wake.clear()
                await look(self)
        finally:
            events.cancel()
            await asyncio.wait({events})

    async def _follow(self, every_s: float) -> None:
        """Keep its prefixes. Where its events break off, that is looked into."""
        while not self.gone:
            with suppress(ExecutorError):
                async with aclosing(self.client.watch_prefixes(patience_s=0.0)) as stream:
                    async for events in stream:
                        if self.index is None:
                            self.index = PrefixIndex.of(self.info, PREFIX_BLOCKS)
                        self.index.apply(events)
            self._wake.set()
            await asyncio.sleep(every_s)
