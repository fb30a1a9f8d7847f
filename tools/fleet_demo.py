"""`make fleet-demo`: three executors, one scheduler over all of them, and one executor that is killed in the middle.

First the prompts are written by one executor alone. Then by the three, on a live board: who is there, who has what,
what was rebuilt. The texts must be the same. Everything is started as a user starts it; this script knows no insides.

Executors whose `exact_span_tokens` is 0, as without the C kernels, compute a lost sequence again within rounding only.
In bfloat16 that is enough to choose another token, so such executors are started again with `--dtype float32`.

    python -m tools.fleet_demo --help
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferrum_rpc.client.sync import ExecutorClient
from ferrum_rpc.errors import ExecutorError
from tools.demo import INTERRUPTED, child, wait_until_serving

SERVE = (sys.executable, "-m", "ferrum_rpc.cli", "serve")
KILLED_AFTER_TOKENS = 200
"""Tokens that the executor has computed by then: it is in the middle of its texts."""
FLAGS = ("--demo", "--bypass", "--token-budget", "1024")
"""Without a prefix cache, and with each prompt in one piece, texts have the same bits whoever computes them, where
`exact_span_tokens` is above 0."""


Executor = subprocess.Popen[str]


def scheduler(targets: Sequence[str], texts: Path, *more: str) -> tuple[str, ...]:
    """The command of a scheduler over ``targets``, which writes what it got to ``texts``."""
    named = [part for each in targets for part in ("--target", each)]
    return (sys.executable, "-m", "clients.scheduler", *named, "--texts", str(texts), *FLAGS, *more)


def read(texts: Path) -> list[dict[str, Any]]:
    """The texts that a scheduler wrote, a line each."""
    return [json.loads(line) for line in texts.read_text().splitlines()]


def kill_when_it_has_begun(executor: Executor, target: str) -> None:
    """SIGKILL, once it has computed `KILLED_AFTER_TOKENS` more tokens and has sequences."""
    with contextlib.suppress(ExecutorError), ExecutorClient(target, lease=None) as client:
        before = client.status().counters.tokens
        while executor.poll() is None:
            status = client.status()
            if status.counters.tokens - before >= KILLED_AFTER_TOKENS and status.pressure.sequences:
                executor.kill()
            time.sleep(0.01)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fleet_demo",
        description="Several executors, one scheduler over them, and one executor killed in the middle.",
    )
    parser.add_argument("model", nargs="?", default="demo", help="what `ferrum-rpc serve` takes (%(default)s)")
    parser.add_argument(
        "--executors", type=int, default=3, choices=range(2, 17), metavar="N", help="how many, 2 to 16 (%(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=240, metavar="N", help="of each text (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live board")
    return parser.parse_args()


def start(arguments: argparse.Namespace, stack: contextlib.ExitStack, *flags: str) -> tuple[list[Executor], list[str]]:
    """The executors, which end with the stack, and their targets, once all of them serve. They share this machine's
    cores: with all of them in each, their threads would wait for each other."""
    threads = ("--threads", str(max(1, (os.cpu_count() or 1) // arguments.executors)))
    command = (*SERVE, arguments.model, "--port", "0", "--log-format", "json", *threads, *flags)
    executors = [
        stack.enter_context(child(command, signal.SIGTERM, stderr=subprocess.PIPE)) for _ in range(arguments.executors)
    ]
    return executors, [wait_until_serving(each, quiet=each is not executors[0]) for each in executors]


def rounds_coarsely(target: str) -> bool:
    """Whether what is computed again by such an executor may choose another token."""
    with ExecutorClient(target, lease=None) as client:
        info = client.info()
    return not info.limits.exact_span_tokens and info.model.weight_dtype != "float32"


def run(arguments: argparse.Namespace) -> int:
    """Start, run, compare, stop. The exit status."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first = stack.enter_context(contextlib.ExitStack())
        executors, targets = start(arguments, first)
        if rounds_coarsely(targets[0]):
            print(
                "\nexact_span_tokens is 0: a lost text would be computed again within rounding. In float32:", flush=True
            )
            first.close()
            executors, targets = start(arguments, stack, "--dtype", "float32")
        flags = ("--max-new-tokens", str(arguments.max_new_tokens))
        print(f"\none executor alone, {targets[0]}:", flush=True)
        with child(
            scheduler(targets[:1], folder / "alone", "--plain", *flags), signal.SIGINT, stdout=subprocess.DEVNULL
        ) as one:
            if status := one.wait():
                return status
        print(
            f"{len(read(folder / 'alone'))} texts. The same by {len(targets)}, of which {targets[1]} is killed:\n",
            flush=True,
        )
        killer = threading.Thread(target=kill_when_it_has_begun, args=(executors[1], targets[1]), daemon=True)
        killer.start()
        shown = ("--plain",) if arguments.plain else ()
        with child(scheduler(targets, folder / "fleet", *shown, *flags), signal.SIGINT) as all_of_them:
            if status := all_of_them.wait():
                return status
        alone, fleet = read(folder / "alone"), read(folder / "fleet")
        rebuilt = sum(each["rebuilds"] for each in fleet)
        same = [each["token_ids"] for each in alone] == [each["token_ids"] for each in fleet]
        killed = executors[1].poll() == -signal.SIGKILL
    print(f"\nexecutors: {targets[1]} was {'killed' if killed else 'NOT killed: it had nothing to do'}")
    print(
        f"texts: {len(fleet)}, {rebuilt} rebuilt elsewhere; {'the same' if same else 'NOT the same'} as by one executor"
    )
    stopped = [each.returncode for at, each in enumerate(executors) if at != 1]
    return 0 if same and killed and rebuilt and not any(stopped) else 1


def main() -> None:
    """Run it; Ctrl-C ends everything in order."""
    arguments = parse()
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    try:
        sys.exit(run(arguments))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
