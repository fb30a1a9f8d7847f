"""The command itself: watch the executors, and write a document, a table or a screen at each interval."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from ferrum_rpc import __version__
from ferrum_rpc.ask import connect, until_interrupted
from ferrum_rpc.client import NEVER_RESEND, ExecutorClient
from ferrum_rpc.client.fleet import Members, certificate_host
from ferrum_rpc.terminal import columns, moves
from ferrum_rpc.top.board import ExecutorBoard, ExecutorRow, RowState
from ferrum_rpc.top.screen import lines

DEFAULT_TARGET: Final = "127.0.0.1:50051"
STYLES: Final = {
    RowState.SERVING: "",
    RowState.STARTING: "yellow",
    RowState.DRAINING: "yellow",
    RowState.MISMATCH: "yellow",
    RowState.UNKNOWN: "dim",
}
"""The style of a row; of every other state it is red."""

Write = Callable[[Sequence[ExecutorRow]], None]


async def top(arguments: argparse.Namespace) -> int:
    """Exit status 0, also after Ctrl-C; with ``once`` 1 if no executor answered."""
    logging.getLogger("ferrum_rpc.client.fleet").addHandler(logging.NullHandler())  # the rows have the reasons
    with _writer(arguments) as write:
        seen: list[ExecutorRow] = []
        interrupted = await until_interrupted(_watch(arguments, write, seen))
    return 0 if interrupted or any(each.status is not None for each in seen) else 1


async def _watch(arguments: argparse.Namespace, write: Write, seen: list[ExecutorRow]) -> None:
    """Write the rows after each interval; with ``once``, leave them in ``seen``."""
    async with members_of(arguments) as members:
        board = ExecutorBoard(members)
        patience_s = arguments.timeout if arguments.once else min(arguments.timeout, arguments.interval_s)
        try:
            await members.all_known(patience_s)
            seen[:] = board.rows()
            if not arguments.once:
                write(seen)
            while True:
                await asyncio.sleep(arguments.interval_s)
                asked = board.ask(arguments.timeout)
                if arguments.once:  # the looks in the background may be older than the interval's end
                    await asyncio.gather(*asked, *map(members.look, members.there))
                seen[:] = board.rows()
                write(seen)
                if arguments.once:
                    return
        finally:
            await board.close()


def members_of(arguments: argparse.Namespace, **options: Any) -> Members:
    """The executors of the command line, watched only. ``options``: of `Members`."""
    targets = arguments.target or [DEFAULT_TARGET]
    return Members(
        targets,
        connect=partial(_client, arguments, targets),
        look_every_s=arguments.interval_s / 2,
        patience_s=arguments.timeout,
        hung_patience_s=math.inf,
        watch_only=True,
        **options,
    )


def _client(arguments: argparse.Namespace, targets: Sequence[str], target: str) -> ExecutorClient:
    """Sends nothing again, and neither does gRPC: its retries hide that an executor starts for longer than `top`
    waits."""
    host = certificate_host(targets, target)
    options = [("grpc.enable_retries", 0), *([("grpc.ssl_target_name_override", host)] if host else [])]
    return connect(arguments, target, resend=NEVER_RESEND, client_name="top", channel_options=options)


def document(rows: Sequence[ExecutorRow], interval_s: float) -> dict[str, Any]:
    """The rows as one JSON object, whose keys docs/operations.md explains."""
    return {
        "ferrum_rpc": __version__,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "interval_s": interval_s,
        "executors": [each.json() for each in rows],
    }


@contextmanager
def _writer(arguments: argparse.Namespace) -> Iterator[Write]:
    """What writes the rows: as JSON, as a plain table, or on the screen of a terminal."""
    out = sys.stdout

    def as_json(rows: Sequence[ExecutorRow]) -> None:
        out.write(json.dumps(document(rows, arguments.interval_s)) + "\n")
        out.flush()

    def as_table(rows: Sequence[ExecutorRow]) -> None:
        out.write("".join(f"{line}\n" for line, _ in lines(rows, columns(out))) + ("" if arguments.once else "\n"))
        out.flush()

    if arguments.json or arguments.once or not moves(out):
        yield as_json if arguments.json else as_table
    else:
        with _screen() as write:
            yield write


@contextmanager
def _screen() -> Iterator[Write]:
    """The terminal's alternate screen, which is left as it was. Each refresh overwrites the lines of the last one."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)

    def render(rows: Sequence[ExecutorRow]) -> Text:
        found = lines(rows, console.width, console.height)
        styled = [(line, "" if state is None else STYLES.get(state, "red")) for line, state in found]
        return Text("\n", no_wrap=True, overflow="crop").join(Text(*each, end="") for each in styled)

    with Live(Text(""), console=console, screen=True, auto_refresh=False) as live:
        yield lambda rows: live.update(render(rows), refresh=True)
