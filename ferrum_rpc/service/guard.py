"""Default deny: every method asks who calls, but the health check.

The guard is the outermost: whoever has no credentials does not even reach the parser. Where nothing is asked of callers
it is not there at all.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health

from ferrum_rpc.core import Caller
from ferrum_rpc.errors import ExecutorError, PermissionDenied, Unauthenticated
from ferrum_rpc.service.calls import CallLog, Context
from ferrum_rpc.service.identity import CALLER
from ferrum_rpc.service.security import Security
from ferrum_rpc.service.tokens import TokenFile

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
        operator = name in self._operators
        return Caller(name, operator=operator, shares=not operator)


class Guard:
    """Makes handlers that know their caller or refuse."""

    def __init__(self, authenticator: Authenticator, calls: CallLog) -> None:
        self._authenticator = authenticator
        self._calls = calls

    def wrap(self, handler: Any, service: str, method: str) -> Any:
        """The handler behind the guard, but for a service that is open to all. ``method``: what a refusal is counted
        under. Raises TypeError for a handler that is not async: its thread's context would not know the caller."""
        if service in OPEN_SERVICES:
            return handler
        operators_only = service in OPERATOR_SERVICES
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


def guard_of(security: Security, calls: CallLog) -> Guard | None:
    """The guard that the settings want; None where callers need no credentials. Raises `SecurityError`."""
    if not security.asks:
        return None
    tokens = None if security.tokens is None else TokenFile(security.tokens).watch()
    return Guard(Authenticator(tokens, security.operators), calls)
