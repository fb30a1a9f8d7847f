"""Expiry of leases and idle sequences, and the drain of the server.

The sweep frees the sequences of leases that were not renewed, and unused ones without a lease. A process that was
stopped or starved received no keep-alives: all leases are extended by the missed time before any of them ends.

A drain refuses new sequences, serves the owned ones until they are released or its grace is over, then refuses
everything new. Work in flight always completes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog

from ferrum_rpc.errors import Draining
from ferrum_rpc.service.health import HealthService
from ferrum_rpc.service.records import SequenceEnd, SequenceRecord
from ferrum_rpc.service.session import Session, end_sessions
from ferrum_rpc.service.state import RETRY_ELSEWHERE_S, Lifecycle, ServerState
from ferrum_rpc.service.supervisor import BackgroundTask

log = structlog.get_logger("ferrum_rpc.lifecycle")

SWEEP_EVERY_S: Final = 0.25
LATE_FROM_S: Final = 0.25
"""Maximum delay of a sweep before leases are extended by it; the usual jitter of a busy loop is far below."""


class Sweeper:
    """Ends expired leases and sequences. `turn` is called every `SWEEP_EVERY_S` seconds from now on."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._due = time.monotonic() + SWEEP_EVERY_S

    def turn(self) -> None:
        """Sweep, or extend all leases by the delay of this call."""
        now = time.monotonic()
        late = now - self._due
        self._due = now + SWEEP_EVERY_S
        if late > LATE_FROM_S:
            self.prolong(late)  # what arrived meanwhile is still in the sockets
        else:
            self.sweep(now)

    def prolong(self, seconds: float) -> None:
        """Extend all deadlines by the time in which this process received nothing."""
        log.warning(
            "sweep_delayed",
            seconds=round(seconds, 2),
            action="leases were prolonged by it; if this repeats, the machine is overloaded or the process was stopped",
        )
        self._state.leases.extend(seconds)
        for record in (*self._state.handles.records(), *self._state.unnamed):
            record.used += seconds
        self._state.peers.extend(seconds)

    def sweep(self, now: float) -> None:
        """End the leases and the idle sequences that have expired at ``now`` (monotonic seconds)."""
        state = self._state
        for lease in state.leases.due(now):
            members = state.end_lease(lease, expired=True)
            state.end(members, SequenceEnd.EXPIRED)
            log.info(
                "lease_expired",
                client=lease.client_name,
                caller=lease.account.caller.name,
                ttl_s=lease.ttl_s,
                sequences=len(members),
                action="nothing, if the scheduler ended; else see why it could not renew: network, or its loop stalls",
            )
        idle = [
            record
            for record in state.handles.records()
            if record.lease is None and not record.busy and record.used <= now - state.limits.idle_ttl_s
        ]
        state.peers.sweep(now)
        state.end([each for each in state.unnamed if self._is_stale(each, now)], SequenceEnd.IDLE)
        if idle:
            state.end(idle, SequenceEnd.IDLE)
            log.info(
                "idle_sequences_expired",
                sequences=len(idle),
                idle_ttl_s=state.limits.idle_ttl_s,
                action="a scheduler forgot them: let it release what it no longer needs, or use a lease",
            )

    def _is_stale(self, record: SequenceRecord, now: float) -> bool:
        """Whether a transfer's sequence must end: a lease keeps an import with an active stream, and no other."""
        kept = record.lease is not None and record.origin is not None
        return not kept and record.used <= now - self._state.limits.idle_ttl_s


class Drain:
    """The drain of a server. Both a signal and an operator may call `begin`; the earlier end wins."""

    def __init__(self, state: ServerState, health: HealthService, sessions: set[Session]) -> None:
        self._state = state
        self._health = health
        self._sessions = sessions
        self.ends = float("inf")
        """When what is owned is served no more, on the clock of the event loop."""
        self._timeout: asyncio.Timeout | None = None
        self._task: asyncio.Task[None] | None = None
        self.begun = asyncio.Event()
        self.done = asyncio.Event()

    def begin(self, grace_s: float) -> None:
        """Start the drain: health is NOT_SERVING from now on; owned sequences are served for at most ``grace_s``
        seconds."""
        self.ends = min(self.ends, asyncio.get_running_loop().time() + grace_s)
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self.ends)
        if self.begun.is_set():
            return
        self.begun.set()
        self._state.drain()
        self._state.end([each for each in self._state.unnamed if each.origin is None], SequenceEnd.ABANDONED)
        self._health.update()
        log.info(
            "draining",
            grace_s=grace_s,
            sequences=len(self._state.handles),
            sessions=len(self._sessions),
            action="let schedulers move on: new sequences are refused, owned ones are served until the grace is over",
        )
        self._task = self._state.supervisor.start(BackgroundTask.DRAIN, self._run)

    async def _run(self) -> None:
        state = self._state
        if state.lifecycle is not Lifecycle.FAILED:
            await self._lame_duck()
        state.close()
        state.cut_runs(Draining("the executor has finished", retry_after_s=RETRY_ELSEWHERE_S))
        left = len(state.handles)
        log.info(
            "drained",
            sequences_left=left,
            action="nothing"
            if not left
            else "their schedulers prefill them elsewhere; a longer grace would serve them",
        )
        end_sessions(self._sessions, state.farewell("the executor has finished"))
        self.done.set()

    async def _lame_duck(self) -> None:
        """Wait until no sequence is owned any more, or the time is over."""
        try:
            async with asyncio.timeout_at(self.ends) as self._timeout:
                await self._state.empty.wait()
        except TimeoutError:
            pass
        finally:
            self._timeout = None
