"""A fleet for programs without asyncio. tools/generate_sync.py makes it of the async one: do not edit.

    from ferrum_rpc.client import ExecutorClient
    from ferrum_rpc.client.fleet.sync import FleetClient

    with FleetClient(targets, connect=partial(ExecutorClient, session=True)) as fleet, fleet.sequence() as sequence:
        for token in sequence.generate(b"In the beginning", max_tokens=64):
            print(token, sequence.owner)

As `client.sync` is of one executor. ``connect`` makes async clients: all executors of a fleet live in its one event
loop, and there its ``placement`` is asked. What `FleetClient.members` and a `Member` tell may be read in any thread;
their methods are of that loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ferrum_rpc.client import transfer
from ferrum_rpc.client.background import ClientFacade, blocking, constructor_of, making, unwrapped
from ferrum_rpc.client.fleet import client as async_fleet_client
from ferrum_rpc.client.fleet import sequence as async_fleet_sequence
from ferrum_rpc.client.fleet.member import Member
from ferrum_rpc.client.fleet.members import Members
from ferrum_rpc.client.sync import Sequence
from ferrum_rpc.core.info import Pressure
from ferrum_rpc.errors import ExecutorError


class FleetSequence(Sequence):
    __doc__ = async_fleet_sequence.FleetSequence.__doc__

    _async: async_fleet_sequence.FleetSequence

    @property
    def owner(self) -> Member | None:
        """The executor that has it; None: none, it is placed with the next call."""
        return self._async.owner

    def migrate(self, to: Member, *, transport: transfer.Transport = "grpc", timeout_s: float | None = None) -> None:
        """Go on at another executor of the fleet, one of `Members.serving`, with the cache; nothing is computed. What
        was lost with its owner is fed there instead. Between two tokens of a stream the stream goes on there.

        After an error it is where it was, as it was. Raises `InvalidRequest` for who takes no sequences,
        `ContextLengthExceeded` where the context there is too short, and as `Sequence.move_to`, which also says what
        ``transport`` is."""
        return self._background.run(self._async.migrate(to, transport=transport, timeout_s=timeout_s))


class FleetClient(ClientFacade[async_fleet_client.FleetClient]):
    __doc__ = async_fleet_client.FleetClient.__doc__

    @constructor_of(async_fleet_client.FleetClient)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(async_fleet_client.FleetClient(*args, **kwargs))

    @property
    def members(self) -> Members:
        """The members of the fleet."""
        return self._async.members

    @property
    def executors(self) -> list[Member]:
        """The present executors, the oldest first."""
        return self._async.executors

    @property
    def pressure(self) -> Pressure | None:
        """How full the executors were in their last answers, together, in blocks of the smallest block size; `Member`
        has that of each. None before the first."""
        return self._async.pressure

    info = blocking(async_fleet_client.FleetClient.info)
    status = blocking(async_fleet_client.FleetClient.status)
    health = blocking(async_fleet_client.FleetClient.health)
    sequence = making(FleetSequence, async_fleet_client.FleetClient.sequence)
    register_token_mask = blocking(async_fleet_client.FleetClient.register_token_mask)
    register_grammar = blocking(async_fleet_client.FleetClient.register_grammar)
    forward = blocking(async_fleet_client.FleetClient.forward)
    batch_prefill = blocking(async_fleet_client.FleetClient.batch_prefill)
    batch_decode = blocking(async_fleet_client.FleetClient.batch_decode)

    def truncate(
        self, rollbacks: Iterable[tuple[Sequence, int]], *, timeout_s: float | None = None
    ) -> list[ExecutorError | None]:
        """Roll back many sequences, each to its own length: ``results[i]`` is None on success, or the `ExecutorError`
        that `Sequence.truncate` would raise. In a session they are one frame, else a call each. After an unknown
        outcome, making the same call again settles it."""
        return self._background.run(self._async.truncate(unwrapped(rollbacks), timeout_s=timeout_s))

    def release(self, sequences: Iterable[Sequence]) -> list[ExecutorError | None]:
        """Free many sequences: ``results[i]`` is None if the sequence is free (also if it was before), or the
        `ExecutorError` that `Sequence.release` would raise. Bounded and completed as that is."""
        return self._background.run(self._async.release(unwrapped(sequences)))

    score = blocking(async_fleet_client.FleetClient.score)
