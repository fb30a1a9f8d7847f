"""Asks the engine whether it makes progress (`engine.liveness`), and has the health service say so when it does not.

On the event loop, ten times a second: a hang is seen within 2 s, and its end as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

import structlog

from ferrum_rpc.engine.api import Engine
from ferrum_rpc.service.health import HealthBoard
from ferrum_rpc.service.supervisor import Background, Supervisor

log = structlog.get_logger("ferrum_rpc.server")

PERIOD_S: Final = 0.1
"""Seconds between two looks. Progress may be so much older than the look that sees it, and the end of patience so much
older than the look that acts on it: 1.7 s in the worst case, with 2 s promised. A look takes microseconds."""


class Watchdog:
    """Watches ``engine`` for ``board`` from `start` to `stop`."""

    def __init__(self, engine: Engine, board: HealthBoard, supervisor: Supervisor) -> None:
        self._engine = engine
        self._supervisor = supervisor
        self._board = board
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = self._supervisor.every(Background.HEARTBEAT, PERIOD_S, self.look)

    async def stop(self) -> None:
        """Look no longer."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def look(self) -> None:
        """Ask once; log when it changes what the health service says."""
        before = self._board.serving
        self._board.report(self._engine.trouble(time.monotonic()))
        if before and not self._board.serving:
            log.error(
                "model_thread_hangs",
                trouble=self._board.trouble,
                action="restart the executor if it does not go on by itself; look at the device's own log",
            )
        elif self._board.serving and not before:
            log.info("model_thread_goes_on")
