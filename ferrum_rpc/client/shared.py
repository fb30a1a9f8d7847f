"""Callers that need the same thing at the same time: one makes it, the others wait and share what became of it.

Without this, callers that wait for each other's turn would each find out by themselves that an executor is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.errors import DeadlineExceeded, ExecutorError, Starting

Value = TypeVar("Value")


class Shared:
    """What is made one at a time. A failure is shared by those who were waiting for it; a maker who was cancelled, or
    whose own time was over (also for an executor that is starting), says nothing of the others, and the next one makes
    it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._making = asyncio.Lock()
        self._failures = 0
        self._failure: ExecutorError | None = None

    async def get(
        self, have: Callable[[], Value | None], make: Callable[[], Awaitable[Value]], deadline: Deadline
    ) -> Value:
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
