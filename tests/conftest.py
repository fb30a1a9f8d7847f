"""Shared by all tests: one compute thread each, for the suite runs in parallel, and logs that cost nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from structlog.testing import capture_logs

from tests.support.quiet_logs import quiet_logs

torch.set_num_threads(1)
settings.register_profile("here", deadline=None)  # what else the machine does is no failure of an example
settings.load_profile("here")

if not torch.cuda.is_available():  # CUDA kernels run in Triton's interpreter; read when something first imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


FIRST = ("tests/faults/test_promises_of_processes.py", "tests/numerics/test_native_builds.py")
"""The longest files. The first one waits for most of its time; beside the other faults, which wait too, the machine
would be idle."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`FIRST` comes first, all else by its path: `make test` hands files out in this order, and all workers must have
    the same, whatever they collected first. pytest then groups what shares a fixture."""
    places = {file: place for place, file in enumerate(FIRST)}
    items.sort(key=lambda item: (places.get(item.nodeid.partition("::")[0], len(FIRST)), item.path))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each of several workers begins at another place of a folder. In a fresh checkout the first one to collect a file
    compiles it with rewritten assertions, and the others then read that: side by side, each would compile all."""
    report = yield
    if isinstance(collector, pytest.Directory) and (worker := getattr(collector.config, "workerinput", None)):
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes stays: the collector looks neither while it is made nor ever again, which is a tenth of the
    suite's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def logs() -> Iterator[Sequence[Any]]:
    """The events that a test logs."""
    with capture_logs() as events:
        yield events


@pytest.fixture(autouse=True)
def logs_are_made_and_not_shown() -> Iterator[None]:
    """As `quiet_logs`."""
    with quiet_logs():
        yield


@pytest.fixture(autouse=True)
def one_compute_thread_remains() -> Iterator[None]:
    """A benchmark or a program that a test runs in this process sets its own number of threads. Beside three other
    workers on two cores, two threads that spin take five times the processor time, in every test that follows."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
