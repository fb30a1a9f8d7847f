"""R14: any bytes get a canonical answer. Random bytes, random messages and damaged messages, for every method that
reflection lists, through gRPC and past it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ferrum_rpc.wire.status import DOMAIN, STATUS_METADATA_KEY
from tests.faults.figures import Figures, at_least, exactly
from tests.faults.fuzzer import Fuzzer
from tests.faults.handlers import registered_handlers
from tests.faults.sizes import Size
from tests.support.inside import creating
from tests.support.serving import Served, serve_identity
from tests.support.waiting import until
from tests.support.wiring import prefill

FORBIDDEN: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
STANDARD: Final = "/grpc."
"""Health and reflection answer as their own standards say: NOT_FOUND, for a service that nobody has, without more."""
LAST: Final = ("Drain", "Reset")
"""Methods that end what the others need; they come last."""
CALLERS_OWN: Final = "Internal error from Core"
"""What a grpc.aio caller tells itself when it still writes while the answer comes (`Call._write`): nobody's answer."""
TIMEOUT_S: Final = 30.0
"""A caller's own end is an answer without ErrorInfo: no answer of an executor takes so long on a busy machine."""
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
        if code is not grpc.StatusCode.OK and not method.startswith(STANDARD) and explanation(trailing) is None:
            self.bare[f"{method}: {code.name} {details}"] += 1


def explanation(trailing: Any) -> status_pb2.Status | None:
    """The status in trailing metadata, if it has our ErrorInfo."""
    status = status_pb2.Status.FromString(dict(trailing or ()).get(STATUS_METADATA_KEY, b""))
    info = error_details_pb2.ErrorInfo()
    infos = [info for each in status.details if each.Is(info.DESCRIPTOR) and each.Unpack(info)]
    return status if any(each.domain == DOMAIN and each.reason for each in infos) else None


async def methods_by_reflection(channel: grpc.aio.Channel, metadata: Any = ()) -> list[MethodDescriptor]:
    """Every method of every service that the server tells of."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(metadata=metadata)
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
    async with serve_identity(**WORLD) as served:
        trial = Trial(served, Fuzzer(random.Random(seed), []))
        methods = await methods_by_reflection(served.channel)
        for method in sorted(methods, key=lambda each: each.name in LAST):
            if method.name == "Drain":
                await trial.look_at_the_books()
                await served.reset()
                pressure = (await served.status()).pressure
                trial.broken += pressure.free_blocks != pressure.total_blocks
            for first in range(0, size.fuzz_direct, CHECK_EVERY):
                await trial.of(method, trial.directly, min(CHECK_EVERY, size.fuzz_direct - first))
            await trial.of(method, trial.through_grpc, size.fuzz_wire)
    answers = trial.answers
    return Figures(
        "Any bytes get a canonical answer",
        exactly("answers INTERNAL, UNKNOWN or DATA_LOSS", sum(answers.forbidden.values()), 0),
        exactly("refusals without ErrorInfo", sum(answers.bare.values()), 0),
        exactly("times that the cache's books did not agree", trial.broken, 0),
        at_least("methods", len(methods), 25),
        at_least("messages that were accepted, so that not all was noise", answers.codes["OK"], len(methods)),
        facts={
            "messages for each method": size.fuzz_direct + size.fuzz_wire,
            "answers": dict(answers.codes),
            "wrong": dict((answers.forbidden + answers.bare).most_common(5)),
        },
    )


Send = Callable[[MethodDescriptor], Awaitable[None]]


class Trial:
    """What one server makes of what a fuzzer writes. ``broken``: times that its books did not agree."""

    def __init__(self, served: Served, fuzzer: Fuzzer) -> None:
        self._served, self._fuzzer = served, fuzzer
        self._handlers = registered_handlers(served.server)
        self.answers, self.broken = Answers(), 0

    async def of(
        self, method: MethodDescriptor, send: Callable[[MethodDescriptor], Awaitable[None]], count: int
    ) -> None:
        """So many messages of a method, while handles are good at least for one call; then the books."""
        if self._served.server.state.lifecycle.value == "serving":
            await self._served.reset()
            self._fuzzer.handles[:] = [await prefill(self._served, [1, 2, 3], request_id="") for _ in range(8)]

        async def some() -> None:
            for _ in range(count // CONCURRENT):
                await send(method)

        await asyncio.gather(*[some() for _ in range(CONCURRENT)])
        await self.look_at_the_books()

    async def look_at_the_books(self) -> None:
        """A stream that was hung up may have left a call in flight: that ends first."""
        state = self._served.server.state
        await until(
            lambda: not (creating(state) or state.unnamed or any(each.busy for each in state.handles.records()))
        )
        try:
            await self._served.check()
        except AssertionError:
            self.broken += 1

    async def directly(self, method: MethodDescriptor) -> None:
        """Call the handler as grpc.aio would, without the wire: a hundred times as many messages in the time."""
        handler = self._handlers[path(method)]
        self.answers.note(path(method), *await handler.call(self._fuzzer.requests(method), _enough(method)))

    async def through_grpc(self, method: MethodDescriptor) -> None:
        name, channel, fuzzer = path(method), self._served.channel, self._fuzzer
        try:
            if method.client_streaming or method.server_streaming:
                # Whatever the kind of the method: on the wire all are streams of messages.
                call = channel.stream_stream(name)(timeout=TIMEOUT_S)
                for each in fuzzer.requests(method):
                    await call.write(each)
                await call.done_writing()
                for _ in range(_enough(method)):
                    if await call.read() is grpc.aio.EOF:
                        break
                else:
                    call.cancel()
            else:
                await channel.unary_unary(name)(fuzzer.request(method), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self.answers.note(name, error.code(), error.details() or "", error.trailing_metadata())
        except (asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # the server ended the stream while we wrote, or this test cancelled a watch
        else:
            self.answers.note(name, grpc.StatusCode.OK, "", ())


def _enough(method: MethodDescriptor) -> int:
    """Messages of an answer that are read before the caller hangs up: a watch has no end of its own."""
    return 1 if method.server_streaming and not method.client_streaming else 1_000
