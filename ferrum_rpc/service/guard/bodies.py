"""Requests under way: how many bodies may be coming in at once, of a connection, of one of several callers, and in all.

gRPC takes a request's body into memory while it comes, up to the message limit, as soon as it is read. Until then it
takes what its window allows, 16 KiB a call. So a body is read when its call has a slot, and calls wait for slots in
turn. A body mostly comes with its headers and leaves its slot at once; a slow one is refused when others wait that its
slot would help.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Any, Final, NamedTuple

import grpc

from ferrum_rpc.core import ANYBODY, Caller
from ferrum_rpc.errors import InvalidRequest, QueueFull
from ferrum_rpc.service.records import RETRY_AFTER_S
from ferrum_rpc.service.trace_context import Context

TIMEOUT_S: Final = 0.5
TURNS: Final = 4
"""How long a body may take while others wait for its slot: so many seconds, and turns of the event loop after them. A
body that has come is seen within three turns, however long those are."""


class BodySource(NamedTuple):
    """Calls of one caller on one connection: they come in their order."""

    peer: str
    caller: str
    shares: bool


class Bodies:
    """Slots for bodies: ``in_all``, ``per_connection`` for a caller on one, ``per_caller`` (default: all) for one of
    several callers. Bound to the running event loop."""

    def __init__(self, in_all: int, per_connection: int, per_caller: int | None = None) -> None:
        self._free = in_all
        self._per_connection = per_connection
        self._per_caller = in_all if per_caller is None else per_caller
        self._taken: Counter[BodySource] = Counter()
        self._of_caller: Counter[str] = Counter()
        self._waiting: dict[BodySource, deque[asyncio.Future[None]]] = {}  # whose turn is next first
        self._reading: dict[asyncio.Task[Any], tuple[float, BodySource]] = {}  # since when, the oldest first
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def under_way(self) -> int:
        """Bodies that are being read."""
        return len(self._reading)

    async def read(self, context: Context, caller: Caller = ANYBODY) -> bytes:
        """The body of a call of one request. Raises `QueueFull` where it took too long while others waited, and
        `InvalidRequest` where the call ended without one."""
        line = BodySource(context.peer(), caller.name, caller.shares)
        if self._free and self._may_have_one(line):
            self._enter(line)
        else:
            await self._turn(line)
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
            self._leave(line)
        if body is grpc.aio.EOF:
            raise InvalidRequest("the call ended without a request")
        return body  # type: ignore[no-any-return] # nothing parses it before

    def _may_have_one(self, line: BodySource) -> bool:
        """Whether one more slot would be within its limits."""
        within = self._taken.get(line, 0) < self._per_connection
        return within and not (line.shares and self._of_caller.get(line.caller, 0) >= self._per_caller)

    def _enter(self, line: BodySource) -> None:
        self._free -= 1
        self._taken[line] += 1
        self._of_caller[line.caller] += 1

    def _leave(self, line: BodySource) -> None:
        """A slot is free. Of the lines that wait and may have it, the next of the caller with the fewest gets it."""
        self._free += 1
        _one_less(self._taken, line)
        _one_less(self._of_caller, line.caller)
        if not self._waiting:
            return
        able = [other for other in self._waiting if self._may_have_one(other)]
        for other in sorted(able, key=lambda each: self._of_caller.get(each.caller, 0)):
            turns = self._waiting.pop(other)
            while turns and turns[0].done():  # its caller has gone
                turns.popleft()
            if turns:
                self._enter(other)
                turns.popleft().set_result(None)
                if turns:
                    self._waiting[other] = turns  # behind the others
                return

    async def _turn(self, line: BodySource) -> None:
        """Wait until it has a slot."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(line, deque()).append(turn)
        self._set_timer()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just got its slot
                self._leave(line)
            raise

    def _set_timer(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(TIMEOUT_S, self._refuse_late)

    def _refuse_late(self) -> None:
        """Others wait: refuse the bodies that have had their time, of all callers, or where all that wait are beyond
        their own limits, of those."""
        self._timer = None
        since = asyncio.get_running_loop().time() - TIMEOUT_S
        late: list[asyncio.Task[Any]] = []
        if self._waiting:
            lacking, who = any(map(self._may_have_one, self._waiting)), {line.caller for line in self._waiting}
            for task, (began, line) in self._reading.items():
                if began <= since and (lacking or line.caller in who):
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
        self._set_timer()


def _one_less(counts: Counter[Any], key: object) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
