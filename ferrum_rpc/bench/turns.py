"""When the next step begins: a closed loop sends it when the last one was answered, an open loop when it is due.

An open loop's due times do not wait for anybody. A step that finds no free caller is late, and its latency counts from
when it was due: a stall then shows in every step that it delayed, and not in one (coordinated omission; Tene, wrk2).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np

from ferrum_rpc.bench.options import Workload

FINE_S: Final = 0.002
"""The last part of a wait is slept in a thread: an event loop's timers go off up to a millisecond late (epoll), which
would be most of the latency of an empty step."""


class Turns(Protocol):
    """Hands out steps to callers."""

    unsent: int
    """Steps that were due and got no caller before the end."""

    async def next(self) -> float | None:
        """When the step was due that is to be sent now, on `time.perf_counter`; None: there is none any more."""


class ClosedLoop:
    """A step is due when a caller is free."""

    unsent = 0

    def __init__(self, workload: Workload, began: float) -> None:
        self._left = workload.steps
        self._end = math.inf if workload.seconds is None else began + workload.seconds

    async def next(self) -> float | None:
        """Now."""
        now = time.perf_counter()
        if self._left == 0 or now >= self._end:
            return None
        if self._left is not None:
            self._left -= 1
        return now


class OpenLoop:
    """A step is due by the clock, and sent by the first caller that is free."""

    def __init__(self, workload: Workload, began: float) -> None:
        self._end = math.inf if workload.seconds is None else began + workload.seconds
        due = itertools.islice(_due_times(workload, began), workload.steps)
        self._due = itertools.takewhile(lambda at: at < self._end, due)
        self.unsent = 0

    async def next(self) -> float | None:
        """The next due time, once it has come."""
        if time.perf_counter() >= self._end:
            self.unsent += sum(1 for _ in self._due)
            return None
        due = next(self._due, None)
        if due is not None:
            await _until(due)
        return due


def turns(workload: Workload, began: float) -> Turns:
    """The turns of a workload whose measurement begins at ``began``."""
    return ClosedLoop(workload, began) if workload.rate is None else OpenLoop(workload, began)


def _due_times(workload: Workload, began: float) -> Iterator[float]:
    assert workload.rate is not None  # noqa: S101 - a closed loop has no due times
    if workload.arrivals == "fixed":
        for step in itertools.count():
            yield began + step / workload.rate
    random = np.random.default_rng([workload.seed, 1])
    at = began
    while True:
        at += float(random.exponential(1 / workload.rate))
        yield at


async def _until(due: float) -> None:
    left = due - time.perf_counter()
    if left > FINE_S:
        await asyncio.sleep(left - FINE_S)
    if due > time.perf_counter():
        await asyncio.to_thread(lambda: time.sleep(max(0.0, due - time.perf_counter())))
