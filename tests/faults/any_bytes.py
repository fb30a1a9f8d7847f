"""R14: any bytes get a canonical answer. Random bytes, random messages and damaged messages, for every method that
reflection lists, through gRPC and past it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ferrum_rpc.executor.v1 import executor_control_pb2
from ferrum_rpc.wire.status import DOMAIN, STATUS_METADATA_KEY
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.fuzzer import Fuzzer
from tests.faults.handlers import Registered, registered_handlers
from tests.faults.sizes import Size
from tests.faults.waiting import until
from tests.serving import Served, serve_identity
from tests.wiring import pb, prefill

FORBIDDEN: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
STANDARD: Final = "/grpc."
"""Health and reflection answer as their own standards say: NOT_FOUND, for a service that nobody has, without more."""
LAST: Final = ("Drain", "Reset")
"""Methods that end what the others need; they come last."""
CALLERS_OWN: Final = "Internal error from Core"
"""What a grpc.aio caller tells itself when it still writes while the answer comes (`Call._write`): nobody's answer."""
CONCURRENT: Final = 8
CHECK_EVERY: Final = 20_000
WORLD: Final[dict[str, int]] = {
    "layers": 1,
    "heads": 1,
    "kv_heads": 1,
    "vocab_size": 64,
    "kv_blocks": 64,
    "max_batch_items": 8,
    "max_batch_tokens": 64,
    "max_sequences": 64,
    "max_response_bytes": 1 << 18,
    "max_request_bytes": 1 << 16,
    "replay_bytes": 1 << 16,
}


