"""Shared by all tests: one compute thread each, for the suite runs in parallel, and logs that cost nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def logs_are_made_and_not_shown() -> Iterator[None]:
    """Every level, for tests that capture; plainly, because structlog's own default draws each stack trace (50 ms)."""
    with open(os.devnull, "w") as nowhere:
        structlog.configure(
            processors=[structlog.processors.KeyValueRenderer()], logger_factory=structlog.PrintLoggerFactory(nowhere)
        )
        yield
        structlog.reset_defaults()
