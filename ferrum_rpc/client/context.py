"""The base of a client: the executor's stubs, calls with resends, and the last known state of the executor.

It is independent of sessions, leases and sequences. `Connection` assembles the parts.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from grpc_health.v1.health_pb2_grpc import HealthStub

from ferrum_rpc.client.encryption import Again, with_hint
from ferrum_rpc.client.info import ExecutorInfo, ExecutorState, ExecutorStatus, info_from_proto, status_from_proto
from ferrum_rpc.client.retry import (
    LONGEST_PAUSE_S,
    REFUSED_BEFORE_RUNNING,
    Backoff,
    Deadline,
    ResendPolicy,
    SingleFlight,
    fate_unknown,
    retry_while_starting,
)
from ferrum_rpc.core import Pressure
from ferrum_rpc.errors import (
    Draining,
    ExecutorError,
    InstanceMismatch,
    InvalidRequest,
    NotSupported,
    Starting,
    TransportError,
)
from ferrum_rpc.executor.v1 import (
    executor_control_pb2_grpc,
    kv_transfer_pb2_grpc,
    model_executor_pb2,
    model_executor_pb2_grpc,
    types_pb2,
)
from ferrum_rpc.wire.info import SCHEMA_REVISION
from ferrum_rpc.wire.items import pressure_from_proto
from ferrum_rpc.wire.status import error_from_rpc

Response = TypeVar("Response")
Metadata = Sequence[tuple[str, str]]

Method = Callable[..., Awaitable[Response]]
"""A unary method of a stub, or what is called like one: ``method(request, timeout=, metadata=)`` is one attempt, given
up after ``timeout`` seconds. It raises gRPC's errors or an `ExecutorError`."""


