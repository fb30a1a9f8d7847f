"""A call on sequences, from the turn of the event loop that begins it until it has ended.

    claim     its sequences are busy from now on: a later call on them is refused, and never this one
    replay    an answer that is recorded is taken, a call in flight with the same id is joined
    wait      for the caches of its sequences that are not in the engine, if any (`service.waits`)
    submit    to the engine's queue
    settle    the engine's answer: committed and recorded, the sequences free again, whether or not the caller waits

The first two happen in the turn that begins the call, so that calls claim in the order in which they arrive. Nearly
always that turn submits it too. Forwards and cache operations are the two kinds.

An error raised by the settling of a call is a bug, and no task awaits the callback that raised it: it is logged and
counted, the call ends with `InternalError`, and its sequences are freed.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar

from ferrum_rpc.errors import Cancelled, ExecutorError, InternalError
from ferrum_rpc.service.replay import Entry, Outcome, Waiter
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import BackgroundTask

FAILED: Final = "the executor failed internally; its log says more"
CANCELLED_BEFORE: Final = "the call was cancelled before it was dispatched; nothing happened"

Failed = dict[int, ExecutorError]
"""What could not be brought into the engine, by the numbers that the sequences were to have there."""

T = TypeVar("T")


class CallPhase(enum.IntEnum):
    """The phases of a call, in order."""

    CLAIMED = 0
    """Its sequences are its own, and calls ahead of it are in flight."""
    WAITING = 1
    """Caches of its sequences are brought in. It does not end before they are there."""
    QUEUED = 2
    """The engine has it."""
    SETTLED = 3
    """Its own part is over, and calls that it repeats are in flight."""
    DONE = 4


class Transaction(ABC, Generic[T]):
    """One call. Awaiting it returns its `answer`; a caller that is cancelled meanwhile abandons it. ``refusal``: the
    error of an ended call, if it was refused."""

    _state: ServerState
    _repeated: dict[Waiter, Entry]  # calls in flight that it repeats
    _on_end: Callable[[], object] | None = None
    _withdrawn: Exception | None = None  # the refusal for the end of its wait
    phase = CallPhase.CLAIMED
    refusal: Exception | None = None

    @abstractmethod
    def answer(self) -> T:
        """The answer of an ended call. Raises its refusal."""

    @abstractmethod
    def fail(self, error: InternalError) -> None:
        """Free what it still holds, after a callback of `settle` has raised."""

    @abstractmethod
    def _cancel(self) -> bool:
        """Cancel it in the engine. False: it runs there."""

    @abstractmethod
    def _awaited(self) -> bool:
        """Whether a duplicate waits for it."""

    @abstractmethod
    def _go_on(self, failed: Failed) -> None:
        """Submit it after its wait, without the sequences that could not be restored."""

    @abstractmethod
    def _undo(self, error: Exception | None) -> None:
        """End it with a refusal: it had no effect and will have none."""

    def settle(self, take: Callable[..., object], *result: object) -> None:
        """Call ``take`` with the answer of the engine, or of the call that this one repeats. Its error ends this call
        and no other."""
        try:
            take(*result)
        except Exception as error:
            supervisor, failure = self._state.supervisor, InternalError(FAILED)
            supervisor.note(BackgroundTask.CALLBACK, error)
            supervisor.attempt(self.fail, failure)
            if self.phase is not CallPhase.DONE and self.phase is not CallPhase.WAITING:
                self.end(failure)

    def cancel(self) -> bool:
        """End it with `Cancelled`, if it has not begun and no duplicate waits for it. False: it runs, or is over."""
        if self.phase >= CallPhase.SETTLED or self._awaited():
            return False
        if self.phase is CallPhase.QUEUED and not self._cancel():
            return False
        self._refuse(Cancelled(CANCELLED_BEFORE))
        return True

    def _refuse(self, error: Exception | None) -> None:
        """Refuse all of it, as soon as its sequences can be freed."""
        if self.phase is CallPhase.WAITING:
            self._withdrawn = self._withdrawn or error
        else:
            self._undo(error)

    def _wait(self, caches: Coroutine[Any, Any, Failed]) -> None:
        """Continue once the caches of its sequences are in the engine."""
        self.phase = CallPhase.WAITING

        async def wait() -> None:
            failed: Failed = {}
            try:
                failed = await caches
            except Exception as error:
                self._state.supervisor.note(BackgroundTask.CALLBACK, error)
                self._withdrawn = InternalError(FAILED)
            self.settle(self._waited, failed)

        self._state.parked.start(wait())

    def _goes_on(self) -> bool:
        """Whether what it waits for is still needed."""
        return self._withdrawn is None

    def _waited(self, failed: Failed) -> None:
        self.phase = CallPhase.CLAIMED
        withdrawn, self._withdrawn = self._withdrawn, None
        if withdrawn is not None and not (isinstance(withdrawn, Cancelled) and self._awaited()):
            self._undo(withdrawn)
        else:
            self._go_on(failed)

    def _repeat(self, entry: Entry, take: Callable[[Outcome], object]) -> None:
        """Call ``take`` with the outcome of the call in flight that this one repeats."""

        def waiter(outcome: Outcome) -> None:
            if self._repeated.pop(waiter, None) is not None:
                self.settle(take, outcome)

        entry.waiters += (waiter,)
        self._repeated[waiter] = entry

    def abandon(self) -> None:
        """Handle a cancelled caller: cancel the call, or let it run without one."""
        self._on_end = None
        self.cancel()
        if self.phase >= CallPhase.QUEUED:  # else a duplicate of its own waits for it
            self._leave_repeated()

    def _leave_repeated(self) -> None:
        """Stop waiting for the call that it repeats."""
        for waiter, entry in self._repeated.items():
            entry.leave(waiter)
        self._repeated.clear()

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call ``call`` when it ends, or at once if it has ended."""
        if self.phase is CallPhase.DONE:
            call()
        else:
            self._on_end = call

    def end(self, refusal: Exception | None = None) -> None:
        """End it, with this ``refusal`` or with its outcome."""
        self.phase, self.refusal = CallPhase.DONE, refusal
        if self._repeated:
            self._leave_repeated()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def __await__(self) -> Generator[Any, None, T]:
        if self.phase is not CallPhase.DONE:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._on_end = lambda: None if ended.done() else ended.set_result(None)
            try:
                yield from ended
            except asyncio.CancelledError:
                self.abandon()
                raise
        return self.answer()
