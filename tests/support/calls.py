"""Calls on the raw stubs of a server: each may be awaited, or cancelled. `wiring.prefill` awaits the handle alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2

from ferrum_rpc.executor.v1 import executor_control_pb2, forward_pb2, kv_transfer_pb2, types_pb2
from tests.support.tokens import bearer
from tests.support.wiring import item, pb


@dataclass(frozen=True)
class Bearing:
    """A stub whose calls have a token."""

    stub: Any
    token: str

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self.stub, name), metadata=bearer(self.token))


class Calls:
    """Who has the stubs ``executor``, ``control``, ``transfer`` and ``health``."""

    __slots__ = ()

    def by(self, token: str) -> Self:
        """The same, for the caller of this token."""
        other: Any = copy(self)
        for name in ("executor", "control", "transfer"):
            setattr(other, name, Bearing(getattr(self, name), token))
        return other

    def prefill(self, tokens: Sequence[int], handle: Any = None, timeout: float | None = None, **fields: Any) -> Any:
        return self.executor.Prefill(pb.PrefillRequest(item=item(tokens, handle, **fields)), timeout=timeout)

    def decode(self, tokens: Sequence[int], handle: Any = None, timeout: float | None = None, **fields: Any) -> Any:
        return self.executor.Decode(pb.DecodeRequest(item=item(tokens, handle, **fields)), timeout=timeout)

    def verify(self, tokens: Sequence[int], handle: types_pb2.KvHandle | None = None, **fields: Any) -> Any:
        return self.executor.ForwardVerify(pb.ForwardVerifyRequest(item=item(tokens, handle, **fields)))

    def unified(self, *items: forward_pb2.ForwardItem, timeout: float | None = None, **fields: Any) -> Any:
        return self.executor.UnifiedForward(pb.UnifiedForwardRequest(items=items, **fields), timeout=timeout)

    def batch_prefill(self, *items: forward_pb2.ForwardItem, **fields: Any) -> Any:
        return self.executor.BatchPrefill(pb.BatchPrefillRequest(items=items, **fields))

    def batch_decode(self, *items: forward_pb2.ForwardItem, **fields: Any) -> Any:
        return self.executor.BatchDecode(pb.BatchDecodeRequest(items=items, **fields))

    def truncate(self, handle: types_pb2.KvHandle, length: int = 0, **fields: Any) -> Any:
        return self.executor.TruncateKv(pb.TruncateKvRequest(handle=handle, length=length, **fields))

    def fork(self, handle: types_pb2.KvHandle, **fields: Any) -> Any:
        return self.executor.ForkKv(pb.ForkKvRequest(handle=handle, **fields))

    def release(self, handle: types_pb2.KvHandle, **fields: Any) -> Any:
        return self.executor.Release(pb.ReleaseRequest(handle=handle, **fields))

    def reserve(self, handle: types_pb2.KvHandle, tokens: int = 0) -> Any:
        return self.executor.ReserveKv(pb.ReserveKvRequest(handle=handle, tokens=tokens))

    def acquire(self, **fields: Any) -> Any:
        return self.executor.AcquireLease(pb.AcquireLeaseRequest(**fields))

    def keep_alive(self, lease_id: str) -> Any:
        return self.executor.KeepAlive(pb.KeepAliveRequest(lease_id=lease_id))

    def revoke(self, lease_id: str) -> Any:
        return self.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease_id))

    def status(self) -> Any:
        return self.executor.GetStatus(pb.GetStatusRequest())

    def info(self) -> Any:
        return self.executor.GetInfo(pb.GetInfoRequest())

    def park(self, handle: types_pb2.KvHandle) -> Any:
        return self.transfer.ParkKv(kv_transfer_pb2.ParkKvRequest(handle=handle))

    def reset(self) -> Any:
        return self.control.Reset(executor_control_pb2.ResetRequest())

    def drain(self, grace_s: float = 60) -> Any:
        grace = duration_pb2.Duration()
        grace.FromNanoseconds(round(grace_s * 1e9))
        return self.control.Drain(executor_control_pb2.DrainRequest(grace=grace))

    async def listed(self) -> list[executor_control_pb2.SequenceInfo]:
        """The sequences of a first page."""
        return list((await self.control.ListSequences(executor_control_pb2.ListSequencesRequest())).sequences)

    def health_check(self, service: str = "") -> Any:
        return self.health.Check(health_pb2.HealthCheckRequest(service=service))

    def health_watch(self, service: str = "") -> Any:
        return self.health.Watch(health_pb2.HealthCheckRequest(service=service))
