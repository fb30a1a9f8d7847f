"""Log lines that are made and not shown: every level, so that tests can capture them, and plainly, because structlog's
own default draws each stack trace (50 ms)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Configures structlog, and puts its defaults back."""
    with open(os.devnull, "w") as nowhere:
        structlog.configure(
            processors=[structlog.processors.KeyValueRenderer()], logger_factory=structlog.PrintLoggerFactory(nowhere)
        )
        yield
        structlog.reset_defaults()
