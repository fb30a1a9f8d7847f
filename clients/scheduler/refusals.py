"""What an executor's refusals mean to a scheduler, and for how long it puts up with them."""

from __future__ import annotations

import asyncio
import time

from ferrum_rpc.client import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    ExecutorError,
    KvBlocksExhausted,
    QueueFull,
    QuotaExceeded,
    RequestIdReused,
    SequenceBusy,
    SequencesExhausted,
    SequenceVersionMismatch,
    Starting,
    TransportError,
)
from ferrum_rpc.client.encryption import FLAGS, in_words, unreachable

OUT_OF_STEP = (SequenceVersionMismatch, SequenceBusy, RequestIdReused)
NOT_NOW = (QueueFull, SequencesExhausted, Starting, Draining)
NO_ROOM = (KvBlocksExhausted, QuotaExceeded)
NO_ANSWER = (TransportError, DeadlineExceeded, Cancelled)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0


class ExecutorGone(Exception):
    """The executor could not be reached, or would not work, for longer than the scheduler's patience."""


class Patience:
    """How long the same trouble may last; progress renews it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """There was progress."""
        self._until = time.monotonic() + self._seconds
        self._pause = FIRST_PAUSE_S

    async def wait(self, trouble: ExecutorError | str) -> None:
        """Pause, longer each time, or as the executor says. Raises `ExecutorGone` at the end of it."""
        if time.monotonic() >= self._until:
            why = in_words(trouble, FLAGS) if isinstance(trouble, ExecutorError) and unreachable(trouble) else trouble
            raise ExecutorGone(f"no progress for {self._seconds:g} s: {why}")
        await asyncio.sleep((isinstance(trouble, ExecutorError) and trouble.retry_after_s) or self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
