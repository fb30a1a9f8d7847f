"""Recorded wire traffic: what a server of an older schema revision answered, without that server.

A recording is a file of tests/vectors, whose README.md describes the format for clients in any language. `Recorder`
stands between a client and a real server and notes every message; `Replayer` answers a client from what was noted.
Both pass bytes on as they are: what an older server wrote is what a client of today has to read.

With ``FERRUM_RECORD=HOST:PORT`` in the environment `recorded` records instead, from the server at that address.
"""

from __future__ import annotations

import asyncio
import json
import os
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from ferrum_rpc.executor.v1 import executor_control_pb2, kv_transfer_pb2, model_executor_pb2

FOLDER = Path(__file__).parents[1] / "vectors"
CHOSEN = {"client_name", "client_revision", "creation", "item_id", "lease_id", "request_id", "step_id", "timeout"}
"""Fields whose value a client chooses: two runs of the same program differ in them."""
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (executor_control_pb2, kv_transfer_pb2, model_executor_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

Way = Literal["in", "out"]


@dataclass
class Call:
    """One call: its messages in their order, each from the client (``in``) or the server (``out``), and its status."""

    method: str
    events: list[tuple[Way, bytes]] = field(default_factory=list)
    code: int = 0
    message: str = ""
    details: bytes = b""
    """Of `google.rpc.Status`, from the trailer ``grpc-status-details-bin``."""

    def to_json(self) -> dict[str, Any]:
        events = [[way, b64encode(content).decode()] for way, content in self.events]
        status = {"code": self.code, "message": self.message, "details": b64encode(self.details).decode()}
        told = {name: each for name, each in status.items() if each}
        return {"method": self.method, "events": events, "status": told}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Call:
        status = data["status"]
        details = b64decode(status.get("details", ""))
        events: list[tuple[Way, bytes]] = [(way, b64decode(content)) for way, content in data["events"]]
        return cls(data["method"], events, status.get("code", 0), status.get("message", ""), details)


def file_of(revision: int) -> Path:
    return FOLDER / f"revision_{revision}.jsonl"


def conversations(revision: int) -> dict[str, list[Call]]:
    """All of a recording, by name."""
    lines = map(json.loads, file_of(revision).read_text(encoding="utf-8").splitlines())
    return {line["name"]: [Call.from_json(each) for each in line["calls"]] for line in lines}


def save(revision: int, name: str, calls: Iterable[Call]) -> None:
    """Write a conversation to its recording, in place of the one of this name."""
    path = file_of(revision)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = {json.loads(line)["name"]: line for line in lines}
    kept[name] = json.dumps({"name": name, "calls": [each.to_json() for each in calls]}, separators=(",", ":"))
    path.write_text("".join(f"{kept[each]}\n" for each in sorted(kept)), encoding="utf-8")


def parsed(method: str, way: Way, content: bytes) -> Message:
    """The message of a call, by the schema of today."""
    described = METHODS[method]
    kind = described.input_type if way == "in" else described.output_type
    return message_factory.GetMessageClass(kind).FromString(content)


def walk(message: Message) -> Iterator[Message]:
    """The message and all messages in it, in the order of the fields."""
    yield message
    for described, value in message.ListFields():
        if described.message_type is not None:
            for each in value if described.is_repeated else (value,):
                yield from walk(each)


def asked(method: str, content: bytes) -> Message:
    """A request without what the client chooses: what it asks for."""
    message = parsed(method, "in", content)
    for each in walk(message):
        for described in each.DESCRIPTOR.fields:
            if described.name in CHOSEN:
                each.ClearField(described.name)
    return message


class _Handler(grpc.GenericRpcHandler):
    """Every method as a stream of bytes, which a call with one message is too."""

    def __init__(self, behaviour: Any) -> None:
        self._behaviour = behaviour

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        if method not in METHODS:
            return None  # UNIMPLEMENTED, as of any server that lacks it

        async def call(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for answer in self._behaviour(method, requests, context):
                yield answer

        return grpc.stream_stream_rpc_method_handler(call)


async def end(call: Call, context: Any) -> None:
    """The status of a call."""
    if call.details:
        context.set_trailing_metadata((("grpc-status-details-bin", call.details),))
    if call.code:
        [code] = [each for each in grpc.StatusCode if each.value[0] == call.code]
        await context.abort(code, call.message)


class Recorder:
    """Passes all calls on to ``upstream``, and notes them in ``calls``."""

    def __init__(self, upstream: grpc.aio.Channel) -> None:
        self.calls: list[Call] = []
        self._upstream = upstream

    async def __call__(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        noted = Call(method)
        self.calls.append(noted)
        call = self._upstream.stream_stream(method)()

        async def forward() -> None:
            async for request in requests:
                noted.events.append(("in", request))
                await call.write(request)
            await call.done_writing()

        writing = asyncio.create_task(forward())
        try:
            async for answer in call:
                noted.events.append(("out", answer))
                yield answer
        except grpc.aio.AioRpcError as error:
            noted.code, noted.message = error.code().value[0], error.details() or ""
            noted.details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")  # type: ignore[assignment]
        finally:
            writing.cancel()
            call.cancel()
        await end(noted, context)


class Replayer:
    """Answers from ``calls``: each recorded call once, to the first that asks for the same. Repeated questions that
    change nothing have the answer again."""

    def __init__(self, calls: list[Call]) -> None:
        self._left = list(calls)
        self._known: dict[tuple[str, bytes], Call] = {}

    def _take(self, method: str, first: bytes) -> Call:
        wanted = asked(method, first)
        for call in self._left:
            if call.method == method and call.events and asked(method, call.events[0][1]) == wanted:
                self._left.remove(call)
                self._known[method, wanted.SerializeToString(deterministic=True)] = call
                return call
        again = self._known.get((method, wanted.SerializeToString(deterministic=True)))
        if again is None or not METHODS[method].name.startswith(("Get", "KeepAlive", "Revoke", "Release")):
            raise AssertionError(f"this is not in the recording: {method} {wanted}")
        return again

    async def __call__(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Each answer follows the requests that it followed in the recording. Frames may come in another order, and
        with other step ids."""
        first = await anext(aiter(requests))
        call = self._take(method, first)
        pending = [content for way, content in call.events if way == "in"]
        ids: dict[int, int] = {}
        came = list[bytes]()

        def note(request: bytes) -> None:
            wanted = asked(method, request)
            found = next((each for each in pending if asked(method, each) == wanted), None)
            if found is None:
                raise AssertionError(f"this is not in the recording: {method} {wanted}")
            pending.remove(found)
            came.append(found)
            if METHODS[method].name == "Session":
                ids[parsed(method, "in", found).step_id] = parsed(method, "in", request).step_id  # type: ignore[attr-defined]

        note(first)
        for way, content in call.events:
            if way == "in":
                while content not in came:
                    async for request in requests:
                        note(request)
                        break
                    else:
                        return  # the client has closed the stream
                came.remove(content)
                continue
            answer = parsed(method, "out", content)
            if METHODS[method].name != "Session" or answer.step_id in {0, ids.get(answer.step_id)}:  # type: ignore[attr-defined]
                yield content
            else:
                answer.step_id = ids[answer.step_id]  # type: ignore[attr-defined]
                yield answer.SerializeToString()
        await end(call, context)


@asynccontextmanager
async def answering(behaviour: Recorder | Replayer) -> AsyncIterator[str]:
    """A server with this behaviour; its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((_Handler(behaviour),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


@asynccontextmanager
async def recorded(revision: int, name: str) -> AsyncIterator[str]:
    """The address of what answers as a server of ``revision`` did in the conversation of this name."""
    if upstream := os.environ.get("FERRUM_RECORD"):
        async with grpc.aio.insecure_channel(upstream) as channel, answering(recorder := Recorder(channel)) as target:
            yield target
        save(revision, name, recorder.calls)
        return
    async with answering(Replayer(conversations(revision)[name])) as target:
        yield target
