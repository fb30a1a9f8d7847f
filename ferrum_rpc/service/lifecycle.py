"""The clock of the service floor: what expires, and how a server goes.

The sweep frees the sequences of leases that nobody renewed and those without a lease that nobody used. It forgives its
own deafness: a process that was stopped or starved heard no keep-alive, so the time it missed is given back to
everybody before anybody is judged.

A drain takes no new sequences, serves the owned ones until they are released or the lame-duck time is over, then
refuses everything that is new. What is in flight always finishes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog

from ferrum_rpc.errors import Draining
from ferrum_rpc.service.books import RETRY_ELSEWHERE_S, Books, Lifecycle
from ferrum_rpc.service.health import HealthBoard
from ferrum_rpc.service.records import Ending, Record
from ferrum_rpc.service.session import Sessions
from ferrum_rpc.service.supervisor import Background

log = structlog.get_logger("ferrum_rpc.lifecycle")

SWEEP_EVERY_S: Final = 0.25
FORGIVEN_FROM_S: Final = 0.25
"""How late a sweep may be before the lateness is given back; a busy loop's usual jitter is far below."""


class Sweeper:
    """Ends what expired, every `SWEEP_EVERY_S` seconds."""

    def __init__(self, books: Books, every_s: float = SWEEP_EVERY_S) -> None:
        self._books = books
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sweep."""
        self._due = time.monotonic() + self._every_s
        self._task = self._books.supervisor.every(Background.SWEEP, self._every_s, self._turn)

    def stop(self) -> None:
        """Sweep no more."""
        if self._task is not None:
            self._task.cancel()

    def _turn(self) -> None:
        now = time.monotonic()
        late = now - self._due
        self._due = now + self._every_s
        if late > FORGIVEN_FROM_S:
            self.forgive(late)  # what arrived meanwhile stands in the sockets: hear it first
        else:
            self.sweep(now)

    def forgive(self, seconds: float) -> None:
        """This process heard nobody for so long."""
        log.warning(
            "sweep_late",
            seconds=round(seconds, 2),
            action="leases were prolonged by it; if this repeats, the machine is overloaded or the process was stopped",
        )
        self._books.leases.extend(seconds)
        for record in self._books.handles.records():
            record.used += seconds

    def sweep(self, now: float) -> None:
        """End the leases and the idle sequences whose time is over at ``now`` (monotonic seconds)."""
        books = self._books
        for lease in books.leases.due(now):
            members = books.end_lease(lease, expired=True)
            books.end(members, Ending.EXPIRED)
            log.info(
                "lease_expired",
                client=lease.client_name,
                caller=lease.owner,
                ttl_s=lease.ttl_s,
                sequences=len(members),
                action="nothing, if the scheduler ended; else see why it could not renew: network, or its loop stalls",
            )
        idle = self._idle(now - books.limits.idle_ttl_s)
        if idle:
            books.end(idle, Ending.IDLE)
            log.info(
                "idle_sequences_expired",
                sequences=len(idle),
                idle_ttl_s=books.limits.idle_ttl_s,
                action="a scheduler forgot them: let it release what it no longer needs, or use a lease",
            )

    def _idle(self, before: float) -> list[Record]:
        return [
            record
            for record in self._books.handles.records()
            if record.lease is None and not record.busy and record.used <= before
        ]


class Drain:
    """The end of a server. `begin` may come from a signal and from an operator; the earlier end wins."""

    def __init__(self, books: Books, health: HealthBoard, sessions: Sessions) -> None:
        self._books = books
        self._health = health
        self._sessions = sessions
        self._until = float("inf")
        self._sooner = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.begun = asyncio.Event()
        self.done = asyncio.Event()

    def begin(self, grace_s: float) -> None:
        """Say NOT_SERVING now; owned sequences are served for at most ``grace_s`` seconds."""
        until = time.monotonic() + grace_s
        if until < self._until:
            self._until = until
            self._sooner.set()
        if self.begun.is_set():
            return
        self.begun.set()
        self._books.drain()
        self._health.update()
        log.info(
            "draining",
            grace_s=grace_s,
            sequences=len(self._books.handles),
            sessions=len(self._sessions),
            action="let schedulers move on: new sequences are refused, owned ones are served until the grace is over",
        )
        self._task = self._books.supervisor.start(Background.DRAIN, self._run)

    async def _run(self) -> None:
        books = self._books
        if books.state is not Lifecycle.FAILED:
            await self._lame_duck()
        books.close()
        left = len(books.handles)
        log.info(
            "drained",
            sequences_left=left,
            action="nothing"
            if not left
            else "their schedulers prefill them elsewhere; a longer grace would serve them",
        )
        self._sessions.end(Draining("the executor has finished", retry_after_s=RETRY_ELSEWHERE_S))
        self.done.set()

    async def _lame_duck(self) -> None:
        """Until nothing is owned any more, or the time is over."""
        empty = asyncio.create_task(self._books.empty.wait())
        try:
            while not empty.done() and (left := self._until - time.monotonic()) > 0:
                self._sooner.clear()
                sooner = asyncio.create_task(self._sooner.wait())
                await asyncio.wait((empty, sooner), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                sooner.cancel()
        finally:
            empty.cancel()
