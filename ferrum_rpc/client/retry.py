"""Sending again what is refused for now: while the model loads, and while an abandoned call still runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from ferrum_rpc.client.policy import LONGEST_PAUSE_S, Deadline
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.errors import SequenceBusy, Starting

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


async def retry_while_busy(state: SequenceState, send: Callable[[], Awaitable[Result]], deadline: Deadline) -> Result:
    """Send, and again while an earlier call on the sequence, whose fate is unknown, may still run: then SEQUENCE_BUSY
    is no mistake of the program. Raises `SequenceBusy` where there is no such call, or after `BUSY_TIMEOUT_S`."""
    doubtful = state.doubt is not None and state.doubt.unknown
    patience = Deadline.after(deadline.remaining(BUSY_TIMEOUT_S))
    pause = FIRST_BUSY_PAUSE_S
    while True:
        try:
            return await send()
        except SequenceBusy:
            if not doubtful or patience.passed:
                raise
        await asyncio.sleep(patience.remaining(pause) or 0.0)
        pause = min(2 * pause, LONGEST_BUSY_PAUSE_S)
