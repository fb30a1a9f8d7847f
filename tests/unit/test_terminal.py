"""Colours and moving lines are for terminals that know them; the log is a screen and lines that fit there."""

from __future__ import annotations

import io
import os
import sys
import termios
from typing import Any

import pytest
import structlog

from ferrum_rpc.console import Console
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.terminal import aligned, colours, columns, moves, program


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
def test_who_gets_moving_lines_and_colours(stream, environment, expected):
    assert (moves(stream, environment), colours(stream, environment)) == expected


@pytest.mark.parametrize(
    ("pair", "variables", "coloured"),
    [(os.openpty, {}, True), (os.openpty, {"NO_COLOR": "1"}, False), (os.pipe, {}, False)],
)
def test_the_console_log_is_coloured_where_it_may_be(pair, variables, coloured, monkeypatch):
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


EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("backend_selected", {"choice": "event loop uvloop", "reason": "it is installed"}),
    ("listening", {"target": "127.0.0.1:50051", "tls": True, "credentials": False}),
    ("memory_planned", {"weights_bytes": 7_374_848, "kv_bytes": 4 << 30}),
    ("metrics_enabled", {"url": "http://127.0.0.1:9464/metrics"}),
    (
        "serving",
        {"version": "1.2.3", "model": "demo", "architecture": "Qwen3ForCausalLM", "parameters": 3_610_624}
        | {"vocab_size": 264, "max_context": 2048, "device": "a CPU", "threads": 2}
        | {"kv_dtype": "bfloat16", "kv_tokens": 1_398_096, "kv_bytes": 4 << 30},
    ),
    ("backend_selected", {"choice": "device=cpu", "reason": "torch finds no CUDA device"}),
    ("backend_selected", {"choice": "dtype=bfloat16", "reason": "the checkpoint's, and the CPU has avx512_bf16"}),
    ("backend_selected", {"choice": "linear=native", "reason": "weights in panels: 8 rows cost little more than one"}),
    ("backend_selected", {"choice": "kv_blocks=87381 (4096 MiB)", "reason": "25% of the free memory, at most 4 GiB"}),
    ("ready", {"target": "127.0.0.1:50051", "instance_id": "1"}),
]


def rendered(console: Console, name: str, level: str = "info", **facts: Any) -> str:
    """What an event looks like; nothing where the screen will show it."""
    try:
        return console(None, name, {"event": name, "level": level, "timestamp": "12:34:56", **facts})
    except structlog.DropEvent:
        return ""


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_way_up_is_one_screen_and_what_follows_are_lines_that_fit(width):
    console = Console(lambda: width, colours=False)
    *before, screen = [rendered(console, name, **facts) for name, facts in EVENTS]
    assert [each for each in before if each] == ["listening on 127.0.0.1:50051, loading the model ..."]
    for words in ("1.2.3 serves demo", "3.61 million parameters", "7.03 MiB", "4 GiB in bfloat16", "linear=native"):
        assert words in " ".join(screen.split())
    assert "uvloop" not in screen and "kv_blocks" not in screen
    command = 'ferrum-rpc generate "In the beginning" --tls-ca FILE'
    assert any(line.endswith(command) for line in screen.splitlines()), "a command is copied from one line"
    assert width < 80 or len(screen.splitlines()) <= 24
    facts = {"grace_s": 30.0, "sequences": 1234, "held_bytes": 3 << 30}
    later = rendered(console, "draining", **facts, action="let schedulers move on " * 4)
    assert later.startswith("12:34:56 draining: grace 30 s,")
    assert " ".join(later.split()).startswith("12:34:56 draining: grace 30 s, sequences 1,234, held 3 GiB →")
    assert "→ let schedulers move on" in later
    lines = [line for line in [*screen.splitlines(), *later.splitlines()] if "ferrum-rpc " not in line]
    assert all(len(line) <= width for line in lines), lines
    chosen = rendered(console, "backend_selected", choice="NIXL agent", reason="later")
    assert chosen == "12:34:56 NIXL agent: because later"


def test_what_stops_a_start_is_all_that_is_said_of_it():
    console = Console(lambda: None, colours=False)
    name, facts = EVENTS[0]
    assert rendered(console, name, **facts) == ""
    failed = rendered(console, "startup_failed", "error", error="no such folder", action="any")
    assert failed == "ferrum-rpc serve: no such folder"
    warning = rendered(console, "backend_selected", "warning", choice="kernels=none", reason="slow", action="nothing")
    assert warning == "12:34:56 warning: kernels=none: because slow"
    joined = rendered(console, "rank_joined", pid=12345, seconds=1.5, lines=12345)
    assert joined.endswith("rank_joined: pid 12345, 1.5 s, lines 12,345")
    assert rendered(console, "failed", "error", exception="Traceback ...").endswith("error: failed\nTraceback ...")


@pytest.mark.parametrize("width", range(40, 201, 20))
def test_texts_are_wrapped_below_themselves_and_words_stay_whole(width):
    path = "/a/" + "long/" * 40
    lines = aligned([("name", "word " * 60), ("a longer name", path), ("last", "")], width)
    assert " ".join(lines).split() == ["name", *["word"] * 60, "a", "longer", "name", path, "last"]
    assert all(len(line) <= width for line in lines if path not in line)
    assert lines[1].startswith(" " * len("a longer name  ") + "word")
    assert aligned([("name", "word " * 60)], None) == ["name  " + "word " * 60]


def test_only_a_terminal_has_a_width():
    reads, writes = os.openpty()
    with open(reads, "rb", buffering=0), open(writes, "w") as stream:
        for given, expected in ((100, 100), (20, 40), (0, 80)):
            termios.tcsetwinsize(stream.fileno(), (24, given))
            assert columns(stream) == expected
    assert columns(io.StringIO()) is None and columns(Screen()) == 80


def test_the_program_is_named_as_it_must_be_typed(tmp_path, monkeypatch):
    script = tmp_path / "ferrum-rpc"
    script.touch(mode=0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    assert program([str(script), "serve"]) == str(script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program([str(script), "serve"]) == program(["somewhere/cli.py"]) == "ferrum-rpc"
