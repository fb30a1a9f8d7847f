"""Shared by all tests: one compute thread each, because the suite itself runs in parallel, and logging as it comes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def logging_as_it_comes() -> Iterator[None]:
    """Servers of tests are told to be quiet; the next test is not."""
    yield
    structlog.reset_defaults()
