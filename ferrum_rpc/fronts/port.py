"""The gRPC server of a worker: who may call, what is counted, and errors as the statuses of the protocol."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

from ferrum_rpc.client import (
    CALLER_ERROR,
    NO_ANSWER,
    NO_CAPACITY,
    SEQUENCE_GONE,
    TRY_LATER,
    DeviceLost,
    ExecutorError,
    InvalidRequest,
    PermissionDenied,
    QueueFull,
    SequencesExhausted,
    Unauthenticated,
)
from ferrum_rpc.fronts.blocks import SlowSubscriber
from ferrum_rpc.fronts.servicer import CALLER_SHARE, LARGE_BYTES, CacheEventsCursor, ConstraintFailed, EngineMethods
from ferrum_rpc.scheduler import ExecutorGone
from ferrum_rpc.service.guard.auth import CALLER, Guard, Security, TokenFile
from ferrum_rpc.service.guard.bind import address, open_port
from ferrum_rpc.service.guard.bodies import Bodies
from ferrum_rpc.service.guard.connections import connection_options
from ferrum_rpc.service.guard.tls import ServerCertificates
from ferrum_rpc.service.health import HealthService
from ferrum_rpc.wire.unfolding import UnfoldingBudget, check

SERVICE: Final = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
TEXT_METHODS: Final = ("Generate", "Embed")
FILES_EVERY_S: Final = 5.0

MAX_REQUEST_BYTES: Final = 8 << 20
BASE_REQUEST_BYTES: Final = 1 << 20
TOKEN_REQUEST_BYTES: Final = 16
"""What a request may have besides its prompt, and for each token of the longest context: its id has up to 5 bytes, and
its text comes along. All other requests wait while one is parsed, so none may be longer than a prompt can be."""

MAX_FIELDS: Final = 1 << 14
BASE_TOKENS: Final = 1 << 16
"""Of a request: a choice or a stop string is a field. Besides four contexts of token ids it may have so many, because
a prompt may be cut. Others are counted, and not parsed."""

MAX_HEALTH_BYTES: Final = 1 << 10
MAX_STREAMS: Final = 8192
"""Calls of one connection: a router has one."""

BODY_BYTES: Final = 128 << 20
BODY_SHARE: Final = 4
"""Requests that may be incoming at once, in total; one connection may have a quarter of them."""

OPEN_BODY_BYTES: Final = 64 << 20
OPEN_BODY_SHARE: Final = 32
"""The same for the health service, for which no credentials are needed."""

CONSTRAINT_FAILED: Final = (("smg-constraint-failed", "engine"),)
"""A text could not go on under its constraint: the router does not try it again."""

log = structlog.get_logger("ferrum_rpc.fronts")


def max_request_bytes(max_context: int) -> int:
    """The largest request of a worker whose longest context has so many tokens."""
    return min(MAX_REQUEST_BYTES, BASE_REQUEST_BYTES + TOKEN_REQUEST_BYTES * max_context)


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
        case NotAdmitted():
            return code.UNAUTHENTICATED, str(error)
        case CacheEventsCursor():
            return code.OUT_OF_RANGE, str(error)
        case SlowSubscriber():
            return code.DATA_LOSS, str(error)
    return code.INTERNAL, f"{type(error).__name__}: {error}"


class NotAdmitted(Exception):
    """The caller has no valid credentials."""


class WorkerPort:
    """Serves the methods of a worker on ``host:port`` (0 picks a free one). ``max_context``: tokens of the longest
    context, for `max_request_bytes`. ``count`` is called with each ended call's method and status. Raises `PortInUse`
    and `SecurityError` in `start`."""

    def __init__(
        self,
        methods: EngineMethods,
        *,
        max_context: int,
        host: str = "127.0.0.1",
        port: int = 0,
        keepalive_time_s: float = 30.0,
        keepalive_timeout_s: float = 10.0,
        security: Security = Security(),
        count: Callable[[str, str], object] = lambda method, code: None,
    ) -> None:
        self.methods = methods
        self._host, self.port = host, port
        self._keepalive_time_s, self._keepalive_timeout_s = keepalive_time_s, keepalive_timeout_s
        self._max_request_bytes = max_request_bytes(max_context)
        self._budget = UnfoldingBudget(MAX_FIELDS, BASE_TOKENS + 4 * max_context)
        self._bodies = Bodies.within(BODY_BYTES, self._max_request_bytes, BODY_SHARE, CALLER_SHARE)
        self._open_bodies = Bodies.within(OPEN_BODY_BYTES, self._max_request_bytes, OPEN_BODY_SHARE)
        self._large = asyncio.Lock()
        self._security = security
        self._count = count
        self._certificates: ServerCertificates | None = None
        self._tokens: TokenFile | None = None
        self._guard: Guard | None = None
        self.health = HealthService(lambda: methods.healthy, lambda: True, (SERVICE.full_name,))
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
            options=connection_options(
                max_request_bytes=self._max_request_bytes,
                max_response_bytes=-1,
                max_streams=MAX_STREAMS,
                keepalive_time_s=self._keepalive_time_s,
                keepalive_timeout_s=self._keepalive_timeout_s,
            )
        )
        if security.asks:
            self._tokens = None if security.tokens is None else TokenFile(security.tokens)
            self._guard = Guard(self._tokens)
        if security.encrypted:
            self._certificates = ServerCertificates(security)
        engine = {name: method for name, method in SERVICE.methods_by_name.items() if _named(name) is not None}
        server.add_registered_method_handlers(
            SERVICE.full_name, {name: self._handler(method) for name, method in engine.items()}
        )
        server.add_registered_method_handlers(
            HEALTH.full_name, {name: self._health_handler(HEALTH.methods_by_name[name]) for name in ("Check", "Watch")}
        )
        self.port = open_port(server, self._host, self.port, security, self._certificates)
        await server.start()
        self._server = server
        self._tasks = [asyncio.create_task(self._follow_health()), asyncio.create_task(self.methods.watch())]
        if self._tokens is not None or self._certificates is not None:
            self._tasks.append(asyncio.create_task(self._reread()))
        log.info("listening", target=self.target, tls=security.encrypted, credentials=security.asks)

    async def drain(self) -> None:
        """Report that no more texts are taken, and wait until those that were taken have ended."""
        self.methods.draining = True
        self.health.update()
        await self.methods.drain()

    async def stop(self, grace_s: float = 1.0) -> None:
        """Serve the calls that have begun for up to ``grace_s`` seconds, then end them, and close the port."""
        self.health.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _follow_health(self) -> None:
        members = self.methods.members
        while True:
            since = members.changes
            self.health.update()
            await members.changed(since)

    async def _reread(self) -> None:
        """Read the files of tokens and certificates again when they change."""
        while True:
            await asyncio.sleep(FILES_EVERY_S)
            for each in (self._tokens, self._certificates):
                if each is not None:
                    await asyncio.to_thread(each.refresh)

    def _handler(self, method: Any) -> Any:
        """The handler of a method of the engine."""
        serve: Callable[..., Awaitable[Any]] = getattr(self.methods, str(_named(method.name)))

        def admit(context: Any) -> None:
            _admit(self._guard, context)
            if method.name in TEXT_METHODS:  # without its request: a flood of calls is refused at half the cost
                self.methods.check_room()

        async def behave(request: Any, context: Any) -> Any:
            if not method.server_streaming:
                return await serve(request)
            await context.send_initial_metadata(())
            return await serve(request, context.write)

        return self._serving(method, behave, self._bodies, self._max_request_bytes, admit)

    def _health_handler(self, method: Any) -> Any:
        """The handler of a method of the health service, for which no credentials are needed."""
        behave = getattr(self.health, method.name)
        return self._serving(method, behave, self._open_bodies, MAX_HEALTH_BYTES, lambda _: None)

    def _serving(
        self,
        method: Any,
        behave: Callable[[Any, Any], Awaitable[Any]],
        bodies: Bodies,
        max_bytes: int,
        admit: Callable[[Any], None],
    ) -> Any:
        """A handler with the check whether a call may go on (``admit``), the reading of its request in turn, its count,
        its log and its status. It is registered as one with a stream of requests: gRPC would read the request before
        the handler runs."""
        expected, name = GetMessageClass(method.input_type), method.name

        async def handle(_: Any, context: Any) -> Any:
            began, code, request, answer = time.monotonic(), "CANCELLED", None, None
            try:
                try:
                    admit(context)
                    request = await self._parsed(expected, await bodies.read(context, CALLER.get()), max_bytes)
                    answer = await behave(request, context)
                    code = "OK"
                    return answer
                except grpc.aio.AbortError:
                    code = "ABORTED"
                    raise
                except Exception as error:
                    status, message = status_of(error)
                    code, trailers = status.name, CONSTRAINT_FAILED if isinstance(error, ConstraintFailed) else ()
                    if status is grpc.StatusCode.INTERNAL:
                        exc_info = not isinstance(error, ExecutorError)
                        log.error("call_failed", method=name, exc_info=exc_info, error=message)
                await context.abort(status, message, trailers)
            except grpc.aio.AbortError as error:
                # gRPC keeps it with the call: what its frames hold would live until the collector runs
                error.__traceback__ = error.__context__ = None
                raise
            finally:
                self._count(name, code)
                took = round(1e3 * (time.monotonic() - began), 1)
                request_id = getattr(request, "request_id", "")
                log.debug("call", method=name, code=code, took_ms=took, request_id=request_id)
                del request, answer, context

        kind = (
            grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
        )
        return kind(handle, response_serializer=GetMessageClass(method.output_type).SerializeToString)

    async def _parsed(self, expected: Any, data: bytes, max_bytes: int) -> Any:
        """The message of a request. Large ones are parsed one after the other, with as much time between two as the
        first took: a health check needs several turns of the event loop, and would wait for one of them in each."""
        if len(data) <= LARGE_BYTES:
            return _message(expected, data, max_bytes, self._budget)
        async with self._large:
            began = time.monotonic()
            try:
                return _message(expected, data, max_bytes, self._budget)
            finally:
                await asyncio.sleep(time.monotonic() - began)


def _admit(guard: Guard | None, context: Any) -> None:
    """Set the caller of a call. Raises `NotAdmitted` for one without valid credentials."""
    if guard is not None:
        try:
            guard.admit(SERVICE.full_name, context)
        except Unauthenticated as error:
            raise NotAdmitted(error.message) from None


def _message(expected: Any, data: bytes, max_bytes: int, budget: UnfoldingBudget) -> Any:
    """The message of a request, of the ``expected`` class. Raises `InvalidRequest`."""
    if len(data) > max_bytes:
        raise InvalidRequest(f"the request has {len(data)} bytes of at most {max_bytes}")
    check(data, expected, budget)
    try:
        return expected.FromString(data)
    except DecodeError:
        raise InvalidRequest("the request is not a valid message of this method") from None


def _named(method: str) -> str | None:
    """The name of the function of a method; None if it is not offered."""
    name = "".join(f"_{each.lower()}" if each.isupper() else each for each in method).lstrip("_")
    found = getattr(EngineMethods, name, None)
    return name if inspect.iscoroutinefunction(found) else None
