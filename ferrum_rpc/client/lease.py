"""The client's lease: acquired with the first sequence, renewed in the background, with a callback if that fails.

The executor frees a client's sequences if the lease is not renewed in time. So the client renews it every sixth of that
time, independently of other calls, and reports failures: a scheduler is warned before its sequences are gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from ferrum_rpc.client.context import Context
from ferrum_rpc.client.info import Capability
from ferrum_rpc.client.retry import LEASE_GONE, NEVER_RESEND, Deadline, SingleFlight
from ferrum_rpc.client.state import Item
from ferrum_rpc.core.check import check_limit
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.executor.v1 import model_executor_pb2
from ferrum_rpc.wire.info import duration, seconds

MAX_CLIENT_NAME: Final = 128
"""In bytes; executors of every revision accept this length."""

FIRST_RETRY: Final = 1 / 16
"""Pause before a failed renewal's first retry, as a share of the period; doubled each time up to a whole one."""

LEASE_FIELD: Final = "create.lease_id"
"""The field of a refusal of a whole batch for one item's lease."""

log = logging.getLogger("ferrum_rpc.client")


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """The policy of a client's lease.

    ``ttl_s``: its lifetime without renewal, in seconds; None is the executor's default, and an executor may grant less.
    ``attempts``: consecutive failed renewals before trouble is reported.
    """

    ttl_s: float | None = None
    attempts: int = 3

    def __post_init__(self) -> None:
        if self.attempts < 1 or (self.ttl_s is not None and self.ttl_s <= 0):
            raise ValueError(f"invalid policy: {self}")


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as granted: an opaque id, its lifetime, and the renewal interval, in seconds."""

    lease_id: str
    ttl_s: float
    renew_every_s: float


@dataclass(frozen=True, slots=True)
class LeaseState:
    """The lease of a client. ``expires_at``: when it ends without another renewal, on `time.monotonic`; never later
    than at the executor. ``healthy``: the last renewals succeeded."""

    lease_id: str
    ttl_s: float
    expires_at: float
    healthy: bool


@dataclass(frozen=True, slots=True)
class LeaseTrouble:
    """Renewals of a lease fail, or it is ``lost`` and the sequences with it. ``expires_at`` as in `LeaseState`."""

    lease_id: str
    lost: bool
    expires_at: float
    error: ExecutorError


class Leases:
    """A client's lease calls, and the one lease of its sequences. Without a ``policy`` they get none, and only a
    session's own lease is kept. ``on_trouble`` is called once when renewals begin to fail, and once when a lease is
    lost. ``session_renewal``: renews the session's own lease, given its id and a deadline; None if it is another lease,
    or the session is not open. ``state``: of the present lease."""

    def __init__(
        self,
        context: Context,
        policy: LeasePolicy | None,
        *,
        client_name: str = "",
        on_trouble: Callable[[LeaseTrouble], None] | None = None,
    ) -> None:
        name = client_name or f"{socket.gethostname()}:{os.getpid()}"
        self.client_name = name.encode()[:MAX_CLIENT_NAME].decode(errors="ignore")
        self.session_renewal: Callable[[str, Deadline], Awaitable[float | None]] | None = None
        self._context = context
        self._wanted = policy is not None
        self._policy = policy or LeasePolicy()
        self._on_trouble = on_trouble
        self._acquiring = SingleFlight("acquiring a lease")
        self.state: LeaseState | None = None
        self._task: asyncio.Task[None] | None = None

    # --- calls ------------------------------------------------------------------------------------------------------

    async def acquire_lease(self, ttl_s: float | None, client_name: str, deadline: Deadline) -> Lease:
        """A new lease. The call has no request id: a lease whose answer is lost has no sequences and expires."""
        info = self._context.known_info
        limits = None if info is None else info.limits
        check_limit(limits, "max_name_bytes", len(client_name.encode()), "bytes of a name", "client_name")
        request = model_executor_pb2.AcquireLeaseRequest(client_name=client_name)
        if ttl_s is not None:
            request.ttl.CopyFrom(duration(ttl_s))
        answer = await self._context.call(self._context.executor.AcquireLease, request, deadline)
        return Lease(answer.lease_id, seconds(answer.ttl), seconds(answer.renew_every))

    async def renew_lease(self, lease_id: str, deadline: Deadline) -> float:
        """Renew it; returns its lifetime in seconds. Renews through the session if it is the session's."""
        context, renew = self._context, self.session_renewal
        if renew is not None and (ttl_s := await renew(lease_id, deadline)) is not None:
            return ttl_s
        request = model_executor_pb2.KeepAliveRequest(lease_id=lease_id)
        answer = await context.call(context.executor.KeepAlive, request, deadline, NEVER_RESEND)
        context.note_pressure(answer.pressure)
        return seconds(answer.ttl)

    async def revoke_lease(self, lease_id: str, deadline: Deadline) -> int:
        """End it; returns how many sequences ended with it."""
        request = model_executor_pb2.RevokeLeaseRequest(lease_id=lease_id)
        answer = await self._context.call(self._context.executor.RevokeLease, request, deadline)
        self._context.note_pressure(answer.pressure)
        return answer.released_sequences

    # --- the client's own -------------------------------------------------------------------------------------------

    @property
    def lease_id(self) -> str:
        """The id of the present lease; empty: none."""
        return "" if self.state is None else self.state.lease_id

    async def current(self, deadline: Deadline) -> str:
        """The id of the present lease, or of a new one; empty if the client has no policy, or the executor no leases.
        Callers that need a new one at the same time share it."""
        if not self._wanted or Capability.LEASES not in (await self._context.info(deadline)).capabilities:
            return ""
        if self.state is not None:
            return self.state.lease_id
        return (await self._acquiring.get(lambda: self.state, lambda: self._acquire(deadline), deadline)).lease_id

    async def _acquire(self, deadline: Deadline) -> LeaseState:
        sent_at = time.monotonic()
        return self.adopt(await self.acquire_lease(self._policy.ttl_s, self.client_name, deadline), sent_at)

    def adopt(self, lease: Lease, sent_at: float) -> LeaseState:
        """Keep this lease, which was requested at ``sent_at`` (monotonic seconds)."""
        self.stop()
        self.state = state = LeaseState(lease.lease_id, lease.ttl_s, sent_at + lease.ttl_s, healthy=True)
        self._task = asyncio.get_running_loop().create_task(self._keep(lease, sent_at), name="ferrum_rpc lease")
        return state

    async def assign(self, item: Item, deadline: Deadline) -> None:
        """Give a new sequence the client's lease, unless the program named another. A creation of unknown outcome keeps
        the lease that it was sent with: under another one it would be another call. A refused creation may be sent
        again to another executor of a fleet, or under another lease."""
        assert item.create is not None  # noqa: S101 - it makes the sequence
        known = item.create.lease_id
        stale = bool(known) and known == item.state.lease_id != self.lease_id and not item.repeats
        if not known or stale:
            lease_id = (item.state.lease_id if item.repeats else "") or await self.current(deadline)
            if lease_id or stale:
                item.create.lease_id = item.state.lease_id = lease_id

    def unassign(self, item: Item, error: ExecutorError) -> bool:
        """Whether a creation was refused only because the client's own lease is gone: it may be sent with another."""
        lease_id = item.state.lease_id
        if item.create is None or item.parent is not None or not lease_id:
            return False
        self.lost(lease_id, error)
        item.create.lease_id = item.state.lease_id = ""
        return True

    def lost(self, lease_id: str, error: ExecutorError) -> None:
        """Note that the executor reports this lease as gone. The next `current` acquires another."""
        state = self.state
        if state is not None and state.lease_id == lease_id:
            self.state = None
            self.stop()
            self._report(LeaseTrouble(lease_id, True, state.expires_at, error))

    async def close(self, deadline: Deadline) -> None:
        """Revoke it, which frees its sequences in one call. Does not raise: a lease that is not revoked expires."""
        state, self.state = self.state, None
        self.stop()
        if state is None:
            return
        try:
            await self.revoke_lease(state.lease_id, deadline)
        except LEASE_GONE:
            pass
        except ExecutorError as error:
            log.warning("the lease of %s could not be revoked and runs out by itself: %s", self.client_name, error)

    def stop(self) -> None:
        """Stop renewing it."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # --- renewal ----------------------------------------------------------------------------------------------------

    async def _keep(self, lease: Lease, sent_at: float) -> None:
        """Renew it until it is lost. No attempt takes longer than a period, and a failed one is retried early."""
        failures = 0
        while True:
            if failures:
                pause = lease.renew_every_s * min(1.0, FIRST_RETRY * 2.0 ** min(failures - 1, 10))
            else:
                pause = max(0.0, sent_at + lease.renew_every_s - time.monotonic())
            await asyncio.sleep(pause)
            sent_at = time.monotonic()
            try:
                ttl_s = await self.renew_lease(lease.lease_id, Deadline.after(lease.renew_every_s))
            except LEASE_GONE as error:
                self.lost(lease.lease_id, error)
                return
            except Exception as error:
                failures += 1
                state = self.state
                if failures >= self._policy.attempts and state is not None and state.healthy:
                    self.state = replace(state, healthy=False)
                    if not isinstance(error, ExecutorError):  # unexpected, but to stop renewing would be worse
                        error = TransportError(f"a renewal failed: {error!r}")
                    self._report(LeaseTrouble(lease.lease_id, False, state.expires_at, error))
            else:
                failures = 0
                self.state = LeaseState(lease.lease_id, lease.ttl_s, sent_at + ttl_s, healthy=True)

    def _report(self, trouble: LeaseTrouble) -> None:
        if trouble.lost:
            log.warning("the lease of %s is lost, prefill its sequences again: %s", self.client_name, trouble.error)
        else:
            log.warning(
                "the lease of %s cannot be renewed, %.1f s are left: is the executor reachable? %s",
                self.client_name,
                max(0.0, trouble.expires_at - time.monotonic()),
                trouble.error,
            )
        if self._on_trouble is not None:
            try:
                self._on_trouble(trouble)
            except Exception:
                log.exception("on_lease_trouble raised")
