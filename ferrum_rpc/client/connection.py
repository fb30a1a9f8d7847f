"""One client's connection: its parts, and the order in which they end."""

from __future__ import annotations

from ferrum_rpc.client.context import Context
from ferrum_rpc.client.forward import Forwards
from ferrum_rpc.client.lease import Leases
from ferrum_rpc.client.operations import Operations
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.client.transport import Transport


class Connection:
    """What `ExecutorClient` and `Sequence` speak through."""

    def __init__(self, context: Context, leases: Leases, transport: Transport, release_timeout_s: float) -> None:
        self.context = context
        self.leases = leases
        self.transport = transport
        self.operations = Operations(transport, release_timeout_s)
        self.forwards = Forwards(context, transport, leases, self.operations)

    async def close(self) -> None:
        """Release what is still live, and end the session and the lease, within the time of a release; then close the
        channel."""
        timeout_s = self.operations.release_timeout_s
        deadline = Deadline.after(timeout_s)
        try:
            await self.operations.finish_releases(deadline)
            # A step that hangs delays the end of the session: there must be time left to revoke the lease.
            await self.transport.close(Deadline.after(timeout_s / 2))
            await self.operations.release_all(deadline, but_of_lease=self.leases.lease_id)
            await self.leases.close(deadline)
        finally:
            self.leases.stop()
            await self.context.channel.close()
