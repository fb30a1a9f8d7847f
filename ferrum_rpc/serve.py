"""`ferrum-rpc serve`: load, serve, and stop on a signal. Joins the settings, the engine and the server."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import structlog

from ferrum_rpc import __version__
from ferrum_rpc.building import build, model_folder
from ferrum_rpc.config import SETTINGS, ServeSettings
from ferrum_rpc.core import NO_KERNELS
from ferrum_rpc.engine.api import Described, Runner
from ferrum_rpc.engine.liveness import Liveness
from ferrum_rpc.engine.process.parent import Program
from ferrum_rpc.engine.ranks.world import check_ranks
from ferrum_rpc.errors import ExecutorError, InvalidRequest
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from ferrum_rpc.logs import configure_logging, drain, lines_dropped
from ferrum_rpc.runtime import choose_loop, keep_freed_memory, polled
from ferrum_rpc.service import control
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.service.guard.bind import PortInUse
from ferrum_rpc.service.guard.watched_file import SecurityError
from ferrum_rpc.service.metrics import Metrics, registry_of
from ferrum_rpc.service.metrics_server import MetricsServer
from ferrum_rpc.service.nixl import make_agent
from ferrum_rpc.service.server import ExecutorServer
from ferrum_rpc.service.telemetry import Tracing, TracingError, connect
from ferrum_rpc.usage import TOKEN_VARIABLE

log = structlog.get_logger("ferrum_rpc.serve")

SECOND_SIGNAL_S = 0.2
"""Seconds for which a second signal waits for the log's reader before it ends the process."""


