"""The ModelExecutor service: translates between messages and the calls of other floors, which take all decisions."""

from __future__ import annotations

import time
from typing import Any, Final

from ferrum_rpc import __version__
from ferrum_rpc.core.check import check_limit
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.executor.v1 import info_pb2, model_executor_pb2_grpc, types_pb2
from ferrum_rpc.executor.v1 import model_executor_pb2 as pb
from ferrum_rpc.service.admission import check_queue_capacity
from ferrum_rpc.service.control import STATE_TO_PROTO
from ferrum_rpc.service.forward import ForwardCall
from ferrum_rpc.service.guard.auth import CALLER
from ferrum_rpc.service.kv_ops import OPERATIONS
from ferrum_rpc.service.records import SequenceEnd
from ferrum_rpc.service.rpc import CallLog, deadline_of
from ferrum_rpc.service.session import Session
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.trace_context import Context
from ferrum_rpc.wire.framing import framed
from ferrum_rpc.wire.info import (
    MINIMUM_CLIENT_REVISION,
    SCHEMA_REVISION,
    device_to_proto,
    duration,
    seconds,
    to_proto,
)
from ferrum_rpc.wire.items import (
    CallShape,
    fill_outputs,
    fill_results,
    fill_step,
    handle_to_proto,
    item_from_proto,
    items_from_proto,
    name_from_proto,
    pressure_to_proto,
)
from ferrum_rpc.wire.kv_stream import listed_tensors
from ferrum_rpc.wire.masks import grammar_from_proto, id_of, words_from_proto

SERVICE: Final = "ferrum_rpc.executor.v1.ModelExecutor"


def _forward(name: str, response_class: type[Any], shape: CallShape, *, one: bool = False) -> Any:
    """The handler of a forward call: of several items, each with its own outcome, or of ``one``, whose refusal fails
    the call."""
    method = f"{SERVICE}/{name}"

    async def handler(self: ModelExecutorServicer, request: Any, context: Context) -> Any:
        messages = (request.item,) if one else request.items
        self.calls.methods[method].items += len(messages)
        account = self.state.quotas.account(CALLER.get())
        check_queue_capacity(self.state, account, messages)
        messages = list(messages)  # read from the request again, each would be wrapped again, in 0.15 µs
        offered = self.state.capabilities
        call = ForwardCall(
            self.state,
            account,
            (item_from_proto(messages[0], shape, offered),) if one else items_from_proto(messages, shape, offered),
            all_or_nothing=not one and request.all_or_nothing,
            deadline=deadline_of(context),
            peer=context.peer,
        )
        if (free_answer := call.free_answer) is not None:  # once gRPC has sent the answer, or the call is over
            done: Any = lambda _: free_answer()  # noqa: E731 - the stubs have a class of theirs
            context.add_done_callback(done)
        await call
        response = response_class()
        if one:
            [outcome] = call.outcomes
            if isinstance(outcome, ExecutorError):
                raise outcome
            rows = fill_outputs(((response.output, outcome),))
        else:
            self.calls.refused_items(method, call.outcomes, context)
            rows = fill_results(response, messages, call.outcomes)
        fill_step(response, self.state.pressure(), call.timing)
        return framed(response, rows)

    handler.__name__ = name
    return handler


def _kv_operation(kind: str, response_class: type[Any]) -> Any:
    """The handler of an operation on one sequence's cache. The answer has the resulting state, in the fields of its
    message."""
    fields = response_class.DESCRIPTOR.fields_by_name

    async def handler(self: ModelExecutorServicer, request: Any, context: Context) -> Any:
        [call] = OPERATIONS[kind](self.state, CALLER.get(), request, None)
        handles, replayed = await call
        response = response_class(pressure=pressure_to_proto(self.state.pressure()))
        if "handle" in fields:
            response.handle.CopyFrom(handle_to_proto(handles[0]))
        elif "handles" in fields:
            response.handles.extend(map(handle_to_proto, handles))
        if "replayed" in fields:
            response.replayed = replayed
        return response

    return handler


