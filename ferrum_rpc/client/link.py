"""The client's end of the wire: what the parts of one client share, from its first call to its end.

`ExecutorClient` and `Sequence` are the faces that a program sees; both speak through one `Link` per client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from ferrum_rpc.client.calls import Calls
from ferrum_rpc.client.facts import Capability, ExecutorInfo, info_from_proto, pressure_from_proto
from ferrum_rpc.client.forwards import Forwards
from ferrum_rpc.client.lease import LeasePolicy, LeaseTrouble
from ferrum_rpc.client.lending import Lending
from ferrum_rpc.client.policy import LONGEST_PAUSE_S, Deadline
from ferrum_rpc.client.releases import Releases
from ferrum_rpc.client.session import SessionTransport
from ferrum_rpc.client.shared import Shared
from ferrum_rpc.client.state import Item, SequenceState
from ferrum_rpc.client.transport import Feed, Outcomes, Transport, UnaryTransport
from ferrum_rpc.core import HandleRef, OutputSpec, Pressure
from ferrum_rpc.errors import ExecutorError, InstanceMismatch, NotSupported, SequenceBusy, Starting
from ferrum_rpc.executor.v1 import model_executor_pb2, model_executor_pb2_grpc, types_pb2
from ferrum_rpc.wire.revision import SCHEMA_REVISION

Result = TypeVar("Result")
Value = TypeVar("Value")

_BUSY_PATIENCE_S = 5.0
_FIRST_LOOK_S = 0.05

log = logging.getLogger("ferrum_rpc.client")


class Link:
    """One channel, one caller. ``steps_in_flight``: requests go through a session of so many steps; None: each is a
    unary call."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        calls: Calls,
        *,
        timeout_s: float | None,
        release_timeout_s: float,
        lease: LeasePolicy | None,
        client_name: str,
        on_lease_trouble: Callable[[LeaseTrouble], None] | None,
        steps_in_flight: int | None,
    ) -> None:
        stub = model_executor_pb2_grpc.ModelExecutorStub(channel)
        messages = model_executor_pb2
        self.executor = stub
        self.calls = calls
        self.prefill = Feed("prefill", stub.Prefill, messages.PrefillRequest)
        self.decode = Feed("decode", stub.Decode, messages.DecodeRequest)
        self.verify = Feed("verify", stub.ForwardVerify, messages.ForwardVerifyRequest)
        self.forward = Feed("forward", stub.UnifiedForward, messages.UnifiedForwardRequest)
        self.batch_prefill = Feed("batch_prefill", stub.BatchPrefill, messages.BatchPrefillRequest)
        self.batch_decode = Feed("batch_decode", stub.BatchDecode, messages.BatchDecodeRequest)
        self.pressure: Pressure | None = None
        self._pressure: types_pb2.KvPressure | None = None
        self._timeout_s = timeout_s
        self._info: ExecutorInfo | None = None
        self._asking = Shared("asking what the executor is")
        self._item_ids = itertools.count(1)
        self.forwards = Forwards(self)
        self.releases = Releases(self, release_timeout_s)
        self.lending = Lending(self, lease, client_name=client_name, on_trouble=on_lease_trouble)
        self._unary = unary = UnaryTransport(stub, calls)
        self.session = None if steps_in_flight is None else SessionTransport(self, channel, unary, steps_in_flight)
        self._fell_back = False

    def deadline(self, timeout_s: float | None) -> Deadline:
        """``timeout_s`` from now, or the client's default."""
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    def saw(self, pressure: types_pb2.KvPressure) -> Pressure:
        """Note the pressure that an answer carries. Items that shared a frame share its message."""
        if self.pressure is None or pressure is not self._pressure:
            self._pressure, self.pressure = pressure, pressure_from_proto(pressure)
        return self.pressure

    def item(self, state: SequenceState, tokens: list[int], output: OutputSpec, truncate_to: int | None = None) -> Item:
        """An item with an id of its own."""
        return state.item(next(self._item_ids), tokens, output, truncate_to)

    async def info(self, deadline: Deadline) -> ExecutorInfo:
        """What the executor is, asked once per process lifetime of it."""
        if self._info is not None:
            return self._info
        return await self._asking.get(lambda: self._info, lambda: self._ask(deadline), deadline)

    async def _ask(self, deadline: Deadline) -> ExecutorInfo:
        request = model_executor_pb2.GetInfoRequest(client_revision=SCHEMA_REVISION)
        answer = await self.loaded(lambda: self.calls.mutate(self.executor.GetInfo, request, deadline), deadline)
        info = info_from_proto(answer)
        if info.minimum_client_revision > SCHEMA_REVISION:
            raise NotSupported(
                f"the executor ({info.server_version}) needs clients of schema revision "
                f"{info.minimum_client_revision}; this one has {SCHEMA_REVISION}"
            )
        self._info = info
        self.calls.max_request_bytes = info.limits.max_request_bytes
        return info

    async def loaded(self, ask: Callable[[], Awaitable[Result]], deadline: Deadline) -> Result:
        """Ask, and while the model loads ask again. Raises `Starting` when the time is over."""
        pause = _FIRST_LOOK_S
        while True:
            try:
                return await ask()
            except Starting:
                left = deadline.remaining()
                if left is not None and left <= pause:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    @property
    def exact_span_tokens(self) -> int:
        """As the executor told; 1, which decides nothing, before it did."""
        return 1 if self._info is None else self._info.limits.exact_span_tokens

    @property
    def standing(self) -> Transport | None:
        """The session, where one is open."""
        return self.session if self.session is not None and self.session.is_open else None

    async def transport(self, deadline: Deadline) -> Transport:
        """How requests travel: through the session where one is wanted and offered."""
        if self.session is None:
            return self._unary
        if self.standing is not None or Capability.SESSION in (await self.info(deadline)).capabilities:
            return self.session
        if not self._fell_back:
            self._fell_back = True
            log.warning("the executor offers no sessions (capability SESSION): requests go as unary calls")
        return self._unary

    async def outcomes(
        self,
        send: Callable[[Transport, Sequence[Value]], Awaitable[Outcomes]],
        values: Sequence[Value],
        deadline: Deadline,
    ) -> list[HandleRef | ExecutorError]:
        """What became of an operation on each of many, sent as many at once as the executor takes. What refuses a whole
        message refuses each in it."""

        async def sent(part: Sequence[Value]) -> Sequence[HandleRef | ExecutorError]:
            try:
                outcomes, pressure = await send(await self.transport(deadline), part)
            except ExecutorError as error:
                return [error] * len(part)
            if pressure is not None:
                self.saw(pressure)
            return outcomes

        if len(values) <= 1:
            return [*await sent(values)] if values else []
        most = len(values) if self._info is None else self._info.limits.max_batch_items
        parts = [sent(values[first : first + most]) for first in range(0, len(values), most)]
        return list(itertools.chain(*await asyncio.gather(*parts)))

    def met(self, instance_id: str) -> None:
        """A session was opened with this process: what another one was is forgotten."""
        if self._info is not None and self._info.instance_id != instance_id:
            self._info = None

    def noticed(self, error: BaseException) -> None:
        """Note what a refusal tells about the executor: another process lifetime has other facts."""
        if isinstance(error, InstanceMismatch):
            self._info = None

    async def close(self) -> None:
        """Give everything back, within the time of a release. Does not raise."""
        deadline, keeper = Deadline.after(self.releases.timeout_s), self.lending.keeper
        try:
            await self.releases.settled(deadline)
            session, self.session = self.session, None
            if session is not None:
                # A step that hangs delays the goodbye: there must be time left to revoke the lease.
                await session.close(Deadline.after(self.releases.timeout_s / 2))
            await self.releases.all(deadline, but_of_lease=keeper.lease_id)
            await keeper.close(deadline)
        finally:
            keeper.stop()

    async def patiently(
        self, state: SequenceState, send: Callable[[], Awaitable[Result]], deadline: Deadline
    ) -> Result:
        """After a call was given up, the executor may still be at it: its SEQUENCE_BUSY is then no mistake of the
        program, and passes."""
        doubtful = state.doubt is not None and state.doubt.unknown
        patience = Deadline.after(deadline.remaining(_BUSY_PATIENCE_S))
        pause = 0.005
        while True:
            try:
                return await send()
            except SequenceBusy:
                if not doubtful or patience.passed:
                    raise
            await asyncio.sleep(patience.remaining(pause) or 0.0)
            pause = min(2 * pause, 0.25)
