"""Colours and moving lines are for terminals that know them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

import pytest
import structlog

from ferrum_rpc.bench import display as bench_display
from ferrum_rpc.bench.stats import Stats
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.terminal import colours, moves


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
