"""What a running server shows of itself, as the settings want it: metrics on a port, spans to a collector.

Both end after the server does, so that its last seconds show too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from ferrum_rpc.service.metrics import Metrics, registry_of
from ferrum_rpc.service.metrics_server import MetricsServer
from ferrum_rpc.service.server import ExecutorServer
from ferrum_rpc.service.tracing import Tracing, connect

log = structlog.get_logger("ferrum_rpc.server")


class Observation:
    """Off where a setting is None. ``metrics_port`` 0 picks a free one."""

    def __init__(self, metrics_host: str, metrics_port: int | None, otel_endpoint: str | None) -> None:
        self._host = metrics_host
        self._port = metrics_port
        self._endpoint = otel_endpoint
        self._metrics: MetricsServer | None = None
        self._tracing: Tracing | None = None

    def begin(self, server: ExecutorServer, failpoints: Mapping[str, int], lines_dropped: Callable[[], int]) -> None:
        """Observe a server that has started. The others are `Metrics`'s. Raises `PortInUse`,
        `TracingError`."""
        if self._endpoint is not None:
            self._tracing = connect(self._endpoint, server.books.handles.instance_id)
            server.calls.tracer = self._tracing
        if self._port is not None:
            registry = registry_of(Metrics(server.books, server.calls, server.steps, failpoints, lines_dropped))
            self._metrics = MetricsServer(registry, self._host, self._port)
            log.info("metrics", url=self._metrics.url)

    async def end(self) -> None:
        """Close the port, send the last spans."""
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.stop)
