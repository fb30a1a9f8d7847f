"""The gRPC servicers: messages in, messages out. Every decision is taken on the floors around this one."""

from __future__ import annotations

import time
from typing import Any, Final

from ferrum_rpc import __version__
from ferrum_rpc.core import StepTiming, WorkItem
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.executor.v1 import (
    executor_control_pb2,
    executor_control_pb2_grpc,
    forward_pb2,
    info_pb2,
    kv_transfer_pb2_grpc,
    model_executor_pb2,
    model_executor_pb2_grpc,
    output_pb2,
    types_pb2,
)
from ferrum_rpc.service.books import Books, Lifecycle
from ferrum_rpc.service.calls import CallLog, Context, Servicer, answers, deadline_of
from ferrum_rpc.service.forward import ForwardPath
from ferrum_rpc.service.operations import CacheOperations
from ferrum_rpc.wire.facts import CAPABILITIES, device_to_proto, limits_to_proto, model_to_proto
from ferrum_rpc.wire.items import (
    Shape,
    fill_output,
    handle_from_proto,
    handle_to_proto,
    item_from_proto,
    pressure_to_proto,
    request_id_from_proto,
    results_to_proto,
    timing_to_proto,
)
from ferrum_rpc.wire.revision import MINIMUM_CLIENT_REVISION, SCHEMA_REVISION
from ferrum_rpc.wire.rows import RowPacker

STATE_TO_PROTO: Final = {
    Lifecycle.STARTING: info_pb2.EXECUTOR_STATE_STARTING,
    Lifecycle.SERVING: info_pb2.EXECUTOR_STATE_SERVING,
    Lifecycle.DRAINING: info_pb2.EXECUTOR_STATE_DRAINING,
    Lifecycle.FAILED: info_pb2.EXECUTOR_STATE_FAILED,
}

WARMUP_BATCH: Final = 8
WARMUP_PREFILL: Final = 128


def not_offered(name: str, capability: str) -> Any:
    """A handler for a method that the contract has and this version has not: visibly, with the capability's name."""

    async def handler(self: Servicer, request: Any, context: Context) -> None:
        raise NotSupported(
            f"{name} is not offered (capability {capability})", metadata={"capability": capability, "method": name}
        )

    handler.__name__ = name
    return answers(handler)


