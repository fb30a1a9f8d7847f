"""How long a scheduler waits for an executor that refuses its calls, or does not answer."""

from __future__ import annotations

import asyncio
import time

from ferrum_rpc.client import ExecutorError, explained

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0


class ExecutorGone(Exception):
    """An executor could not be reached, or accepted no work, for longer than the scheduler's patience."""


class Patience:
    """How long a run may go without progress, and the pauses between attempts."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Start again: there was progress."""
        self._until = time.monotonic() + self._seconds
        self._pause = FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        """How much longer there may be no progress; 0 or less if there was none for too long."""
        return self._until - time.monotonic()

    async def wait(self, reason: ExecutorError | str) -> None:
        """Pause, twice as long each time, or as long as the executor asks for. Raises `ExecutorGone` with the
        ``reason`` when the time is over."""
        if self.left_s <= 0:
            why = explained(reason) if isinstance(reason, ExecutorError) else reason
            raise ExecutorGone(f"no progress for {self._seconds:g} s: {why}")
        await asyncio.sleep((isinstance(reason, ExecutorError) and reason.retry_after_s) or self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
