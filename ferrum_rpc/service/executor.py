"""The scheduler's side of the contract: messages in, messages out. Every decision is taken on the floors around."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

from ferrum_rpc import __version__
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import info_pb2, model_executor_pb2, model_executor_pb2_grpc, types_pb2
from ferrum_rpc.service import kv_ops
from ferrum_rpc.service.admission import check_room
from ferrum_rpc.service.auth import CALLER
from ferrum_rpc.service.control import STATE_TO_PROTO, not_offered
from ferrum_rpc.service.forward import ForwardCall
from ferrum_rpc.service.records import Account, Ending
from ferrum_rpc.service.rpc import CallLog, Context, deadline_of
from ferrum_rpc.service.session import Session, Sessions
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.wire.framing import framed
from ferrum_rpc.wire.info import (
    CAPABILITIES,
    MINIMUM_CLIENT_REVISION,
    SCHEMA_REVISION,
    device_to_proto,
    limits_to_proto,
    model_to_proto,
    seconds,
    set_seconds,
)
from ferrum_rpc.wire.items import (
    Shape,
    fill_outputs,
    fill_results,
    fill_step,
    handle_from_proto,
    handle_to_proto,
    item_from_proto,
    items_from_proto,
    pressure_to_proto,
    request_id_from_proto,
)

SERVICE: Final = "ferrum_rpc.executor.v1.ModelExecutor"


def _of_one(name: str, response_class: type[Any], shape: Shape) -> Any:
    """The handler of a forward call of one item: its refusal is the call's."""
    method = f"{SERVICE}/{name}"

    async def handler(self: ModelExecutorServicer, request: Any, context: Context) -> Any:
        self.calls.methods[method].items += 1
        message = request.item
        account = self.state.quotas.account(CALLER.get())
        check_room(self.state, account, (message,))
        call = await ForwardCall(
            self.state,
            account,
            (item_from_proto(message, shape),),
            deadline=deadline_of(context),
            hold=partial(self.hold, context),
        )
        outcome = call.outcomes[0]
        if isinstance(outcome, ExecutorError):
            raise outcome
        response = response_class()
        rows = fill_outputs(((response.output, outcome),))
        fill_step(response, self.state.pressure(), call.timing)
        return framed(response, rows)

    handler.__name__ = name
    return handler


def _of_many(name: str, response_class: type[Any], shape: Shape) -> Any:
    """The handler of a forward call of several items: each has an outcome of its own."""
    method = f"{SERVICE}/{name}"

    async def handler(self: ModelExecutorServicer, request: Any, context: Context) -> Any:
        messages = request.items
        self.calls.methods[method].items += len(messages)
        account = self.state.quotas.account(CALLER.get())
        check_room(self.state, account, messages)
        call = await ForwardCall(
            self.state,
            account,
            items_from_proto(messages, shape),
            all_or_nothing=request.all_or_nothing,
            deadline=deadline_of(context),
            hold=partial(self.hold, context),
        )
        self.calls.refused_items(method, call.outcomes, context)
        response = response_class()
        rows = fill_results(response, messages, call.outcomes)
        fill_step(response, self.state.pressure(), call.timing)
        return framed(response, rows)

    handler.__name__ = name
    return handler


