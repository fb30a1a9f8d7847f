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
from typing import Any, NoReturn

from ferrum_rpc.service.transaction import Transaction

Reply = tuple[Any, Iterable[Any]]
"""A frame's answer, and the frames of rows that go ahead of it."""

Begun = tuple[Sequence[Transaction[Any]], Callable[[], Reply]]
"""What a frame asked for, which has begun, and what makes its answer when all of it has ended."""


@dataclass(slots=True, eq=False)
class Step:
    """A frame that is being worked on. ``reply`` makes its answer, or raises what refuses it; ``waits``: how many of
    its ``calls`` have not ended."""

    number: int
    calls: Sequence[Transaction[Any]] = ()
    reply: Callable[[], Reply] | None = None
    waits: int = 0


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

    def begin(self, number: int, begin: Callable[[], Begun]) -> None:
        """Begin a step; what ``begin`` raises is its answer."""
        step = self._open[number] = Step(number)
        try:
            step.calls, step.reply = begin()
        except Exception as error:
            step.reply = _raising(error)
        step.waits = len(step.calls)
        if not step.calls:
            self._ready(step)
        for call in step.calls:
            call.then(lambda: self._one_ended(step))

    def take_back(self, number: int) -> None:
        """Have the step answered with `Cancelled`, if it has not begun."""
        step = self._open.get(number)
        for call in () if step is None else step.calls:
            call.take_back()

    def abandon(self) -> None:
        """The session is over: take back what has not begun; what runs has nobody to hear of it."""
        for step in self._open.values():
            for call in step.calls:
                call.abandon()
        self._open.clear()
        self._ended.clear()

    async def idle(self) -> None:
        """Wait until every step is answered."""
        while self._open:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    @staticmethod
    def take_reply(step: Step) -> Reply:
        """The step's answer, once; or raises what refuses it. The step refers to it no more: rows that are written one
        part after the other must not stay until the last."""
        reply, step.calls, step.reply = step.reply, (), None
        assert reply is not None  # noqa: S101 - it has ended, and nobody took its answer
        return reply()

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
            self._ready(step)

    def _ready(self, step: Step) -> None:
        self._ended.append(step)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _forget(self, step: Step) -> None:
        self._open.pop(step.number, None)
        self.leaving = False
        if not self._open and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def reply() -> NoReturn:
        raise error

    return reply
