"""Which lease a sequence lives with: the client's own, lent to every sequence that begins and names no other.

Between the keeper (`client.lease`), which is independent of sequences, and the calls, which are independent of leases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from ferrum_rpc.client.context import Context
from ferrum_rpc.client.facts import Capability, seconds
from ferrum_rpc.client.lease import Lease, LeaseKeeper, LeasePolicy, LeaseTrouble
from ferrum_rpc.client.policy import NEVER_RESEND, Deadline
from ferrum_rpc.client.state import Item
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import model_executor_pb2
from ferrum_rpc.wire.info import set_seconds

LEASE_FIELD: Final = "create.lease_id"
"""What a refusal of a whole batch names where one item's lease was the reason."""


class SessionLease(Protocol):
    """What leases need of a session: it renews its own lease with a frame in place of a call."""

    lease_id: str

    @property
    def is_open(self) -> bool:
        """Whether its stream is open."""

    async def renew(self, deadline: Deadline) -> float:
        """Renew its lease; returns for how many seconds."""


class Lending:
    """A client's lease calls, and the lease that its sequences get. Without a ``policy`` they get none, and only the
    lease that a session has of its own is kept."""

    def __init__(
        self,
        context: Context,
        policy: LeasePolicy | None,
        *,
        client_name: str,
        on_trouble: Callable[[LeaseTrouble], None] | None,
    ) -> None:
        self.session: SessionLease | None = None
        self._context = context
        self._wanted = policy is not None
        self.keeper = LeaseKeeper(self, policy or LeasePolicy(), client_name=client_name, on_trouble=on_trouble)

    # --- calls ------------------------------------------------------------------------------------------------------

    async def acquire_lease(self, ttl_s: float | None, client_name: str, deadline: Deadline) -> Lease:
        """A new one. The call has no request id: a lease whose answer is lost holds nothing and runs out."""
        context = self._context
        request = model_executor_pb2.AcquireLeaseRequest(client_name=client_name)
        if ttl_s is not None:
            set_seconds(request.ttl, ttl_s)
        answer = await context.calls.call(context.executor.AcquireLease, request, deadline)
        return Lease(answer.lease_id, seconds(answer.ttl), seconds(answer.renew_every))

    async def renew_lease(self, lease_id: str, deadline: Deadline) -> float:
        """Renew it; returns for how many seconds. Through the session where it is the session's."""
        context, session = self._context, self.session
        if session is not None and session.is_open and session.lease_id == lease_id:
            return await session.renew(deadline)
        request = model_executor_pb2.KeepAliveRequest(lease_id=lease_id)
        try:
            answer = await context.calls.call(context.executor.KeepAlive, request, deadline, NEVER_RESEND)
        except ExecutorError as error:
            context.note_error(error)
            raise
        context.note_pressure(answer.pressure)
        return seconds(answer.ttl)

    async def revoke_lease(self, lease_id: str, deadline: Deadline) -> int:
        """End it; returns how many sequences went with it."""
        context = self._context
        request = model_executor_pb2.RevokeLeaseRequest(lease_id=lease_id)
        answer = await context.calls.call(context.executor.RevokeLease, request, deadline)
        context.note_pressure(answer.pressure)
        return answer.released_sequences

    # --- the client's own -------------------------------------------------------------------------------------------

    async def current(self, deadline: Deadline) -> str:
        """The lease of the client's sequences; empty where it wants none, or the executor has none."""
        if not self._wanted or Capability.LEASES not in (await self._context.info(deadline)).capabilities:
            return ""
        return await self.keeper.current(deadline)

    async def lend(self, item: Item, deadline: Deadline) -> None:
        """A sequence that begins gets the client's lease, unless its maker named another. A creation in doubt keeps the
        one that it went out with: under another it would be another call."""
        if not item.proto.create.lease_id:
            lease_id = item.state.lease_in_doubt(item.request_id) or await self.current(deadline)
            if lease_id:
                item.proto.create.lease_id = item.state.lease_id = lease_id

    def returned(self, item: Item, error: ExecutorError) -> bool:
        """Whether a creation was refused only because the client's own lease is gone: then it may be lent another."""
        lease_id = item.state.lease_id
        if item.handle is not None or not lease_id:
            return False
        self.keeper.lost(lease_id, error)
        item.proto.create.lease_id = item.state.lease_id = ""
        return True
