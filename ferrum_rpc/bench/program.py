"""The command itself: connect, measure, report, and release everything, however it ends."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from ferrum_rpc.ask import connect, until_interrupted
from ferrum_rpc.bench.display import progress, show
from ferrum_rpc.bench.measure import measure
from ferrum_rpc.bench.options import workload_from
from ferrum_rpc.bench.report import report
from ferrum_rpc.bench.stats import Stats
from ferrum_rpc.client import NEVER_RESEND
from ferrum_rpc.client.encryption import METADATA, explained
from ferrum_rpc.errors import ExecutorError, InvalidRequest, Reason

INTERRUPTED: Final = 130

ADVICE: Final = {
    Reason.TRANSPORT: "check with `ferrum-rpc health` that an executor runs at {target}, with TLS if asked for",
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
    """Exit status 0; 1 if nothing could be measured, or a caller could not continue; 130 after Ctrl-C or SIGTERM."""
    workload, stats = workload_from(arguments), Stats()
    info, interrupted = None, False
    try:
        if arguments.json is not None:
            _writable(arguments.json)
        # A call goes out once: a repetition would hide what it cost. Twice as many steps may be in flight as are sent:
        # an answer may be read before the executor knows that it has written it.
        options: dict[str, Any] = {"session": workload.way == "session", "steps_in_flight": 2 * workload.in_flight}
        connected = connect(arguments, resend=NEVER_RESEND, client_name="bench", **options)
        async with progress(workload, stats, sys.stderr), connected as client:
            interrupted = await until_interrupted(measure(client, workload, stats))
            with contextlib.suppress(ExecutorError):
                info = await client.info(timeout_s=1.0)  # known since before the first step
    except ExecutorError as error:
        _say(error, arguments.target)
        return 1
    made = report(arguments.target, info, workload, stats, interrupted=interrupted)
    show(made, sys.stdout)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(made, indent=1) + "\n")
    if stats.reason is not None:
        _say(stats.reason, arguments.target)
    if interrupted:
        return INTERRUPTED
    return 1 if stats.reason is not None or not stats.step.count else 0


def _writable(path: Path) -> None:
    """Refuse a file that cannot be written before the run, not after it."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidRequest(f"cannot write {path}: name a file in an existing folder", field="json")


def _say(error: ExecutorError, target: str) -> None:
    advice = ADVICE.get(error.reason, "")
    sys.stderr.write(f"ferrum-rpc bench: {error.reason}: {explained(error, target)}\n")
    if advice and METADATA not in error.metadata:
        sys.stderr.write(f"{advice.format(target=target)}\n")
