"""The scheduler's side of the contract: messages in, messages out. Every decision is taken on the floors around."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, TypeVar

from ferrum_rpc import __version__
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import info_pb2, model_executor_pb2, model_executor_pb2_grpc, types_pb2
from ferrum_rpc.service.books import Books
from ferrum_rpc.service.calls import CallLog, Context, answers, answers_stream, deadline_of
from ferrum_rpc.service.control import STATE_TO_PROTO, not_offered
from ferrum_rpc.service.forward import Call, ForwardPath
from ferrum_rpc.service.identity import caller
from ferrum_rpc.service.operations import CacheOperations
from ferrum_rpc.service.records import Account, Ending
from ferrum_rpc.service.session import Session, Sessions
from ferrum_rpc.service.unread import UNCOUNTED_BYTES
from ferrum_rpc.wire.facts import CAPABILITIES, device_to_proto, limits_to_proto, model_to_proto, seconds, set_seconds
from ferrum_rpc.wire.framing import Framing
from ferrum_rpc.wire.items import (
    Shape,
    fill_lone,
    fill_pressure,
    fill_results,
    fill_timing,
    handle_from_proto,
    handle_to_proto,
    item_from_proto,
    items_from_proto,
    pressure_to_proto,
    request_id_from_proto,
)
from ferrum_rpc.wire.revision import MINIMUM_CLIENT_REVISION, SCHEMA_REVISION

M = TypeVar("M")
"""An answer's type."""


