"""``/metrics`` on a port of its own.

Each connection has a thread for one request, and `REQUEST_TIMEOUT_S` in total; with more than `MAX_CONNECTIONS` the
oldest is closed. The server of prometheus_client has neither bound, and a backlog of 5.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from ferrum_rpc.service.guard.bind import PortInUse

REQUEST_TIMEOUT_S: Final = 10.0
"""A connection whose request is not received and answered in this time is closed, even if it keeps sending."""

MAX_CONNECTIONS: Final = 64
BACKLOG: Final = 128
"""Connections that the system queues until they are accepted."""

STOP_POLL_S: Final = 0.1
"""How often the thread checks whether it should end."""


class MetricsServer:
    """Serves a registry on ``host:port`` (0 picks a free one) until `stop`. Raises `PortInUse`."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        server_class = _ServerV6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), server_class, _Quiet)
        except OSError as error:
            raise PortInUse(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="ferrum-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        host = str(host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def stop(self) -> None:
        """Close the port. Waits up to `STOP_POLL_S` for the thread to notice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[socket.socket, float] = {}  # since when, oldest first
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a new connection's thread, and end an old one if there are too many."""
        self._open[request] = time.monotonic()
        self._close_oldest(MAX_CONNECTIONS, 0.0)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Between two polls of the port: close connections that take too long."""
        self._close_oldest(0, REQUEST_TIMEOUT_S)

    def shutdown_request(self, request: Any) -> None:
        """The connection's own thread has finished."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Slow or disconnected clients are not logged."""

    def _close_oldest(self, max_open: int, age_s: float) -> None:
        """Close the connections above ``max_open`` and older than ``age_s``, which wakes their threads."""
        for request, since in list(self._open.items())[: max(0, len(self._open) - max_open)]:
            if time.monotonic() - since < age_s:
                return
            self._open.pop(request, None)
            with suppress(OSError):  # it has ended by itself
                request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """Skips the base class's look-up of the own host name, which takes seconds without a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    """Handles a request without a log line."""

    timeout = REQUEST_TIMEOUT_S

    def get_stderr(self) -> Any:
        """wsgiref would log here that a client has disconnected."""
        return io.StringIO()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named by the base class
        """Log nothing."""
