"""One client's connection: its parts, and the order in which they end."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from ferrum_rpc.client.calls import Calls, Metadata
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.dispatch import Dispatcher
from ferrum_rpc.client.forward import Forwards
from ferrum_rpc.client.lease import LeasePolicy, Leases, LeaseTrouble
from ferrum_rpc.client.policy import Deadline, ResendPolicy
from ferrum_rpc.client.release import Releases
from ferrum_rpc.client.session import SessionTransport
from ferrum_rpc.client.transport import UnaryTransport


class Connection:
    """What `ExecutorClient` and `Sequence` speak through. ``steps_in_flight``: requests go through a session of so many
    steps; None: each is a unary call."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        metadata: Metadata,
        resend: ResendPolicy,
        timeout_s: float | None,
        release_timeout_s: float,
        lease: LeasePolicy | None,
        client_name: str,
        on_lease_trouble: Callable[[LeaseTrouble], None] | None,
        steps_in_flight: int | None,
    ) -> None:
        self._channel = channel
        self.context = context = Context(channel, Calls(metadata=metadata, resend=resend), timeout_s)
        self.leases = leases = Leases(context, lease, client_name=client_name, on_trouble=on_lease_trouble)
        unary = UnaryTransport(context.executor, context.calls)
        session = None
        if steps_in_flight is not None:
            session = SessionTransport(context, leases, channel, unary, steps_in_flight)
            leases.renewal = session.renewal
        self.dispatcher = Dispatcher(context, unary, session)
        self.releases = Releases(context, self.dispatcher, release_timeout_s)
        self.forwards = Forwards(context, self.dispatcher, leases, self.releases)

    async def close(self) -> None:
        """Release what is still live, and end the session and the lease, within the time of a release; then close the
        channel."""
        deadline, keeper = Deadline.after(self.releases.timeout_s), self.leases.keeper
        try:
            await self.releases.settled(deadline)
            # A step that hangs delays the end of the session: there must be time left to revoke the lease.
            await self.dispatcher.close(Deadline.after(self.releases.timeout_s / 2))
            await self.releases.all(deadline, but_of_lease=keeper.lease_id)
            await keeper.close(deadline)
        finally:
            keeper.stop()
            await self._channel.close()
