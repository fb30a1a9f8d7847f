"""Slots for incoming request bodies: per connection, per caller if there are several, and in total.

gRPC reads the body of a request into memory as it arrives, up to the message limit, once reading has begun. Before that
it holds what its window allows, 16 KiB per call. So a body is read when its call has a slot, and calls wait for slots
in turn. Most bodies arrive with their headers and leave their slot at once. A slow one is refused if calls wait that
could use its slot.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final, Self

import grpc

from ferrum_rpc.core import ANYBODY, Caller
from ferrum_rpc.errors import InvalidRequest, QueueFull
from ferrum_rpc.service.guard.slots import Line, Slots
from ferrum_rpc.service.trace_context import Context

TIMEOUT_S: Final = 0.5
TURNS: Final = 4
"""How long a body may take while others wait for its slot: seconds, and turns of the event loop after them. A body that
has arrived is seen within three turns, however long those are."""

RETRY_AFTER_S: Final = 0.05


class Bodies:
    """Slots for bodies: ``in_all``, ``per_connection`` for a caller on one connection, ``per_caller`` (default: all)
    for one of several callers. Bound to the running event loop."""

    def __init__(self, in_all: int, per_connection: int, per_caller: int | None = None) -> None:
        self._slots = Slots(in_all)
        self._in_all = in_all
        self._per_connection = per_connection
        self._per_caller = in_all if per_caller is None else per_caller
        self._reading: dict[asyncio.Task[Any], tuple[float, Line]] = {}  # since when, the oldest first
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, total_bytes: int, largest: int, share: int, caller_share: float = 1.0) -> Self:
        """Slots for bodies of up to ``largest`` bytes that may take ``total_bytes`` at once: a ``share``-th of that per
        connection, at least one; ``caller_share`` of it for one of several callers."""
        in_all = max(share, total_bytes // largest)
        return cls(in_all, in_all // share, math.ceil(in_all * caller_share))

    @property
    def under_way(self) -> int:
        """Bodies that are being read."""
        return len(self._reading)

    async def read(self, context: Context, caller: Caller = ANYBODY) -> bytes:
        """The body of a call of one request. Raises `QueueFull` if it took too long while others waited, and
        `InvalidRequest` if the call ended without one."""
        name, limit = caller.name, self._per_caller if caller.shares else self._in_all
        line = ((context.peer(), name), self._per_connection), (name, limit)
        if not self._slots.enter(line):
            self._set_timer()
            await self._slots.wait(line)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        self._reading[task] = asyncio.get_running_loop().time(), line
        try:
            body = await context.read()
        except asyncio.CancelledError:
            if task not in self._late:
                raise
            task.uncancel()
            raise QueueFull("the request came in too slowly while others waited", retry_after_s=RETRY_AFTER_S) from None
        finally:
            self._late.discard(task)
            del self._reading[task]
            self._slots.leave(line)
        if body is grpc.aio.EOF:
            raise InvalidRequest("the call ended without a request")
        return body  # type: ignore[no-any-return] # nothing parses it before

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TIMEOUT_S, self._refuse_late)

    def _refuse_late(self) -> None:
        """Refuse the bodies that have exceeded their time because others wait: those of all callers, or, if all that
        wait are beyond their own limits, only those of the same callers."""
        self._timer = None
        since = asyncio.get_running_loop().time() - TIMEOUT_S
        late: list[asyncio.Task[Any]] = []
        if waiting := self._slots.waiting:
            lacking, who = any(map(self._slots.allows, waiting)), {line[-1] for line in waiting}
            for task, (began, line) in self._reading.items():
                if began <= since and (lacking or line[-1] in who):
                    late.append(task)
        self._after_turns(TURNS, late)

    def _after_turns(self, turns: int, late: list[asyncio.Task[Any]]) -> None:
        late = [task for task in late if task in self._reading and task not in self._late]
        if late and turns:
            asyncio.get_running_loop().call_soon(self._after_turns, turns - 1, late)
            return
        self._late.update(late)
        for task in late:
            task.cancel()
        if self._slots.waiting:
            self._set_timer()
