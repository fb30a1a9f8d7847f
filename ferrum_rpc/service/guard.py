"""Default deny: every method asks who calls, but the health check.

The guard stands between the servicers and the grpc server while they register, as `decoding` does, so that a method
that somebody adds later is guarded without knowing it. It is the outermost: whoever has no credentials does not even
reach the parser. Where nothing is asked of callers it is not there at all.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1 import health

from ferrum_rpc.core import Caller
from ferrum_rpc.errors import ExecutorError, PermissionDenied, Unauthenticated
from ferrum_rpc.service.calls import UNKNOWN_METHOD, CallLog, Context
from ferrum_rpc.service.identity import CALLER
from ferrum_rpc.service.security import Security
from ferrum_rpc.service.tokens import TokenFile

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

OPEN_SERVICES: Final = frozenset({health.SERVICE_NAME})
"""Whoever restarts or routes must see how the server does, without a secret."""

OPERATOR_SERVICES: Final = frozenset({"ferrum_rpc.executor.v1.ExecutorControl"})
"""Changes what every caller sees."""

AUTHORIZATION: Final = "authorization"
SCHEME: Final = "bearer"


class Authenticator:
    """Tells who a call is from: the name of its token, or else of the certificate that its connection showed. Where
    both are asked for, TLS itself has checked the certificate, and the token has the name."""

    def __init__(self, tokens: TokenFile | None, operators: frozenset[str] = frozenset()) -> None:
        self._tokens = tokens
        self._operators = operators

    def caller(self, context: Context) -> Caller:
        """Raises `Unauthenticated`."""
        return self._by_certificate(context) if self._tokens is None else self._by_token(context, self._tokens)

    @staticmethod
    def _by_token(context: Context, tokens: TokenFile) -> Caller:
        given = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION]
        if len(given) != 1:
            raise Unauthenticated("send one `authorization: Bearer <token>` with the call")
        scheme, _, token = str(given[0]).partition(" ")
        caller = tokens.caller(token.strip()) if scheme.lower() == SCHEME else None
        if caller is None:
            raise Unauthenticated("the call's token is not accepted")
        return caller

    def _by_certificate(self, context: Context) -> Caller:
        names = tuple(context.peer_identities() or ())  # alternative names, or where there are none the common name
        try:
            name = names[0].decode() if names else ""
        except UnicodeDecodeError:  # replacing what is no text would give two certificates one name
            name = ""
        if not name:
            raise Unauthenticated(
                "the client's certificate has no subject alternative name and no common name in UTF-8"
            )
        return Caller(name, operator=name in self._operators)


class Guard:
    """A grpc server, as far as registering is concerned, whose handlers know their caller or refuse."""

    def __init__(self, server: Any, authenticator: Authenticator, calls: CallLog) -> None:
        self._server = server
        self._authenticator = authenticator
        self._calls = calls

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """As `grpc.aio.Server.add_registered_method_handlers`."""
        if service_name not in OPEN_SERVICES:
            method_handlers = {
                name: self.wrap(handler, f"{service_name}/{name}", operators_only=service_name in OPERATOR_SERVICES)
                for name, handler in method_handlers.items()
            }
        self._server.add_registered_method_handlers(service_name, method_handlers)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As `grpc.aio.Server.add_generic_rpc_handlers`. The methods of a service are registered besides, and found
        there first; what is left for these are methods that do not exist."""
        self._server.add_generic_rpc_handlers(tuple(_Guarded(each, self) for each in handlers))

    def wrap(self, handler: Any, method: str, *, operators_only: bool) -> Any:
        """The handler behind the guard. ``method``: what a refusal is counted under."""
        kind = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
        serve = _serving(getattr(handler, kind))
        # A lone request comes as bytes and is parsed behind the guard; a stream is parsed as the handler reads it.
        parse = None if handler.request_streaming else handler.request_deserializer

        async def guarded(request: Any, context: Context) -> Any:
            try:
                caller = self._authenticator.caller(context)
                CALLER.set(caller)  # grpc.aio runs every call in a task, and so in a context, of its own
                if operators_only and not caller.operator:
                    raise PermissionDenied("only operators may use this service")
            except ExecutorError as error:
                await self._calls.refuse(method, context, error)
                raise AssertionError("abort raises") from error
            return await serve(request if parse is None else parse(request), context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        deserializer = handler.request_deserializer if handler.request_streaming else None
        return make(guarded, deserializer, handler.response_serializer)


class _Guarded(grpc.GenericRpcHandler):
    """A generic handler whose method handlers are guarded when they are looked up."""

    def __init__(self, inner: grpc.GenericRpcHandler, guard: Guard) -> None:
        self._inner = inner
        self._guard = guard

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The guarded handler of a method, or None where the inner one has none."""
        handler: Handler | None = self._inner.service(handler_call_details)
        service = handler_call_details.method.strip("/").partition("/")[0]
        if handler is None or service in OPEN_SERVICES:
            return handler
        wrapped: Handler = self._guard.wrap(handler, UNKNOWN_METHOD, operators_only=service in OPERATOR_SERVICES)
        return wrapped


def _kind(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _serving(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    """A handler as a coroutine; an async generator's answers are written one by one."""
    if inspect.iscoroutinefunction(behaviour):
        return behaviour
    if not inspect.isasyncgenfunction(behaviour):
        raise TypeError(f"{behaviour!r} is no async handler; a thread's context would not know the caller")

    async def serve(request: Any, context: Context) -> None:
        async with contextlib.aclosing(behaviour(request, context)) as answers:
            async for each in answers:
                await context.write(each)

    return serve


def guarded(server: Any, security: Security, calls: CallLog) -> Any:
    """The server to register with: behind a guard if callers need credentials, else the server itself. Raises
    `SecurityError`."""
    if not security.asks:
        return server
    tokens = None if security.tokens is None else TokenFile(security.tokens)
    return Guard(server, Authenticator(tokens, security.operators), calls)
