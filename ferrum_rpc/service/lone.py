"""A session's steps of one item: begun where their frame is read, answered by one task for all of them.

A scheduler that decodes a sequence by itself sends such frames, one after the other, and each is short: a task of its
own would cost as much as admitting the item does. What such a step may not do is wait: one that repeats a call has to,
and is left to a task. This file knows neither streams nor messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from ferrum_rpc.core import Caller, StepTiming, WorkItem
from ferrum_rpc.service.forward import Call, ForwardAnswer, ForwardPath


@dataclass(slots=True, eq=False)
class Lone:
    """A step of one item. ``answered`` is done when its answer was written, or the session is over. ``ending``: what
    its call ended with, once it has; an exception where it has no answer but that."""

    answered: asyncio.Future[None]
    call: Call | None = None
    ending: StepTiming | Exception | None = None

    @property
    def began(self) -> bool:
        """Whether it went to the engine."""
        return self.call is not None and self.call.submission is not None

    def answer(self) -> ForwardAnswer:
        """What the step came to. Raises what refused it."""
        if isinstance(self.ending, Exception):
            raise self.ending
        assert self.call is not None  # noqa: S101 - only a refused step has none
        return ForwardAnswer([self.call.outcomes[0]], self.ending)


class LoneSteps:
    """The lone steps of one session. ``write`` answers one that has ended; it is called one at a time."""

    def __init__(self, forward: ForwardPath, write: Callable[[Lone], Awaitable[None]]) -> None:
        self._forward = forward
        self._write = write
        self._open: set[Lone] = set()
        self._ended: deque[Lone] = deque()
        self._wake: asyncio.Future[None] | None = None

    def begin(
        self, item: WorkItem, *, caller: Caller, deadline: float | None, max_bytes: int, origin: object
    ) -> Lone | None:
        """Begin a step, or have its refusal answered. None: it repeats a call, and nothing was begun."""
        lone = Lone(asyncio.get_running_loop().create_future())
        try:
            lone.call = self._forward.start(
                item,
                caller=caller,
                deadline=deadline,
                max_bytes=max_bytes,
                origin=origin,
                finished=partial(self._end, lone),
            )
        except Exception as error:  # its answer says so
            self._end(lone, error)
        else:
            if lone.call is None:
                return None
        self._open.add(lone)
        return lone

    def take_back(self, lone: Lone) -> None:
        """Have the step answered with `Cancelled`, if it has not begun."""
        if lone.call is not None:
            self._forward.take_back(lone.call)

    def abandon(self) -> None:
        """The session is over: take back what has not begun; what runs has nobody to hear of it."""
        for lone in self._open:
            if lone.call is not None:
                self._forward.abandon(lone.call)
            lone.answered.cancel()

    async def run(self) -> None:
        """Answer the steps in the order that they end, until cancelled."""
        while True:
            while self._ended:
                lone = self._ended.popleft()
                await self._write(lone)
                self._open.discard(lone)
                if not lone.answered.done():  # whoever waited for all steps may have been cancelled
                    lone.answered.set_result(None)
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def _end(self, lone: Lone, ending: StepTiming | Exception | None) -> None:
        lone.ending = ending
        self._ended.append(lone)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