class ModelExecutorServicer(model_executor_pb2_grpc.ModelExecutorServicer):
    """The service for schedulers."""

    service = SERVICE

    def __init__(self, state: ServerState, calls: CallLog, sessions: set[Session]) -> None:
        self.calls = calls
        self.state = state
        self._sessions = sessions

    # --- forward ----------------------------------------------------------------------------------------------------

    Prefill = _forward("Prefill", pb.PrefillResponse, CallShape.PREFILL, one=True)
    Decode = _forward("Decode", pb.DecodeResponse, CallShape.DECODE, one=True)
    ForwardVerify = _forward("ForwardVerify", pb.ForwardVerifyResponse, CallShape.VERIFY, one=True)
    BatchPrefill = _forward("BatchPrefill", pb.BatchPrefillResponse, CallShape.PREFILL)
    BatchDecode = _forward("BatchDecode", pb.BatchDecodeResponse, CallShape.DECODE)
    UnifiedForward = _forward("UnifiedForward", pb.UnifiedForwardResponse, CallShape.ANY)

    # --- the cache --------------------------------------------------------------------------------------------------

    TruncateKv = _kv_operation("truncate", pb.TruncateKvResponse)
    ForkKv = _kv_operation("fork", pb.ForkKvResponse)
    Release = _kv_operation("release", pb.ReleaseResponse)
    ReserveKv = _kv_operation("reserve", pb.ReserveKvResponse)

    async def RegisterTokenMask(
        self, request: pb.RegisterTokenMaskRequest, context: Context
    ) -> pb.RegisterTokenMaskResponse:
        """Answers once the mask is queued to the engine, ahead of items that name it."""
        state, words = self.state, words_from_proto(request.words, "words")
        account, vocab_size = state.quotas.account(CALLER.get()), state.model.vocab_size
        if (mask_id := id_of(words)) != request.sha256:
            raise InvalidRequest("sha256 must be the digest of the words", field="sha256")
        state.masks.register(account, mask_id, words, vocab_size, "words")
        return pb.RegisterTokenMaskResponse(token_mask_id=mask_id)

    async def RegisterGrammar(self, request: pb.RegisterGrammarRequest, context: Context) -> pb.RegisterGrammarResponse:
        """Answers when the grammar is compiled."""
        state = self.state
        tokenizer = state.model.tokenizer_sha256
        if not tokenizer:
            raise NotSupported("the executor offers no grammars (capability GRAMMAR)")
        check_limit(state.limits, "max_grammar_bytes", len(request.text), "bytes of a grammar", "text")
        grammar = grammar_from_proto(request)
        grammar_id = grammar.id(tokenizer)
        await state.grammars.register(state.quotas.account(CALLER.get()), grammar_id, grammar)
        return pb.RegisterGrammarResponse(grammar_id=grammar_id)

    # --- leases and sessions ------------------------------------------------------------------------------------------

    async def AcquireLease(self, request: pb.AcquireLeaseRequest, context: Context) -> pb.AcquireLeaseResponse:
        """A lease with the requested duration, within the limits."""
        _ = self.state.model
        ttl = seconds(request.ttl) if request.HasField("ttl") else None
        lease = self.state.leases.acquire(CALLER.get(), ttl, name_from_proto(request.client_name, "client_name"))
        return pb.AcquireLeaseResponse(
            lease_id=lease.id, ttl=duration(lease.ttl_s), renew_every=duration(lease.renew_every_s)
        )

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:
        lease = self.state.leases.renew(request.lease_id, CALLER.get().name)
        return pb.KeepAliveResponse(pressure=self._pressure(), ttl=duration(lease.ttl_s))

    async def RevokeLease(self, request: pb.RevokeLeaseRequest, context: Context) -> pb.RevokeLeaseResponse:
        """Ends a lease and its sequences; answers when their blocks are free."""
        state = self.state
        lease = state.leases.find(request.lease_id, CALLER.get().name)
        released = await state.ended(state.end_lease(lease, expired=False), SequenceEnd.REVOKED)
        return pb.RevokeLeaseResponse(released_sequences=released, pressure=self._pressure())

    async def Session(self, _: Any, context: Context) -> None:  # type: ignore[override] # no generator
        await Session(self.state, self.calls, self._sessions, context).run()

    # --- what it is and how it does ---------------------------------------------------------------------------------

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        model, device, cache = self.state.model, self.state.device, self.state.engine.cache
        return pb.GetInfoResponse(
            server_version=__version__,
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=MINIMUM_CLIENT_REVISION,
            instance_id=self.state.handles.instance_id,
            model=to_proto(info_pb2.ModelInfo, model),
            kv_cache=info_pb2.KvCacheInfo(
                block_size=cache.block_size,
                total_blocks=cache.total_blocks,
                bytes_per_token=model.kv_bytes_per_token,
                state_bytes=model.state_bytes,
                tensors=listed_tensors(model),
            ),
            limits=to_proto(
                info_pb2.Limits,
                self.state.quotas.limits(self.state.limits, CALLER.get()),
                exact_span_tokens=device.exact_span_tokens,
                free_truncation_tokens=device.free_truncation_tokens,
                checkpoint_tokens=device.checkpoint_tokens,
                max_forks=self.state.limits.max_batch_items,
                max_operations=self.state.limits.max_batch_items,
            ),
            capabilities=self.state.capabilities,
            device=device_to_proto(device),
        )

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """The executor's state and load; answers in every state."""
        state = self.state
        engine, cache = state.engine.counters, state.engine.cache
        free, cached, imports = cache.free_blocks, cache.cached_blocks, state.unfinished_imports()
        return pb.GetStatusResponse(
            state=STATE_TO_PROTO[state.condition],
            pressure=self._pressure(),
            counters=to_proto(
                info_pb2.Counters,
                engine,
                state.counters,
                cache,
                replays=state.replay.replays,
                forward_time=duration(engine.forward_s),
            ),
            methods=[
                to_proto(info_pb2.MethodCount, count, method=name) for name, count in sorted(self.calls.methods.items())
            ],
            uptime=duration(time.monotonic() - state.started),
            replay_bytes=state.replay.bytes,
            leases=len(state.leases),
            sessions=state.sessions,
            blocks=info_pb2.KvBlocks(
                free=free - cached,
                cached=cached,
                used=cache.total_blocks - free,
                parked_bytes=cache.tier_bytes + state.parked.bytes,
                parked_sequences=state.parked.sequences,
                unfinished_imports=len(imports),
                importing=sum(map(state.quotas.blocks, imports)),
            ),
        )

    def _pressure(self) -> types_pb2.KvPressure:
        return pressure_to_proto(self.state.pressure())