class ModelExecutorServicer(model_executor_pb2_grpc.ModelExecutorServicer):
    """The scheduler's side."""

    service = SERVICE

    def __init__(self, state: ServerState, calls: CallLog, sessions: Sessions) -> None:
        self.calls = calls
        self.state = state
        self._sessions = sessions

    # --- forward ----------------------------------------------------------------------------------------------------

    Prefill = _of_one("Prefill", model_executor_pb2.PrefillResponse, Shape.PREFILL)
    Decode = _of_one("Decode", model_executor_pb2.DecodeResponse, Shape.DECODE)
    ForwardVerify = _of_one("ForwardVerify", model_executor_pb2.ForwardVerifyResponse, Shape.VERIFY)
    BatchPrefill = _of_many("BatchPrefill", model_executor_pb2.BatchPrefillResponse, Shape.PREFILL)
    BatchDecode = _of_many("BatchDecode", model_executor_pb2.BatchDecodeResponse, Shape.DECODE)
    UnifiedForward = _of_many("UnifiedForward", model_executor_pb2.UnifiedForwardResponse, Shape.ANY)

    def hold(self, context: Context, account: Account, size: int) -> None:
        """Take room for a call's answer until the call is over, which it is when gRPC has sent the answer."""
        give = self.state.unread.take(context.peer(), account, size)
        done: Any = lambda _: give()  # noqa: E731 - the stubs want a class of theirs
        context.add_done_callback(done)

    # --- the cache --------------------------------------------------------------------------------------------------

    async def TruncateKv(  # noqa: N802
        self, request: model_executor_pb2.TruncateKvRequest, context: Context
    ) -> model_executor_pb2.TruncateKvResponse:
        """Roll back."""
        (handle,), replayed = await kv_ops.truncate(
            self.state,
            handle_from_proto(request.handle),
            request.length,
            request_id_from_proto(request.request_id),
            caller=CALLER.get(),
        )
        return model_executor_pb2.TruncateKvResponse(
            handle=handle_to_proto(handle), pressure=self._pressure(), replayed=replayed
        )

    async def ForkKv(  # noqa: N802
        self, request: model_executor_pb2.ForkKvRequest, context: Context
    ) -> model_executor_pb2.ForkKvResponse:
        """Share until they diverge."""
        handles, replayed = await kv_ops.fork(
            self.state,
            handle_from_proto(request.handle),
            request.count or 1,
            request.at_length if request.HasField("at_length") else None,
            request_id_from_proto(request.request_id),
            caller=CALLER.get(),
            lease_id=request.lease_id,
        )
        return model_executor_pb2.ForkKvResponse(
            handles=[handle_to_proto(handle) for handle in handles], pressure=self._pressure(), replayed=replayed
        )

    async def Release(  # noqa: N802
        self, request: model_executor_pb2.ReleaseRequest, context: Context
    ) -> model_executor_pb2.ReleaseResponse:
        """Free."""
        _, replayed = await kv_ops.release(
            self.state,
            handle_from_proto(request.handle),
            any_version=request.any_version,
            request_id=request_id_from_proto(request.request_id),
            caller=CALLER.get(),
        )
        return model_executor_pb2.ReleaseResponse(pressure=self._pressure(), replayed=replayed)

    async def ReserveKv(  # noqa: N802
        self, request: model_executor_pb2.ReserveKvRequest, context: Context
    ) -> model_executor_pb2.ReserveKvResponse:
        """Hold blocks."""
        (handle,), _ = await kv_ops.reserve(
            self.state, handle_from_proto(request.handle), request.tokens, caller=CALLER.get()
        )
        return model_executor_pb2.ReserveKvResponse(handle=handle_to_proto(handle), pressure=self._pressure())

    # --- leases and sessions ------------------------------------------------------------------------------------------

    async def AcquireLease(  # noqa: N802
        self, request: model_executor_pb2.AcquireLeaseRequest, context: Context
    ) -> model_executor_pb2.AcquireLeaseResponse:
        """A lease; its time is what was asked for, within the limits."""
        _ = self.state.model
        ttl = seconds(request.ttl) if request.HasField("ttl") else None
        lease = self.state.leases.acquire(CALLER.get(), ttl, request.client_name)
        response = model_executor_pb2.AcquireLeaseResponse(lease_id=lease.id)
        set_seconds(response.ttl, lease.ttl_s)
        set_seconds(response.renew_every, lease.renew_every_s)
        return response

    async def KeepAlive(  # noqa: N802
        self, request: model_executor_pb2.KeepAliveRequest, context: Context
    ) -> model_executor_pb2.KeepAliveResponse:
        """A sign of life."""
        lease = self.state.leases.renew(request.lease_id, CALLER.get().name)
        response = model_executor_pb2.KeepAliveResponse(pressure=self._pressure())
        set_seconds(response.ttl, lease.ttl_s)
        return response

    async def RevokeLease(  # noqa: N802
        self, request: model_executor_pb2.RevokeLeaseRequest, context: Context
    ) -> model_executor_pb2.RevokeLeaseResponse:
        """The end of a lease and of its sequences; answers when their blocks are free."""
        state = self.state
        lease = state.leases.find(request.lease_id, CALLER.get().name)
        released = await state.ended(state.end_lease(lease, expired=False), Ending.REVOKED)
        return model_executor_pb2.RevokeLeaseResponse(released_sequences=released, pressure=self._pressure())

    async def Session(self, _: Any, context: Context) -> None:  # type: ignore[override] # noqa: N802 - no generator
        """Frames both ways."""
        await Session(self.state, self.calls, self._sessions, context).run()

    # --- what it is and how it does ---------------------------------------------------------------------------------

    async def GetInfo(  # noqa: N802
        self, request: model_executor_pb2.GetInfoRequest, context: Context
    ) -> model_executor_pb2.GetInfoResponse:
        """What the executor is."""
        model, cache = self.state.model, self.state.engine.cache
        return model_executor_pb2.GetInfoResponse(
            server_version=__version__,
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=MINIMUM_CLIENT_REVISION,
            instance_id=self.state.handles.instance_id,
            model=model_to_proto(model),
            kv_cache=info_pb2.KvCacheInfo(
                block_size=cache.block_size, total_blocks=cache.total_blocks, bytes_per_token=model.kv_bytes_per_token
            ),
            limits=limits_to_proto(self.state.quotas.limits(self.state.limits, CALLER.get()), self.state.device),
            capabilities=CAPABILITIES,
            device=device_to_proto(self.state.device),
        )

    async def GetStatus(  # noqa: N802
        self, request: model_executor_pb2.GetStatusRequest, context: Context
    ) -> model_executor_pb2.GetStatusResponse:
        """How it does; answers in every state."""
        state = self.state
        engine, counters = state.engine.counters, state.counters
        response = model_executor_pb2.GetStatusResponse(
            state=STATE_TO_PROTO[state.lifecycle],
            pressure=self._pressure(),
            counters=info_pb2.Counters(
                steps=engine.steps,
                tokens=engine.tokens,
                rows=engine.rows,
                sequences_created=counters.created,
                sequences_released=counters.released,
                replays=state.replay.replays,
                kv_exhausted=counters.kv_exhausted,
                queue_full=counters.queue_full,
                tokens_truncated=counters.tokens_truncated,
                blocks_copied=engine.blocks_copied,
                leases_expired=counters.leases_expired,
                sequences_expired=counters.sequences_expired,
            ),
            replay_bytes=state.replay.bytes,
            leases=len(state.leases),
            sessions=state.sessions,
        )
        response.counters.forward_time.FromMicroseconds(round(engine.forward_s * 1e6))
        response.uptime.FromMilliseconds(round((time.monotonic() - state.started) * 1e3))
        for name, count in sorted(self.calls.methods.items()):
            response.methods.add(
                method=name, calls=count.calls, errors=count.errors, items=count.items, item_errors=count.item_errors
            )
        return response

    def _pressure(self) -> types_pb2.KvPressure:
        return pressure_to_proto(self.state.pressure())

    # --- not offered by this version --------------------------------------------------------------------------------

    RegisterTokenMask = not_offered("RegisterTokenMask", "TOKEN_MASKS")