class Context:
    """One channel to one executor, at ``target``. ``metadata``: credentials, sent with every call. ``timeout_s``: the
    default of calls. ``encrypted``: the channel has TLS. ``again``: finds why the address that accepts connections
    refuses this client, if gRPC reports another address.

    ``draining``: the executor has reported that it is draining, which explains a connection lost later. ``hung``: its
    last `status` reported no progress. ``only_instance``: if set, calls to any other process are refused here.
    ``known_info``: the last result of `info`; None before the first answer, and after a restart of the executor.
    ``max_request_bytes``: the executor's limit, once known; a longer frame would end a session's stream with all its
    steps. ``pressure``: that of the last answer.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        target: str = "",
        metadata: Metadata,
        resend: ResendPolicy,
        timeout_s: float | None,
        encrypted: bool = False,
        again: Again | None = None,
    ) -> None:
        self.channel = channel
        self.target = target
        self.executor = model_executor_pb2_grpc.ModelExecutorStub(channel)
        self.control = executor_control_pb2_grpc.ExecutorControlStub(channel)
        self.transfer = kv_transfer_pb2_grpc.KvTransferStub(channel)
        self.health = HealthStub(channel)
        self.metadata = tuple(metadata)
        self.item_ids = itertools.count(1)
        self.draining = self.hung = False
        self.only_instance = ""
        self.known_info: ExecutorInfo | None = None
        self.max_request_bytes: int | None = None
        self.pressure: Pressure | None = None
        self._pressure: types_pb2.KvPressure | None = None
        self._resend = resend
        self._timeout_s = timeout_s
        self._encrypted, self._again = encrypted, again
        self._getting_info = SingleFlight("asking what the executor is")

    def deadline(self, timeout_s: float | None) -> Deadline:
        """``timeout_s`` from now, or the client's default."""
        if timeout_s is None:
            timeout_s = self._timeout_s
        return Deadline(None if timeout_s is None else time.monotonic() + timeout_s)

    async def call(
        self, method: Method[Response], request: Any, deadline: Deadline, policy: ResendPolicy | None = None
    ) -> Response:
        """Call, and while the outcome is unknown send the same request again, as the policy (default: the client's) and
        the deadline allow. Raises the `ExecutorError` that the answer stands for, and `InvalidRequest` for a request
        that is too long: nothing was sent then.

        Only requests that carry a request id, or whose repetition changes nothing, may be sent again; for the others
        there is `NEVER_RESEND`.
        """
        policy = policy or self._resend
        unknown: ExecutorError | None = None
        backoff: Backoff | None = None
        resend = 0
        while True:
            try:
                if self.max_request_bytes is not None and request.ByteSize() > self.max_request_bytes:
                    raise InvalidRequest(
                        f"the request takes {request.ByteSize()} bytes and the executor at most "
                        f"{self.max_request_bytes}",
                        field="request",
                        metadata={"max_request_bytes": self.max_request_bytes},
                    )
                return await method(
                    request, timeout=deadline.remaining(policy.attempt_timeout_s), metadata=self.metadata
                )
            except (ExecutorError, grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as failure:
                error = self.error_of(failure)
            if isinstance(error, TransportError) and error.metadata.get("grpc_code") == "CANCELLED":
                raise error  # this client was closed; an executor that ends calls answers differently
            if fate_unknown(error):
                unknown = error
            elif unknown is None or not isinstance(error, REFUSED_BEFORE_RUNNING):
                raise error
            backoff, resend = backoff or Backoff(deadline, policy.backoff_s, LONGEST_PAUSE_S), resend + 1
            if resend > policy.times or not await backoff.wait():
                # only the last attempt may report that it is draining
                unknown = self.note_error(unknown)
                raise await with_hint(unknown, deadline, encrypted=self._encrypted, again=self._again)

    def error_of(self, failure: BaseException) -> ExecutorError:
        """The error of a failed attempt. Raises the caller's cancellation."""
        if isinstance(failure, grpc.aio.AioRpcError):
            failure = error_from_rpc(failure)
        if isinstance(failure, ExecutorError):
            return self.note_error(failure)
        task = asyncio.current_task()
        if isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling():
            raise failure
        # This task was not cancelled: its channel was closed under it, and grpc.aio reports that by cancelling.
        return closed()

    async def info(self, deadline: Deadline) -> ExecutorInfo:
        """The executor's description, requested once per process lifetime."""
        if self.known_info is not None:
            return self.known_info
        return await self._getting_info.get(lambda: self.known_info, lambda: self._get_info(deadline), deadline)

    async def _get_info(self, deadline: Deadline) -> ExecutorInfo:
        request = model_executor_pb2.GetInfoRequest(client_revision=SCHEMA_REVISION)
        answer = await retry_while_starting(lambda: self.call(self.executor.GetInfo, request, deadline), deadline)
        info = info_from_proto(answer)
        if info.minimum_client_revision > SCHEMA_REVISION:
            raise NotSupported(
                f"the executor ({info.server_version}) needs clients of schema revision "
                f"{info.minimum_client_revision}; this one has {SCHEMA_REVISION}"
            )
        self.note_instance(info.instance_id)
        self.known_info, self.max_request_bytes = info, info.limits.max_request_bytes
        return info

    async def status(self, deadline: Deadline, policy: ResendPolicy | None = None) -> ExecutorStatus:
        """The executor's present status."""
        answer = await self.call(self.executor.GetStatus, model_executor_pb2.GetStatusRequest(), deadline, policy)
        self.note_pressure(answer.pressure)
        status = status_from_proto(answer)
        self.hung = status.state is ExecutorState.HUNG
        if not self.hung:  # which hides whether it drains
            self.draining = status.state is ExecutorState.DRAINING
        return status

    # --- what is known of the executor ---------------------------------------------------------------------------

    def note_pressure(self, pressure: types_pb2.KvPressure) -> Pressure:
        """Keep the pressure of an answer. Items that shared a frame share its message. An executor that still loads
        (after a restart) has no cache yet: the last pressure stays."""
        if not pressure.block_size and self.pressure is not None:
            return pressure_from_proto(pressure)
        if self.pressure is None or pressure is not self._pressure:
            self._pressure, self.pressure = pressure, pressure_from_proto(pressure)
        return self.pressure

    def note_instance(self, instance_id: str) -> None:
        """Note that this process has answered, and drop the state of another one. Raises `InstanceMismatch` unless it
        is ``only_instance``, if that is set."""
        if self.only_instance not in {"", instance_id}:
            raise InstanceMismatch("the executor was restarted: what the old one held is gone")
        if self.known_info is not None and self.known_info.instance_id != instance_id:
            self.known_info = None

    def note_error(self, error: ExecutorError) -> ExecutorError:
        """Note from an error that the executor drains, or is another process. Returns the error to raise: `Draining` if
        the connection to a draining executor is lost; the outcome of the call is as unknown as with any lost
        connection."""
        if isinstance(error, Draining):
            self.draining = True
        elif isinstance(error, Starting | InstanceMismatch):
            self.draining = False
            if isinstance(error, InstanceMismatch):
                self.known_info = None
        elif self.draining and isinstance(error, TransportError) and error.metadata.get("grpc_code") != "CANCELLED":
            return Draining(f"the executor was draining and is gone: {error.message}", metadata=error.metadata)
        return error


def closed() -> TransportError:
    """The error of a call whose own client is closed meanwhile."""
    return TransportError("the client was closed while a call was in flight", metadata={"grpc_code": "CANCELLED"})