class ModelExecutorServicer(model_executor_pb2_grpc.ModelExecutorServicer):
    """The scheduler's side."""

    service = "ferrum_rpc.executor.v1.ModelExecutor"

    def __init__(self, books: Books, calls: CallLog) -> None:
        self.calls = calls
        self._books = books
        self._forward = ForwardPath(books)
        self._operations = CacheOperations(books)

    # --- forward ----------------------------------------------------------------------------------------------------

    @answers
    async def Prefill(  # noqa: N802 - named by the contract
        self, request: model_executor_pb2.PrefillRequest, context: Context
    ) -> model_executor_pb2.PrefillResponse:
        """One prompt, or the next chunk of one."""
        response = model_executor_pb2.PrefillResponse()
        await self._single("Prefill", request, response, Shape.PREFILL, context)
        return response

    @answers
    async def Decode(  # noqa: N802
        self, request: model_executor_pb2.DecodeRequest, context: Context
    ) -> model_executor_pb2.DecodeResponse:
        """One token."""
        response = model_executor_pb2.DecodeResponse()
        await self._single("Decode", request, response, Shape.DECODE, context)
        return response

    @answers
    async def ForwardVerify(  # noqa: N802
        self, request: model_executor_pb2.ForwardVerifyRequest, context: Context
    ) -> model_executor_pb2.ForwardVerifyResponse:
        """A draft, every position."""
        response = model_executor_pb2.ForwardVerifyResponse()
        await self._single("ForwardVerify", request, response, Shape.VERIFY, context)
        return response

    @answers
    async def BatchPrefill(  # noqa: N802
        self, request: model_executor_pb2.BatchPrefillRequest, context: Context
    ) -> model_executor_pb2.BatchPrefillResponse:
        """Several prompts or chunks."""
        results, blocks, timing = await self._batch("BatchPrefill", request, Shape.PREFILL, context)
        return model_executor_pb2.BatchPrefillResponse(
            results=results, row_blocks=blocks, pressure=self._pressure(), timing=timing
        )

    @answers
    async def BatchDecode(  # noqa: N802
        self, request: model_executor_pb2.BatchDecodeRequest, context: Context
    ) -> model_executor_pb2.BatchDecodeResponse:
        """Several tokens."""
        results, blocks, timing = await self._batch("BatchDecode", request, Shape.DECODE, context)
        return model_executor_pb2.BatchDecodeResponse(
            results=results, row_blocks=blocks, pressure=self._pressure(), timing=timing
        )

    @answers
    async def UnifiedForward(  # noqa: N802
        self, request: model_executor_pb2.UnifiedForwardRequest, context: Context
    ) -> model_executor_pb2.UnifiedForwardResponse:
        """Any mix."""
        results, blocks, timing = await self._batch("UnifiedForward", request, Shape.ANY, context)
        return model_executor_pb2.UnifiedForwardResponse(
            results=results, row_blocks=blocks, pressure=self._pressure(), timing=timing
        )

    async def _single(self, method: str, request: Any, response: Any, shape: Shape, context: Context) -> None:
        """A call of one item: its refusal is the call's."""
        self.calls.method(f"{self.service}/{method}").items += 1
        item = item_from_proto(request.item, shape)
        answer = await self._forward.forward([item], deadline=deadline_of(context))
        outcome = answer.outcomes[0]
        if isinstance(outcome, ExecutorError):
            raise outcome
        packer = RowPacker()
        fill_output(response.output, outcome, packer)
        response.row_blocks.extend(packer.finish())
        response.pressure.CopyFrom(self._pressure())
        if answer.timing is not None:
            response.timing.CopyFrom(timing_to_proto(answer.timing))

    async def _batch(
        self, method: str, request: Any, shape: Shape, context: Context
    ) -> tuple[list[forward_pb2.ItemResult], list[output_pb2.RowBlock], types_pb2.StepTiming | None]:
        """A call of several items: each has an outcome of its own."""
        count = self.calls.method(f"{self.service}/{method}")
        count.items += len(request.items)
        items: list[WorkItem | ExecutorError] = []
        for item in request.items:
            try:
                items.append(item_from_proto(item, shape))
            except ExecutorError as error:
                items.append(error)
        answer = await self._forward.forward(
            items, all_or_nothing=request.all_or_nothing, deadline=deadline_of(context)
        )
        count.item_errors += sum(isinstance(outcome, ExecutorError) for outcome in answer.outcomes)
        results, blocks = results_to_proto(request.items, answer.outcomes)
        return results, blocks, _timing(answer.timing)

    # --- the cache --------------------------------------------------------------------------------------------------

    @answers
    async def TruncateKv(  # noqa: N802
        self, request: model_executor_pb2.TruncateKvRequest, context: Context
    ) -> model_executor_pb2.TruncateKvResponse:
        """Roll back."""
        handle, replayed = await self._operations.truncate(
            handle_from_proto(request.handle), request.length, request_id_from_proto(request.request_id)
        )
        return model_executor_pb2.TruncateKvResponse(
            handle=handle_to_proto(handle), pressure=self._pressure(), replayed=replayed
        )

    @answers
    async def ForkKv(  # noqa: N802
        self, request: model_executor_pb2.ForkKvRequest, context: Context
    ) -> model_executor_pb2.ForkKvResponse:
        """Share until they diverge."""
        if request.lease_id:
            raise NotSupported("leases are not offered (capability LEASES)", field="lease_id")
        handles, replayed = await self._operations.fork(
            handle_from_proto(request.handle),
            request.count or 1,
            request.at_length if request.HasField("at_length") else None,
            request_id_from_proto(request.request_id),
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
        )
        return model_executor_pb2.ReleaseResponse(pressure=self._pressure(), replayed=replayed)

    @answers
    async def ReserveKv(  # noqa: N802
        self, request: model_executor_pb2.ReserveKvRequest, context: Context
    ) -> model_executor_pb2.ReserveKvResponse:
        """Hold blocks."""
        handle = await self._operations.reserve(handle_from_proto(request.handle), request.tokens)
        return model_executor_pb2.ReserveKvResponse(handle=handle_to_proto(handle), pressure=self._pressure())

    # --- what it is and how it does ---------------------------------------------------------------------------------

    @answers
    async def GetInfo(  # noqa: N802
        self, request: model_executor_pb2.GetInfoRequest, context: Context
    ) -> model_executor_pb2.GetInfoResponse:
        """What the executor is."""
        model, cache = self._books.model, self._books.thread.cache
        return model_executor_pb2.GetInfoResponse(
            server_version=__version__,
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=MINIMUM_CLIENT_REVISION,
            instance_id=self._books.handles.instance_id,
            model=model_to_proto(model),
            kv_cache=info_pb2.KvCacheInfo(
                block_size=cache.block_size, total_blocks=cache.total_blocks, bytes_per_token=model.kv_bytes_per_token
            ),
            limits=limits_to_proto(self._books.limits),
            capabilities=CAPABILITIES,
            device=device_to_proto(self._books.device),
        )

    @answers
    async def GetStatus(  # noqa: N802
        self, request: model_executor_pb2.GetStatusRequest, context: Context
    ) -> model_executor_pb2.GetStatusResponse:
        """How it does; answers in every state."""
        books = self._books
        engine, counters = books.thread.counters, books.counters
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
            ),
            replay_bytes=books.replay.bytes,
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

    Session = not_offered("Session", "SESSION")
    AcquireLease = not_offered("AcquireLease", "LEASES")
    KeepAlive = not_offered("KeepAlive", "LEASES")
    RevokeLease = not_offered("RevokeLease", "LEASES")
    RegisterTokenMask = not_offered("RegisterTokenMask", "TOKEN_MASKS")


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServicer):
    """Moving caches: the contract is complete, this version does not offer it."""

    service = "ferrum_rpc.executor.v1.KvTransfer"

    def __init__(self, calls: CallLog) -> None:
        self.calls = calls

    ExportKv = not_offered("ExportKv", "KV_TRANSFER")
    ImportKv = not_offered("ImportKv", "KV_TRANSFER")
    WatchKvEvents = not_offered("WatchKvEvents", "KV_EVENTS")


