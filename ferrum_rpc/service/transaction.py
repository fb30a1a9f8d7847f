"""A call on sequences, from the turn of the event loop that begins it until it has ended.

    claim     its sequences are busy from now on: a later call on them is refused, and never this one
    replay    an answer that is recorded is taken, a call in flight with the same id is joined
    submit    to the engine's queue
    settle    the engine's answer: committed and recorded, the sequences free again, whether or not the caller waits

The first three happen in the turn that begins the call, so that calls claim in the order in which they arrive. Forwards
and cache operations are the two kinds.

What settling a call raises is a bug, and no task awaits the callback that raised it: it is logged and counted, and the
call ends with `InternalError`, its sequences free.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, Generic, TypeVar

from ferrum_rpc.errors import InternalError
from ferrum_rpc.service.replay import Entry, Outcome, Waiter
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import BackgroundTask

FAILED: Final = "the executor failed internally; its log says more"

T = TypeVar("T")


class Transaction(ABC, Generic[T]):
    """One call. Awaiting it gives its `answer`; a caller that is cancelled meanwhile abandons it."""

    _state: ServerState
    _on_end: Callable[[], object] | None = None
    _repeated: tuple[tuple[Entry, Waiter], ...] = ()  # calls in flight that it repeats
    ended = False
    refusal: Exception | None = None

    @abstractmethod
    def answer(self) -> T:
        """What it came to, once it has ended; raises what refused it."""

    @abstractmethod
    def take_back(self) -> bool:
        """End it with `Cancelled`, if it has not begun and no duplicate waits for it. False: it goes on, or is over."""

    @abstractmethod
    def fail(self, error: InternalError) -> None:
        """Free what it still holds: what `settle` called has raised."""

    def settle(self, take: Callable[..., object], *result: object) -> None:
        """Call ``take`` with the answer of the engine, or of the call that this one repeats. What it raises ends this
        call and no other."""
        try:
            take(*result)
        except Exception as error:
            supervisor, failure = self._state.supervisor, InternalError(FAILED)
            supervisor.note(BackgroundTask.CALLBACK, error)
            supervisor.attempt(self.fail, failure)
            if not self.ended:
                self.end(failure)

    def _wait_for(self, entry: Entry, take: Callable[[Outcome], object]) -> None:
        """Have ``take`` called with the outcome of a call in flight that this one repeats."""
        waiter = partial(self.settle, take)
        entry.waiters += (waiter,)
        self._repeated += ((entry, waiter),)

    def _leave_repeated(self) -> None:
        """It waits no longer for what it repeats."""
        for entry, waiter in self._repeated:
            entry.leave(waiter)
        self._repeated = ()

    def abandon(self) -> None:
        """Its caller was cancelled: take it back, or let it run without one."""
        self._on_end = None
        self.take_back()

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call ``call`` when it ends: at once where it has."""
        if self.ended:
            call()
        else:
            self._on_end = call

    def end(self, refusal: Exception | None = None) -> None:
        """It is over; ``refusal`` is what it is answered with, if not with its outcome."""
        self.ended, self.refusal = True, refusal
        if self._repeated:
            self._leave_repeated()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.ended:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._on_end = lambda: None if ended.done() else ended.set_result(None)
            try:
                yield from ended
            except asyncio.CancelledError:
                self.abandon()
                raise
        return self.answer()
