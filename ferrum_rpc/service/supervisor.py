"""The background tasks of a server: none of them ends silently.

An exception of such a task is logged and counted, and the task continues. While an essential task has failed
`STUCK_AFTER` times in a row or more, the health service answers NOT_SERVING.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

log = structlog.get_logger("ferrum_rpc.server")

RESTART_AFTER_S: Final = 0.1
STUCK_AFTER: Final = 3


class BackgroundTask(enum.StrEnum):
    """Background tasks; the value is the name in the metrics."""

    SWEEP = "sweep"
    HEARTBEAT = "heartbeat"
    DRAIN = "drain"
    SESSION = "session"
    CALLBACK = "callback"
    """A callback of the event loop, or a task that is not awaited, for example the answer of an engine."""
    PARK = "park"
    EVENTS = "events"
    TOKENS = "tokens"
    CERTIFICATES = "certificates"
    """Files that were rewritten and are invalid."""


class Supervisor:
    """Runs background tasks and counts their failures, in ``failures``. ``on_change`` is called when `stuck` may have
    changed."""

    def __init__(self) -> None:
        self.failures: dict[str, int] = dict.fromkeys((each.value for each in BackgroundTask), 0)
        self.on_change: Callable[[], object] = lambda: None
        self._in_a_row: dict[BackgroundTask, int] = {}
        self._periodic: list[asyncio.Task[None]] = []

    @property
    def stuck(self) -> bool:
        """Whether an essential task fails repeatedly."""
        return any(count >= STUCK_AFTER for count in self._in_a_row.values())

    def every(self, task: BackgroundTask, seconds: float, turn: Callable[[], object]) -> asyncio.Task[None]:
        """Call ``turn`` every so many seconds, until cancelled or `stop`. The task is essential."""

        async def run() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    turn()
                except Exception as error:
                    self._in_a_row[task] = self._in_a_row.get(task, 0) + 1
                    self.note(task, error)
                    self.on_change()
                else:
                    if self._in_a_row.pop(task, 0) >= STUCK_AFTER:
                        self.on_change()

        periodic = asyncio.create_task(run(), name=f"ferrum-{task.value}")
        self._periodic.append(periodic)
        return periodic

    def stop(self) -> None:
        """Stop calling the turns of `every`."""
        for task in self._periodic:
            task.cancel()

    def start(
        self,
        task: BackgroundTask,
        run: Callable[[], Awaitable[None]],
        failed: Callable[[Exception], object] = lambda error: None,
    ) -> asyncio.Task[None]:
        """Run a task until it returns or is cancelled. When it raises, ``failed`` is called, and it runs again."""

        async def again_and_again() -> None:
            while True:
                try:
                    await run()
                except Exception as error:
                    self.note(task, error)
                    failed(error)
                    await asyncio.sleep(RESTART_AFTER_S)
                else:
                    return

        return asyncio.create_task(again_and_again(), name=f"ferrum-{task.value}")

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Record exceptions of callbacks and tasks of the loop that are not handled elsewhere."""
        loop.set_exception_handler(self._unhandled)

    def attempt(self, run: Callable[..., object], *arguments: object) -> bool:
        """Call it. False if it raised, which is recorded as a callback's failure."""
        try:
            run(*arguments)
        except Exception as error:
            self.note(BackgroundTask.CALLBACK, error)
            return False
        return True

    def note(self, task: BackgroundTask, error: BaseException) -> None:
        """Log and count a failure."""
        self.count(task)
        log.error(
            "background_task_failed",
            task=task.value,
            exc_info=error,
            action="report this stack trace: it is a bug in the executor; the task goes on",
        )

    def count(self, task: BackgroundTask) -> None:
        """Count a failure whose reason is logged already. May be called by any thread, for one task by one at a
        time."""
        self.failures[task.value] += 1

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            loop.default_exception_handler(context)
        else:
            self.note(BackgroundTask.CALLBACK, error)
