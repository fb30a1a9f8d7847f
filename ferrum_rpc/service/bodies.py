"""Requests under way: how many bodies may be coming in at once, of one connection and in all.

gRPC takes a request's body into memory while it comes, up to the message limit, as soon as it is read. Until then it
takes what its window allows, 16 KiB a call. So a body is read when its call has a slot, and calls wait for slots in
turn. A body mostly comes with its headers and leaves its slot at once; a slow one is refused when others wait.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from typing import Any, Final

import grpc

from ferrum_rpc.errors import InvalidRequest, QueueFull
from ferrum_rpc.service.records import RETRY_AFTER_S
from ferrum_rpc.service.trace_context import Context

TIMEOUT_S: Final = 0.5
TURNS: Final = 4
"""How long a body may take while others wait for its slot: so many seconds, and turns of the event loop after them. A
body that has come is seen within three turns, however long those are."""


class Bodies:
    """Slots for bodies: ``in_all``, and ``per_connection`` of them for one peer. Bound to the running event loop."""

    def __init__(self, in_all: int, per_connection: int) -> None:
        self._free = in_all
        self._per_connection = per_connection
        self._taken: defaultdict[str, int] = defaultdict(int)  # slots by peer
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the peer whose turn is next first
        self._reading: dict[asyncio.Task[Any], float] = {}  # since when, the oldest first
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def under_way(self) -> int:
        """Bodies that are being read."""
        return len(self._reading)

    async def read(self, context: Context) -> bytes:
        """The body of a call of one request. Raises `QueueFull` where it took too long while others waited, and
        `InvalidRequest` where the call ended without one."""
        peer = context.peer()
        if self._free and self._taken.get(peer, 0) < self._per_connection:
            self._free -= 1
            self._taken[peer] += 1
        else:
            await self._turn(peer)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        self._reading[task] = asyncio.get_running_loop().time()
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
            self._leave(peer)
        if body is grpc.aio.EOF:
            raise InvalidRequest("the call ended without a request")
        return body  # type: ignore[no-any-return] # nothing parses it before

    def _leave(self, peer: str) -> None:
        """A slot is free: it goes to the next peer that waits and may have it."""
        self._free += 1
        self._taken[peer] -= 1
        if not self._taken[peer]:
            del self._taken[peer]
        for other in list(self._waiting):
            if self._taken.get(other, 0) >= self._per_connection:
                continue
            turns = self._waiting.pop(other)
            while turns and turns[0].done():  # its caller has gone
                turns.popleft()
            if turns:
                self._free -= 1
                self._taken[other] += 1
                turns.popleft().set_result(None)
                if turns:
                    self._waiting[other] = turns  # behind the others
                return

    async def _turn(self, peer: str) -> None:
        """Wait until the peer has a slot."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append(turn)
        self._set_timer()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just got its slot
                self._leave(peer)
            raise

    def _set_timer(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(TIMEOUT_S, self._refuse_late)

    def _refuse_late(self) -> None:
        """Others wait: refuse the bodies that have had their time."""
        self._timer = None
        since = asyncio.get_running_loop().time() - TIMEOUT_S
        late = [task for task, began in self._reading.items() if began <= since] if self._waiting else []
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
