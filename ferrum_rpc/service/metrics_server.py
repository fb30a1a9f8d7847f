"""``/metrics`` on a port of its own: whoever may scrape need not be able to call.

A thread answers, past the event loop: it does even while the loop or the model is stuck, when the numbers are wanted
most. Each connection has a thread for one request, and `REQUEST_TIMEOUT_S` in all; where more than `MAX_CONNECTIONS`
are open, the oldest is closed, so that connections held open hold up no other. The server that prometheus_client
starts has none of these bounds, and a backlog of 5; from the library come the numbers and their format.
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

from ferrum_rpc.service.listen import PortInUse

REQUEST_TIMEOUT_S: Final = 10.0
"""A connection whose request is not asked and answered by then is closed, however busily it sends."""

MAX_CONNECTIONS: Final = 64
BACKLOG: Final = 128
"""Connections that the system keeps until they are taken."""

STOP_POLL_S: Final = 0.1
"""How often the thread asks whether it should end."""


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
        """What Prometheus is told to scrape."""
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
        """Give a new connection its thread, and an old one's up where there are too many."""
        self._open[request] = time.monotonic()
        self._close_oldest(MAX_CONNECTIONS, 0.0)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Between two looks at the port: close what takes too long."""
        self._close_oldest(0, REQUEST_TIMEOUT_S)

    def shutdown_request(self, request: Any) -> None:
        """The connection's own thread has done with it."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is slow or gone is no event of the executor's."""

    def _close_oldest(self, most: int, age_s: float) -> None:
        """Wake the threads of what is above ``most`` and older than ``age_s``: their connection is at its end."""
        for request, since in list(self._open.items())[: max(0, len(self._open) - most)]:
            if time.monotonic() - since < age_s:
                return
            self._open.pop(request, None)
            with suppress(OSError):  # it has ended by itself
                request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """Without the base class's look-up of the own host name, which takes seconds where no name server answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    """One line a scrape is nothing that an operator wants to read."""

    timeout = REQUEST_TIMEOUT_S

    def get_stderr(self) -> Any:
        """Where the answer to a client that is gone would be complained about."""
        return io.StringIO()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named by the base class
        """Say nothing."""
