"""One client's connection: its parts, and the order in which they end."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from ferrum_rpc.client.context import Context, Metadata
from ferrum_rpc.client.forward import Forwards
from ferrum_rpc.client.lease import LeasePolicy, Leases, LeaseTrouble
from ferrum_rpc.client.release import Releases
from ferrum_rpc.client.retry import Deadline, ResendPolicy
from ferrum_rpc.client.session import SessionTransport
from ferrum_rpc.client.transport import Transport


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
        self.context = context = Context(channel, metadata=metadata, resend=resend, timeout_s=timeout_s)
        self.leases = leases = Leases(context, lease, client_name=client_name, on_trouble=on_lease_trouble)
        self.transport = (
            Transport(context) if steps_in_flight is None else SessionTransport(context, leases, steps_in_flight)
        )
        self.releases = Releases(self.transport, release_timeout_s)
        self.forwards = Forwards(context, self.transport, leases, self.releases)

    async def close(self) -> None:
        """Release what is still live, and end the session and the lease, within the time of a release; then close the
        channel."""
        deadline = Deadline.after(self.releases.timeout_s)
        try:
            await self.releases.settled(deadline)
            # A step that hangs delays the end of the session: there must be time left to revoke the lease.
            await self.transport.close(Deadline.after(self.releases.timeout_s / 2))
            await self.releases.all(deadline, but_of_lease=self.leases.lease_id)
            await self.leases.close(deadline)
        finally:
            self.leases.stop()
            await self.context.channel.close()
