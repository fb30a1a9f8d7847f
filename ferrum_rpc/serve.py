"""`ferrum-rpc serve`: load, serve, and stop when told. Joins the settings, the engine and the server."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from functools import partial
from importlib import resources
from typing import Final

import structlog

from ferrum_rpc import __version__
from ferrum_rpc.allocator import keep_freed_memory
from ferrum_rpc.config import TOKEN_VARIABLE, ServeSettings
from ferrum_rpc.engine.heartbeat import Heartbeat
from ferrum_rpc.engine.thread import Runner
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.event_loop import choose_loop
from ferrum_rpc.failpoints import NO_FAILPOINTS, Failpoints, parse_failpoints
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.openmp import wait_briefly
from ferrum_rpc.service.control import WARMUP_BATCH, WARMUP_PREFILL
from ferrum_rpc.service.listen import PortInUse
from ferrum_rpc.service.observation import Observation
from ferrum_rpc.service.operations import CacheOperations
from ferrum_rpc.service.security import Security, SecurityError
from ferrum_rpc.service.server import ExecutorServer, Keepalive
from ferrum_rpc.service.tracing import TracingError

DEMO: Final = "demo"
BUILT_IN: Final = (DEMO, "identity")

log = structlog.get_logger("ferrum_rpc.serve")


def build(model: str, settings: ServeSettings, failpoints: Failpoints = NO_FAILPOINTS) -> Runner:
    """Load the model and make its runner. Runs in the model thread and is what imports torch, so that the port is bound
    and health is answered before."""
    wait_briefly()
    import torch

    from ferrum_rpc.engine.build import BuildConfig, build_runner
    from ferrum_rpc.engine.failing import failing_stage
    from ferrum_rpc.engine.runner import no_stage
    from ferrum_rpc.models.identity import IdentityConfig

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)  # this process is ours
    config = BuildConfig(
        model=str(resources.files("ferrum_rpc") / "assets" / "demo") if model == DEMO else model,
        name=model if model in BUILT_IN else "",
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
        attention=settings.attention,
        cuda_graphs=settings.cuda_graphs,
        block_size=settings.block_size,
        kv_memory=settings.kv_memory,
        kv_blocks=settings.kv_blocks,
        max_sequences=settings.max_sequences,
        max_context=settings.max_context,
        identity=IdentityConfig(
            vocab_size=settings.identity_vocab_size,
            layers=settings.identity_layers,
            heads=settings.identity_heads,
            kv_heads=settings.identity_kv_heads,
            head_dim=settings.identity_head_dim,
            max_context=settings.identity_max_context,
            positional=settings.identity_positional,
        ),
    )
    return build_runner(config, _Progress(), failing_stage(failpoints) if failpoints.rules else no_stage)


def serve(model: str, settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT. Exit status: 0 after a graceful stop, 1 if it could not serve."""
    configure_logging(settings.log_format, settings.log_level)
    loop = choose_loop(settings.event_loop)
    log.info("chosen", choice=f"event loop {loop.name}", reason=loop.reason)
    log.info("chosen", choice="allocator", reason=keep_freed_memory())
    try:
        with asyncio.Runner(loop_factory=loop.make) as runner:
            return runner.run(_serve(model, settings))
    except (PortInUse, SecurityError, TracingError, ExecutorError) as error:
        log.error("cannot_serve", error=str(error), action="change the setting or free what it names, then start again")
        return 1


class _Progress:
    """Loading progress, once a second and at the end: one moving line on a terminal, log lines otherwise."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._told < 1:
            return
        self._told = now
        if self._terminal and done < total:
            sys.stderr.write(f"\rloading weights {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB")
            sys.stderr.flush()
        else:
            log.info("loading", bytes=done, total_bytes=total, seconds=round(now - self._began, 2))


async def _serve(model: str, settings: ServeSettings) -> int:
    failpoints = Failpoints(parse_failpoints(settings.failpoints), settings.failpoint_seed)
    if failpoints.rules:
        log.warning(
            "failpoints_on",
            failpoints=settings.failpoints,
            action="this server fails on purpose; take --failpoints or FERRUM_FAILPOINTS away to serve",
        )
    server = ExecutorServer(
        partial(build, model, settings, failpoints),
        settings.limits(),
        host=settings.host,
        port=settings.port,
        grace_s=settings.grace_s,
        keepalive=Keepalive(settings.keepalive_time_s, settings.keepalive_timeout_s),
        max_streams=settings.max_streams,
        security=_security(settings),
        heartbeat=Heartbeat(settings.stall_timeout_s, settings.max_step_s),
        failpoints=failpoints,
    )
    observation = Observation(settings.metrics_host, settings.metrics_port, settings.otel_endpoint)
    _drain_on_signals(server)
    await server.start()
    loading = asyncio.create_task(server.ready())
    draining = asyncio.create_task(server.draining.begun.wait())
    drained = asyncio.create_task(server.draining.done.wait())
    failing = asyncio.create_task(server.failed())
    try:
        observation.begin(server, failpoints.fired)
        await asyncio.wait((loading, draining), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            runner = await loading
            if settings.warmup:
                await CacheOperations(server.books).warm_up(WARMUP_BATCH, WARMUP_PREFILL)
            gc.collect()
            gc.freeze()  # the model and its libraries are here to stay: no collection need look at them again
            _banner(server, runner)
            await asyncio.wait((drained, failing), return_when=asyncio.FIRST_COMPLETED)
        return 1 if failing.done() else 0
    finally:
        for task in (loading, draining, drained, failing):
            task.cancel()
        log.info("stopping", grace_s=settings.grace_s, in_flight=server.calls.in_flight)
        await server.stop(settings.grace_s)
        await observation.end()


def _security(settings: ServeSettings) -> Security:
    """The part of the settings that says who may call. Raises `SecurityError`."""
    if settings.tokens is None and TOKEN_VARIABLE in os.environ:
        action = "to ask callers for tokens, name a file of them with --tokens or FERRUM_TOKENS"
        log.warning("token_variable_ignored", variable=TOKEN_VARIABLE, action=action)
    return Security(
        tokens=settings.tokens,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        tls_client_ca=settings.tls_client_ca,
        operators=frozenset(name.strip() for name in settings.operators.split(",") if name.strip()),
        insecure=settings.insecure,
    )


def _drain_on_signals(server: ExecutorServer) -> None:
    """The first SIGTERM or SIGINT drains, the second ends the process at once."""

    def on_signal(number: int) -> None:
        if told:
            os._exit(128 + number)
        told.append(number)
        server.drain()

    told: list[int] = []
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _banner(server: ExecutorServer, runner: Runner) -> None:
    info, device = runner.info, runner.device
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
    )
    for choice, reason in device.choices:
        log.info("chosen", choice=choice, reason=reason)
    log.info("ready", target=server.target)