@dataclass
class Answers:
    """How often each code came, and which answers no server should give."""

    codes: Counter[str] = field(default_factory=Counter)
    forbidden: Counter[str] = field(default_factory=Counter)
    bare: Counter[str] = field(default_factory=Counter)
    """Refusals without ErrorInfo."""

    def note(self, method: str, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        if code is grpc.StatusCode.INTERNAL and details == CALLERS_OWN:
            return
        self.codes[code.name] += 1
        if code.name in FORBIDDEN:
            self.forbidden[f"{method}: {code.name} {details}"] += 1
        if code is not grpc.StatusCode.OK and not method.startswith(STANDARD) and not has_error_info(trailing):
            self.bare[f"{method}: {code.name} {details}"] += 1


def has_error_info(trailing: Any) -> bool:
    """Whether trailing metadata carry our ErrorInfo."""
    details = dict(trailing or ()).get(STATUS_METADATA_KEY)
    if not isinstance(details, bytes):
        return False
    info = error_details_pb2.ErrorInfo()
    return any(
        each.Unpack(info) and info.domain == DOMAIN and bool(info.reason)
        for each in status_pb2.Status.FromString(details).details
        if each.Is(info.DESCRIPTOR)
    )


async def methods_by_reflection(channel: grpc.aio.Channel) -> list[MethodDescriptor]:
    """Every method of every service that the server tells of."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = [each.name for each in (await call.read()).list_services_response.service]
    await call.done_writing()
    pool = descriptor_pool.Default()
    return [method for name in sorted(names) for method in pool.FindServiceByName(name).methods]


def path(method: MethodDescriptor) -> str:
    """What a method is called on the wire."""
    return f"/{method.containing_service.full_name}/{method.name}"


async def r14_any_bytes_get_a_canonical_answer(size: Size, seed: int = 14) -> Figures:
    """Fuzz every method; the cache's books must agree throughout, and be empty after a reset."""
    answers, broken, reached = Answers(), 0, 0
    async with serve_identity(**WORLD) as served:
        methods = await methods_by_reflection(served.channel)
        direct = registered_handlers(served.server)
        fuzzer = Fuzzer(random.Random(seed), [])
        for method in sorted(methods, key=lambda each: each.name in LAST):
            if method.name == "Drain":
                broken += await _books_disagree(served)
                await served.control.Reset(executor_control_pb2.ResetRequest())
                pressure = (await served.executor.GetStatus(pb.GetStatusRequest())).pressure
                broken += pressure.free_blocks != pressure.total_blocks
            for first in range(0, size.fuzz_direct, CHECK_EVERY):
                await _some_sequences(served, fuzzer)
                count = min(CHECK_EVERY, size.fuzz_direct - first)
                await _direct(direct[path(method)], method, fuzzer=fuzzer, answers=answers, count=count)
                broken += await _books_disagree(served)
            await _some_sequences(served, fuzzer)
            await _through_grpc(served.channel, method, fuzzer=fuzzer, answers=answers, count=size.fuzz_wire)
            broken += await _books_disagree(served)
            reached += 1
    return Figures(
        "R14",
        "Any bytes get a canonical answer",
        (
            exactly("answers INTERNAL, UNKNOWN or DATA_LOSS", sum(answers.forbidden.values()), 0),
            exactly("refusals without ErrorInfo", sum(answers.bare.values()), 0),
            exactly("times that the cache's books did not agree", broken, 0),
            at_least("methods", reached, 25),
            at_least("messages that were accepted, so that not all was noise", answers.codes["OK"], reached),
        ),
        {
            "messages for each method": size.fuzz_direct + size.fuzz_wire,
            "answers": dict(answers.codes),
            "wrong": dict((answers.forbidden + answers.bare).most_common(5)),
        },
    )


async def _some_sequences(served: Served, fuzzer: Fuzzer) -> None:
    """Handles that are good at least for one call."""
    if served.server.state.lifecycle.value != "serving":
        return
    await served.control.Reset(executor_control_pb2.ResetRequest())
    fuzzer.handles[:] = [await prefill(served, [1, 2, 3], request_id="") for _ in range(8)]


async def _books_disagree(served: Served) -> int:
    """1 where the invariants do not hold. A stream that was hung up may have left a call in flight: that ends first."""
    state = served.server.state
    await until(lambda: not (state._creating or state.unnamed or any(each.busy for each in state.handles.records())))
    try:
        await served.check()
    except AssertionError:
        return 1
    return 0


def _enough(method: MethodDescriptor) -> int:
    """Messages of an answer that are read before the caller hangs up: a watch has no end of its own."""
    return 1 if method.server_streaming and not method.client_streaming else 1_000


async def _direct(
    handler: Registered, method: MethodDescriptor, *, fuzzer: Fuzzer, answers: Answers, count: int
) -> None:
    """Call the handler as grpc.aio would, without the wire between: a hundred times as many messages in the time."""

    async def one() -> None:
        for _ in range(count // CONCURRENT):
            code, details, trailing = await handler.call(fuzzer.requests(method), _enough(method))
            answers.note(path(method), code, details, trailing)

    await asyncio.gather(*[one() for _ in range(CONCURRENT)])


async def _through_grpc(
    channel: grpc.aio.Channel, method: MethodDescriptor, *, fuzzer: Fuzzer, answers: Answers, count: int
) -> None:
    name, streaming = path(method), method.client_streaming or method.server_streaming

    async def one() -> None:
        for _ in range(count // CONCURRENT):
            try:
                if streaming:
                    # Whatever the kind of the method: on the wire all are streams of messages.
                    call = channel.stream_stream(name)(timeout=5.0)
                    for each in fuzzer.requests(method):
                        await call.write(each)
                    await call.done_writing()
                    for _ in range(_enough(method)):
                        if await call.read() is grpc.aio.EOF:
                            break
                    else:
                        call.cancel()
                else:
                    await channel.unary_unary(name)(fuzzer.request(method), timeout=30.0)
            except grpc.aio.AioRpcError as error:
                answers.note(name, error.code(), error.details() or "", error.trailing_metadata())
            except (asyncio.InvalidStateError, asyncio.CancelledError):
                continue  # the server ended the stream while we wrote, or this test cancelled a watch
            else:
                answers.note(name, grpc.StatusCode.OK, "", ())

    await asyncio.gather(*[one() for _ in range(CONCURRENT)])
