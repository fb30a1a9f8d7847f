"""The table of all methods, and the path of a request to its handler: authentication, then the body, then the message.

Every method passes here, so a method that is added later is also guarded, bounded and parsed. A method with one request
is registered as one with a stream. Otherwise gRPC would read the body into memory before the headers are checked, and
parse it before the handler runs, answering UNKNOWN if that fails.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from ferrum_rpc.core import Limits
from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.service.guard.auth import ARRIVED, CALLER, OPEN_SERVICES, Guard
from ferrum_rpc.service.guard.bodies import Bodies
from ferrum_rpc.service.rpc import UNKNOWN_METHOD, Call, CallLog, refuse
from ferrum_rpc.service.trace_context import Context
from ferrum_rpc.wire.framing import serializing
from ferrum_rpc.wire.unfolding import UNCOUNTED_BYTES, UnfoldingBudget, check

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[[Any, Context], Awaitable[Any]]

CONTRACT: Final = "ferrum_rpc.executor.v1."
"""Prefix of the names of the executor's own services."""

OPEN_BYTES: Final = 1 << 10
"""Maximum size of a request to a service without authentication. A health check's is a name."""

BODY_BYTES: Final = 256 << 20
BODY_SHARE: Final = 4
"""Request bodies that may be incoming at once, in total; one connection may have a quarter of them."""

OPEN_BODY_BYTES: Final = 64 << 20
OPEN_SHARE: Final = 32
"""The same for services without authentication. A prober needs one; 31 slow ones do not delay it."""


class Registry(grpc.GenericRpcHandler):
    """A gRPC server as far as registration is concerned, and the generic handler that a real one calls. ``handlers``
    are by path, ``/package.Service/Method``. Without a ``guard`` every caller is admitted. An unregistered method is
    refused like any other call. ``budgets``: the larger size limits of some request types when they are parsed."""

    def __init__(self, calls: CallLog, guard: Guard | None, limits: Limits) -> None:
        async def unknown(_: Any, context: Context) -> None:
            raise NotSupported("the executor has no such method")

        self._calls = calls
        self._guard = guard
        self._budget = UnfoldingBudget.of(limits)
        self.budgets: dict[Any, UnfoldingBudget] = {}
        longest = limits.max_request_bytes  # what gRPC takes, whatever the method
        self._guarded = longest, Bodies.within(BODY_BYTES, longest, BODY_SHARE, limits.caller_share)
        self._open = min(longest, OPEN_BYTES), Bodies.within(OPEN_BODY_BYTES, longest, OPEN_SHARE)
        self.handlers: dict[str, Handler] = {}
        self._unknown = self._received(  # whatever kind of call it is
            grpc.stream_stream_rpc_method_handler(unknown), "", UNKNOWN_METHOD
        )

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As `grpc.aio.Server.add_generic_rpc_handlers`, for generated code that also registers methods."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """As `grpc.aio.Server.add_registered_method_handlers`. Raises TypeError for a handler that is not async,
        because its thread's context would lack the caller."""
        for name, each in method_handlers.items():
            method = f"{service_name}/{name}"
            self.handlers[f"/{method}"] = self._received(each, service_name, method)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """The handler of a method; for an unknown one, a handler that refuses."""
        return self.handlers.get(handler_call_details.method, self._unknown)

    def _received(self, handler: Any, service: str, method: str) -> Handler:
        """Wrap a handler with all the checks of a request. ``method``: the name under which it is counted. Calls of
        services outside the contract are counted if they are refused before their handler runs."""
        calls, guard = self._calls, self._guard
        max_bytes, bodies = self._open if service in OPEN_SERVICES else self._guarded
        parse = self._parser(handler.request_deserializer, max_bytes)
        streams, answers_stream = handler.request_streaming, handler.response_streaming
        counted = service.startswith(CONTRACT)
        behaviour = _serving(
            handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        )

        async def receive(requests: Any, context: Context) -> Any:
            if not ARRIVED.get():  # grpc.aio itself accepted it
                ARRIVED.set(time.monotonic())
            call: Call | None = None
            request = response = None
            reached = False
            try:
                try:
                    if guard is not None:
                        guard.admit(service, context)
                    request = requests if streams else parse(await bodies.read(context, CALLER.get()))
                    reached = True
                    if counted:
                        call = Call(calls, method, context, answers_stream)
                    response = await behaviour(request, context)
                    return response
                except BaseException as error:
                    if call is None:
                        if not isinstance(error, ExecutorError):
                            raise
                        call = Call(calls, method, context, answers_stream)
                    if (refusal := call.failed(error)) is None:
                        raise
                await refuse(context, refusal)
            except grpc.aio.AbortError as error:
                # gRPC keeps it with the call: what its frames hold would live until the collector runs.
                error.__traceback__ = error.__context__ = None
                raise
            finally:
                if call is not None:
                    call.end(response, reached and not answers_stream)
                del requests, request, response, context, call

        serialize = serializing(handler.response_serializer)
        if answers_stream:
            return grpc.stream_stream_rpc_method_handler(receive, parse if streams else None, serialize)
        return grpc.stream_unary_rpc_method_handler(receive, parse if streams else None, serialize)

    def _parser(self, parse: Callable[[bytes], Any] | None, max_bytes: int) -> Callable[[bytes], Any]:
        """Parse a message. Raises `InvalidRequest` for invalid bytes, or if it is too large in bytes or content."""
        message = getattr(parse, "__self__", None)

        def parsed(data: bytes) -> Any:
            if len(data) > max_bytes:
                raise InvalidRequest(
                    f"the request has {len(data)} bytes of at most {max_bytes}",
                    metadata={"max_request_bytes": max_bytes},
                )
            if parse is None:
                return data
            if message is not None and len(data) > UNCOUNTED_BYTES:
                check(data, message, self.budgets.get(message, self._budget))
            try:
                return parse(data)
            except DecodeError:
                raise InvalidRequest("the request is not a valid message of this method") from None

        return parsed


def _serving(behaviour: Any) -> Behaviour:
    """A handler as a coroutine; the answers of an async generator are written one by one."""
    if inspect.iscoroutinefunction(behaviour):
        return cast(Behaviour, behaviour)
    if not inspect.isasyncgenfunction(behaviour):
        raise TypeError(f"{behaviour!r} must be an async handler: a thread's context would lack the caller")

    async def serve(request: Any, context: Context) -> None:
        async with aclosing(behaviour(request, context)) as answers:
            async for each in answers:
                await context.write(each)

    return serve
