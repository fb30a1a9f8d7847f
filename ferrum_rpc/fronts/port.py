"""The gRPC server of a worker: who may call, what is counted, and errors as the statuses of the protocol."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from ferrum_rpc.client import (
    CALLER_ERROR,
    NO_ANSWER,
    NO_CAPACITY,
    SEQUENCE_GONE,
    TRY_LATER,
    DeviceLost,
    ExecutorError,
    PermissionDenied,
    QueueFull,
    SequencesExhausted,
    Unauthenticated,
)
from ferrum_rpc.fronts.blocks import SlowSubscriber
from ferrum_rpc.fronts.servicer import CacheEventsCursor, ConstraintFailed, EngineMethods
from ferrum_rpc.scheduler import ExecutorGone
from ferrum_rpc.service.guard.auth import Guard, Security, TokenFile
from ferrum_rpc.service.guard.bind import address, open_port
from ferrum_rpc.service.guard.tls import ServerCertificates

SERVICE: Final = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
MOST_REQUEST_BYTES: Final = 64 << 20
FILES_EVERY_S: Final = 5.0

CONSTRAINT_FAILED: Final = (("smg-constraint-failed", "engine"),)
"""A text could not go on under its constraint: the router does not try it again."""

log = structlog.get_logger("ferrum_rpc.fronts")


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """The protocol's status of an error: as its own engine has it, where the router's answers come from."""
    code = grpc.StatusCode
    match error:
        case Unauthenticated() | PermissionDenied():  # the worker's own credentials, which its caller cannot change
            return code.INTERNAL, f"the executor refuses the worker: {error.message}"
        case QueueFull() | SequencesExhausted():
            return code.RESOURCE_EXHAUSTED, error.message
        case ExecutorError() if isinstance(error, NO_CAPACITY):
            return code.RESOURCE_EXHAUSTED, error.message
        case ExecutorError() if isinstance(error, CALLER_ERROR):
            return code.INVALID_ARGUMENT, error.message
        case ExecutorError() if isinstance(error, (*TRY_LATER, *NO_ANSWER, *SEQUENCE_GONE, DeviceLost)):
            return code.UNAVAILABLE, error.message
        case ExecutorError():
            return code.INTERNAL, error.message
        case ExecutorGone():
            return code.UNAVAILABLE, str(error)
        case ConstraintFailed():
            words = f"the engine could not continue the request under its constraint: {error}"
            return code.FAILED_PRECONDITION, words
        case CacheEventsCursor():
            return code.OUT_OF_RANGE, str(error)
        case SlowSubscriber():
            return code.DATA_LOSS, str(error)
    return code.INTERNAL, f"{type(error).__name__}: {error}"


class WorkerPort:
    """Serves the methods of a worker on ``host:port`` (0 picks a free one). ``count`` is called with each ended call's
    method and status. Raises `PortInUse` and `SecurityError` in `start`."""

    def __init__(
        self,
        methods: EngineMethods,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        security: Security = Security(),
        count: Callable[[str, str], object] = lambda method, code: None,
    ) -> None:
        self.methods = methods
        self._host, self.port = host, port
        self._security = security
        self._count = count
        self._certificates: ServerCertificates | None = None
        self._tokens: TokenFile | None = None
        self._guard: Guard | None = None
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def target(self) -> str:
        """Where it listens."""
        return address(self._host, self.port)

    async def start(self) -> None:
        """Bind, and serve from now on."""
        security = self._security
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MOST_REQUEST_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            )
        )
        if security.asks:
            self._tokens = None if security.tokens is None else TokenFile(security.tokens)
            self._guard = Guard(self._tokens)
        if security.encrypted:
            self._certificates = ServerCertificates(security)
        handlers = {name: self._handler(name) for name in SERVICE.methods_by_name if _named(name) is not None}
        server.add_registered_method_handlers(SERVICE.full_name, handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self.port = open_port(server, self._host, self.port, security, self._certificates)
        await server.start()
        self._server = server
        self._tasks = [asyncio.create_task(self._follow_health()), asyncio.create_task(self.methods.watch())]
        if self._tokens is not None or self._certificates is not None:
            self._tasks.append(asyncio.create_task(self._reread()))
        log.info("listening", target=self.target, tls=security.encrypted, credentials=security.asks)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Serve the calls that have begun for up to ``grace_s`` seconds, then end them, and close the port."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace_s)

    async def report_health(self) -> None:
        """Make the standard health service say whether the worker takes texts."""
        status = health_pb2.HealthCheckResponse
        found = status.SERVING if self.methods.healthy else status.NOT_SERVING
        for service in ("", SERVICE.full_name):
            await self._health.set(service, found)

    async def _follow_health(self) -> None:
        members = self.methods.members
        while True:
            since = members.changes
            await self.report_health()
            await members.changed(since)

    async def _reread(self) -> None:
        """Read the files of tokens and certificates again when they change."""
        while True:
            await asyncio.sleep(FILES_EVERY_S)
            for each in (self._tokens, self._certificates):
                if each is not None:
                    await asyncio.to_thread(each.refresh)

    def _handler(self, name: str) -> Any:
        method = SERVICE.methods_by_name[name]
        serve = getattr(self.methods, str(_named(name)))
        kind = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        return kind(
            self._serving(name, serve, streams=method.server_streaming),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    async def _admit(self, context: Any) -> None:
        """End the call of a caller without valid credentials."""
        if self._guard is not None:
            try:
                self._guard.caller(context)
            except Unauthenticated as error:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)

    def _serving(self, name: str, serve: Callable[..., Awaitable[Any]], *, streams: bool) -> Any:
        """The handler of a method: with the check of the caller, its count, its log and its status."""

        async def handle(request: Any, context: Any) -> Any:
            began, code, answer = time.monotonic(), "CANCELLED", None
            try:
                await self._admit(context)
                if streams:
                    await context.send_initial_metadata(())
                answer = await (serve(request, context.write) if streams else serve(request))
                code = "OK"
                return answer
            except grpc.aio.AbortError:
                code = "UNAUTHENTICATED"
                raise
            except Exception as error:
                found, message = status_of(error)
                code = found.name
                if found is grpc.StatusCode.INTERNAL:
                    log.error("call_failed", method=name, exc_info=not isinstance(error, ExecutorError), error=message)
                await context.abort(found, message, CONSTRAINT_FAILED if isinstance(error, ConstraintFailed) else ())
            finally:
                self._count(name, code)
                took = round(1e3 * (time.monotonic() - began), 1)
                request_id = getattr(request, "request_id", "")
                log.debug("call", method=name, code=code, took_ms=took, request_id=request_id)

        return handle


def _named(method: str) -> str | None:
    """The name of the function of a method; None if it is not offered."""
    name = "".join(f"_{each.lower()}" if each.isupper() else each for each in method).lstrip("_")
    found = getattr(EngineMethods, name, None)
    return name if inspect.iscoroutinefunction(found) else None
