"""What a session's frames ask of the cache: roll back, share and release, several sequences in one frame.

A frame has one outcome for every handle, so that one sequence that is busy or gone does not refuse the others. This
file knows neither the stream nor its order of frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ferrum_rpc.core import Caller, HandleRef
from ferrum_rpc.errors import ExecutorError, InvalidRequest
from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.service.books import Books
from ferrum_rpc.service.operations import CacheOperations
from ferrum_rpc.wire.items import (
    fill_pressure,
    handle_from_proto,
    handle_to_proto,
    pressure_to_proto,
    request_id_from_proto,
)
from ferrum_rpc.wire.status import status_from_error


class SessionCache:
    """The cache as one session sees it. ``refused(outcomes)`` counts and tells the refusals among a frame's outcomes;
    ``origin`` marks the sequences that the session makes."""

    def __init__(self, books: Books, caller: Caller, origin: object, refused: Callable[[list[Any]], object]) -> None:
        self._books = books
        self._operations = CacheOperations(books)
        self._caller = caller
        self._origin = origin
        self._refused = refused

    async def truncate(self, request: session_pb2.SessionTruncate) -> session_pb2.SessionHandlesAnswer:
        """Roll back, each handle to a length of its own."""
        if len(request.handles) != len(request.lengths):
            raise InvalidRequest("`lengths` has one for every handle", field="lengths")
        request_id = request_id_from_proto(request.request_id)
        return await self._each(
            [
                self._operations.truncate(handle_from_proto(handle), length, request_id, caller=self._caller)
                for handle, length in zip(request.handles, request.lengths, strict=True)
            ],
            lambda _, result: result[0],
        )

    async def release(self, request: session_pb2.SessionRelease) -> session_pb2.SessionHandlesAnswer:
        """Free."""
        handles = [handle_from_proto(handle) for handle in request.handles]
        return await self._each(
            [
                self._operations.release(handle, any_version=request.any_version, caller=self._caller)
                for handle in handles
            ],
            lambda index, _: handles[index],
        )

    async def fork(self, request: session_pb2.SessionFork) -> session_pb2.SessionHandlesAnswer:
        """Share until they diverge."""
        children, _ = await self._operations.fork(
            handle_from_proto(request.handle),
            request.count or 1,
            request.at_length if request.HasField("at_length") else None,
            request_id_from_proto(request.request_id),
            caller=self._caller,
            origin=self._origin,
        )
        answer = session_pb2.SessionHandlesAnswer(pressure=pressure_to_proto(self._books.pressure()))
        for child in children:
            answer.results.add(handle=handle_to_proto(child))
        return answer

    async def _each(
        self, calls: list[Coroutine[Any, Any, Any]], handle: Callable[[int, Any], HandleRef]
    ) -> session_pb2.SessionHandlesAnswer:
        """One outcome per handle."""
        most = self._books.limits.max_batch_items
        if len(calls) > most:
            for call in calls:
                call.close()
            raise InvalidRequest(f"{len(calls)} handles exceed the limit of {most}", field="handles")
        answer = session_pb2.SessionHandlesAnswer()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        self._refused(outcomes)
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, ExecutorError):
                answer.results.add(error=status_from_error(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answer.results.add(handle=handle_to_proto(handle(index, outcome)))
        fill_pressure(answer.pressure, self._books.pressure())
        return answer
