"""Bytes that are no message, and methods that do not exist, get the same canonical answers as everything else.

grpc.aio parses a request before it calls the handler, and answers UNKNOWN with the parser's text when that fails; a
method that nobody registered answers without ErrorInfo. `Decoding` stands between the servicers and the grpc server
while they register: it wraps parsers, knows nothing of callers, and can be stacked with others of its kind.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from ferrum_rpc.errors import ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.service.calls import UNKNOWN_METHOD, CallLog, Context

Parser = Callable[[bytes], Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Refuse = Callable[[Context, ExecutorError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Malformed:
    """What stands in place of a request that could not be parsed."""

    error: InvalidRequest


class Decoding:
    """A grpc server, as far as registering is concerned, whose handlers refuse what they cannot parse."""

    def __init__(self, server: Any, calls: CallLog) -> None:
        self._server = server
        self._calls = calls

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As `grpc.aio.Server.add_generic_rpc_handlers`."""
        self._server.add_generic_rpc_handlers(tuple(_Wrapped(each, self._calls) for each in handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """As `grpc.aio.Server.add_registered_method_handlers`."""
        wrapped = {
            name: wrap(handler, f"{service_name}/{name}", self._calls) for name, handler in method_handlers.items()
        }
        self._server.add_registered_method_handlers(service_name, wrapped)


class UnknownMethods(grpc.GenericRpcHandler):
    """Answers every method; to be registered last, so that it gets those that nobody else has."""

    def __init__(self, calls: CallLog) -> None:
        async def refuse(_: Any, context: Context) -> None:
            await calls.refuse(UNKNOWN_METHOD, context, NotSupported("the executor has no such method"))

        self._handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """A handler that refuses, whatever kind of call it is."""
        return self._handler


class _Wrapped(grpc.GenericRpcHandler):
    """A generic handler whose method handlers are wrapped when they are looked up."""

    def __init__(self, inner: grpc.GenericRpcHandler, calls: CallLog) -> None:
        self._inner = inner
        self._calls = calls

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The wrapped handler of a method, or None where the inner one has none."""
        handler = self._inner.service(handler_call_details)
        return None if handler is None else wrap(handler, UNKNOWN_METHOD, self._calls)


def wrap(handler: Any, method: str, calls: CallLog) -> Any:
    """The handler with a parser that cannot fail. A request that comes alone is answered here; in a stream of requests
    the refusal is raised where the next one is read, and ends the stream. ``method``: what it is counted under."""
    if handler.request_deserializer is None:
        return handler
    parse = handler.request_deserializer
    refuse = partial(calls.refuse, method)
    if not handler.request_streaming:
        if handler.response_streaming:
            serve = _guard_answers(handler.unary_stream, refuse)
            return grpc.unary_stream_rpc_method_handler(serve, _marked(parse), handler.response_serializer)
        serve = _guard_answer(handler.unary_unary, refuse)
        return grpc.unary_unary_rpc_method_handler(serve, _marked(parse), handler.response_serializer)
    if handler.response_streaming:
        serve = _guard_answers(handler.stream_stream, refuse)
        return grpc.stream_stream_rpc_method_handler(serve, _raising(parse), handler.response_serializer)
    serve = _guard_answer(handler.stream_unary, refuse)
    return grpc.stream_unary_rpc_method_handler(serve, _raising(parse), handler.response_serializer)


def _raising(parse: Parser) -> Parser:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise InvalidRequest("the request is no message of this method") from None

    return parsed


def _marked(parse: Parser) -> Parser:
    raising = _raising(parse)

    def parsed(data: bytes) -> Any:
        try:
            return raising(data)
        except InvalidRequest as error:
            return Malformed(error)

    return parsed


def _guard_answer(serve: Callable[[Any, Context], Any], refuse: Refuse) -> Callable[[Any, Context], Any]:
    async def answer(request: Any, context: Context) -> Any:
        if isinstance(request, Malformed):
            await refuse(context, request.error)
        try:
            return await serve(request, context)
        except ExecutorError as error:  # of a handler that is not ours, while it read the stream
            await refuse(context, error)

    return answer


def _guard_answers(serve: Callable[[Any, Context], Any], refuse: Refuse) -> Callable[[Any, Context], Any]:
    if not inspect.isasyncgenfunction(serve):
        return _guard_answer(serve, refuse)

    async def answers(request: Any, context: Context) -> AsyncIterator[Any]:
        if isinstance(request, Malformed):
            await refuse(context, request.error)
        try:
            async for each in serve(request, context):
                yield each
        except ExecutorError as error:
            await refuse(context, error)

    return answers
