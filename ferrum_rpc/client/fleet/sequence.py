"""`FleetSequence`: a sequence that has one owner at a time among the executors of a fleet.

All that a `Sequence` does it does at its owner (`client.fleet.owner`).
"""

from __future__ import annotations

from ferrum_rpc.client import transfer
from ferrum_rpc.client.fleet.member import Member
from ferrum_rpc.client.fleet.owner import FleetOwner
from ferrum_rpc.client.sender import Sender, nothing
from ferrum_rpc.client.sequence import Sequence
from ferrum_rpc.errors import ContextLengthExceeded, InvalidRequest


class FleetSequence(Sequence):
    """One sequence in the KV cache of one executor of a fleet. Made by `FleetClient.sequence`; used as a `Sequence`."""

    _sender: Sender[FleetOwner]

    def __init__(self, sender: Sender[FleetOwner]) -> None:
        super().__init__(sender)
        sender.owner.fleet.senders[sender.state] = sender

    @property
    def owner(self) -> Member | None:
        """The executor that has it; None: none, it is placed with the next call."""
        return self._sender.owner.executor

    async def migrate(
        self, to: Member, *, transport: transfer.Transport = "grpc", timeout_s: float | None = None
    ) -> None:
        """Go on at another executor of the fleet, one of `Members.serving`, with the cache; nothing is computed. What
        was lost with its owner is fed there instead. Between two tokens of a stream the stream goes on there.

        After an error it is where it was, as it was. Raises `InvalidRequest` for who takes no sequences,
        `ContextLengthExceeded` where the context there is too short, and as `Sequence.move_to`, which also says what
        ``transport`` is."""
        sender, owner = self._sender, self._sender.owner
        if to not in owner.fleet.members.serving:
            raise InvalidRequest(f"{to!r} does not accept sequences of this fleet", field="to")
        if self.length > to.max_context:
            raise ContextLengthExceeded(
                f"the sequence has {self.length} tokens, and the context there is {to.max_context}",
                metadata={"max_context": to.max_context, "seq_len": self.length},
            )
        deadline = sender.deadline(timeout_s)
        with sender.claim("migrate", keeps_prompt=True), owner.wanting(to):
            await sender.send(nothing, deadline)
            if owner.member is not to:
                to.promise(-(-self.length // to.info.block_size))
                await owner.carry(to, transport, deadline)