def serve(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT. Exit status: 0 after a graceful stop, 1 if it could not serve."""
    configure_logging(settings.log_format, settings.log_level)
    try:
        model_folder(settings.model.path)
    except InvalidRequest as error:
        action = "name a model folder, a GGUF file, a name on the hub or a built-in model, then start again"
        log.error("startup_failed", error=error.message, action=action)
        return 1
    if settings.model.ranks == 1 and os.environ.get("WORLD_SIZE", "1") not in {"0", "1"}:
        action = "to share the model among them, give --tensor-parallel or --pipeline-parallel; else start one process"
        log.warning("world_size_ignored", world_size=os.environ["WORLD_SIZE"], action=action)
    loop = choose_loop(settings.event_loop)
    log.info("backend_selected", choice=f"event loop {loop.name}", reason=loop.reason)
    log.info("backend_selected", choice="allocator", reason=keep_freed_memory())
    log.info("backend_selected", choice="sockets", reason=f"read {polled()}")
    try:
        check_ranks(settings.model)
        with asyncio.Runner(loop_factory=loop.make) as runner:
            return runner.run(_serve(settings))
    except (PortInUse, SecurityError, TracingError, ExecutorError) as error:
        log.error("startup_failed", error=str(error), action=_action(error))
        return 1


def _action(error: Exception) -> str:
    """The action for an error of the start."""
    if isinstance(error, ExecutorError) and error.field is not None and error.field not in SETTINGS:
        return "repair or download again the file of the model, or serve another; `ferrum-rpc doctor` checks it"
    return "change the setting or free what it names, then start again"


async def _serve(settings: ServeSettings) -> int:
    failpoints = Failpoints(parse_failpoints(settings.failpoints), settings.failpoint_seed)
    if failpoints.rules:
        log.warning(
            "failpoints_enabled",
            failpoints=settings.failpoints,
            action="this server fails on purpose; take --failpoints or FERRUM_FAILPOINTS away to serve",
        )
    server = ExecutorServer(
        _engine(settings, failpoints),
        settings.limits(),
        host=settings.host,
        port=settings.port,
        grace_s=settings.grace_s,
        park_dir=settings.kv_park_dir,
        nixl_agent=make_agent if settings.kv_transport == "nixl" else None,
        keepalive_time_s=settings.keepalive_time_s,
        keepalive_timeout_s=settings.keepalive_timeout_s,
        max_streams=settings.max_streams,
        security=_security(settings),
        liveness=Liveness(settings.stall_timeout_s, settings.max_step_s),
        failpoints=failpoints,
    )
    observers: list[MetricsServer | Tracing] = []
    _drain_on_signals(server)
    await server.start()
    loading = asyncio.create_task(server.ready())
    draining = asyncio.create_task(server.draining.begun.wait())
    drained = asyncio.create_task(server.draining.done.wait())
    failing = asyncio.create_task(server.failed())
    try:
        if settings.otel_endpoint is not None:
            server.calls.tracer = connect(settings.otel_endpoint, server.state.handles.instance_id)
            observers.append(server.calls.tracer)
        if settings.metrics_port is not None:
            numbers = Metrics(server.state, server.calls, server.steps, failpoints.fired, lines_dropped)
            numbers.health, numbers.expiries = server.health.gauges, server.certificate_expiries
            metrics = MetricsServer(registry_of(numbers), settings.metrics_host, settings.metrics_port)
            observers.append(metrics)
            log.info("metrics_enabled", url=metrics.url)
        await asyncio.wait((loading, draining), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            runner = await loading
            if settings.warmup:
                await warm_up(server)
            gc.collect()
            gc.freeze()  # the model and its libraries are here to stay: no collection need look at them again
            _banner(server, runner)
            await asyncio.wait((drained, failing), return_when=asyncio.FIRST_COMPLETED)
        status = 1 if failing.done() else 0
    finally:
        for task in (loading, draining, drained, failing):
            task.cancel()
        log.info("stopping", grace_s=settings.grace_s, in_flight=server.calls.in_flight)
        ended = await server.stop(settings.grace_s)
        for each in observers:
            await asyncio.to_thread(each.stop)
    if not ended:  # the interpreter must not end under the model thread
        drain(SECOND_SIGNAL_S)
        os._exit(status)
    return status


async def warm_up(server: ExecutorServer) -> None:
    """Run typical shapes. If they are refused, the server continues; its first calls are slower."""
    try:
        await control.warm_up(server.state)
    except ExecutorError as error:
        action = "nothing, if the executor was asked to stop; else look at what refuses: the first calls are slower"
        log.warning("warm_up_refused", error=str(error), action=action)


def _engine(settings: ServeSettings, failpoints: Failpoints) -> Callable[[], Runner] | Program:
    """What runs the model: a function that builds its runner, or a process of its own."""
    if settings.engine == "thread":
        return partial(build, settings.model, failpoints, (settings.max_batch_tokens, settings.max_batch_items))
    if not hasattr(os, "memfd_create"):
        raise InvalidRequest("an engine in a process of its own shares memory as only Linux does", field="engine")
    return Program((sys.executable, "-m", "ferrum_rpc.worker"), settings, failpoints.fired.update)


def _security(settings: ServeSettings) -> Security:
    """The security settings. Raises `SecurityError`."""
    if settings.tokens is None and TOKEN_VARIABLE in os.environ:
        action = "to ask callers for tokens, name a file of them with --tokens or FERRUM_TOKENS"
        log.warning("token_variable_ignored", variable=TOKEN_VARIABLE, action=action)
    return Security(
        tokens=settings.tokens,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        tls_client_ca=settings.tls_client_ca,
        operators=_names(settings.operators),
        trusted=_names(settings.trusted),
        insecure=settings.insecure,
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _drain_on_signals(server: ExecutorServer) -> None:
    """The first SIGTERM or SIGINT drains, the second ends the process at once."""

    def on_signal(number: int) -> None:
        if signals:
            drain(SECOND_SIGNAL_S)
            os._exit(128 + number)
        signals.append(number)
        server.drain()

    signals: list[int] = []
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _banner(server: ExecutorServer, runner: Described) -> None:
    info, device = runner.info, runner.device
    pressure = server.state.pressure()
    kv_tokens = pressure.total_blocks * pressure.block_size
    log.info(
        "serving",
        version=__version__,
        target=server.target,
        model=info.name,
        architecture=info.architecture,
        parameters=info.parameters,
        vocab_size=info.vocab_size,
        max_context=info.max_context,
        device=device.name,
        threads=device.threads,
        dtype=info.weight_dtype,
        kv_dtype=info.kv_dtype,
        kv_tokens=kv_tokens,
        kv_bytes=kv_tokens * info.kv_bytes_per_token,
        exact_span_tokens=device.exact_span_tokens,
    )
    for choice, reason in device.choices:
        say = log.warning if choice == NO_KERNELS else log.info
        say("backend_selected", choice=choice, reason=reason)
    log.info("ready", target=server.target, instance_id=server.state.handles.instance_id)
