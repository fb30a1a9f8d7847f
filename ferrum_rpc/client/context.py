"""What every part of a client shares: the executor's stub, what is known of the executor, and the ids of items.

The bottom of the client, independent of sessions and leases. `Connection` puts the parts together.
"""

from __future__ import annotations

import itertools
import time

import grpc
from grpc_health.v1.health_pb2_grpc import HealthStub

from ferrum_rpc.client.calls import Calls
from ferrum_rpc.client.info import ExecutorInfo, info_from_proto, pressure_from_proto
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.client.retry import SingleFlight, retry_while_starting
from ferrum_rpc.client.transport import FeedRpc
from ferrum_rpc.core import Pressure
from ferrum_rpc.errors import InstanceMismatch, NotSupported
from ferrum_rpc.executor.v1 import executor_control_pb2_grpc, model_executor_pb2, model_executor_pb2_grpc, types_pb2
from ferrum_rpc.wire.info import SCHEMA_REVISION


class Context:
    """One channel to one executor. ``timeout_s``: of calls that are given none."""

    def __init__(self, channel: grpc.aio.Channel, calls: Calls, timeout_s: float | None) -> None:
        stub = model_executor_pb2_grpc.ModelExecutorStub(channel)
        messages = model_executor_pb2
        self.executor = stub
        self.control = executor_control_pb2_grpc.ExecutorControlStub(channel)
        self.health = HealthStub(channel)
        self.calls = calls
        self.prefill = FeedRpc("prefill", stub.Prefill, messages.PrefillRequest, single=True)
        self.decode = FeedRpc("decode", stub.Decode, messages.DecodeRequest, single=True)
        self.verify = FeedRpc("verify", stub.ForwardVerify, messages.ForwardVerifyRequest, single=True)
        self.forward = FeedRpc("forward", stub.UnifiedForward, messages.UnifiedForwardRequest)
        self.batch_prefill = FeedRpc("batch_prefill", stub.BatchPrefill, messages.BatchPrefillRequest)
        self.batch_decode = FeedRpc("batch_decode", stub.BatchDecode, messages.BatchDecodeRequest)
        self.pressure: Pressure | None = None
        self._pressure: types_pb2.KvPressure | None = None
        self._timeout_s = timeout_s
        self._info: ExecutorInfo | None = None
        self._asking = SingleFlight("asking what the executor is")
        self.item_ids = itertools.count(1)

    def deadline(self, timeout_s: float | None) -> Deadline:
        """``timeout_s`` from now, or the client's default."""
        if timeout_s is None:
            timeout_s = self._timeout_s
        return Deadline(None if timeout_s is None else time.monotonic() + timeout_s)

    async def info(self, deadline: Deadline) -> ExecutorInfo:
        """What the executor is, asked once per process lifetime of it."""
        if self._info is not None:
            return self._info
        return await self._asking.get(lambda: self._info, lambda: self._ask(deadline), deadline)

    async def _ask(self, deadline: Deadline) -> ExecutorInfo:
        request = model_executor_pb2.GetInfoRequest(client_revision=SCHEMA_REVISION)
        answer = await retry_while_starting(lambda: self.calls.call(self.executor.GetInfo, request, deadline), deadline)
        info = info_from_proto(answer)
        if info.minimum_client_revision > SCHEMA_REVISION:
            raise NotSupported(
                f"the executor ({info.server_version}) needs clients of schema revision "
                f"{info.minimum_client_revision}; this one has {SCHEMA_REVISION}"
            )
        self._info = info
        self.calls.max_request_bytes = info.limits.max_request_bytes
        return info

    @property
    def known_info(self) -> ExecutorInfo | None:
        """What `info` returned last; None before the first answer, and after the executor was restarted."""
        return self._info

    @property
    def exact_span_tokens(self) -> int:
        """The limit of that name; 1, which decides nothing, where no info is known."""
        return 1 if self._info is None else self._info.limits.exact_span_tokens

    # --- what answers say of the executor ---------------------------------------------------------------------------

    def note_pressure(self, pressure: types_pb2.KvPressure) -> Pressure:
        """Keep the pressure of an answer. Items that shared a frame share its message."""
        if self.pressure is None or pressure is not self._pressure:
            self._pressure, self.pressure = pressure, pressure_from_proto(pressure)
        return self.pressure

    def note_instance(self, instance_id: str) -> None:
        """A session was opened with this process: drop what is known of another one."""
        if self._info is not None and self._info.instance_id != instance_id:
            self._info = None

    def note_error(self, error: BaseException) -> None:
        """Drop what is known of the executor where the error says that it is another process."""
        if isinstance(error, InstanceMismatch):
            self._info = None
