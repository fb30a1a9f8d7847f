"""`ferrum-rpc worker`: connect to the executors, serve a router, and drain on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import smg_grpc_proto  # before the other packages of the worker: the error then names its extra
import structlog

from ferrum_rpc import __version__
from ferrum_rpc.ask import connect
from ferrum_rpc.client import ExecutorClient, ExecutorInfo, InvalidRequest
from ferrum_rpc.client.fleet import Members, certificate_host
from ferrum_rpc.fronts.folder import ModelFolder
from ferrum_rpc.fronts.load import WorkLoad, registry_of_worker
from ferrum_rpc.fronts.options import DEFAULT_TARGET
from ferrum_rpc.fronts.port import WorkerPort
from ferrum_rpc.fronts.servicer import EngineMethods
from ferrum_rpc.logs import configure_logging, drain
from ferrum_rpc.scheduler import STEPS_IN_FLIGHT, Lookup, Scheduler
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.service.guard.bind import PortInUse, is_loopback
from ferrum_rpc.service.guard.watched_file import SecurityError
from ferrum_rpc.service.metrics_server import MetricsServer

DEMO: Final = ("demo", "demo-draft")
DEMO_PACKAGE: Final = "ferrum_rpc_demo"
"""The package with the folders of the built-in models, which executors do not report."""

OTHERS_S: Final = 1.0
"""Seconds for which the other executors are waited for once one serves, so that the first texts are spread."""

SWITCH_S: Final = 0.0005
"""How long a thread that reads a large request may hold up the event loop at a time."""

CLOSE_S: Final = 5.0
SECOND_SIGNAL_S: Final = 0.2

log = structlog.get_logger("ferrum_rpc.fronts")


async def worker(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Exit status: 0 after a drain, 1 if it could not serve."""
    configure_logging(arguments.log_format, arguments.log_level)
    sys.setswitchinterval(SWITCH_S)
    ending = _ending()
    try:
        async with serving(arguments, ending) as port:
            if port is not None:
                await ending.wait()
                await _drain(port, arguments.grace_s)
    except (PortInUse, SecurityError, InvalidRequest) as error:
        action = "change the setting or free what it names, then start again"
        log.error("startup_failed", error=str(error), action=action)
        return 1
    log.info("stopped")
    return 0


@asynccontextmanager
async def serving(arguments: argparse.Namespace, ending: asyncio.Event) -> AsyncIterator[WorkerPort | None]:
    """A worker that serves; None if it is to end before an executor serves. Raises `PortInUse`, `SecurityError`, and
    `InvalidRequest` for an executor without a folder that has a tokenizer."""
    security = _security(arguments)
    async with AsyncExitStack() as stack:
        members = await stack.enter_async_context(_members(arguments))
        log.info("connecting", version=__version__, targets=list(members.targets))
        if (info := await _first(members, ending)) is None:
            yield None
            return
        folder = ModelFolder(_folder(arguments.tokenizer, info))
        scheduler = Scheduler(
            members,
            token_budget=arguments.token_budget,
            max_running=arguments.max_running,
            max_waiting=arguments.max_waiting,
            run_tokens=arguments.run_tokens,
            max_delay_s=arguments.max_delay_s,
            drafter=Lookup() if arguments.speculate else None,
            tokenizer=folder.tokenizer,
            patience_s=arguments.patience_s,
            close_timeout_s=CLOSE_S,
        )
        await stack.enter_async_context(scheduler)
        load = WorkLoad(scheduler, members, arguments.max_running, arguments.max_waiting)
        methods = EngineMethods(scheduler, members, folder, load, model_name=arguments.served_model_name)
        port = WorkerPort(
            methods,
            max_context=max([info.model.max_context, *(each.max_context for each in members.there)]),
            host=arguments.host,
            port=arguments.port,
            keepalive_time_s=arguments.serve_keepalive_time_s,
            keepalive_timeout_s=arguments.serve_keepalive_timeout_s,
            security=security,
            count=load.count_call,
        )
        if arguments.metrics_port is not None:
            metrics = MetricsServer(registry_of_worker(load), arguments.metrics_host, arguments.metrics_port)
            stack.callback(metrics.stop)
            log.info("metrics_enabled", url=metrics.url)
        await port.start()
        stack.push_async_callback(port.stop)
        log.info(
            "ready",
            target=port.target,
            protocol=f"smg vllm_engine {smg_grpc_proto.__version__}",
            model=arguments.served_model_name or info.model.name,
            executors=[each.target for each in members.serving],
        )
        yield port


