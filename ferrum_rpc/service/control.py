"""The operator's part of the contract.

An operator's action affects every caller: a reset releases all sequences. The guard in front of the handlers decides
who is an operator.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ferrum_rpc.core import OutputSpec, Positions, Span
from ferrum_rpc.engine.commands import Command, Operations
from ferrum_rpc.errors import ExecutorError, InstanceMismatch, InvalidRequest
from ferrum_rpc.executor.v1 import executor_control_pb2 as pb
from ferrum_rpc.executor.v1 import executor_control_pb2_grpc, info_pb2
from ferrum_rpc.service.asking import between_steps, in_a_step
from ferrum_rpc.service.records import Adapter, Resource, SequenceEnd, SequenceRecord
from ferrum_rpc.service.slow_calls import SlowestCalls
from ferrum_rpc.service.state import Lifecycle, ServerState
from ferrum_rpc.service.trace_context import Context
from ferrum_rpc.wire.info import duration, seconds, to_proto
from ferrum_rpc.wire.items import name_from_proto, pressure_to_proto

STATE_TO_PROTO: Final[dict[Lifecycle, Any]] = {
    each: info_pb2.ExecutorState.Value(f"EXECUTOR_STATE_{each.name}") for each in Lifecycle
}

PAGE_TOKEN: Final = re.compile("[0-9]{1,20}")
WARMUP_BATCH: Final = 8
WARMUP_PREFILL: Final = 128


async def warm_up(state: ServerState, batch_size: int = WARMUP_BATCH, prefill_tokens: int = WARMUP_PREFILL) -> int:
    """Run a prefill of ``prefill_tokens`` and a decode of ``batch_size``, on sequences of its own that it releases;
    returns the number of steps. Only the engine knows these sequences: they count against no limit and no quota. They
    take at most half of the free slots for states, because others may be served already, and none that has a
    checkpoint."""
    # A task of its own, so that a cancelled caller leaves no sequences behind.
    return await asyncio.shield(asyncio.create_task(_warm_up(state, batch_size, prefill_tokens)))


async def _warm_up(state: ServerState, batch_size: int, prefill_tokens: int) -> int:
    model, limits = state.model, state.limits
    batch_size, cache = min(batch_size, limits.max_batch_items), state.engine.cache
    if cache.total_slots:
        empty, every = cache.free_slots - cache.checkpoints, state.device.checkpoint_tokens
        batch_size = min(batch_size, cache.free_slots // 2, empty)
        if not batch_size:
            return 0
        # the prompt, and the token behind it, keep checkpoints so far apart
        prefill_tokens = min(prefill_tokens, (empty - batch_size + 1) * every - 2)
    prefill_tokens = max(1, min(prefill_tokens, limits.max_batch_tokens - batch_size, model.max_context - 1))
    numbers = [state.handles.number() for _ in range(batch_size)]
    one = np.zeros(1, dtype=np.int32)
    prompts = [np.arange(prefill_tokens, dtype=np.int32) % model.vocab_size, *[one] * (batch_size - 1)]
    spec = OutputSpec(Positions.LAST)
    spans = [Span(number, tokens, 0, spec, create=True) for number, tokens in zip(numbers, prompts, strict=True)]
    outcomes = await in_a_step(state.engine.submit, spans)
    made = [span for span, each in zip(spans, outcomes, strict=True) if not isinstance(each, ExecutorError)]
    if not made:
        return 0
    await in_a_step(state.engine.submit, [Span(span.sequence, one, span.end, spec) for span in made])
    await between_steps(state.engine.submit, Command(Operations.release, [span.sequence for span in made]))
    return 2


LIST_PAGE: Final = 100
MAX_PAGE_SIZE: Final = 1000
MAX_CALLERS: Final = 1024


class ExecutorControlServicer(executor_control_pb2_grpc.ExecutorControlServicer):
    """The operator's methods."""

    service = "ferrum_rpc.executor.v1.ExecutorControl"

    def __init__(self, state: ServerState, drain: Callable[[float | None], None], slowest: SlowestCalls) -> None:
        self._state = state
        self._drain = drain
        self._slowest = slowest

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        limit = self._state.limits.max_batch_tokens
        if request.prefill_tokens > limit:
            raise InvalidRequest(f"prefill_tokens exceeds the limit of {limit} a call", field="prefill_tokens")
        began = time.monotonic()
        steps = await warm_up(self._state, request.batch_size or WARMUP_BATCH, request.prefill_tokens or WARMUP_PREFILL)
        response = pb.WarmupResponse(steps=steps, pressure=pressure_to_proto(self._state.pressure()))
        response.elapsed.FromMicroseconds(round((time.monotonic() - began) * 1e6))
        return response

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:
        """Release every sequence, including those being created and those with a call in flight when it ends, and empty
        the prefix cache; returns when the blocks are free."""
        state = self._state
        _ = state.model
        if request.instance_id and request.instance_id != state.handles.instance_id:
            raise InstanceMismatch("another process lifetime was meant; nothing was released")
        transfers = len(state.unnamed)
        released = await state.ended(state.sequences(), SequenceEnd.RESET) - transfers
        await between_steps(state.engine.submit, Command(Operations.forget_prefixes))
        return pb.ResetResponse(released_sequences=released, pressure=pressure_to_proto(self._state.pressure()))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        grace = seconds(request.grace) if request.HasField("grace") else None
        if grace is not None and grace < 0:
            raise InvalidRequest("grace must not be negative", field="grace")
        self._drain(grace)
        return pb.DrainResponse(state=STATE_TO_PROTO[self._state.lifecycle], sequences=len(self._state.handles))

    async def ListSequences(self, request: pb.ListSequencesRequest, context: Context) -> pb.ListSequencesResponse:
        """Live sequences in the order of their creation, a page at a time."""
        if request.page_token and not PAGE_TOKEN.fullmatch(request.page_token):
            raise InvalidRequest("page_token must be that of an earlier answer", field="page_token")
        after = int(request.page_token or 0)
        limit = min(request.page_size or LIST_PAGE, MAX_PAGE_SIZE)
        records = [record for record in self._state.handles.records() if record.order > after]
        records.sort(key=lambda record: record.order)
        response = pb.ListSequencesResponse()
        for record in records[:limit]:
            self._describe(record, response.sequences.add())
        if len(records) > limit:
            response.next_page_token = str(records[limit - 1].order)
        return response

    async def GetActivity(self, request: pb.GetActivityRequest, context: Context) -> pb.GetActivityResponse:
        """What each caller holds, and the slowest calls of the last minute."""
        blocks, slots, needed = Counter[str](), Counter[str](), int(self._state.engine.cache.total_slots > 0)
        for record in (*self._state.handles.records(), *self._state.unfinished_imports()):
            name = record.account.caller.name
            blocks[name] += self._blocks(record)
            slots[name] += 0 if record.parked else needed
        accounts = sorted(self._state.quotas.holding(), key=lambda each: -each.held[Resource.SEQUENCES])
        return pb.GetActivityResponse(
            callers=[
                pb.CallerActivity(
                    identity=each.caller.name,
                    sequences=each.held[Resource.SEQUENCES],
                    blocks=blocks[each.caller.name],
                    leases=each.held[Resource.LEASES],
                    sessions=each.held[Resource.SESSIONS],
                    items=each.held[Resource.QUEUED_ITEMS],
                    slots=slots[each.caller.name],
                )
                for each in accounts[:MAX_CALLERS]
            ],
            slowest_calls=[
                to_proto(pb.SlowCall, call, elapsed=duration(call.elapsed_s), ago=duration(ago_s))
                for call, ago_s in self._slowest.slowest()
            ],
        )

    def _blocks(self, record: SequenceRecord) -> int:
        return self._state.quotas.blocks(record)

    def _describe(self, record: SequenceRecord, info: pb.SequenceInfo) -> None:
        info.label = record.label
        info.seq_len = record.length
        info.parked = record.parked is not None
        info.blocks = self._blocks(record)
        info.identity = record.account.caller.name
        info.busy = record.busy
        info.leased = record.lease is not None
        info.adapter = "" if record.adapter is None else record.adapter.name
        if record.lease is not None:
            info.client_name = record.lease.client_name
        info.idle.CopyFrom(duration(max(0.0, time.monotonic() - record.used)))

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Load an adapter; returns when it can be used, at once if it is loaded already."""
        _ = self._state.model
        return pb.LoadAdapterResponse(
            adapter=_adapter_to_proto(await self._state.adapters.load(name_from_proto(request.name, "name")))
        )

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        _ = self._state.model
        await self._state.adapters.unload(name_from_proto(request.name, "name"))
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        _ = self._state.model
        return pb.ListAdaptersResponse(adapters=list(map(_adapter_to_proto, self._state.adapters.listed())))


def _adapter_to_proto(adapter: Adapter) -> pb.AdapterInfo:
    return to_proto(pb.AdapterInfo, adapter, bytes=adapter.nbytes)
