"""Accepts several calls at a time; grpc.aio accepts them one by one.

One accept of grpc.aio takes about five turns of the event loop. With 4 ms of other work per turn, 64 callers together
get 49 calls per second, and a new one waits unseen behind all of them. gRPC's core allows any number of pending
accepts. So each method has some of its own here, in addition to grpc.aio's, made with the functions of grpc.aio's own
loop. These functions are private to grpcio: if they are missing or have changed, the server logs it and uses grpc.aio's
own loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import grpc
import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined] # the stubs leave it out

from ferrum_rpc.service.guard.auth import ARRIVED

log = structlog.get_logger("ferrum_rpc.server")

AT_ONCE: Final = 8
"""Pending accepts per method, in addition to grpc.aio's own."""

_SIGNATURES: Final = {
    "_handle_stream_unary_rpc": ("method_handler", "rpc_state", "loop"),
    "_handle_stream_stream_rpc": ("method_handler", "rpc_state", "loop"),
    "_schedule_rpc_coro": ("rpc_coro", "rpc_state", "loop", "method_name"),
}


class Acceptors:
    """The accepts of one server. Create it before the server starts: it registers its ``handlers``, by path, at the
    server."""

    def __init__(self, server: grpc.aio.Server, handlers: Mapping[str, Any]) -> None:
        self._server: Any = getattr(server, "_server", None)
        self._handlers = handlers if self._known() else {}
        self._loops: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        for path, handler in self._handlers.items():
            service, method = path.removeprefix("/").rsplit("/", 1)
            server.add_registered_method_handlers(service, {method: handler})

    def start(self) -> None:
        """Begin to accept. The server must have started."""
        if not self._handlers:
            log.warning(
                "grpc_accept_fallback", grpcio=grpc.__version__, action="callers wait longer; pin a tried grpcio"
            )
        for path, handler in self._handlers.items():
            self._loops.update(asyncio.create_task(self._accept(path, handler)) for _ in range(AT_ONCE))

    def _known(self) -> bool:
        """Whether this grpcio has the private functions."""
        names = {name: getattr(cygrpc, name, None) for name in _SIGNATURES}
        return hasattr(self._server, "_request_registered_call") and all(
            function is not None and function.__code__.co_varnames[: function.__code__.co_argcount] == _SIGNATURES[name]
            for name, function in names.items()
        )

    async def _accept(self, path: str, handler: Any) -> None:
        """Accept the calls of one method until the server stops, which fails the pending accepts."""
        private: Any = cygrpc
        handle: Callable[..., Any] = (
            private._handle_stream_stream_rpc if handler.response_streaming else private._handle_stream_unary_rpc
        )
        pending = partial(self._server._request_registered_call, path.encode())
        loop, calls, schedule = asyncio.get_running_loop(), self._calls, private._schedule_rpc_coro
        while True:
            try:
                state = await pending()
            except private._RequestCallError:
                return
            except Exception:
                log.exception("accept_failed", method=path, action="calls wait longer; report this stack trace")
                return
            ARRIVED.set(time.monotonic())  # the task's context is a copy of this one
            task = loop.create_task(schedule(handle(handler, state, loop), state, loop, path))
            calls.add(task)
            task.add_done_callback(calls.discard)