async def _drain(port: WorkerPort, grace_s: float) -> None:
    """Let the router move on and the texts end, for up to ``grace_s`` seconds."""
    log.info("draining", grace_s=grace_s, texts=port.methods.texts)
    drained = asyncio.create_task(port.drain())
    done, _ = await asyncio.wait({drained}, timeout=grace_s)
    if not done:
        drained.cancel()
        await asyncio.wait({drained})
    log.info("drained", texts_left=port.methods.texts)


async def _first(members: Members, ending: asyncio.Event) -> ExecutorInfo | None:
    """The description of an executor, once one serves. None if the worker is to end."""
    ends = asyncio.create_task(ending.wait())
    try:
        while not members.serving and not ends.done():
            changed = asyncio.create_task(members.changed(members.changes))
            await asyncio.wait({changed, ends}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        if ends.done():
            return None
        await members.all_known(OTHERS_S)
        return members.serving[0].info if members.serving else await _first(members, ending)
    finally:
        ends.cancel()


def _folder(given: Path | None, info: ExecutorInfo) -> Path:
    """The folder with the tokenizer. Raises `InvalidRequest`."""
    if given is not None:
        return given
    if info.model.folder:
        return Path(info.model.folder)
    if info.model.name in DEMO and (package := find_spec(DEMO_PACKAGE)) is not None and package.origin is not None:
        return Path(package.origin).parent / info.model.name
    words = f"the executor does not report the folder of {info.model.name}: name one with --tokenizer"
    raise InvalidRequest(words, field="tokenizer")


def _members(arguments: argparse.Namespace) -> Members:
    targets = arguments.target or [DEFAULT_TARGET]
    return Members(targets, connect=partial(_client, arguments, targets))


def _client(arguments: argparse.Namespace, targets: Sequence[str], target: str) -> ExecutorClient:
    host = certificate_host(targets, target)
    return connect(
        arguments,
        target,
        session=True,
        steps_in_flight=STEPS_IN_FLIGHT,
        tokens_ahead=True,
        client_name=f"worker {arguments.protocol}",
        channel_options=[("grpc.ssl_target_name_override", host)] if host else [],
    )


def _security(arguments: argparse.Namespace) -> Security:
    """The security of the worker's own port. Raises `SecurityError`."""
    open_to_all = arguments.serve_tls_cert is None and arguments.serve_tokens is None and not arguments.insecure
    if open_to_all and not is_loopback(arguments.host):
        raise SecurityError(
            f"{arguments.host} can be reached from other machines, and any client there could use the model: set "
            "--serve-tls-cert and --serve-tls-key, or --serve-tokens, or listen on 127.0.0.1, or set --insecure if the "
            "network itself is trusted"
        )
    return Security(
        tokens=arguments.serve_tokens,
        tls_cert=arguments.serve_tls_cert,
        tls_key=arguments.serve_tls_key,
        tls_client_ca=arguments.serve_tls_client_ca,
        insecure=arguments.insecure,
    )


def _ending() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT. The second one ends the process at once."""
    ending = asyncio.Event()

    def on_signal(number: int) -> None:
        if ending.is_set():
            drain(SECOND_SIGNAL_S)
            os._exit(128 + number)
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return ending
