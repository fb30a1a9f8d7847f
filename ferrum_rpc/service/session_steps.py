"""A session's steps in flight: begun where their frame is read, answered by one task in the order in which they end.

A step begins in the turn of the event loop that reads its frame, so that frames claim their sequences in the order in
which they arrive. It takes no task of its own, which would cost as much as admitting an item does. This file knows
neither streams nor messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ferrum_rpc.service.transaction import Transaction

Reply = tuple[Any, Iterable[Any]]
"""A frame's answer, and the frames of rows that go ahead of it."""


@dataclass(slots=True, eq=False)
class Step:
    """A frame that is being worked on. ``reply`` makes its answer
    once its ``calls`` have ended, or raises what refuses it; ``waits``: how many of them have not. ``give_back`` gives
    back the room of a large answer."""

    number: int
    calls: Sequence[Transaction[Any]] = ()
    reply: Callable[[], Reply] | None = None
    waits: int = 0
    give_back: Callable[[], None] | None = None


class Steps:
    """The steps of one session. ``write`` answers one that has ended; it is called one at a time."""

    def __init__(self, write: Callable[[Step], Awaitable[None]]) -> None:
        self._write = write
        self._open: dict[int, Step] = {}
        self._ended: deque[Step] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self.leaving = False
        """Whether the last message of an answer is being written: its client may know before we do."""

    def __len__(self) -> int:
        """The steps that count as in flight: those that their client cannot know to be answered."""
        return len(self._open) - self.leaving

    def begin(self, number: int, begin: Callable[[Step, Any], None], request: Any) -> None:
        """Begin a step: ``begin(step, request)`` sets its ``calls`` and ``reply``; what it raises is its answer."""
        step = self._open[number] = Step(number)
        try:
            begin(step, request)
        except Exception as error:
            step.calls, step.reply = (), partial(_raise, error)
        step.waits = len(step.calls) or 1
        for call in step.calls:
            call.when_ended(partial(self._one_ended, step))
        if not step.calls:
            self._one_ended(step)

    def take_back(self, number: int) -> None:
        """Have the step answered with `Cancelled`, if it has not begun."""
        step = self._open.get(number)
        for call in () if step is None else step.calls:
            call.take_back()

    def abandon(self) -> None:
        """The session is over: take back what has not begun, and let the rest run without it."""
        for step in self._open.values():
            for call in step.calls:
                call.abandon()
            if step.give_back is not None:
                step.give_back()
        self._open.clear()
        self._ended.clear()

    async def idle(self) -> None:
        """Wait until every step is answered."""
        while self._open:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    async def run(self) -> None:
        """Answer the steps in the order in which they end, until cancelled."""
        while True:
            while self._ended:
                step = self._ended.popleft()
                try:
                    await self._write(step)
                finally:
                    self._forget(step)
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def _one_ended(self, step: Step) -> None:
        step.waits -= 1
        if not step.waits:
            self._ended.append(step)
            if self._wake is not None and not self._wake.done():
                self._wake.set_result(None)

    def _forget(self, step: Step) -> None:
        self.leaving = False
        if self._open.pop(step.number, None) is not None and step.give_back is not None:
            step.give_back()
        if not self._open and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


def _raise(error: Exception) -> Reply:
    raise error
