"""Waiting for what can be seen but does not tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 30.0


async def until(holds: Callable[[], bool], timeout_s: float = PATIENCE_S, every_s: float = 0.001) -> float:
    """Look until it holds; seconds that it took. Raises TimeoutError."""
    began = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - what is looked at is another thread's or another process's
            await asyncio.sleep(every_s)
    return time.monotonic() - began
