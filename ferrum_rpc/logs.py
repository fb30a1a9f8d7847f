"""structlog for the programs: a console on a terminal, one JSON object a line otherwise. Called once, by a program."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog

from ferrum_rpc.terminal import colours


class Unbreakable:
    """A text stream whose reader may be gone. A log line is never a reason to stop: a drain that could not tell of its
    beginning would not end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream's, or nothing."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As the stream's, or nothing."""
        with suppress(OSError, ValueError):
            self._stream.flush()


def configure_logging(log_format: str = "auto", level: str = "info") -> None:
    """``log_format``: auto, console or json. Logs go to standard error; answers of commands to standard output."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=colours(sys.stderr)) if console else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not console:
        processors.append(structlog.processors.dict_tracebacks)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, Unbreakable(sys.stderr))),
        cache_logger_on_first_use=False,
    )
