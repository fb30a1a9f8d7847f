"""One attempt at a time for callers that need the same thing: the others wait and share its outcome.

Without this, each caller would in its turn wait for an executor that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.errors import DeadlineExceeded, ExecutorError, Starting

Value = TypeVar("Value")


class SingleFlight:
    """A value that is made by one caller at a time. A failure is shared by the callers that waited for it. Where the
    caller was cancelled or its own deadline passed (also while the executor starts), the next caller tries again."""

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
