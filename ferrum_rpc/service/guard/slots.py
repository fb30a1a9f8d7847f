"""Slots of work that takes a while: callers wait for them in turn, and one of several has its share at most.

The next slot is for the caller that has the fewest; of those, for the one that waits longest. A caller's own come in
their order.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ferrum_rpc.service.records import Account, Resource


class Slots:
    """``count`` slots, each caller's share of them as of ``resource``. Bound to the running event loop."""

    def __init__(self, count: int, resource: Resource) -> None:
        self._free = count
        self._resource = resource
        self._taken: Counter[Account] = Counter()
        self._waiting: dict[Account, deque[asyncio.Future[None]]] = {}  # whoever waits longest first

    @asynccontextmanager
    async def held(self, account: Account) -> AsyncIterator[None]:
        """A slot of the caller's. Waits for it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(turn)
        self._pass_on()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just got its slot
                self._leave(account)
            raise
        try:
            yield
        finally:
            self._leave(account)

    def _leave(self, account: Account) -> None:
        self._free += 1
        self._taken[account] -= 1
        if not self._taken[account]:
            del self._taken[account]
        self._pass_on()

    def _pass_on(self) -> None:
        """Give what is free to those that wait and may have it."""
        while self._free:
            for account, turns in list(self._waiting.items()):
                while turns and turns[0].done():  # it was cancelled
                    turns.popleft()
                if not turns:
                    del self._waiting[account]
            able = [each for each in self._waiting if self._taken[each] < each.most[self._resource]]
            if not able:
                return
            account = min(able, key=self._taken.__getitem__)  # the first of several
            turns = self._waiting.pop(account)
            self._free -= 1
            self._taken[account] += 1
            turns.popleft().set_result(None)
            if turns:
                self._waiting[account] = turns  # behind the others
