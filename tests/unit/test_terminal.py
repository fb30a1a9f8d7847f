"""Colours and moving lines are for terminals that know them, and nobody else's lines stand between ours."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import structlog

from ferrum_rpc.bench import display as bench_display
from ferrum_rpc.bench.stats import Stats
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.terminal import VERBOSITY, colours, keep_grpc_quiet, moves


class Screen(io.StringIO):
    """A terminal that keeps what it was sent."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "expected"),
    [
        (Screen(), {"TERM": "xterm"}, (True, True)),
        (Screen(), {}, (True, True)),
        (Screen(), {"TERM": "xterm", "NO_COLOR": ""}, (True, True)),  # an empty one is none
        (Screen(), {"TERM": "xterm", "NO_COLOR": "1"}, (True, False)),
        (Screen(), {"TERM": "dumb"}, (False, False)),
        (io.StringIO(), {"TERM": "xterm"}, (False, False)),
    ],
)
def test_who_gets_moving_lines_and_colours(
    stream: io.StringIO, environment: dict[str, str], expected: tuple[bool, bool]
) -> None:
    assert (moves(stream, environment), colours(stream, environment)) == expected


@pytest.mark.parametrize(
    ("pair", "variables", "coloured"),
    [
        (os.openpty, {}, True),
        (os.openpty, {"NO_COLOR": "1"}, False),
        (os.openpty, {"TERM": "dumb"}, False),
        (os.pipe, {}, False),
    ],
)
def test_the_console_log_is_coloured_where_it_may_be(
    pair: Callable[[], tuple[int, int]], variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = pair()
    for name, value in {"TERM": "xterm", "NO_COLOR": "", **variables}.items():
        monkeypatch.setenv(name, value)
    before = structlog.get_config()
    with open(reads, "rb", buffering=0) as reader, open(writes, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        try:
            configure_logging("console")
            structlog.get_logger("here").info("an_event")
        finally:
            structlog.configure(**before)
        written = reader.read(4096).decode()
        monkeypatch.undo()
    assert "an_event" in written
    assert ("\x1b[" in written) is coloured


async def test_a_dumb_terminal_gets_no_line_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen()
    async with bench_display.progress(None, Stats(), screen):  # type: ignore[arg-type]
        pass
    assert screen.getvalue() == ""


def test_grpc_writes_nothing_unless_the_user_says_so() -> None:
    silent: dict[str, str] = {}
    keep_grpc_quiet(silent)
    assert silent == {VERBOSITY: "NONE"}
    asked = {VERBOSITY: "DEBUG"}
    keep_grpc_quiet(asked)
    assert asked == {VERBOSITY: "DEBUG"}


TALKATIVE = """
import socket
from concurrent.futures import ThreadPoolExecutor

from ferrum_rpc import cli


def make_grpc_write(_):
    import grpc, trustme

    made = trustme.CA().issue_cert("localhost")
    pair = [(made.private_key_pem.bytes(), made.cert_chain_pems[0].bytes())]
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    server.start()
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(b"this is no handshake" * 10)
        while peer.recv(100):
            pass
    server.stop(None).wait()
    return 0


cli._run = make_grpc_write
cli.main(["status"])
"""


@pytest.mark.parametrize(("said", "writes"), [(None, False), ("INFO", True)])
def test_a_failed_handshake_writes_no_line_of_grpcs_between_ours(said: str | None, writes: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != VERBOSITY}
    if said is not None:
        environment[VERBOSITY] = said
    run = [sys.executable, "-c", TALKATIVE]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("andshake" in done.stderr) is writes and bool(done.stderr) is writes
