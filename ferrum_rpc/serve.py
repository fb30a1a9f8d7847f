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
from ferrum_rpc.config import ServeSettings
from ferrum_rpc.engine.thread import Runner
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.service.operations import CacheOperations
from ferrum_rpc.service.server import ExecutorServer, PortInUse
from ferrum_rpc.service.servicers import WARMUP_BATCH, WARMUP_PREFILL

DEMO: Final = "demo"
BUILT_IN: Final = (DEMO, "identity")

log = structlog.get_logger("ferrum_rpc.serve")


def build(model: str, settings: ServeSettings) -> Runner:
    """Load the model and make its runner. Runs in the model thread and is what imports torch, so that the port is bound
    and health is answered before.

    OpenMP's threads are told to sleep rather than spin between two products: a spinning one takes the core that the
    event loop needs. Measured with two cores and a second busy process: p95 of a decode step of the demo model 7 ms
    instead of 237, of a batch of 32 14 ms instead of 456. Whoever sets OMP_WAIT_POLICY decides otherwise.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch loads OpenMP
    import torch

    from ferrum_rpc.engine.build import BuildConfig, build_runner
    from ferrum_rpc.models.identity import IdentityConfig

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)  # this process is ours
    config = BuildConfig(
        model=str(resources.files("ferrum_rpc") / "assets" / "demo") if model == DEMO else model,
        name=model if model in BUILT_IN else "",
        device=settings.device,
        dtype=settings.dtype,
        attention=settings.attention,
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
    return build_runner(config, _Progress())


def serve(model: str, settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT. Exit status: 0 after a graceful stop, 1 if it could not serve."""
    configure_logging(settings.log_format, settings.log_level)
    try:
        return asyncio.run(_serve(model, settings))
    except (PortInUse, ExecutorError) as error:
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
    server = ExecutorServer(partial(build, model, settings), settings.limits(), host=settings.host, port=settings.port)
    stop = asyncio.Event()
    _stop_on_signals(stop)
    await server.start()
    loading = asyncio.create_task(server.ready())
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(server.failed())
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            runner = await loading
            if settings.warmup:
                await CacheOperations(server.books).warm_up(WARMUP_BATCH, WARMUP_PREFILL)
            gc.collect()
            gc.freeze()  # the model and its libraries are here to stay: no collection need look at them again
            _banner(server, runner)
            await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
        return 1 if failing.done() else 0
    finally:
        for task in (loading, stopping, failing):
            task.cancel()
        log.info("stopping", grace_s=settings.grace_s, in_flight=server.calls.in_flight)
        await server.stop(settings.grace_s)


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT stops gracefully, the second at once."""

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

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
