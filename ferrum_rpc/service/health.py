"""The standard health service, and the only place that decides its answers.

SERVING means that the executor's condition is serving (`ServerState.condition`). `LIVENESS` is the service name for
whatever restarts executors: it is SERVING also while the executor loads or drains. Code that may change the condition
calls `update`. No other code sets a health status.

The official asyncio servicer is not used (grpcio-health-checking 1.81). When the first watcher of a service leaves, it
removes the condition on which the others wait, so they never get a change again; and a watcher that does not read holds
the lock that a change needs. Here every watcher waits on its own, and a change waits for none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrum_rpc.wire.info import LIVENESS

Status = health_pb2.HealthCheckResponse

LOOK_EVERY_S: Final = 0.1
"""Seconds between two checks of the engine. Its progress, and the end of its time limit, may each be this much older
than the check that detects them: 1.7 s in the worst case, with 2 s promised. A check takes microseconds."""

STALE_S: Final = 2.0
"""Without an update for this long the event loop is blocked, and answers no check."""

WHOLE_SERVER: Final = ""
"""The service name for the whole server."""


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no types
    """``grpc.health.v1.Health`` of one server. ``ready()``: whether it accepts new sequences; ``live()``: whether it is
    healthy, also while it loads or drains. Call `update` when one of them may have changed. Bound to the running event
    loop.
    """

    def __init__(self, ready: Callable[[], bool], live: Callable[[], bool], services: Iterable[str]) -> None:
        self._ready, self._live = ready, live
        self._services = frozenset((WHOLE_SERVER, LIVENESS, *services))
        self._closed = False
        self._updated: float | None = None
        self._changed = asyncio.Event()  # a new one after every change
        self._known = self._now()

    @property
    def serving(self) -> bool:
        """The current answer to a check of the whole server."""
        return self._known[0]

    @property
    def live(self) -> bool:
        """The current answer to a check of `LIVENESS`."""
        return self._known[1]

    def gauges(self) -> dict[str, float]:
        """1 if a check would be answered SERVING, by the name of the check. May be called by any thread."""
        turns = self._updated is None or time.monotonic() - self._updated < STALE_S
        ready, live = self._known
        return {"ready": float(turns and ready), "live": float(turns and live)}

    def _now(self) -> tuple[bool, bool]:
        works = not self._closed
        return works and self._ready(), works and self._live()

    def update(self) -> None:
        """Check again; wake the watchers if the answer changed."""
        self._updated = time.monotonic()
        now = self._now()
        if now != self._known:
            self._known = now
            self._wake()

    def close(self) -> None:
        """Set NOT_SERVING permanently. Watchers get it and their streams end, so no watch delays the end of the
        server."""
        self._closed = True
        self.update()
        self._wake()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """The current status of a service; NOT_FOUND for an unknown one."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return Status(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The current status of a service, and every change. Changes that are reverted before a watcher reads are
        skipped."""
        sent: int | None = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != sent:
                await context.write(Status(status=status))
                sent = status
            elif self._closed:
                return
            else:
                await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(Status.SERVICE_UNKNOWN)
        serving = self.live if service == LIVENESS else self.serving
        return int(Status.SERVING if serving else Status.NOT_SERVING)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
