"""Bytes that are no message get the same canonical answers as everything else.

grpc.aio parses a request before it calls the handler, and answers UNKNOWN with the parser's text when that fails.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ferrum_rpc.errors import ExecutorError, InvalidRequest
from ferrum_rpc.service.calls import CallLog, Context
from ferrum_rpc.wire.framing import serializing

Parser = Callable[[bytes], Any]
Refuse = Callable[[Context, ExecutorError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Malformed:
    """What stands in place of a request that could not be parsed."""

    error: InvalidRequest


def parsing(handler: Any, method: str, calls: CallLog) -> Any:
    """The handler with a parser that cannot fail. A request that comes alone is answered here; in a stream of requests
    the refusal is raised where the next one is read, and ends the stream. ``method``: what it is counted under."""
    if handler.request_deserializer is None:
        return handler
    parse, serialize = handler.request_deserializer, serializing(handler.response_serializer)
    refuse = partial(calls.refuse, method)
    if not handler.request_streaming:
        if handler.response_streaming:
            serve = _guard_answers(handler.unary_stream, refuse)
            return grpc.unary_stream_rpc_method_handler(serve, _marked(parse), serialize)
        serve = _guard_answer(handler.unary_unary, refuse)
        return grpc.unary_unary_rpc_method_handler(serve, _marked(parse), serialize)
    if handler.response_streaming:
        serve = _guard_answers(handler.stream_stream, refuse)
        return grpc.stream_stream_rpc_method_handler(serve, _raising(parse), serialize)
    serve = _guard_answer(handler.stream_unary, refuse)
    return grpc.stream_unary_rpc_method_handler(serve, _raising(parse), serialize)


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
