"""The server: one port, the three services, health and reflection, and an orderly end.

It binds before the model is loaded, so that a health check answers from the first second (NOT_SERVING until the model
is there). Two grpc defaults would hurt: with ``so_reuseport`` a second server silently shares the port, and
``server.stop()`` returns before aborted handlers have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ferrum_rpc.core import Limits
from ferrum_rpc.engine.thread import ModelThread, Runner
from ferrum_rpc.executor.v1 import (
    executor_control_pb2_grpc,
    kv_transfer_pb2_grpc,
    model_executor_pb2_grpc,
)
from ferrum_rpc.service.books import Books
from ferrum_rpc.service.calls import CallLog
from ferrum_rpc.service.servicers import ExecutorControlServicer, KvTransferServicer, ModelExecutorServicer

log = structlog.get_logger("ferrum_rpc.server")

SERVICES: Final = (ModelExecutorServicer.service, KvTransferServicer.service, ExecutorControlServicer.service)
FRAME_OVERHEAD: Final = 1 << 16
"""Bytes that a message may take above the limit on its rows: results, statuses, pressure."""


class PortInUse(RuntimeError):
    """Another process listens on the port."""


class ExecutorServer:
    """One executor on one port. ``build`` makes the runner and is called in the model thread."""

    def __init__(self, build: Callable[[], Runner], limits: Limits, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.books = Books(limits)
        self.calls = CallLog()
        self.port = port
        self._host = host
        self._build = build
        self._limits = limits
        self._health = health.aio.HealthServicer()
        self._ready: asyncio.Future[Runner] = asyncio.get_running_loop().create_future()
        self._failed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def target(self) -> str:
        """What a client dials."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self.port}"

    async def start(self) -> None:
        """Bind, answer health checks, and begin to load. Raises `PortInUse`."""
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", self._limits.max_request_bytes),
                ("grpc.max_send_message_length", self._limits.max_response_bytes + FRAME_OVERHEAD),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
            )
        )
        model_executor_pb2_grpc.add_ModelExecutorServicer_to_server(
            ModelExecutorServicer(self.books, self.calls), server
        )
        kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(self.calls), server)
        executor_control_pb2_grpc.add_ExecutorControlServicer_to_server(
            ExecutorControlServicer(self.books, self.calls), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            self.port = server.add_insecure_port(self.target)
        except RuntimeError as error:
            raise PortInUse(
                f"cannot listen on {self.target}: another process has the port, or the address is not of this machine"
            ) from error
        self._server = server
        await self._set_health(serving=False)
        thread = ModelThread(
            self._build,
            loop=asyncio.get_running_loop(),
            max_step_items=self._limits.max_batch_items,
            max_step_tokens=self._limits.max_batch_tokens,
            on_ready=self._on_ready,
            on_failed=self._on_failed,
        )
        self.books.attach(thread)
        await server.start()
        thread.start()
        log.info("listening", target=self.target)

    async def ready(self) -> Runner:
        """Wait until the model is loaded and the executor serves; raises what loading raised."""
        runner = await asyncio.shield(self._ready)
        await self._set_health(serving=True)
        return runner

    async def failed(self) -> None:
        """Wait until the model thread dies, which may be never."""
        await self._failed.wait()

    async def stop(self, grace_s: float = 30.0) -> None:
        """Say NOT_SERVING, refuse what is new, let calls in flight finish for ``grace_s``, end the model thread."""
        self.books.drain()
        if self._server is None:
            return
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self.calls.idle()
        await self.books.thread.stop()
        log.info("stopped", target=self.target, sequences=len(self.books.handles))

    def _on_ready(self, runner: Runner) -> None:
        self.books.serve(runner.info, runner.device)
        if not self._ready.done():
            self._ready.set_result(runner)

    def _on_failed(self, error: BaseException) -> None:
        self.books.fail()
        self._failed.set()
        if not self._ready.done():
            self._ready.set_exception(error)
            return
        log.error("model_thread_failed", error=repr(error), action="restart the executor; every handle is lost")
        self._health_task = asyncio.ensure_future(self._set_health(serving=False))

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *SERVICES):
            await self._health.set(service, status)
