"""Trying again what cannot be had now: while the model loads, while an abandoned call still runs, and one caller for
all that need the same thing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from ferrum_rpc.client.policy import LONGEST_PAUSE_S, Deadline
from ferrum_rpc.errors import DeadlineExceeded, ExecutorError, Starting

Result = TypeVar("Result")

BUSY_TIMEOUT_S: Final = 5.0
FIRST_BUSY_PAUSE_S, LONGEST_BUSY_PAUSE_S = 0.005, 0.25
FIRST_STARTING_PAUSE_S: Final = 0.05


async def retry_while_starting(send: Callable[[], Awaitable[Result]], deadline: Deadline) -> Result:
    """Send, and again while the model loads. Raises `Starting` when the time is over."""
    pause = FIRST_STARTING_PAUSE_S
    while True:
        try:
            return await send()
        except Starting:
            left = deadline.remaining()
            if left is not None and left <= pause:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


class BusyPauses:
    """Pauses while an earlier call on a sequence, whose fate is unknown, may still run: ``most_s`` seconds in all, and
    none beyond the deadline."""

    def __init__(self, deadline: Deadline, most_s: float | None = BUSY_TIMEOUT_S) -> None:
        self._until = Deadline.after(deadline.remaining(most_s))
        self._pause = FIRST_BUSY_PAUSE_S

    async def wait(self) -> bool:
        """Pause, each time for twice as long. False, at once: no time is left."""
        if self._until.passed:
            return False
        await asyncio.sleep(self._until.remaining(self._pause) or 0.0)
        self._pause = min(2 * self._pause, LONGEST_BUSY_PAUSE_S)
        return True


class SingleFlight:
    """A value that is made by one caller at a time, while the others that need it wait: each in its turn would wait for
    an executor that is gone. A failure is shared by the callers that waited for it. Where the caller was cancelled or
    its own deadline passed (also while the executor starts), the next caller tries again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._making = asyncio.Lock()
        self._failures = 0
        self._failure: ExecutorError | None = None

    async def get(
        self, have: Callable[[], Result | None], make: Callable[[], Awaitable[Result]], deadline: Deadline
    ) -> Result:
        """What is there, or is made now. Raises what making it raised, and `DeadlineExceeded` (its fate is known:
        nothing was sent) where that took too long."""
        failures = self._failures
        try:
            async with asyncio.timeout(deadline.remaining()), self._making:
                if (value := have()) is not None:
                    return value
                if self._failure is not None and self._failures != failures:
                    raise self._failure
                try:
                    return await make()
                except (DeadlineExceeded, Starting):
                    raise
                except ExecutorError as error:
                    self._failures, self._failure = self._failures + 1, error
                    raise
        except TimeoutError:
            raise DeadlineExceeded(f"{self._what} took too long; nothing was sent") from None
