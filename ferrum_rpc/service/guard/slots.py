"""Slots for long work: a bounded number, with a share for each caller.

Waiting callers take turns: the next slot goes to the caller that has the fewest, and within a caller to the one that
waited longest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Hashable
from contextlib import asynccontextmanager

Line = tuple[tuple[Hashable, int], ...]
"""A queue of waiters with the same limits: the keys against which a slot counts, each with its maximum. The last key is
the caller."""


class Slots:
    """``count`` slots. Bound to the running event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: dict[Hashable, int] = {}
        self._waiting: dict[Line, deque[asyncio.Future[None]]] = {}  # whose turn is next first

    @property
    def waiting(self) -> Collection[Line]:
        """The queues that have waiters."""
        return self._waiting

    def allows(self, line: Line) -> bool:
        """Whether one more slot is within the limits of the queue."""
        for key, limit in line:  # noqa: SIM110 - a generator is a call for each key
            if self._held.get(key, 0) >= limit:
                return False
        return True

    def enter(self, line: Line) -> bool:
        """Take a slot. False if the caller has to wait for one."""
        if not self._free or not self.allows(line):
            return False
        self._free -= 1
        for key, _ in line:
            self._held[key] = self._held.get(key, 0) + 1
        return True

    def leave(self, line: Line) -> None:
        """Free a slot, and pass it to the next waiter."""
        self._free += 1
        for key, _ in line:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
        if self._waiting:
            self._pass_on()

    async def wait(self, line: Line) -> None:
        """Wait for a slot in turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(line, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just got its slot
                self.leave(line)
            raise

    @asynccontextmanager
    async def held(self, line: Line) -> AsyncIterator[None]:
        """Wait for a slot and hold it while the body runs."""
        if not self.enter(line):
            await self.wait(line)
        try:
            yield
        finally:
            self.leave(line)

    def _pass_on(self) -> None:
        """Give the free slot to the next waiter that may have it."""
        able = filter(self.allows, self._waiting)
        for line in sorted(able, key=lambda each: self._held.get(each[-1][0], 0)):
            turns = self._waiting.pop(line)
            while turns and turns[0].done():  # its caller has gone
                turns.popleft()
            if turns:
                self.enter(line)
                turns.popleft().set_result(None)
                if turns:
                    self._waiting[line] = turns  # behind the others
                return
