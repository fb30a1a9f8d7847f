"""structlog for the programs: readable on a terminal (`console`), otherwise one JSON object per line. Configured once,
by a program.

Logging never stops or blocks the program. A separate thread writes the lines, because a slow reader would otherwise
hang the event loop as soon as its pipe is full. Lines beyond `HELD_CHARACTERS` are dropped, counted, and reported when
the reader continues. Tracebacks omit the values of local variables, which include prompts.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TextIO, cast

import structlog

from ferrum_rpc.console import Console
from ferrum_rpc.terminal import colours, columns

HELD_CHARACTERS: Final = 1 << 20
"""Maximum characters of lines that wait for the reader."""

FLUSH_S: Final = 1.0
"""Seconds for which the end of the program waits for the reader."""


class LineWriter:
    """Writes lines to a descriptor and never waits. The writer's thread calls ``resumed(lines)`` when lines were
    dropped and the reader has caught up. A closed descriptor is not an error."""

    def __init__(self, descriptor: int, resumed: Callable[[int], object]) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._resumed = resumed
        self._lines: deque[str] = deque()
        self._size = 0
        self._reported = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="ferrum-log", daemon=True).start()

    def write(self, line: str) -> int:
        """Queue a line, or drop it if too much waits."""
        with self._changed:
            if self._size + len(line) > HELD_CHARACTERS:
                self.dropped += 1
            else:
                self._lines.append(line)
                self._size += len(line)
                self._changed.notify_all()
        return len(line)

    def flush(self) -> None:
        """Does nothing: the thread writes as fast as it can."""

    def drain(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until everything is written and reported, at most ``timeout_s``. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._size and self._reported == self.dropped, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            self._put(line.encode(errors="backslashreplace"))
            with self._changed:
                self._size -= len(line)
                self._changed.notify_all()
                lost = 0 if self._lines else self.dropped - self._reported
            if lost:
                self._resumed(lost)
                with self._changed:
                    self._reported += lost
                    self._changed.notify_all()

    def _put(self, data: bytes) -> None:
        with suppress(OSError):  # the reader has gone
            while data:
                data = data[os.write(self._descriptor, data) :]


_writers: Final[list[LineWriter]] = []


def lines_dropped() -> int:
    """The number of log lines dropped since the start, because the reader was too slow."""
    return sum(writer.dropped for writer in _writers)


def drain(timeout_s: float = FLUSH_S) -> None:
    """Wait until the log is written, at most ``timeout_s``, because the process is about to end."""
    for writer in _writers:
        writer.drain(timeout_s)


atexit.register(drain)


def configure_logging(log_format: str = "auto", level: str = "info") -> None:
    """``log_format``: auto, console or json. Logs go to standard error; answers of commands to standard output."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
    ]
    if console:
        screen = Console(partial(columns, sys.stderr), colours=colours(sys.stderr))
        processors += [structlog.processors.format_exc_info, screen]
    else:
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors += [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]
    writer = LineWriter(sys.stderr.fileno(), _warn)
    _writers.append(writer)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, writer)),
        cache_logger_on_first_use=False,
    )


def _warn(lines: int) -> None:
    action = "see what holds up the reader of this log; until it went on, its lines were dropped"
    structlog.get_logger("ferrum_rpc.logs").warning("log_lines_dropped", lines=lines, action=action)