class ModelExecutorServicer(model_executor_pb2_grpc.ModelExecutorServicer):
    """The scheduler's side."""

    service = "ferrum_rpc.executor.v1.ModelExecutor"

    def __init__(self, books: Books, calls: CallLog, sessions: Sessions) -> None:
        self.calls = calls
        self._books = books
        self._forward = ForwardPath(books)
        self._operations = CacheOperations(books)
        self._sessions = sessions

    # --- forward ----------------------------------------------------------------------------------------------------

    @answers
    async def Prefill(  # noqa: N802 - named by the contract
        self, request: model_executor_pb2.PrefillRequest, context: Context
    ) -> model_executor_pb2.PrefillResponse:
        """One prompt, or the next chunk of one."""
        response = model_executor_pb2.PrefillResponse()
        return await self._single("Prefill", request, response, Shape.PREFILL, context)

    @answers
    async def Decode(  # noqa: N802
        self, request: model_executor_pb2.DecodeRequest, context: Context
    ) -> model_executor_pb2.DecodeResponse:
        """One token."""
        response = model_executor_pb2.DecodeResponse()
        return await self._single("Decode", request, response, Shape.DECODE, context)

    @answers
    async def ForwardVerify(  # noqa: N802
        self, request: model_executor_pb2.ForwardVerifyRequest, context: Context
    ) -> model_executor_pb2.ForwardVerifyResponse:
        """A draft, every position."""
        response = model_executor_pb2.ForwardVerifyResponse()
        return await self._single("ForwardVerify", request, response, Shape.VERIFY, context)

    @answers
    async def BatchPrefill(  # noqa: N802
        self, request: model_executor_pb2.BatchPrefillRequest, context: Context
    ) -> model_executor_pb2.BatchPrefillResponse:
        """Several prompts or chunks."""
        response = model_executor_pb2.BatchPrefillResponse()
        return await self._batch("BatchPrefill", request, response, Shape.PREFILL, context)

    @answers
    async def BatchDecode(  # noqa: N802
        self, request: model_executor_pb2.BatchDecodeRequest, context: Context
    ) -> model_executor_pb2.BatchDecodeResponse:
        """Several tokens."""
        response = model_executor_pb2.BatchDecodeResponse()
        return await self._batch("BatchDecode", request, response, Shape.DECODE, context)

    @answers
    async def UnifiedForward(  # noqa: N802
        self, request: model_executor_pb2.UnifiedForwardRequest, context: Context
    ) -> model_executor_pb2.UnifiedForwardResponse:
        """Any mix."""
        response = model_executor_pb2.UnifiedForwardResponse()
        return await self._batch("UnifiedForward", request, response, Shape.ANY, context)

    async def _single(self, method: str, request: Any, response: M, shape: Shape, context: Context) -> M:
        """A call of one item: its refusal is the call's. Returns ``response``, filled and perhaps framed."""
        self.calls.method(f"{self.service}/{method}").items += 1
        who, message = caller(), request.item
        self._forward.check_room((message,), who)
        item = item_from_proto(message, shape)
        answer = await self._forward.forward(
            (item,), caller=who, deadline=deadline_of(context), hold=partial(self._hold, context)
        )
        outcome = answer.outcomes[0]
        if isinstance(outcome, ExecutorError):
            raise outcome
        filled: Any = response
        framing = Framing()
        fill_lone(filled.output, filled.row_blocks, outcome, framing.put)
        self._complete(response, answer)
        return framing.framed(response)

    async def _batch(self, method: str, request: Any, response: M, shape: Shape, context: Context) -> M:
        """A call of several items: each has an outcome of its own. Returns ``response``, filled and perhaps framed."""
        count = self.calls.method(f"{self.service}/{method}")
        count.items += len(request.items)
        who = caller()
        self._forward.check_room(request.items, who)
        items = items_from_proto(request.items, shape)
        answer = await self._forward.forward(
            items,
            caller=who,
            all_or_nothing=request.all_or_nothing,
            deadline=deadline_of(context),
            hold=partial(self._hold, context),
        )
        self.calls.refused_items(f"{self.service}/{method}", answer.outcomes, context)
        framing = Framing()
        fill_results(response, request.items, answer.outcomes, framing.put)
        self._complete(response, answer)
        return framing.framed(response)

    def _hold(self, context: Context, account: Account, size: int) -> None:
        """Take room for a call's answer until the call is over, which it is when gRPC has sent the answer."""
        if size > UNCOUNTED_BYTES:
            give = self._books.unread.take(context.peer(), account, size)
            done: Any = lambda _: give()  # noqa: E731 - the stubs want a class of theirs
            context.add_done_callback(done)

    def _complete(self, response: Any, answer: Call) -> None:
        fill_pressure(response.pressure, self._books.pressure())
        if answer.timing is not None:
            fill_timing(response.timing, answer.timing)

    # --- the cache --------------------------------------------------------------------------------------------------

    @answers
    async def TruncateKv(  # noqa: N802
        self, request: model_executor_pb2.TruncateKvRequest, context: Context
    ) -> model_executor_pb2.TruncateKvResponse:
        """Roll back."""
        handle, replayed = await self._operations.truncate(
            handle_from_proto(request.handle),
            request.length,
            request_id_from_proto(request.request_id),
            caller=caller(),
        )
        return model_executor_pb2.TruncateKvResponse(
            handle=handle_to_proto(handle), pressure=self._pressure(), replayed=replayed
        )

    @answers
    async def ForkKv(  # noqa: N802
        self, request: model_executor_pb2.ForkKvRequest, context: Context
    ) -> model_executor_pb2.ForkKvResponse:
        """Share until they diverge."""
        handles, replayed = await self._operations.fork(
            handle_from_proto(request.handle),
            request.count or 1,
            request.at_length if request.HasField("at_length") else None,
            request_id_from_proto(request.request_id),
            caller=caller(),
            lease_id=request.lease_id,
        )
        return model_executor_pb2.ForkKvResponse(
            handles=[handle_to_proto(handle) for handle in handles], pressure=self._pressure(), replayed=replayed
        )

    @answers
    async def Release(  # noqa: N802
        self, request: model_executor_pb2.ReleaseRequest, context: Context
    ) -> model_executor_pb2.ReleaseResponse:
        """Free."""
        replayed = await self._operations.release(
            handle_from_proto(request.handle),
            any_version=request.any_version,
            request_id=request_id_from_proto(request.request_id),
            caller=caller(),
        )
        return model_executor_pb2.ReleaseResponse(pressure=self._pressure(), replayed=replayed)

    @answers
    async def ReserveKv(  # noqa: N802
        self, request: model_executor_pb2.ReserveKvRequest, context: Context
    ) -> model_executor_pb2.ReserveKvResponse:
        """Hold blocks."""
        handle = await self._operations.reserve(handle_from_proto(request.handle), request.tokens, caller=caller())
        return model_executor_pb2.ReserveKvResponse(handle=handle_to_proto(handle), pressure=self._pressure())

    # --- leases and the hot path ------------------------------------------------------------------------------------

    @answers
    async def AcquireLease(  # noqa: N802
        self, request: model_executor_pb2.AcquireLeaseRequest, context: Context
    ) -> model_executor_pb2.AcquireLeaseResponse:
        """A lease; its time is what was asked for, within the limits."""
        _ = self._books.model
        ttl = seconds(request.ttl) if request.HasField("ttl") else None
        lease = self._books.leases.acquire(caller(), ttl, request.client_name)
        response = model_executor_pb2.AcquireLeaseResponse(lease_id=lease.id)
        set_seconds(response.ttl, lease.ttl_s)
        set_seconds(response.renew_every, lease.renew_every_s)
        return response

    @answers
    async def KeepAlive(  # noqa: N802
        self, request: model_executor_pb2.KeepAliveRequest, context: Context
    ) -> model_executor_pb2.KeepAliveResponse:
        """A sign of life."""
        lease = self._books.leases.renew(request.lease_id, caller().name)
        response = model_executor_pb2.KeepAliveResponse(pressure=self._pressure())
        set_seconds(response.ttl, lease.ttl_s)
        return response

    @answers
    async def RevokeLease(  # noqa: N802
        self, request: model_executor_pb2.RevokeLeaseRequest, context: Context
    ) -> model_executor_pb2.RevokeLeaseResponse:
        """The end of a lease and of its sequences; answers when their blocks are free."""
        books = self._books
        lease = books.leases.find(request.lease_id, caller().name)
        released = await books.ended(books.end_lease(lease, expired=False), Ending.REVOKED)
        return model_executor_pb2.RevokeLeaseResponse(released_sequences=released, pressure=self._pressure())

    @answers_stream
    async def Session(self, _: Any, context: Context) -> None:  # noqa: N802
        """Frames both ways."""
        await Session(self._books, self.calls, self._sessions, context).run()

    # --- what it is and how it does ---------------------------------------------------------------------------------

    @answers
    async def GetInfo(  # noqa: N802
        self, request: model_executor_pb2.GetInfoRequest, context: Context
    ) -> model_executor_pb2.GetInfoResponse:
        """What the executor is."""
        model, cache = self._books.model, self._books.engine.cache
        return model_executor_pb2.GetInfoResponse(
            server_version=__version__,
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=MINIMUM_CLIENT_REVISION,
            instance_id=self._books.handles.instance_id,
            model=model_to_proto(model),
            kv_cache=info_pb2.KvCacheInfo(
                block_size=cache.block_size, total_blocks=cache.total_blocks, bytes_per_token=model.kv_bytes_per_token
            ),
            limits=limits_to_proto(self._books.quotas.limits(self._books.limits, caller()), self._books.device),
            capabilities=CAPABILITIES,
            device=device_to_proto(self._books.device),
        )

    @answers
    async def GetStatus(  # noqa: N802
        self, request: model_executor_pb2.GetStatusRequest, context: Context
    ) -> model_executor_pb2.GetStatusResponse:
        """How it does; answers in every state."""
        books = self._books
        engine, counters = books.engine.counters, books.counters
        response = model_executor_pb2.GetStatusResponse(
            state=STATE_TO_PROTO[books.state],
            pressure=self._pressure(),
            counters=info_pb2.Counters(
                steps=engine.steps,
                tokens=engine.tokens,
                rows=engine.rows,
                sequences_created=counters.created,
                sequences_released=counters.released,
                replays=books.replay.replays,
                kv_exhausted=counters.kv_exhausted,
                queue_full=counters.queue_full,
                tokens_truncated=counters.tokens_truncated,
                blocks_copied=engine.blocks_copied,
                leases_expired=counters.leases_expired,
                sequences_expired=counters.sequences_expired,
            ),
            replay_bytes=books.replay.bytes,
            leases=len(books.leases),
            sessions=books.sessions,
        )
        response.counters.forward_time.FromMicroseconds(round(engine.forward_s * 1e6))
        response.uptime.FromMilliseconds(round((time.monotonic() - books.started) * 1e3))
        for name, count in sorted(self.calls.methods.items()):
            response.methods.add(
                method=name, calls=count.calls, errors=count.errors, items=count.items, item_errors=count.item_errors
            )
        return response

    def _pressure(self) -> types_pb2.KvPressure:
        return pressure_to_proto(self._books.pressure())

    # --- not offered by this version --------------------------------------------------------------------------------

    RegisterTokenMask = not_offered("RegisterTokenMask", "TOKEN_MASKS")
