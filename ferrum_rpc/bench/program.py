"""The command itself: connect, measure, report, and leave nothing behind, however it ends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

from ferrum_rpc.bench.display import progress, show
from ferrum_rpc.bench.measure import measure
from ferrum_rpc.bench.options import Workload, workload_from
from ferrum_rpc.bench.report import report
from ferrum_rpc.bench.tally import Tally
from ferrum_rpc.client import NEVER_RESEND, ExecutorClient, read_token, tls
from ferrum_rpc.errors import ExecutorError, InvalidRequest, Reason

INTERRUPTED: Final = 130

ADVICE: Final = {
    Reason.TRANSPORT: "is an executor running at {target}, and with TLS or without as asked? `ferrum-rpc health` tells",
    Reason.QUEUE_FULL: "lower --callers, --depth or --rate, or wait until other clients have gone",
    Reason.KV_BLOCKS_EXHAUSTED: "lower --batch, --depth, --callers or --context, or wait until other clients have gone",
    Reason.SEQUENCES_EXHAUSTED: "lower --batch, --depth or --callers, or wait until other clients have gone",
    Reason.QUOTA_EXCEEDED: "lower --batch, --depth, --callers or --context: this caller may hold no more",
    Reason.OUTPUT_TOO_LARGE: "lower --batch, ask for --output greedy, or use --way session, which takes larger answers",
    Reason.UNAUTHENTICATED: "name a token with --token-file or FERRUM_TOKEN, or a certificate with --tls-cert",
    Reason.DEADLINE_EXCEEDED: "raise --timeout, or lower --prompt-tokens and --batch",
    Reason.STARTING: "wait until `ferrum-rpc health` says SERVING",
    Reason.DRAINING: "this executor is about to end: measure another",
}


async def bench(arguments: argparse.Namespace) -> int:
    """Exit status 0; 1 where nothing could be measured, or a caller could not go on; 130 after Ctrl-C or SIGTERM."""
    workload, tally = workload_from(arguments), Tally()
    info, interrupted = None, False
    try:
        if arguments.json is not None:
            _writable(arguments.json)
        async with progress(workload, tally, sys.stderr), _client(arguments, workload) as client:
            with _interrupts() as stop:
                interrupted = await _unless(stop, measure(client, workload, tally))
            with contextlib.suppress(ExecutorError):
                info = await client.info(timeout_s=1.0)  # known since before the first step
    except ExecutorError as error:
        _say(error, arguments.target)
        return 1
    made = report(arguments.target, info, workload, tally, interrupted=interrupted)
    show(made, sys.stdout)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(made, indent=1) + "\n")
    if tally.reason is not None:
        _say(tally.reason, arguments.target)
    if interrupted:
        return INTERRUPTED
    return 1 if tally.reason is not None or not tally.step.count else 0


def _client(arguments: argparse.Namespace, workload: Workload) -> ExecutorClient:
    """One connection. A call goes out once: a repetition would hide what it cost."""
    files = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    return ExecutorClient(
        arguments.target,
        timeout_s=arguments.timeout,
        credentials=tls(*files) if arguments.tls or any(files) else None,
        token=arguments.token if arguments.token_file is None else read_token(arguments.token_file),
        resend=NEVER_RESEND,
        client_name="bench",
        session=workload.way == "session",
        # Twice what is sent: an answer may be read before the executor knows that it has written it.
        steps_in_flight=2 * workload.groups,
    )


@contextlib.contextmanager
def _interrupts() -> Iterator[asyncio.Event]:
    """Set by the first Ctrl-C or SIGTERM; the second one ends the program as if nobody listened."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def ignore_no_more() -> None:
        for each in signals:
            loop.remove_signal_handler(each)

    def interrupt() -> None:
        stop.set()
        ignore_no_more()

    for each in signals:
        loop.add_signal_handler(each, interrupt)
    try:
        yield stop
    finally:
        ignore_no_more()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do it until it is done or ``stop`` is set; whether it was stopped."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return False
        return True
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def _writable(path: Path) -> None:
    """Refuse a file that cannot be written before the run, not after it."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidRequest(f"cannot write {path}: name a file in a folder that is there", field="json")


def _say(error: ExecutorError, target: str) -> None:
    advice = ADVICE.get(error.reason, "")
    sys.stderr.write(f"ferrum-rpc bench: {error.reason}: {error.message}\n")
    if advice:
        sys.stderr.write(f"{advice.format(target=target)}\n")