class ExecutorControlServicer(executor_control_pb2_grpc.ExecutorControlServicer):
    """The operator's side."""

    service = "ferrum_rpc.executor.v1.ExecutorControl"

    def __init__(self, books: Books, calls: CallLog) -> None:
        self.calls = calls
        self._books = books
        self._operations = CacheOperations(books)

    @answers
    async def Warmup(  # noqa: N802
        self, request: executor_control_pb2.WarmupRequest, context: Context
    ) -> executor_control_pb2.WarmupResponse:
        """Run typical shapes."""
        most = self._books.limits.max_batch_tokens
        if request.prefill_tokens > most:
            raise InvalidRequest(f"prefill_tokens exceeds the limit of {most} a call", field="prefill_tokens")
        began = time.monotonic()
        steps = await self._operations.warm_up(
            request.batch_size or WARMUP_BATCH, request.prefill_tokens or WARMUP_PREFILL
        )
        response = executor_control_pb2.WarmupResponse(steps=steps, pressure=pressure_to_proto(self._books.pressure()))
        response.elapsed.FromMicroseconds(round((time.monotonic() - began) * 1e6))
        return response

    @answers
    async def Reset(  # noqa: N802
        self, request: executor_control_pb2.ResetRequest, context: Context
    ) -> executor_control_pb2.ResetResponse:
        """Release everything."""
        released = await self._operations.reset(request.instance_id)
        return executor_control_pb2.ResetResponse(
            released_sequences=released, pressure=pressure_to_proto(self._books.pressure())
        )

    Drain = not_offered("Drain", "DRAIN")
    LoadAdapter = not_offered("LoadAdapter", "ADAPTERS")
    UnloadAdapter = not_offered("UnloadAdapter", "ADAPTERS")
    ListAdapters = not_offered("ListAdapters", "ADAPTERS")
    ListSequences = not_offered("ListSequences", "LIST_SEQUENCES")


def _timing(timing: StepTiming | None) -> types_pb2.StepTiming | None:
    return None if timing is None else timing_to_proto(timing)
