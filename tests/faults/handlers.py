"""A server's handlers, called as grpc.aio calls them but without sockets between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from ferrum_rpc.service.server import ExecutorServer

Answer = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]


class Context:
    """As much of a servicer context as the handlers use. ``messages`` are the requests of a stream."""

    def __init__(self, messages: AsyncIterator[Any], enough: int) -> None:
        self.answer: Answer = (grpc.StatusCode.OK, "", ())
        self.left = enough
        self._messages = messages
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, trailing: tuple[tuple[str, str | bytes], ...]) -> None:
        self._trailing = trailing

    def code(self) -> grpc.StatusCode:
        return self.answer[0]

    def trailing_metadata(self) -> Any:
        return self._trailing

    def peer(self) -> str:
        return "test"

    def add_done_callback(self, callback: Any) -> None:
        """Calls end when their handlers do; nobody hangs up before."""

    def cancelled(self) -> bool:
        return False

    def done(self) -> bool:
        return False

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.answer = (code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError

    async def read(self) -> Any:
        return await anext(self._messages, grpc.aio.EOF)

    async def write(self, _: Any) -> None:
        """The caller hangs up when it has read enough: its handler is cancelled, as grpc.aio does it."""
        self.left -= 1
        task = asyncio.current_task()
        if not self.left and task is not None:
            task.cancel()

    async def send_initial_metadata(self, _: Any) -> None:
        """Nobody reads it."""


class Registered:
    """One method's handler."""

    def __init__(self, handler: grpc.RpcMethodHandler) -> None:
        self._handler = handler

    async def call(self, requests: Sequence[bytes], enough: int = 1 << 30) -> Answer:
        """What the handler answers to these bytes, until ``enough`` messages came. An exception that it lets out is
        UNKNOWN, as grpc.aio makes it."""
        handler = self._handler

        async def parsed() -> AsyncIterator[Any]:
            for each in requests:
                yield each if handler.request_deserializer is None else handler.request_deserializer(each)

        context = Context(parsed(), enough)
        try:
            await asyncio.create_task(self._serve(context))
        except grpc.aio.AbortError:
            return context.answer
        except asyncio.CancelledError:
            if context.left > 0:
                raise
        except Exception as error:
            return (grpc.StatusCode.UNKNOWN, repr(error), ())
        return context.answer

    async def _serve(self, context: Context) -> None:
        handler = self._handler
        response = await (handler.stream_unary or handler.stream_stream)(context._messages, context)
        if not handler.response_streaming:
            handler.response_serializer(response)


def registered_handlers(server: ExecutorServer) -> dict[str, Registered]:
    """Handlers of a running server, by full method name."""
    return {path: Registered(handler) for path, handler in server.methods().handlers.items()}
