"""A call on sequences, from the turn of the event loop that begins it until it has ended.

    claim     its sequences are busy from now on: whoever comes later is refused, and never it
    replay    an answer that is recorded is taken, a call in flight with the same id is joined
    submit    to the engine's queue
    settle    the engine's answer: committed and recorded, the sequences free again, whether or not the caller listens

The first three happen in the turn that begins the call, so that calls claim in the order in which they arrive. Forwards
and cache operations are both this; the file knows neither of them.

What settling a call raises is a bug, and nobody awaits the callback that raised it: it is logged and counted, and the
call ends with `InternalError`, its sequences free.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, TypeVar

from ferrum_rpc.errors import InternalError
from ferrum_rpc.service.supervisor import Supervisor

FAILED: Final = "the executor failed internally; its log says more"

T = TypeVar("T")


class Transaction(ABC, Generic[T]):
    """One call. Awaiting it gives its `answer`; a caller that is cancelled meanwhile abandons it."""

    __slots__ = ("_hear", "_supervisor", "ended", "refusal")

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.ended = False
        self.refusal: Exception | None = None
        self._hear: Callable[[], object] | None = None

    @abstractmethod
    def answer(self) -> T:
        """What it came to, once it has ended; raises what refused it."""

    @abstractmethod
    def take_back(self) -> bool:
        """End it with `Cancelled`, if it has not begun and no duplicate waits for it. False: it goes on, or is over."""

    @abstractmethod
    def fail(self, error: InternalError) -> None:
        """Free what it still holds: what `take` called has raised."""

    def take(self, settle: Callable[..., object], *told: object) -> None:
        """Call ``settle`` with what the engine, or the call that this one repeats, has told. What it raises ends this
        call and no other."""
        if not self._supervisor.attempt(settle, *told):
            error = InternalError(FAILED)
            self._supervisor.attempt(self.fail, error)
            if not self.ended:
                self.end(error)

    def abandon(self) -> None:
        """Its caller is gone: take it back, or let it run with nobody to hear of it."""
        self._hear = None
        self.take_back()

    def then(self, hear: Callable[[], object]) -> None:
        """Call ``hear`` when it ends: at once where it has."""
        if self.ended:
            hear()
        else:
            self._hear = hear

    def end(self, refusal: Exception | None = None) -> None:
        """It is over; ``refusal`` is what it is answered with, if not with its outcome."""
        self.ended, self.refusal = True, refusal
        hear, self._hear = self._hear, None
        if hear is not None:
            hear()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.ended:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.then(lambda: None if ended.done() else ended.set_result(None))
            try:
                yield from ended
            except asyncio.CancelledError:
                self.abandon()
                raise
        return self.answer()
