"""``/metrics`` on a port of its own: whoever may scrape need not be able to call.

A thread answers, past the event loop: it does even while the loop or the model is stuck, when the numbers are wanted
most.
"""

from __future__ import annotations

import socket
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from ferrum_rpc.service.listen import PortInUse

REQUEST_TIMEOUT_S: Final = 10.0
"""A connection that sends no request gives its thread back after this."""


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
    allow_reuse_address = True

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

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named by the base class
        """Say nothing."""
