"""A gate in the model thread, to hold a step and let it go, as often as a test likes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StepGate:
    """A stage hook. While armed, the next step waits before its forward pass."""

    def __init__(self) -> None:
        self._armed = False
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, stage: str) -> None:
        if self._armed and stage == "forward":
            self._reached.set()
            assert self._opened.wait(30), "nobody opened the gate"

    def arm(self) -> None:
        """Hold the next step."""
        self._reached.clear()
        self._opened.clear()
        self._armed = True

    @property
    def holds(self) -> bool:
        """Whether a step stands at the gate."""
        return self._armed and self._reached.is_set()

    async def reached(self) -> None:
        """Wait until a step stands at the gate."""
        assert await asyncio.to_thread(self._reached.wait, 30), "no step came to the gate"

    def open(self) -> None:
        """Let it go, and those after it."""
        self._armed = False
        self._opened.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Armed; open again at the end, whatever happened."""
        self.arm()
        try:
            yield
        finally:
            self.open()
