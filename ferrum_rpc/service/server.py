"""The server: one port, three services, health and reflection, and a graceful shutdown.

It binds before the model is loaded, so that health checks are answered from the first second (NOT_SERVING until the
model is loaded). Two grpc defaults are wrong here: with ``so_reuseport`` a second server silently shares the port, and
``server.stop()`` returns before aborted handlers have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from ferrum_rpc.core import Limits
from ferrum_rpc.engine.api import Described, Engine, Runner
from ferrum_rpc.engine.liveness import Liveness
from ferrum_rpc.engine.process.parent import EngineProcess, Program
from ferrum_rpc.engine.thread import ModelThread
from ferrum_rpc.executor.v1 import (
    executor_control_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    model_executor_pb2_grpc,
)
from ferrum_rpc.failpoints import NO_FAILPOINTS, Failpoints
from ferrum_rpc.service.control import ExecutorControlServicer
from ferrum_rpc.service.executor import ModelExecutorServicer
from ferrum_rpc.service.guard.accept import Acceptors
from ferrum_rpc.service.guard.auth import Guard, Security, TokenFile
from ferrum_rpc.service.guard.bind import address, open_port
from ferrum_rpc.service.guard.connections import connection_options
from ferrum_rpc.service.guard.tls import ServerCertificates
from ferrum_rpc.service.health import LOOK_EVERY_S, HealthService
from ferrum_rpc.service.kv_events import KvEvents
from ferrum_rpc.service.kv_transfer import KvTransferServicer
from ferrum_rpc.service.lifecycle import SWEEP_EVERY_S, Drain, Sweeper
from ferrum_rpc.service.meters import StepMeter
from ferrum_rpc.service.nixl import Nixl
from ferrum_rpc.service.parking import IDLE_TURN_S, IdleParking
from ferrum_rpc.service.registry import Registry
from ferrum_rpc.service.rpc import CallLog
from ferrum_rpc.service.session import Session, end_sessions
from ferrum_rpc.service.state import Lifecycle, ServerState
from ferrum_rpc.service.supervisor import BackgroundTask
from ferrum_rpc.wire.unfolding import UnfoldingBudget

log = structlog.get_logger("ferrum_rpc.server")

SERVICES: Final = (ModelExecutorServicer.service, KvTransferServicer.service, ExecutorControlServicer.service)
FRAME_OVERHEAD: Final = 1 << 16
"""Bytes of a message beyond the limit on its rows: results, statuses, pressure."""

FILES_EVERY_S: Final = 1.0
"""A removed token works for about this long; a check of the files takes the event loop some microseconds."""


class ExecutorServer:
    """One executor on one port. ``build`` makes the runner and is called in the model thread; or it is the program of
    an engine process. A client that sends nothing for ``keepalive_time_s`` is pinged, and disconnected if it does not
    answer within ``keepalive_timeout_s``. ``park_dir``: folder of parked sequences; None: no parking. ``nixl_agent``:
    makes the agent of a name for transfers by NIXL; None: no NIXL.

    ``max_streams`` limits the open streams of a connection. A stream that is opened and reset at once (CVE-2023-44487)
    takes turns of the event loop, which delays other calls; gRPC refuses streams above the limit at almost no cost.
    With 3,000 resets a second in bursts of 60 on two cores, another client's p99 is 1.1 times that without at 16
    streams, 1.8 at 32, 2.4 at 64 and above. But gRPC counts a stream until the handler's last object is freed, so few
    streams suffice only for clients that use sessions and batches.
    """

    def __init__(
        self,
        build: Callable[[], Runner] | Program,
        limits: Limits,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        keepalive_time_s: float = 30.0,
        keepalive_timeout_s: float = 10.0,
        max_streams: int = 4096,
        grace_s: float = 30.0,
        park_dir: Path | None = None,
        nixl_agent: Callable[[str], Any] | None = None,
        security: Security = Security(),
        liveness: Liveness | None = None,
        failpoints: Failpoints = NO_FAILPOINTS,
    ) -> None:
        nixl = Nixl(limits.max_transfers, nixl_agent) if nixl_agent is not None else None
        self.state = ServerState(limits, failpoints, park_dir, nixl)
        self.idle_parking = IdleParking(self.state)
        self.calls = CallLog()
        self.steps = StepMeter()
        self.port = port
        self._host = host
        self._build = build
        self._limits = limits
        self._keepalive_time_s, self._keepalive_timeout_s = keepalive_time_s, keepalive_timeout_s
        self._max_streams = max_streams
        self._security = security
        self.certificates: ServerCertificates | None = None
        self._liveness = liveness
        self.health = HealthService(self._is_ready, self._is_live, SERVICES)
        self.sessions: set[Session] = set()
        self.events = KvEvents(self.state)
        self.draining = Drain(self.state, self.health, self.sessions)
        self._grace_s = grace_s
        self._ready: asyncio.Future[Described] = asyncio.get_running_loop().create_future()
        self._failed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def target(self) -> str:
        """The target for clients."""
        return address(self._host, self.port)

    def certificate_expiries(self) -> Mapping[str, float]:
        """See `ServerCertificates`; empty without TLS. May be called from any thread."""
        return {} if self.certificates is None else self.certificates.expiries

    async def start(self) -> None:
        """Bind, answer health checks, and begin to load. Raises `PortInUse`, `SecurityError`, and `InvalidRequest` for
        the folder of parked sequences and for NIXL."""
        self.state.parked.open()
        if self.state.nixl is not None:
            await self.state.nixl.start()
        server = grpc.aio.server(
            options=connection_options(
                max_request_bytes=self._limits.max_request_bytes,
                max_response_bytes=self._limits.max_response_bytes + FRAME_OVERHEAD,
                max_streams=self._max_streams,
                keepalive_time_s=self._keepalive_time_s,
                keepalive_timeout_s=self._keepalive_timeout_s,
            )
        )
        self._methods = registry = self.methods()
        server.add_generic_rpc_handlers((registry,))
        acceptors = Acceptors(server, registry.handlers)
        supervisor = self.state.supervisor
        if self._security.encrypted:
            rejected = partial(supervisor.count, BackgroundTask.CERTIFICATES)
            self.certificates = ServerCertificates(self._security, rejected)
            # log unusable files at once, and update the expiry in the metrics
            supervisor.every(BackgroundTask.CERTIFICATES, FILES_EVERY_S, self.certificates.refresh)
        self.port = open_port(server, self._host, self.port, self._security, self.certificates)
        self._server = server
        supervisor.on_change = self.health.update
        supervisor.watch(asyncio.get_running_loop())
        engine = self.state.engine = self._engine()
        await server.start()
        acceptors.start()
        engine.start()
        supervisor.every(BackgroundTask.HEARTBEAT, LOOK_EVERY_S, self.look)
        security = self._security
        log.info("listening", target=self.target, tls=security.encrypted, credentials=security.asks)

    def look(self) -> None:
        """Check whether the engine makes progress, and log changes of the reported state."""
        state = self.state
        before = state.condition
        state.look()
        self.health.update()
        if before is (now := state.condition):
            return
        if now is Lifecycle.HUNG:
            log.error(
                "engine_hung",
                reason=state.hang,
                action="restart the executor if it does not recover by itself; see the device's own log",
            )
        elif before is Lifecycle.HUNG:
            log.info("engine_recovered")

    def _is_ready(self) -> bool:
        return self.state.condition is Lifecycle.SERVING and self._is_live()

    def _is_live(self) -> bool:
        broken = self.state.condition in {Lifecycle.FAILED, Lifecycle.HUNG}
        return not broken and not self.state.supervisor.stuck

    def _engine(self) -> Engine:
        about: Any = {
            "loop": asyncio.get_running_loop(),
            "max_step_items": self._limits.max_batch_items,
            "max_step_tokens": self._limits.max_batch_tokens,
            "max_running": self._limits.max_running,
            "on_ready": self._on_ready,
            "on_failed": self._on_failed,
            "on_step": self.steps.observe,
            "liveness": self._liveness,
        }
        build = self._build
        if not isinstance(build, Program):
            return ModelThread(build, **about)
        limits = self._limits  # the maximum of waiting and running items, and one operation per sequence; twice that
        slots = 2 * (limits.max_queued_items + 2 * limits.max_batch_items + limits.max_sequences)
        return EngineProcess(build, slots=max(slots, 1 << 16), **about)

    def methods(self) -> Registry:
        table: Any = Registry(self.calls, self._guard(), self._limits)
        model_executor_pb2_grpc.add_ModelExecutorServicer_to_server(
            ModelExecutorServicer(self.state, self.calls, self.sessions), table
        )
        kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(self.state, self.events), table)
        executor_control_pb2_grpc.add_ExecutorControlServicer_to_server(
            ExecutorControlServicer(self.state, self.drain, self.calls.slowest), table
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, table)
        reflected = reflection.aio.ReflectionServicer((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, table)
        return cast(Registry, table)

    def _guard(self) -> Guard | None:
        """The guard of the settings; None if callers need no credentials. Raises `SecurityError`."""
        security, supervisor, tokens = self._security, self.state.supervisor, None
        if security.tokens is not None:
            tokens = TokenFile(security.tokens, failed=partial(supervisor.count, BackgroundTask.TOKENS))
            # log an unusable file at once, not at the next call
            supervisor.every(BackgroundTask.TOKENS, FILES_EVERY_S, tokens.refresh)
        return Guard(tokens, security.operators, security.trusted) if security.asks else None

    async def ready(self) -> Described:
        """Wait until the model is loaded and the executor serves. Raises the error of loading."""
        return await asyncio.shield(self._ready)

    async def failed(self) -> None:
        """Wait until the model thread fails, which may never happen."""
        await self._failed.wait()

    def drain(self, grace_s: float | None = None) -> None:
        """Drain, as SIGTERM does: owned sequences are served for ``grace_s`` seconds (default: the server's). Wait for
        ``draining.done``, then call `stop`."""
        self.draining.begin(self._grace_s if grace_s is None else grace_s)

    async def stop(self, grace_s: float = 30.0) -> bool:
        """Answer NOT_SERVING, refuse new calls, let calls in flight finish for ``grace_s``, end the model thread.
        False: the thread hangs or still loads, and is abandoned; then the process cannot end in the normal way."""
        self.state.drain()
        self.state.supervisor.stop()
        if self._server is None:
            return True
        self.health.close()
        end_sessions(self.sessions, self.state.farewell("the executor stops"))
        self.events.close()
        await self._server.stop(grace_s)
        await self.calls.idle()
        ended = await self.state.engine.stop()
        if not ended and self._ready.done():
            log.error("engine_abandoned", action="it hangs and ends with the process; see the device's log")
        await self.state.parked.close()
        if self.state.nixl is not None:
            await self.state.nixl.stop()
        log.info("stopped", target=self.target, sequences=len(self.state.handles))
        return ended

    def _on_ready(self, runner: Described) -> None:
        self.state.serve(runner.info, runner.device)
        self._methods.budgets[kv_transfer_pb2.ImportKvRequest] = UnfoldingBudget.of(
            self._limits, runner.info.max_context
        )
        # only now: while torch is imported the loop is late, and there is nothing to sweep
        self.state.supervisor.every(BackgroundTask.SWEEP, SWEEP_EVERY_S, Sweeper(self.state).turn)
        if self.state.parked.offered and self._limits.kv_park_idle_s:
            self.state.supervisor.every(BackgroundTask.PARK, IDLE_TURN_S, self.idle_parking.turn)
        self.health.update()
        if not self._ready.done():
            self._ready.set_result(runner)

    def _on_failed(self, error: BaseException) -> None:
        self.state.fail()
        self.health.update()
        self._failed.set()
        if not self._ready.done():
            self._ready.set_exception(error)
            return
        log.error("engine_failed", error=repr(error), action="restart the executor; every handle is lost")
